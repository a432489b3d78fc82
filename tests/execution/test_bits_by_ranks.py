"""Bits do not depend on how many ranks there are, where operators work on whole fields, too."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gigagrad.execution.layout import aligned, laid_out
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


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "shape", [(1, 3, 5, 7), (1, 1, 5, 7), (1, 4, 1, 7), (1, 4, 5, 1), (1, 1, 1, 1), (5, 7), (3,), ()]
)
def test_a_crop_lies_as_a_new_tensor_wherever_it_was_cut_out(shape, layout):
    layout = layout if len(shape) == 4 else torch.contiguous_format
    fresh = torch.empty(shape, memory_format=layout)
    outer = [size + 3 * (axis > 1) for axis, size in enumerate(shape)]
    for offset in range(4):
        whole = torch.empty(outer, memory_format=layout).normal_()
        cut = whole
        for axis, size in enumerate(shape):
            cut = cut.narrow(axis, min(offset, outer[axis] - size), size)
        found = laid_out(cut, layout)
        assert torch.equal(found, cut)
        assert found.stride() == fresh.stride()
        assert found.data_ptr() % 64 == 0
        assert laid_out(found, layout).data_ptr() == found.data_ptr()


def test_what_is_at_an_odd_address_is_moved_unless_it_holds_integers():
    floats, integers = torch.randn(65)[1:], torch.arange(65)[1:]
    assert aligned(floats).data_ptr() % 64 == 0
    assert torch.equal(aligned(floats), floats)
    assert aligned(integers) is integers


@pytest.mark.parametrize("name", ["batch", "group", "layer", "deviation"])
def test_sums_far_from_zero_have_the_bits_of_one_process(name):
    model, near, target = made(name, torch.float32)
    run = prepared_for(model, F.mse_loss, (near + 1e5).float(), target.float(), tile=(6, 7))
    alone, _ = outcome(run, SingleRank())
    for count in (2, 3, 5):
        assert [bits for bits, _ in run_threaded(count, partial(outcome, run), timeout=60)] == [alone] * count
