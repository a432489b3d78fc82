"""Exactness in float64 over generated networks: loss and every parameter's gradient against whole-image autograd.

Even seeds run in the memory layout that the engine chooses, which in float64 is contiguous; odd ones in channels_last.
"""

from __future__ import annotations

import pytest

from tests.exactness.comparison import compare
from tests.exactness.generated import make_case

# The plain reference warns where it pads unevenly; that is one of the cases.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

SEEDS = (*range(40), 42, 47, 50, 52, 68, 73, 75, 79)
"""All layers, settings of theirs and losses that the first 80 draw. `bench/exactness.py` compares thousands."""
TOLERANCE = 1e-11


@pytest.mark.parametrize("seed", SEEDS)
def test_generated_network_is_exact(seed: int) -> None:
    case = make_case(seed)
    layout = "channels_last" if seed % 2 else None
    result = compare(case.model, case.loss, case.image, case.target, tile=case.tile, layout=layout)
    assert result.loss_error <= TOLERANCE, case.description
    assert result.gradient_error <= TOLERANCE, f"{result.worst_parameter}\n{case.description}"
