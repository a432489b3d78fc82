"""What ranks send each other, against a count of all pairs of them, and what that takes."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gigagrad.boxes import Box
from gigagrad.plans import split_stages
from gigagrad.plans.owners import Owners
from gigagrad.plans.sums import late_gradients
from gigagrad.plans.traffic import Meeting, meetings, near, plan_for_ranks
from tests.plans.networks import graph_of, plan_of

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
        stage, expected = ladder.stages[step.stage], np.zeros((count, count), np.int64)
        if step.phase == "forward":
            for i in stage.kept:
                for pair in pairs:
                    expected[pair] += graph[i].bytes_per_pixel * sum(box.area for box in owners.halo(i, *pair))
        else:
            for i in (i for i in stage.reads if graph[i].differentiable and not graph[i].is_source):
                for pair in pairs:
                    boxes = [*owners.cotangents.sums(stage.index, i, *pair)]
                    boxes += [box for _, box in owners.cotangents.strips(stage.index, i, *pair)]
                    expected[pair] += graph[i].bytes_per_pixel * sum(box.area for box in boxes)
        assert (ending[0].fields == expected).all()
        assert not any(meeting.fields.any() for meeting in ending[1:])


def test_every_rank_meets_even_where_it_has_nothing_to_send(ladder):
    plan = ladder.plan((96, 96))
    ending = meetings(ladder.problem, ladder.stages, plan, Owners(ladder.graph, ladder.stages, plan, 2))
    assert all(ending)
    idle = [passes[0].messages[1 - busy].any() for passes in ending for busy in (0, 1)]
    assert not all(idle)


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


def test_gradients_are_put_together_a_few_at_a_time():
    widths = [64, 2048, 2048, 64]
    layers = [nn.Conv2d(a, b, 1) for a, b in zip([3, *widths], [*widths, 1], strict=True)]
    graph = graph_of(nn.Sequential(*layers), size=8)
    plan = plan_of(graph, tiles=((8, 8),) * 9)
    groups = late_gradients(graph, split_stages(graph, [field.node for field in plan.kept]))
    assert len(groups) > 1
    assert sorted(i for some in groups for i in some) == [n.id for n in graph.nodes if n.op == "parameter"]
    assert all(len(some) == 1 or sum(graph[i].nbytes for i in some) <= 2**24 for some in groups)


def test_what_messages_take(ladder):
    meeting = Meeting(np.array([[0, 4, 5], [2, 0, 0], [0, 0, 0]]), np.array([[0, 6, 0], [0, 0, 0], [0, 0, 0]]))
    assert meeting.sent_bytes.tolist() == [15, 2, 0]
    assert meeting.memory_bytes == (9 + 6) + 2 + 9  # it goes, it comes, and what of it are crops
    plan = ladder.plan()
    problem = dataclasses.replace(ladder.problem, ranks=3)
    every = meetings(problem, ladder.stages, plan, Owners(ladder.graph, ladder.stages, plan, 3))
    planned = plan_for_ranks(problem, plan)
    assert max(m.memory_bytes for passes in every for m in passes) == planned.message_bytes
    assert sum(m.messages.sum() for passes in every for m in passes) == planned.sent_bytes
