"""Steps are plain data, and what is said of a list of them is counted right."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gigagrad.boxes import Box
from gigagrad.graphs import InputSpec, capture
from gigagrad.plans import MEMORY, Tiles
from gigagrad.plans.emit import shared_by
from gigagrad.plans.program import (
    Allocate,
    Buffer,
    Exchange,
    Gather,
    Release,
    Scalars,
    Step,
    Sum,
    Transfer,
    Whole,
    from_plain,
    held_bytes,
    live,
    message_memory,
    messages,
    to_plain,
)
from gigagrad.plans.segments import gathered, is_read
from tests.exactness.networks import draw_recipe, make_case
from tests.plans.networks import plan_of, problem_of

TOP, BOTTOM = Box(0, 0, 5, 9), Box(5, 0, 8, 9)
NOTHING = Sum((), (), ())


def buffer(node, size=100, *, cotangent=False, tier=MEMORY, replicated=False):
    return Buffer(node, cotangent, tier, size, ((TOP,), (BOTTOM,)), (size, size // 2), replicated)


STEPS = (
    Allocate((buffer(3), buffer(4, 7, cotangent=True, tier="disk", replicated=True))),
    Tiles(0, "forward", (0, 3, 8)),
    Exchange(
        (Transfer(3, TOP, 0, 1, 45), Transfer(4, BOTTOM, 1, 1, 27, 6)),
        Sum((1,), (2,), (5, 6)),
        NOTHING,
        ((0, 2), (3,)),
        (16, 24),
    ),
    Gather((2,), False, (8, 12)),
    Scalars(0),
    Scalars(None),
    Release(((3, False), (4, True))),
    Whole("forward and backward"),
)


def test_every_kind_of_step_survives_json():
    assert {type(step) for step in STEPS} == set(get_args(Step))
    for step in STEPS:
        again = from_plain(Step, json.loads(json.dumps(to_plain(step))))
        assert again == step
        assert type(again) is type(step)
        assert hash(again) == hash(step)
    assert from_plain(tuple[Step, ...], json.loads(json.dumps(to_plain(STEPS)))) == STEPS


def test_what_a_step_is_stands_in_its_json():
    assert to_plain(STEPS[1]) == {"step": "Tiles", "segment": 0, "phase": "forward", "first_chunks": [0, 3, 8]}
    assert to_plain(STEPS[5]) == {"step": "Scalars", "segment": None}
    for wrong in ({"written_by": "a later version"}, {"segment": "0"}, {"phase": None}, {"first_chunks": 3}):
        with pytest.raises(TypeError):
            from_plain(Step, {**to_plain(STEPS[1]), **wrong})


def test_buffers_live_from_their_allocation_to_their_release():
    a, b, c = buffer(1), buffer(1, cotangent=True), buffer(2)
    first, second, third, fourth = (Tiles(segment, "forward") for segment in range(4))
    steps = (first, Allocate((a, c)), second, Allocate((b,)), third, Scalars(2), Release((a.key, c.key)), fourth)
    assert list(live(steps)) == [(first, ()), (second, (a, c)), (third, (a, c, b)), (fourth, (b,))]
    assert list(live(steps[:2])) == [(first, ())]
    assert list(live((Release((a.key,)), first))) == [(first, ())]


def test_what_is_held_is_counted_by_tier_and_kind():
    held = (buffer(1, 100), buffer(2, 11, cotangent=True), buffer(3, 7, tier="disk"), buffer(4, 50, replicated=True))
    assert held_bytes(held, MEMORY, 1.0) == (150, 11)
    assert held_bytes(held, MEMORY, 0.25) == (25 + 50, 3)
    assert held_bytes(held, "disk", 0.5) == (4, 0)
    assert held_bytes(held, "host", 1.0) == (0, 0)
    assert held_bytes((), MEMORY, 1.0) == (0, 0)


def test_messages_by_pairs_of_ranks():
    fields, sums = messages(STEPS[2], 2)
    assert fields.tolist() == [[0, 45], [0, 0]]  # a rank's own strips do not travel
    assert sums.tolist() == [[0, 2 * 24], [1 * 16, 0]]
    fields, sums = messages(STEPS[3], 2)
    assert fields.tolist() == [[0, 0], [0, 0]]
    assert sums.tolist() == [[0, 8], [12, 0]]
    for step in STEPS:
        assert isinstance(step, Exchange | Gather) or not any(one.any() for one in messages(step, 2))


def test_what_messages_take_in_memory():
    boxes = [(0, 1, 4), (0, 2, 5), (1, 0, 2), (2, 2, 99)]
    transfers = tuple(Transfer(3, TOP, sender, receiver, size) for sender, receiver, size in boxes)
    step = Exchange(transfers, NOTHING, NOTHING, ((0,), (), ()), (3, 6, 7))
    fields, sums = messages(step, 3)
    assert fields.tolist() == [[0, 4, 5], [2, 0, 0], [0, 0, 0]]
    assert sums.tolist() == [[0, 6, 7], [0, 0, 0], [0, 0, 0]]
    assert (fields + sums).sum(1).tolist() == [22, 2, 0]
    assert message_memory(step, 3) == (9 + 13) + 2 + 9  # it goes, it comes, and what of it are crops
    assert message_memory(Gather((1,), True, (8, 4, 0)), 3) == 2 * 8 + 4
    assert message_memory(Tiles(0, "forward"), 3) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 99)), max_size=12))
def test_bytes_of_all_transfers_between_two_ranks_add_up(boxes):
    transfers = tuple(Transfer(0, TOP, sender, receiver, size) for sender, receiver, size in boxes)
    fields, sums = messages(Exchange(transfers, NOTHING, NOTHING, (), ()), 4)
    for pair in np.ndindex(4, 4):
        expected = sum(size for sender, receiver, size in boxes if (sender, receiver) == pair)
        assert fields[pair] == (expected if pair[0] != pair[1] else 0)
    assert not sums.any()


def test_a_rank_holds_no_more_than_its_share_rounded_up():
    assert buffer(1, 10).most_bytes(0.25) == 3
    assert buffer(1, 10, replicated=True).most_bytes(0.25) == 10


recipes = st.composite(lambda draw: draw_recipe(lambda low, high: draw(st.integers(low, high))))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(max_examples=settings.default.max_examples // 5, derandomize=True)
@given(recipes(), st.data(), st.integers(1, 4), st.booleans())
def test_steps_of_any_network_take_and_give_back(recipe, data, ranks, backward):
    assume(recipe is not None)
    case = make_case(recipe)
    image = InputSpec((1, *case.image.shape), case.image.dtype, field=True, differentiable=data.draw(st.booleans()))
    dense = case.target.ndim == 3
    target = InputSpec((1,) * dense + tuple(case.target.shape), case.target.dtype, field=dense)
    graph = capture(case.model, case.loss, image, target)
    computed = [n.id for n in graph.nodes if n.is_field and not is_read(graph, n.id)]
    tile = data.draw(st.tuples(st.integers(4, 40), st.integers(4, 40)))
    kept = data.draw(st.sets(st.sampled_from(computed), max_size=4)) if computed else set()
    problem = problem_of(graph, backward=backward)
    plan = plan_of(graph, backward=backward, tiles=(tile,), kept=kept | gathered(graph))
    assume(plan.segments)
    found = shared_by(problem, plan, ranks)
    assert shared_by(problem, found, ranks) == shared_by(problem, plan, ranks) == found
    assert from_plain(tuple[Step, ...], json.loads(json.dumps(to_plain(found.steps)))) == found.steps
    there, taken = set(), []
    for step in found.steps:
        for key in (one.key for one in step.buffers) if isinstance(step, Allocate) else ():
            assert key not in there
            there.add(key)
            taken.append(key)
        for key in step.keys if isinstance(step, Release) else ():
            there.remove(key)
    assert len(taken) == len(set(taken))  # nothing is taken again
    assert {field.node for field in plan.kept} == {node for node, cotangent in taken if not cotangent}
    results = {(node.id, True) for node in graph.nodes if node.is_source and node.is_field and node.differentiable}
    assert there <= results
    for step in found.steps:
        if isinstance(step, Allocate):
            for one in step.buffers:
                node = graph[one.node]
                assert len(one.held) == len(one.held_bytes) == ranks
                assert np.all(painted(one.held, node) >= 1)
                assert all(painted([own], node).max(initial=0) <= 1 for own in one.held)  # nobody holds a pixel twice
    if ranks == 1:
        assert found.steps == plan.steps
        assert replace(found, ranks=None) == plan


def painted(held, node):
    """How often boxes of ranks cover each pixel of a field."""
    field = np.zeros((node.size(0), node.size(1)), int)
    for box in (box for own in held for box in own):
        field[box.y0 : box.y1, box.x0 : box.x1] += 1
    return field
