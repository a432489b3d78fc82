"""What ranks send each other, against a count of all pairs of them, and what that takes."""

from __future__ import annotations

import dataclasses
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from gigagrad.boxes import Box
from gigagrad.plans.owners import Owners
from gigagrad.plans.traffic import Meeting, meetings, near, plan_for_ranks

boxes_st = st.lists(
    st.builds(lambda y, x, h, w: Box(y, x, y + h, x + w), *[st.integers(0, 30)] * 2, *[st.integers(1, 12)] * 2),
    max_size=3,
)


@settings(max_examples=10, deadline=None)
@given(st.tuples(st.integers(9, 60), st.integers(9, 60)), st.integers(1, 12))
def test_fields_travel_between_all_pairs_that_have_something_in_common(ladder, tile, count):
    plan = ladder.plan(tile)
    owners = Owners(ladder.graph, ladder.stages, plan, count)
    graph, pairs = ladder.graph, [(a, b) for a in range(count) for b in range(count) if a != b]
    for step, ending in zip(plan.passes, meetings(ladder.problem, ladder.stages, plan, owners), strict=True):
        stage, found = ladder.stages[step.stage], [+Counter(m.messages) for m in ending if not m.sums]
        expected = [Counter[tuple[int, int]]()] if stage.kept else []
        if step.phase == "forward":
            for i in stage.kept:
                for pair in pairs:
                    expected[0][pair] += graph[i].bytes_per_pixel * sum(box.area for box in owners.halo(i, *pair))
        else:
            added = [i for i in stage.reads if graph[i].differentiable and not graph[i].is_source]
            expected = [Counter[tuple[int, int]](), Counter[tuple[int, int]]()] if added else []
            for i in added:
                for pair in pairs:
                    sums = owners.cotangents.sums(stage.index, i, *pair)
                    strips = [box for _, box in owners.cotangents.strips(stage.index, i, *pair)]
                    for counted, boxes in zip(expected, (sums, strips), strict=True):
                        counted[pair] += graph[i].bytes_per_pixel * sum(box.area for box in boxes)
        assert found == [+counted for counted in expected]


def test_every_rank_meets_even_where_it_has_nothing_to_send(ladder):
    plan = ladder.plan((96, 96))
    ending = meetings(ladder.problem, ladder.stages, plan, Owners(ladder.graph, ladder.stages, plan, 2))
    assert all(ending)
    assert not all(any(meeting.messages.values()) for passes in ending for meeting in passes)


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
    every = meetings(problem, ladder.stages, plan, Owners(ladder.graph, ladder.stages, plan, 3))
    planned = plan_for_ranks(problem, plan)
    assert max(m.memory_bytes for passes in every for m in passes) == planned.message_bytes
    assert sum(m.sent_bytes.total() for passes in every for m in passes) == planned.sent_bytes
