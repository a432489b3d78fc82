"""Tiles are saved where there is room, first those that save the most time for a byte."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.plans import Amount, Segment, saving
from gigagrad.plans.check import check
from gigagrad.plans.choose import make_plan
from gigagrad.plans.plan import SAVED, SegmentPlan, amount_of, total
from gigagrad.plans.saving import Savable, is_saved, with_saved, worth_saving

from .networks import MIB, graph_of, problem_of, residual


def segment(index: int, nbytes: int, seconds: float) -> SegmentPlan:
    return SegmentPlan(
        computes=Segment(index, (), (), None, (), (), ()),
        tile=(16, 16),
        tiles=(4, 4),
        crop=(16, 16),
        computed_ratio=1.0,
        tile_peak_bytes=nbytes,
        memory=(Amount("tiles", nbytes),),
        forward_seconds=seconds,
        backward_seconds=3 * seconds,
    )


amounts = st.tuples(st.integers(1, 1000), st.integers(1, 40), st.integers(1, 200), st.integers(0, 50))


@given(drawn=st.lists(amounts, min_size=1, max_size=5), room=st.integers(0, 20_000), ranks=st.integers(1, 4))
def test_no_pass_holds_more_than_the_room(drawn, room, ranks):
    segments = [segment(i, nbytes, tiles) for i, (nbytes, tiles, _, _) in enumerate(drawn)]
    savable = [Savable(tiles, -(-tiles // ranks), each, copies, 1.0) for _, tiles, each, copies in drawn]
    fits = max(total(one.memory) for one in segments) <= room
    found = with_saved(segments, savable, [one.tile_count for one in savable], room)
    held = 0
    for one, of_it in zip(found, savable, strict=True):
        held += of_it.bytes_of(one.saved_tiles)
        assert amount_of(one.memory, SAVED) == held
        assert not fits or total(one.memory) <= room
        assert not one.saved_tiles or total(one.memory) <= room
    # Not another tile of any segment would fit.
    for i, of_it in enumerate(savable if fits else ()):
        more = of_it.bytes_of(found[i].saved_tiles + 1) - of_it.bytes_of(found[i].saved_tiles)
        left = min(room - total(one.memory) for one in found[i:])
        assert found[i].saved_tiles == of_it.tile_count or more > left


@given(count=st.integers(1, 60), data=st.data())
def test_tiles_in_a_row_have_their_share_of_those_saved(count, data):
    saved, row = data.draw(st.integers(0, count)), data.draw(st.integers(1, count))
    chosen = [is_saved(position, saved, count) for position in range(count)]
    assert sum(chosen) == saved
    one = Savable(count, row, 1, 0, 1.0)
    assert max(sum(chosen[start : start + row]) for start in range(count)) <= one.bytes_of(saved)
    assert one.bytes_of(one.fitting(7)) <= 7


def test_what_saves_most_for_a_byte_comes_first():
    segments = [segment(0, 100, 1.0), segment(1, 100, 1.0)]
    savable = [Savable(16, 16, 10, 0, 0.01), Savable(16, 16, 10, 0, 0.05)]
    slow, fast = with_saved(segments, savable, [16, 16], 100 + 160 + 80)
    assert (slow.saved_tiles, fast.saved_tiles) == (8, 16)
    assert fast.backward_seconds == pytest.approx(3.0 - 16 * 0.05)


def test_what_gains_little_is_left_out():
    segments = [segment(0, 100, 1.0)]
    assert worth_saving(segments, [Savable(16, 16, 10, 0, 1e-4)]) == [0]
    assert worth_saving(segments, [Savable(16, 16, 10, 0, 1e-2)]) == [16]
    assert worth_saving(segments, [None]) == [0]


def test_plans_save_what_the_budget_has_room_for(monkeypatch):
    monkeypatch.setattr(saving, "_WORTH_IT", -math.inf)
    problem = problem_of(graph_of(residual(2)))
    tight = make_plan(problem, tiles=((64, 64),), kept={})
    assert not any(one.saved_tiles for one in tight.segments), "its budget is not known, nor what is free"
    ample = make_plan(replace(problem, budget_bytes=tight.predicted_peak_bytes + 64 * MIB), tiles=((64, 64),), kept={})
    assert any(one.saved_tiles for one in ample.segments)
    assert ample.predicted_peak_bytes <= tight.predicted_peak_bytes + 64 * MIB
    assert ample.modelled_seconds != tight.modelled_seconds
    assert not check(problem, ample)
    again = make_plan(
        replace(problem, budget_bytes=tight.predicted_peak_bytes + 2 * MIB),
        tiles=((64, 64),),
        kept={},
        saved=tuple(one.saved_tiles for one in ample.segments),
    )
    counts = [sum(one.saved_tiles for one in plan.segments) for plan in (again, ample)]
    assert 0 < counts[0] < counts[1]
    fewer = replace(ample, segments=tuple(replace(one, saved_tiles=10 * one.tile_count) for one in ample.segments))
    assert any("save" in fault.text for fault in check(problem, fewer))
