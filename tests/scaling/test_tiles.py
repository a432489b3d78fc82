"""A step by the clock: against timelines drawn by hand, and what must hold for any."""

from __future__ import annotations

import dataclasses
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gigagrad.plans import estimate
from gigagrad.plans.emit import shared_by
from gigagrad.plans.plan import amount_of, total
from gigagrad.scaling import (
    BALANCE,
    CHUNKS,
    COPIES,
    HALOS,
    LATENCY,
    REPLICATED,
    SUMS,
    Link,
    PassTimes,
    _lost,
    clock,
    tile_step,
)
from tests.plans.networks import graph_of, plan_of, problem_of

FREE = Link(inf, 0.0)
CAUSES = (CHUNKS, BALANCE, HALOS, SUMS, LATENCY, COPIES, REPLICATED)
seconds_st = st.floats(0, 10)


def exchange_of(count, fields, sums=()):
    """Bytes by pairs of ranks."""
    matrices = np.zeros((2, count, count), np.int64)
    for matrix, messages in zip(matrices, (fields, dict(sums)), strict=True):
        for pair, nbytes in messages.items():
            matrix[pair] = nbytes
    return tuple(matrices)


@st.composite
def steps(draw, count=None):
    """Passes of some ranks, each with an exchange at least."""
    count = count or draw(st.integers(1, 5))
    pairs = st.tuples(*[st.integers(0, count - 1)] * 2).filter(lambda pair: pair[0] != pair[1])
    messages = st.dictionaries(pairs, st.integers(1, 1000), max_size=6) if count > 1 else st.just({})
    exchange = st.builds(lambda fields, sums: exchange_of(count, fields, sums), messages, messages)
    swept = st.builds(PassTimes, st.lists(seconds_st, min_size=count, max_size=count), st.lists(exchange, min_size=1))
    return draw(st.lists(swept, min_size=1, max_size=4))


@given(steps(count=1), st.floats(1, 1e3), st.floats(0, 1))
def test_alone_nobody_waits(swept, rate, latency):
    assert clock(swept, Link(rate, latency)) == pytest.approx(sum(one.seconds[0] for one in swept))


@given(steps())
def test_with_links_that_take_no_time_the_slowest_share_counts(swept):
    assert clock(swept, FREE) == pytest.approx(sum(max(one.seconds) for one in swept))


@given(steps(), st.floats(1, 1e3), st.floats(0, 1), st.integers(2, 9))
def test_more_bytes_and_slower_links_are_never_faster(swept, rate, latency, times):
    taken = clock(swept, Link(rate, latency))
    more = [PassTimes(seconds, [(times * fields, times * sums) for fields, sums in met]) for seconds, met in swept]
    slower = [clock(more, Link(rate, latency)), clock(swept, Link(rate / 2, latency)), clock(swept, Link(rate, 1.5))]
    assert min(slower) >= taken - 1e-9
    assert taken >= clock(swept, FREE) - 1e-9


def test_a_timeline_by_hand():
    """Rank 1 is last; its word is heard after two messages of nothing. What rank 0 sends goes one after the other."""
    met = [exchange_of(3, {(0, 1): 60, (0, 2): 300, (2, 0): 100}, {(0, 1): 40})]
    link = Link(bytes_per_second=100.0, latency_seconds=0.25)
    heard = 5 + 2 * 0.25
    assert clock([PassTimes([1, 5, 2], met)], link) == heard + 4 + 0.25
    # Rank 1 is free when the first of them is there, and the next pass is its own.
    following = PassTimes([0, 10, 0], [])
    assert clock([PassTimes([1, 5, 2], met), following], link) == heard + 1 + 0.25 + 10


def test_losses_go_by_what_they_are_lost_to():
    halos, sums = exchange_of(2, {(0, 1): 100}), exchange_of(2, {}, {(1, 0): 50})
    swept = [PassTimes([2, 0], [halos]), PassTimes([1, 2], [sums])]
    latency = (1 + 1) * 0.5 + 2 * 0.5
    expected = {CHUNKS: 1.0, BALANCE: 0.5, LATENCY: latency, HALOS: 1.0, SUMS: 0.5}
    assert _lost(swept, Link(100.0, 0.5), inf) == pytest.approx({COPIES: 0.0, **expected})
    assert clock(swept, Link(100.0, 0.5)) == pytest.approx(5 / 2 + sum(expected.values()))
    # Rank 0 packs 100 bytes and opens 50, rank 1 the other way round.
    assert _lost(swept, Link(100.0, 0.5), 200.0)[COPIES] == pytest.approx((100 + 100 + 50 + 50) / 200)


def test_one_rank_takes_what_is_planned(ladder):
    plan = ladder.plan()
    step = tile_step(ladder.problem, plan, 1, Link(1.0, 1.0))
    assert step.seconds == pytest.approx(plan.predicted_seconds)
    assert step.alone_seconds == pytest.approx(plan.predicted_seconds)
    assert step.sent_bytes == 0
    assert step.memory_bytes == plan.predicted_peak_bytes
    assert step.lost == {cause: pytest.approx(0) for cause in CAUSES}


@pytest.mark.parametrize("count", [2, 3, 8])
def test_what_several_ranks_take_adds_up(ladder, count):
    plan = ladder.plan()
    step = tile_step(ladder.problem, plan, count, Link(1e8, 1e-4))
    assert step.seconds == pytest.approx(step.alone_seconds / count + sum(step.lost.values()))
    assert all(seconds >= -1e-12 for seconds in step.lost.values())
    assert min(step.lost[cause] for cause in (HALOS, SUMS, LATENCY, COPIES)) > 0
    planned = shared_by(ladder.problem, plan, count).ranks
    assert planned.sent_bytes / count <= step.sent_bytes < planned.sent_bytes
    least, most = (peak_bytes(plan, share) for share in (1 / count, planned.held_share))
    assert least <= step.memory_bytes - planned.message_bytes <= most < plan.predicted_peak_bytes


def peak_bytes(plan, share):
    """With this share of the fields in every pass."""
    held = [amount_of(moment, estimate.FIELDS, estimate.COTANGENTS) for moment in plan.moments]
    return max(total(moment) - (1 - share) * own for moment, own in zip(plan.moments, held, strict=True))


def test_measured_seconds_take_the_place_of_predicted_ones(ladder):
    plan = ladder.plan()
    found = tile_step(ladder.problem, plan, 2, FREE, [100.0, *[0.0] * (len(plan.passes) - 1)])
    assert found.alone_seconds == 100
    assert found.seconds == pytest.approx(50, rel=0.1)


def test_no_more_ranks_than_parts_have_something_to_do(ladder):
    plan = ladder.plan((48, 96))
    step = tile_step(ladder.problem, plan, 10_000, FREE)
    assert step.ranks == max(segment.tile_count for segment in plan.segments) == 2
    assert tile_step(ladder.problem, plan, 2, FREE) == step


def test_tiles_that_leave_threads_idle_count_as_if_they_did_not(ladder):
    """18 tiles, 4 at a time, are 5 rounds; 9 of them are 3, not 2.5."""
    plan = dataclasses.replace(ladder.plan((16, 32)), workers=4)
    passes = [1.0, *[0.0] * (len(plan.passes) - 1)]
    alone, two = (tile_step(ladder.problem, plan, count, FREE, passes).seconds for count in (1, 2))
    assert two == pytest.approx(alone * 3 / 5, rel=0.05)


def test_whole_fields_are_every_rank_s_own():
    graph = graph_of(nn.Sequential(nn.Conv2d(3, 1, 3, padding=1), Sorted()), size=32)
    plan = plan_of(graph, tiles=((8, 8),) * 9)
    step = tile_step(problem_of(graph), plan, 4, FREE)
    assert plan.whole_seconds > 0
    assert step.lost[REPLICATED] == pytest.approx(0.75 * plan.whole_seconds)
    assert step.seconds > plan.whole_seconds


class Sorted(nn.Module):
    """An operator that looks at the whole field."""

    def forward(self, x):
        return x.flatten(2).sort().values.unflatten(2, x.shape[2:])
