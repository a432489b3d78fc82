"""Sums of what tiles contribute."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.execution import scalars
from gigagrad.execution.scalars import add


@given(
    st.lists(st.integers(1, 9), max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([1, 5, 40, 10_000]),
    st.booleans(),
)
def test_sums_of_any_shape_added_in_parts(shape, dtype, at_once, last):
    noise = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=noise).to(dtype) for _ in range(3)]
    if last and len(shape) == 4:
        values[1:] = [value.contiguous(memory_format=torch.channels_last) for value in values[1:]]
    sums: dict[int, torch.Tensor] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scalars, "_AT_ONCE", at_once)
        for value in values:
            add(sums, 7, value.requires_grad_(), torch.float64)
    assert sums[7].dtype == torch.float64
    assert not sums[7].requires_grad
    expected = values[0].double() + values[1].double() + values[2].double()
    assert torch.equal(sums[7], expected.detach())


def test_a_sum_is_no_view_of_its_first_value_and_lies_as_it_does():
    first = torch.ones(2, 3, 4, 5, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    sums: dict[int, torch.Tensor] = {}
    add(sums, 0, first, torch.float64)
    add(sums, 0, first, torch.float64)
    assert first.eq(1).all()
    assert sums[0].is_contiguous(memory_format=torch.channels_last)
