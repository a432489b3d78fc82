"""Meetings against what `plans.traffic` counts pair by pair."""

from __future__ import annotations

import dataclasses
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from gigagrad.boxes import Box
from gigagrad.plans.shares import Shares
from gigagrad.plans.traffic import plan_for_ranks, traffic
from gigagrad.scaling.meetings import Meeting, meetings, near

boxes_st = st.lists(
    st.builds(lambda y, x, h, w: Box(y, x, y + h, x + w), *[st.integers(0, 30)] * 2, *[st.integers(1, 12)] * 2),
    max_size=3,
)


@settings(max_examples=10, deadline=None)
@given(st.tuples(st.integers(9, 60), st.integers(9, 60)), st.integers(1, 12))
def test_to_the_byte_what_all_pairs_are_found_to_send(ladder, tile, count):
    plan = ladder.plan(tile)
    shares = Shares(ladder.graph, ladder.stages, plan, count)
    found = [
        (index, +Counter(meeting.messages))
        for index, ending in enumerate(meetings(ladder.problem, ladder.stages, plan, shares))
        for meeting in ending
        if any(meeting.messages.values())
    ]
    told = traffic(ladder.problem, ladder.stages, plan, Shares(ladder.graph, ladder.stages, plan, count))
    assert found == [(index, +Counter(meeting)) for index, meeting in told]


def test_every_rank_meets_even_where_it_has_nothing_to_send(ladder):
    plan = ladder.plan((96, 96))
    ending = meetings(ladder.problem, ladder.stages, plan, Shares(ladder.graph, ladder.stages, plan, 2))
    assert all(ending)
    assert not all(any(meeting.messages.values()) for passes in ending for meeting in passes)
    assert {(m.words, m.sums) for passes in ending for m in passes} == {(1, False), (3, True)}


@given(st.lists(boxes_st, min_size=1, max_size=6), st.lists(boxes_st, min_size=1, max_size=6))
def test_no_two_ranks_whose_boxes_meet_are_missed(some, others):
    pairs = near(some, others)
    assert len(pairs) == len(set(pairs))
    meeting = {
        (a, b)
        for a, left in enumerate(some)
        for b, right in enumerate(others)
        if a != b and any(not one.intersect(other).empty for one in left for other in right)
    }
    assert meeting <= set(pairs)
    assert all(some[a] and others[b] and a != b for a, b in pairs)


def test_what_messages_take(ladder):
    meeting = Meeting({(0, 1): 10, (0, 2): 5, (1, 0): 2})
    assert meeting.sent_bytes == {0: 15, 1: 2}
    assert meeting.memory_bytes == 2 * 17
    plan = ladder.plan()
    problem = dataclasses.replace(ladder.problem, ranks=3)
    every = meetings(problem, ladder.stages, plan, Shares(ladder.graph, ladder.stages, plan, 3))
    planned = plan_for_ranks(problem, plan)
    assert max(m.memory_bytes for passes in every for m in passes) == planned.message_bytes
    assert sum(m.sent_bytes.total() for passes in every for m in passes) == planned.sent_bytes
