"""Exactness in float64 of whole training steps: random networks in training mode against whole-image autograd.

Loss, every parameter's gradient and every buffer after the step. A failing recipe is printed as Python; pasted into
`KNOWN` it is a regression test.
"""

from __future__ import annotations

import random

import pytest
import torch

from tests.exactness.networks import (
    Node,
    Recipe,
    compare_forward,
    compare_step,
    draw_recipe,
    ill_conditioned,
    make_case,
)

# The plain reference warns where it pads unevenly; that is one of the cases.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

STEPS, PREDICTIONS = 40, 8
DRAWN_BY_OTHERS = {1, 5, 9, 15, 17, 21, 25, 36, 38}
"""Seeds all of whose operators, options and losses the steps of the others have, too."""
TOLERANCE = 1e-9

HEAD = {"out": 1, "kernel_size": 1}


def small(channels: int, *nodes: Node, loss: str = "mse", steps: int = 1) -> Recipe:
    """A chain of nodes on an image of 8 x 8 px, the last of them the output."""
    return Recipe((channels, 8, 8), nodes, (len(nodes),), loss=loss, loss_options={}, tile=(4, 4), steps=steps)


KNOWN = {
    "instance norm whose output nothing reads": small(
        1, Node("norm", (0,), {"kind": "instance", "track_running_stats": True}), Node("conv", (0,), HEAD)
    ),
    "batch norm that averages over all its steps": small(
        1, Node("norm", (0,), {"kind": "batch", "momentum": None}), Node("conv", (1,), HEAD), steps=2
    ),
    "one batch norm under two names": small(
        1, Node("norm", (0,), {"kind": "batch"}), Node("again", (1,), {"node": 1}), Node("conv", (2,), HEAD)
    ),
    "one instance norm run twice in a step": small(
        1,
        Node("norm", (0,), {"kind": "instance", "affine": True, "track_running_stats": True}),
        Node("again", (1,), {"node": 1}),
        Node("conv", (2,), HEAD),
    ),
    "group norm of one group behind a permutation": small(
        4,
        Node("norm", (0,), {"kind": "channels"}),
        Node("norm", (1,), {"kind": "group", "groups": 1, "affine": True}),
        Node("conv", (2,), HEAD),
    ),
    "a field flattened behind a product with a number": small(
        3, Node("modulate", (0, 0), {}), Node("classifier", (1,), {"kind": "flat", "out": 2}), loss="label"
    ),
}


def drawn(seed: int) -> Recipe:
    """Draws the first network of that seed that plain PyTorch can train."""
    draw, recipe = random.Random(seed).randint, None
    while recipe is None:
        recipe = draw_recipe(draw)
    return recipe


# The same networks in every run: the suite says what a change broke; bench/networks.py looks for new ones.
@pytest.mark.parametrize("seed", sorted({*range(STEPS)} - DRAWN_BY_OTHERS))
def test_a_training_step_is_exact(seed: int) -> None:
    recipe = drawn(seed)
    outcome = compare_step(recipe)
    assert outcome.worst <= TOLERANCE or ill_conditioned(recipe, outcome.worst), (outcome, recipe)


@pytest.mark.parametrize("seed", range(STEPS, STEPS + PREDICTIONS))
def test_a_prediction_is_exact(seed: int) -> None:
    recipe = drawn(seed)
    assert compare_forward(recipe) <= TOLERANCE, recipe


@pytest.mark.parametrize("name", KNOWN)
def test_a_network_that_once_failed_is_exact(name: str) -> None:
    outcome = compare_step(KNOWN[name])
    assert outcome.worst <= TOLERANCE, outcome


@pytest.mark.parametrize("seed", range(20))
def test_a_recipe_is_python_and_makes_the_same_network_each_time(seed: int) -> None:
    recipe = drawn(seed)
    assert eval(repr(recipe), {"Recipe": Recipe, "Node": Node}) == recipe
    first, second = make_case(recipe), make_case(recipe)
    assert torch.equal(first.target, second.target)
    for a, b in zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
