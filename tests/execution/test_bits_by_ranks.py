"""Bits do not depend on how many ranks there are, where operators work on whole fields, too."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gigagrad.ranks import SingleRank, run_threaded
from tests.exactness.test_large_offsets import made
from tests.execution.by_ranks import outcome, prepared_for
from tests.execution.whole_field_ends import make_whole_case

SEEDS = 1011, 1046, 2000, 2001, 2002
"""Before strides and addresses were always those of new tensors, the first two had other bits by 2, 4 and 5 ranks."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loss_of_whole_fields_has_the_bits_of_one_process(seed):
    case = make_whole_case(seed)
    run = prepared_for(case.model, case.loss, case.image, case.target, **case.options)
    expected, _ = outcome(run, SingleRank())
    for count in (2, 3, 5):
        assert {bits for bits, _ in run_threaded(count, lambda ranks: outcome(run, ranks))} == {expected}, (
            case.description
        )


def test_files_have_the_bits_of_memory(tmp_path: Path):
    """A whole field that was read from a file lies as one that was kept in memory."""
    case = make_whole_case(1046)
    options = {**case.options, "scratch": tmp_path}
    found = []
    for tier in ("memory", "disk"):
        run = prepared_for(case.model, case.loss, case.image, case.target, **options)
        state = run.engine.state_dict()
        for choice in state["choices"].values():
            choice["kept"] = [[node, tier] for node, _ in choice["kept"]]
        run.engine.load_state_dict(state)
        with torch.no_grad():
            found.append(run.engine.backward(case.image, case.target))
            found += [parameter.grad.clone() for parameter in case.model.parameters() if parameter.grad is not None]
            case.model.zero_grad()
    half = len(found) // 2
    assert all(torch.equal(one, two) for one, two in zip(found[:half], found[half:], strict=True))


@pytest.mark.parametrize("name", ["batch", "group", "layer", "deviation"])
def test_sums_far_from_zero_have_the_bits_of_one_process(name):
    model, near, target = made(name, torch.float32)
    run = prepared_for(model, F.mse_loss, (near + 1e5).float(), target.float(), tile=(6, 7))
    alone, _ = outcome(run, SingleRank())
    for count in (2, 3, 5):
        assert [bits for bits, _ in run_threaded(count, partial(outcome, run), timeout=60)] == [alone] * count
