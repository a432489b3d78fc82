"""Steps for several ranks: what they send each other, against a count of all pairs of them, and what that takes."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gigagrad.boxes import Box
from gigagrad.plans import Tiles, split_segments
from gigagrad.plans.emit import near, shared_by
from gigagrad.plans.partition import Partition, late_gradients
from gigagrad.plans.program import Exchange, Gather, message_memory, messages
from tests.plans.networks import graph_of, plan_of

boxes_st = st.lists(
    st.builds(lambda y, x, h, w: Box(y, x, y + h, x + w), *[st.integers(0, 30)] * 2, *[st.integers(1, 12)] * 2),
    max_size=3,
)


def exchanged(plan):
    """Each pass with what ends it: the bytes of fields and of sums by pairs of ranks."""
    found: list[tuple[Tiles, list[Any]]] = []
    ranks = plan.ranks.count
    for step in plan.steps:
        if isinstance(step, Tiles):
            found.append((step, []))
        elif isinstance(step, Exchange | Gather):
            found[-1][1].append(messages(step, ranks))
    return found


@settings(max_examples=10, deadline=None)
@given(st.tuples(st.integers(9, 60), st.integers(9, 60)), st.integers(1, 12))
def test_fields_travel_between_all_pairs_that_have_something_in_common(ladder, tile, count):
    plan = shared_by(ladder.problem, ladder.plan(tile), count)
    partition = Partition(ladder.graph, plan, count)
    graph, pairs = ladder.graph, [(a, b) for a in range(count) for b in range(count) if a != b]
    assert len(exchanged(plan)) == len(plan.passes)
    for step, ending in exchanged(plan):
        segment, expected = ladder.segments[step.segment], np.zeros((count, count), np.int64)
        if step.phase == "forward":
            for i in segment.kept:
                for pair in pairs:
                    expected[pair] += graph[i].bytes_per_pixel * sum(box.area for box in partition.halo(i, *pair))
        else:
            for i in (i for i in segment.reads if graph[i].differentiable and not graph[i].is_source):
                for pair in pairs:
                    boxes = [*partition.sums(segment.index, i, *pair)]
                    boxes += [box for _, box in partition.overlaps(segment.index, i, *pair)]
                    expected[pair] += graph[i].bytes_per_pixel * sum(box.area for box in boxes)
        assert (ending[0][0] == expected).all()
        assert not any(fields.any() for fields, _ in ending[1:])


@settings(max_examples=5, deadline=None)
@given(st.tuples(st.integers(9, 60), st.integers(9, 60)), st.integers(1, 6))
def test_a_rank_sends_what_it_has_and_adds_up_its_own_strips(ladder, tile, count):
    """Boxes of a receiver do not overlap, but for cotangents of several chunks, which come in their order."""
    plan = shared_by(ladder.problem, ladder.plan(tile), count)
    partition = Partition(ladder.graph, plan, count)
    tiles = None
    for step in plan.steps:
        if isinstance(step, Tiles):
            tiles = step
        for one in step.transfers if isinstance(step, Exchange) else ():
            assert one.chunk is None or one.chunk in tiles.own(one.sender)
            assert one.size_bytes == ladder.graph[one.node].bytes_per_pixel * one.box.area
            if tiles.phase == "forward":
                assert any(one.box.within(box) for box in partition.written(one.node, one.sender))
                assert any(one.box.within(box) for box in partition.held(one.node, one.receiver))
            assert one.sender != one.receiver or one.chunk is not None
        if isinstance(step, Exchange):
            by_pair = groupby(
                sorted(step.transfers, key=lambda one: (one.node, one.sender, one.receiver)),
                lambda one: (one.node, one.sender, one.receiver),
            )
            for _, some in by_pair:
                chunks = [one.chunk for one in some if one.chunk is not None]
                assert chunks == sorted(chunks)


def test_every_rank_exchanges_even_where_it_has_nothing_to_send(ladder):
    plan = shared_by(ladder.problem, ladder.plan((96, 96)), 2)
    ending = [every for _, every in exchanged(plan)]
    assert len(ending) == len(plan.passes)
    assert all(ending)
    idle = [sum(every[0])[1 - busy].any() for every in ending for busy in (0, 1)]
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
    groups = late_gradients(graph, split_segments(graph, [field.node for field in plan.kept]))
    assert len(groups) > 1
    assert sorted(i for some in groups for i in some) == [n.id for n in graph.nodes if n.op == "parameter"]
    assert all(len(some) == 1 or sum(graph[i].nbytes for i in some) <= 2**24 for some in groups)


def test_what_messages_take(ladder):
    shared = shared_by(ladder.problem, ladder.plan(), 3)
    assert max(message_memory(step, 3) for step in shared.steps) == shared.ranks.message_bytes > 0
    sent = sum(fields.sum() + sums.sum() for _, every in exchanged(shared) for fields, sums in every)
    assert sent == shared.ranks.sent_bytes > 0


def test_what_one_rank_does_alone_is_not_sent(ladder):
    plan = ladder.plan()
    alone = shared_by(ladder.problem, plan, 1)
    assert alone.steps == plan.steps
    assert (alone.ranks.held_share, alone.ranks.sent_bytes, alone.ranks.message_bytes) == (1.0, 0, 0)
    assert not any(isinstance(step, Gather) for step in plan.steps)


def test_the_largest_share_is_that_of_any_pass(ladder):
    """Counted again, buffer by buffer."""
    shared = shared_by(ladder.problem, ladder.plan(), 3)
    largest, there = 0.0, dict[Any, Any]()
    for step in shared.steps:
        there |= {buffer.key: buffer for buffer in getattr(step, "buffers", ())}
        for key in getattr(step, "keys", ()):
            del there[key]
        held = [buffer for buffer in there.values() if not buffer.replicated]
        for rank in range(3) if isinstance(step, Tiles) and held else ():
            own = sum(buffer.held_bytes[rank] for buffer in held)
            largest = max(largest, own / sum(buffer.size_bytes for buffer in held))
    assert shared.ranks.held_share == largest
    assert 1 / 3 < largest < 1
