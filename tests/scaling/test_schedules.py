"""Schedules against the formulas of their papers, and against timelines drawn by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.schedules import GPIPE, ONE_F_ONE_B, PIPEDREAM_2BW, StageTimes, simulate
from gigagrad.errors import ConfigError
from gigagrad.scaling import Link

SCHEDULES = [GPIPE, ONE_F_ONE_B, PIPEDREAM_2BW]
ranks_st, rounds_st, chunks_st = st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)


def equal_stages(ranks: int, chunks: int = 1) -> list[StageTimes]:
    return [StageTimes(1 / chunks, 2 / chunks)] * (ranks * chunks)


@given(ranks_st, st.integers(1, 20))
def test_gpipe_and_1f1b_idle_as_published(p, m):
    gpipe, alternating = (simulate(schedule, equal_stages(p), p, m) for schedule in (GPIPE, ONE_F_ONE_B))
    for found in (gpipe, alternating):
        assert found.idle_share == pytest.approx((p - 1) / (m + p - 1))  # GPipe, section 2.3
        assert found.seconds == pytest.approx(3 * m * (1 + (p - 1) / m))  # Megatron-LM, section 2.2.1
        assert found.weight_versions == 1
    assert gpipe.held == (m,) * p
    assert alternating.held == tuple(min(m, p - rank) for rank in range(p))


@given(ranks_st, rounds_st, chunks_st)
def test_interleaved_1f1b_idles_as_published(p, rounds, v):
    m = rounds * p
    found = simulate(ONE_F_ONE_B, equal_stages(p, v), p, m)
    assert found.seconds == pytest.approx(3 * m * (1 + (p - 1) / (v * m)))  # Megatron-LM, section 2.2.2
    if v > 1:
        assert max(found.held) == min(v * m, v * p + p - 1)  # p (1 + (p - 1) / (p v)) micro-batches in v stages


@given(ranks_st, rounds_st, chunks_st)
def test_2bw_never_waits(p, m, v):
    found = simulate(PIPEDREAM_2BW, equal_stages(p, v), p, m * p if v > 1 else m)
    assert found.idle_share == pytest.approx(0)


@given(ranks_st, st.integers(0, 12))
def test_2bw_holds_two_versions_and_pipedream_one_for_each_rank(p, more):
    assert simulate(PIPEDREAM_2BW, equal_stages(p), p, p + more).weight_versions == min(p, 2)
    pipedream = simulate(PIPEDREAM_2BW, equal_stages(p), p, 1)
    assert pipedream.weight_versions == p
    assert pipedream.held == tuple(range(p, 0, -1))


def test_only_what_empties_the_pipeline_is_exact():
    assert [schedule.exact for schedule in SCHEDULES] == [True, True, False]


def test_the_slowest_stage_sets_the_pace():
    stages = [StageTimes(1, 1), StageTimes(2, 3), StageTimes(1, 1)]
    assert simulate(PIPEDREAM_2BW, stages, 3, 6).seconds == pytest.approx(6 * 5)
    assert simulate(GPIPE, stages, 3, 6).seconds == pytest.approx(1 + 6 * 2 + 1 + 1 + 6 * 3 + 1)


def test_messages_delay_what_waits_for_them():
    stages = [StageTimes(1, 1, cut_bytes=10), StageTimes(1, 1, cut_bytes=999)]
    link = Link(10, 1)  # 2 s a message
    assert simulate(GPIPE, stages, 2, 1, link).seconds == 1 + 2 + 1 + 1 + 2 + 1
    # Rank 0: F0 F1 at 0 and 1, B0 when its gradient is back at 7, B1 at 9; rank 1: F0 at 3, B0 at 4, F1 at 5, B1 at 6.
    assert simulate(ONE_F_ONE_B, stages, 2, 2, link).seconds == 10
    assert simulate(GPIPE, stages, 1, 1, link).seconds == 4  # a rank sends itself nothing


@pytest.mark.parametrize(
    ("stages", "ranks", "micro_batches", "message"),
    [
        (3, 2, 2, "3 stages on 2 ranks"),
        (0, 2, 2, "0 stages on 2 ranks"),
        (2, 0, 2, "2 stages on 0 ranks"),
        (2, 2, 0, "1 at least here, got 0"),
        (4, 2, 3, "a multiple of 2 here, got 3"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(stages, ranks, micro_batches, message):
    with pytest.raises(ConfigError, match=message):
        simulate(ONE_F_ONE_B, [StageTimes(1, 1)] * stages, ranks, micro_batches)
