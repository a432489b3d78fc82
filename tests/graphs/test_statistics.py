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


@pytest.mark.parametrize("dims", [[0, 2, 3], [2, 3], [1, 2, 3]])
@pytest.mark.parametrize("last", [False, True])
def test_moments_without_values_have_the_same_gradient(dims, last):
    """Far from zero in float32, also of a view, and of fields of a few pixels."""
    torch.manual_seed(0)
    for size in ((50, 50), (1, 3)):
        whole = 1000 + torch.randn(2, 3, 60, 60)
        whole = whole.contiguous(memory_format=torch.channels_last) if last else whole
        field = whole[:, :, 4 : 4 + size[0], 7 : 7 + size[1]].requires_grad_()
        weights = torch.randn(moments(field, dims).shape, dtype=torch.float64)
        weights[0] = -2000 * weights[1]  # as of a variance: most of it cancels
        silent = moments(field, dims, values=False)
        assert not silent.any()
        found = [torch.autograd.grad(sums, field, weights)[0] for sums in (moments(field, dims), silent)]
        reference = field.detach().double().requires_grad_()
        (expected,) = torch.autograd.grad(moments(reference, dims), reference, weights)
        for one in found:
            torch.testing.assert_close(one.double(), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


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


def tokens(*strides):
    return torch.randn(1, 5, 4, 4, dtype=torch.float64).contiguous().as_strided((1, 5, 4, 4), strides)


FIELDS = {
    "contiguous": lambda: tokens(80, 16, 4, 1),
    "channels last": lambda: tokens(80, 1, 20, 5),
    "transposed": lambda: tokens(5, 1, 20, 5),
    "a crop": lambda: torch.randn(1, 9, 8, 5, dtype=torch.float64).permute(0, 3, 1, 2)[..., 2:6, 3:7],
}


@pytest.mark.parametrize("name", FIELDS)
def test_field_and_cotangent_may_be_laid_out_differently(name):
    """Transposed tokens have a batch stride at which PyTorch's own backward of batch norm goes wrong."""
    torch.manual_seed(0)
    field = FIELDS[name]().requires_grad_()
    statistics = [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    cotangent = torch.randn(1, 16, 5, dtype=torch.float64).transpose(1, 2).reshape(1, 5, 4, 4)
    inputs = (field, *statistics)
    expected = torch.autograd.grad(normalise(*inputs), inputs, cotangent.contiguous())
    for ours, theirs in zip(torch.autograd.grad(normalise(*inputs), inputs, cotangent), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_statistics_may_be_one_value_expanded():
    torch.manual_seed(0)
    field = FIELDS["channels last"]().requires_grad_()
    mean, scale, shift = (torch.randn(1, dtype=torch.float64).expand(5) for _ in range(3))
    mean.requires_grad_(), scale.requires_grad_()
    plain = [value.contiguous().detach().requires_grad_() for value in (mean, scale, shift)]
    cotangent = torch.randn_like(field)
    ours = torch.autograd.grad(normalise(field, mean, scale, shift), (field, mean, scale), cotangent)
    theirs = torch.autograd.grad(normalise(field, *plain), (field, *plain[:2]), cotangent)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
