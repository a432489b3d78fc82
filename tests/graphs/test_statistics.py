"""Moments and normalisation: gradients by finite differences, and digits kept where sums of squares would lose them."""

import pytest
import torch

from gigagrad.graphs.statistics import moments, normalise


@pytest.mark.parametrize("dims", [[0, 2, 3], [2, 3], [1, 2, 3]])
def test_moments_are_sums(dims):
    torch.manual_seed(0)
    field = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    expected = torch.stack([field.sum(dims), (field**2).sum(dims)])
    torch.testing.assert_close(moments(field, dims), expected)
    assert torch.autograd.gradcheck(lambda x: moments(x, dims), (field,))


def test_moments_keep_their_digits_far_from_zero():
    torch.manual_seed(0)
    field = 1000 + torch.randn(1, 1, 200, 200)
    first, second = moments(field, [0, 2, 3])[:, 0] / field.numel()
    assert (second - first**2).item() == pytest.approx(field.double().var(correction=0).item(), rel=1e-5)


def test_the_gradient_of_a_variance_keeps_its_digits_far_from_zero():
    torch.manual_seed(0)
    field = (1000 + torch.randn(1, 1, 50, 50)).requires_grad_()
    first, second = moments(field, [0, 2, 3])[:, 0] / field.numel()
    (found,) = torch.autograd.grad(second - first**2, field)
    reference = field.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(reference.var(correction=0), reference)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-8)


def test_normalise():
    torch.manual_seed(0)
    field = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    mean, scale, shift = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    view = (1, 3, 1, 1)
    expected = (field - mean.view(view)) * scale.view(view) + shift.view(view)
    torch.testing.assert_close(normalise(field, mean, scale, shift), expected)
    assert torch.autograd.gradcheck(normalise, (field, mean, scale, shift))


def test_half_precision_is_normalised_with_float32_statistics():
    field = torch.randn(1, 3, 5, 4).bfloat16().requires_grad_()
    mean, scale, shift = torch.zeros(3), torch.ones(3, requires_grad=True), torch.zeros(3)
    output = normalise(field, mean, scale, shift)
    output.float().sum().backward()
    assert output.dtype == field.grad.dtype == torch.bfloat16
    assert scale.grad.dtype == torch.float32
    assert moments(field, [0, 2, 3]).dtype == torch.float64
