"""Moments and normalisation: gradients by finite differences, and digits kept where sums of squares would lose them."""

import functools

import pytest
import torch

from gigagrad.graphs import statistics
from gigagrad.graphs.statistics import (
    average,
    grouped,
    mean_and_scale,
    merged,
    moments,
    normalise,
    running_mean,
    running_variance,
    variance,
)

EVERY = [[0, 2, 3], [2, 3], [1, 2, 3]]


def mean_and_variance(found):
    return torch.stack([average(found), variance(found, 0)])


def expected_of(field, dims):
    return torch.stack([field.mean(dims), field.var(dims, correction=0)])


@pytest.mark.parametrize("dims", EVERY)
def test_moments(dims):
    torch.manual_seed(0)
    field = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    found = moments(field, dims)
    torch.testing.assert_close(mean_and_variance(found), expected_of(field, dims))
    torch.testing.assert_close(variance(found, 1), field.var(dims))
    assert torch.autograd.gradcheck(lambda x: mean_and_variance(moments(x, dims)), (field,))


@pytest.mark.parametrize("offset", [0, 1e3, 1e8, -1e12])
@pytest.mark.parametrize("dims", EVERY)
def test_crops_of_any_size_and_offset_are_merged(dims, offset):
    """The reference is computed near zero: taking the offset away again is exact."""
    torch.manual_seed(0)
    field = torch.randn(2, 3, 40, 30, dtype=torch.float64) + offset
    field[:, :, :13] += 1e-3 * offset  # the tiles' means differ
    crops = [part for rows in field.split([1, 12, 27], 2) for part in rows.split([17, 13], 3)]
    found = functools.reduce(merged, [moments(crop, dims) for crop in crops])
    near, (mean, spread) = field - offset, mean_and_variance(found)
    torch.testing.assert_close(spread, near.var(dims, correction=0), rtol=1e-12, atol=0)
    torch.testing.assert_close((found[1] - offset) + found[2], near.mean(dims), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mean, field.mean(dims))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_on_a_gpu(layout, dtype):
    """Its kernels of norms give what operators give, and to a normalised field what PyTorch's own gradient is."""
    torch.manual_seed(0)
    field = (3 + torch.randn(2, 24, 37, 41, dtype=torch.float64)).to(dtype).contiguous(memory_format=layout)
    statistics = [1 + torch.rand(shape, dtype=torch.promote_types(dtype, torch.float32)) for shape in ((2, 24), 24)]
    tolerance = (4 if dtype == torch.bfloat16 else 1e3) * torch.finfo(dtype).eps
    found = []
    for device in ("cpu", "cuda"):
        leaves = [one.to(device).requires_grad_() for one in (field, *statistics)]
        values = normalise(*leaves)
        sums = moments(leaves[0], [0, 2, 3])
        cotangents = values.detach().cos(), torch.tensor([0.0, 1.0, 1.0, 1e-3], device=device)[:, None].expand(4, 24)
        gradients = torch.autograd.grad([values, sums], leaves, [cotangents[0], cotangents[1].to(sums.dtype)])
        found.append([one.detach().cpu() for one in (values, sums, *gradients)])
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(there, here, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_by_a_kernel_that_reads_a_value_a_channel(layout, monkeypatch):
    """As on a GPU, with what PyTorch's kernel does written in operators."""

    def elemt(values, weight, bias, mean, invstd, eps):
        assert {mean.shape, invstd.shape} == {(values.shape[1],)}
        assert mean.dtype == invstd.dtype == torch.promote_types(values.dtype, torch.float32)
        assert bias is None or bias.shape == mean.shape
        assert weight is None
        assert eps == 0
        calls.append(values.shape)
        per_channel = [one.view(-1, 1, 1) for one in (mean, invstd, torch.zeros_like(mean) if bias is None else bias)]
        return ((values - per_channel[0]) * per_channel[1] + per_channel[2]).to(values.dtype)

    torch.manual_seed(0)
    field = (3 + torch.randn(2, 6, 9, 11, dtype=torch.float64)).contiguous(memory_format=layout).requires_grad_()
    leaves = [field, *(torch.rand(shape, dtype=torch.float64).requires_grad_() for shape in ((2, 6), 6))]

    def found():
        values, sums = normalise(*leaves), moments(field, [0, 2, 3])
        cotangents = [values.detach().cos(), sums.detach().sin()]
        return [values, sums, *torch.autograd.grad([values, sums], leaves, cotangents)]

    expected, calls = found(), list[torch.Size]()
    monkeypatch.setattr(statistics, "_by_channel", lambda values: True)
    monkeypatch.setattr(torch, "batch_norm_elemt", elemt)
    for here, there in zip(expected, found(), strict=True):
        torch.testing.assert_close(there, here)
    assert len(calls) == 3


def test_channels_are_grouped():
    torch.manual_seed(0)
    field = (1e8 * torch.randn(2, 6, 1, 1) + torch.randn(2, 6, 5, 4)).double().requires_grad_()
    within = field.detach().reshape(2, 3, -1).requires_grad_()

    def together(x):
        return mean_and_variance(grouped(moments(x, [2, 3]).view(4, 2, 3, 2)))

    torch.testing.assert_close(together(field), expected_of(within, [2]))
    (found,) = torch.autograd.grad(together(field)[1].sum(), field)
    (expected,) = torch.autograd.grad(within.var(2, correction=0).sum(), within)
    torch.testing.assert_close(found, expected.view_as(found))


def test_float32_keeps_its_digits_far_from_zero():
    """Where a float32 has no digit left for a tenth of the deviation, too."""
    torch.manual_seed(0)
    for offset in (1e3, 1e6, 1e7):
        field = (offset + torch.randn(1, 1, 200, 200)).requires_grad_()
        reference = field.detach().double().requires_grad_()
        expected = reference.var(correction=0)
        found = variance(moments(field, [0, 2, 3]), 0)
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
        (found,), (expected,) = torch.autograd.grad(found, field), torch.autograd.grad(expected, reference)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-9)


def test_equal_values_have_no_variance():
    for value in (0.1, 1e8 + 0.1, -3e-7):
        crops = [torch.full((1, 1, *size), value, dtype=torch.float64) for size in ((3, 7), (5, 1), (11, 3))]
        spread = variance(functools.reduce(merged, [moments(crop, [0, 2, 3]) for crop in crops]), 0)
        assert spread.item() <= 1e-40 * value**2


def test_one_value_has_an_unknown_variance_when_corrected():
    found = moments(torch.ones(1, 2, 1, 1), [0, 2, 3])
    assert variance(found, 1).isnan().all()
    assert not variance(found, 0).any()


@pytest.mark.parametrize("dims", EVERY)
@pytest.mark.parametrize("last", [False, True])
def test_the_gradient_is_of_the_moments_that_are_known(dims, last):
    """Far from zero in float32, also of a view, and of fields of a few pixels."""
    torch.manual_seed(0)
    for size in ((50, 50), (1, 3)):
        whole = 1000 + torch.randn(2, 3, 60, 60)
        whole = whole.contiguous(memory_format=torch.channels_last) if last else whole
        known = moments(whole, dims)
        crop = whole[:, :, 4 : 4 + size[0], 7 : 7 + size[1]].requires_grad_()
        weights = torch.randn(2, *known.shape[1:], dtype=torch.float64)
        found = moments(crop, dims, known)
        assert torch.equal(found, known)
        (found,) = torch.autograd.grad(mean_and_variance(found), crop, weights)
        reference = whole.double().requires_grad_()
        (expected,) = torch.autograd.grad(expected_of(reference, dims), reference, weights)
        expected = expected[:, :, 4 : 4 + size[0], 7 : 7 + size[1]]
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-9)


def test_normalise():
    torch.manual_seed(0)
    field = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    mean, scale, shift = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    view = (1, 3, 1, 1)
    expected = (field - mean.view(view)) * scale.view(view) + shift.view(view)
    torch.testing.assert_close(normalise(field, torch.stack([mean, scale]), shift), expected)
    torch.testing.assert_close(normalise(field, torch.stack([mean, scale]), None), expected - shift.view(view))
    assert torch.autograd.gradcheck(
        lambda x, m, s, b: normalise(x, torch.stack([m, s]), b), (field, mean, scale, shift)
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_mean_and_scale(weighted):
    torch.manual_seed(0)
    field = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True) if weighted else None
    cotangent = torch.randn(2, 3, dtype=torch.float64)
    leaves = [field] if weight is None else [field, weight]
    root = (field.var([0, 2, 3], correction=0) + 1e-3).rsqrt()
    expected = torch.stack([field.mean([0, 2, 3]), root if weight is None else root * weight])
    found = mean_and_scale(moments(field, [0, 2, 3]), weight, 1e-3, torch.float64)
    torch.testing.assert_close(found, expected)
    theirs = torch.autograd.grad(expected, leaves, cotangent)
    for one, other in zip(torch.autograd.grad(found, leaves, cotangent), theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_running_statistics():
    torch.manual_seed(0)
    field, norm = torch.randn(2, 3, 5, 4, dtype=torch.float64), torch.nn.BatchNorm2d(3, momentum=0.3).double()
    old = norm.running_mean.clone(), norm.running_var.clone()
    norm(field)
    found = moments(field, [0, 2, 3])
    torch.testing.assert_close(running_mean(old[0], found, 0.3), norm.running_mean)
    torch.testing.assert_close(running_variance(old[1], found, 0.3), norm.running_var)


def test_half_precision_is_normalised_with_float32_statistics():
    field = torch.randn(1, 3, 5, 4).bfloat16().requires_grad_()
    mean, scale, shift = torch.zeros(3), torch.ones(3, requires_grad=True), torch.zeros(3)
    output = normalise(field, torch.stack([mean, scale]), shift)
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
    statistics = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5), 5)]
    cotangent = torch.randn(1, 16, 5, dtype=torch.float64).transpose(1, 2).reshape(1, 5, 4, 4)
    inputs = (field, *statistics)
    expected = torch.autograd.grad(normalise(*inputs), inputs, cotangent.contiguous())
    for ours, theirs in zip(torch.autograd.grad(normalise(*inputs), inputs, cotangent), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_statistics_may_be_one_value_expanded():
    torch.manual_seed(0)
    field = FIELDS["channels last"]().requires_grad_()
    both, shift = torch.randn(2, 1, dtype=torch.float64).expand(2, 5), torch.randn(1, dtype=torch.float64).expand(5)
    both.requires_grad_()
    plain = [value.contiguous().detach().requires_grad_() for value in (both, shift)]
    cotangent = torch.randn_like(field)
    ours = torch.autograd.grad(normalise(field, both, shift), (field, both), cotangent)
    theirs = torch.autograd.grad(normalise(field, *plain), (field, plain[0]), cotangent)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_where_statistics_are_of_half_precision_too(dtype):
    """The kernel took no half statistics beside float32 ones."""
    torch.manual_seed(0)
    field, cotangent = (torch.randn(1, 3, 5, 7).to(dtype) for _ in range(2))
    leaves = [
        field.requires_grad_(),
        torch.rand(2, 3).to(dtype).requires_grad_(),
        torch.rand(3).to(dtype).requires_grad_(),
    ]
    found = torch.autograd.grad(normalise(*leaves), leaves, cotangent)
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    expected = torch.autograd.grad(normalise(*wide), wide, cotangent.float())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.to(dtype))
