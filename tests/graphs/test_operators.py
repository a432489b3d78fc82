"""Operators of our own: sums of half precisions."""

import pytest
import torch

from gigagrad.graphs import operators
from gigagrad.graphs.operators import field_bins, field_sum

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@HALVES
@pytest.mark.parametrize("dims", [[0, 2, 3], [1, 2], [2, 3]], ids=str)
@pytest.mark.parametrize("keepdim", [True, False])
def test_sums_of_half_precisions_are_in_float32(dtype, dims, keepdim, monkeypatch):
    monkeypatch.setattr(operators, "_AT_ONCE", 50)
    field = (torch.rand(1, 3, 9, 17) * 100).to(dtype).requires_grad_()
    total = field_sum(field, dims, keepdim)
    expected = field.double().sum(dims, keepdim=keepdim)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    cotangent = torch.rand_like(total)
    (ours,) = torch.autograd.grad(total, field, cotangent)
    (theirs,) = torch.autograd.grad(expected, field, cotangent.double())
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs)


def test_a_sum_may_leave_the_range_of_float16():
    field = torch.full((1, 1, 600, 600), 2.0, dtype=torch.float16)
    assert field_sum(field, [2, 3], True).item() == 720_000


@HALVES
def test_bins_of_half_precisions_are_in_float32(dtype):
    field = (torch.rand(1, 2, 6, 8) * 100).to(dtype).requires_grad_()
    weights_y = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]], dtype=torch.float64)
    weights_x = torch.tensor([[0.25] * 4 + [0] * 4, [0] * 4 + [0.25] * 4], dtype=torch.float64)
    bins = field_bins(field, [2, 3], weights_y, weights_x)
    assert bins.dtype == torch.float32
    expected = weights_y @ field.double() @ weights_x.T
    torch.testing.assert_close(bins.double(), expected, rtol=1e-6, atol=0)
    cotangent = torch.rand_like(bins)
    (ours,) = torch.autograd.grad(bins, field, cotangent)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), weights_y.T @ cotangent.double() @ weights_x, rtol=1e-2, atol=1e-2)
