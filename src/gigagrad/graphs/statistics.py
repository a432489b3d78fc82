"""Compute the two halves of every norm: the moments of a field, and pixels normalised by given statistics.

A sum of squares minus the square of a sum loses its digits where the mean is large beside the deviation. So the moments
of a tile are its count, its mean and the sum of squared differences from that mean, which are merged two by two (Chan,
Golub and LeVeque, "Algorithms for computing the sample variance", 1983). The mean is kept as two numbers, for the
difference of two tiles' means is to have as many digits as the deviation; gradients are centred on the image's mean.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from gigagrad.graphs.crops import strides

_FEW, _EVERY = 4096, 8
"""The number of values above which only one row of so many is looked at for a first guess of the mean."""


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, field: torch.Tensor, dims: list[int], known: torch.Tensor | None) -> torch.Tensor:
        result = _values(field, dims, known)
        ctx.dims = dims
        ctx.save_for_backward(field, result)
        return result

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        field, result = ctx.saved_tensors
        shape = [1 if dim in ctx.dims else size for dim, size in enumerate(field.shape)]
        count, mean, rest, _ = result.reshape(4, *shape)
        _, to_mean, _, to_squares = cotangents[0].reshape(4, *shape)
        wide = _wide(field)
        centre, slope = mean.to(wide.dtype), 2 * to_squares
        constant = to_mean / count + slope * ((centre - mean) - rest)
        found = _affine(wide, centre, slope.to(wide.dtype), constant.to(wide.dtype))
        return found.to(field.dtype), None, None


def _values(field: torch.Tensor, dims: list[int], known: torch.Tensor | None) -> torch.Tensor:
    return _of_field(field, dims) if known is None else known.clone()


def _of_field(field: torch.Tensor, dims: list[int]) -> torch.Tensor:
    wide = _wide(field)
    kept = [size for dim, size in enumerate(field.shape) if dim not in dims]
    count = field.numel() // max(prod(kept), 1)
    centre = _about(wide, dims, count)
    difference = _affine(wide, centre)
    rest = _total(difference, dims).div_(count)
    squares = _total(difference.mul_(difference), dims)
    # Where finite values have infinite squares, so may the rest: their difference is infinite, not NaN.
    squares = torch.where(squares.isinf() & rest.isfinite(), squares, squares.addcmul(rest, rest, value=-count))
    values = (torch.full_like(rest, count), centre.double(), _finite(centre, rest), squares)
    return torch.stack(values).view(4, *kept)


def _about(values: torch.Tensor, dims: list[int], count: int) -> torch.Tensor:
    """Return roughly the mean, of which the rest is corrected: of an eighth of the rows where there are many. It is no
    further from the mean of all than 2.7 standard deviations, so that squares lose no more than a digit.
    """
    if count > _FEW:
        rows = dims[max(0, len(dims) - 2)]
        values = values[tuple(slice(None, None, _EVERY if dim == rows else None) for dim in range(values.ndim))]
    return torch.mean(values, dims, keepdim=True)


def _by_channel(values: torch.Tensor) -> bool:
    """Say whether the device has a kernel that reads one value a channel: on CUDA operators that broadcast take seven
    times as long, and PyTorch's gradient of a normalised field, too (docs/decisions/0070-a-profile-of-a-gpu.md).
    """
    return values.device.type == "cuda"


def _affine(
    values: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor | None = None, shift: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `(values - mean) * scale + shift`, these three with axes of 1 where `values` has more: in one pass where
    they have one value a channel and the device has a kernel for that.
    """
    channels = values.shape[1] if values.ndim == 4 else 0
    if _by_channel(values) and mean.shape == (1, channels, 1, 1):
        scale = mean.new_ones(channels) if scale is None else scale.flatten()
        shift = None if shift is None else shift.flatten()
        result: torch.Tensor = torch.batch_norm_elemt(values, None, shift, mean.flatten(), scale, 0.0)
        return result
    difference = values - mean
    return difference if scale is None or shift is None else torch.addcmul(shift, difference, scale)


def _finite(mean: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Return the part that rounding a mean has left; 0 for an infinite one."""
    return torch.where(mean.isinf(), 0.0, rest)


def _total(values: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Sum over `dims`, kept as axes of 1, in float64: short sums first, which is ten times as fast as
    `torch.var_mean` on one thread (8 to 14 GB/s instead of 0.8) and closer to the truth.
    """
    if values.ndim == 4 and values.shape[1] > 1 and values.stride(1) == 1:  # channels last
        order = (0, 2, 3, 1)
        return _total(values.permute(order), [order.index(dim) for dim in dims]).permute(0, 3, 1, 2)
    return values.sum(dims[-1], keepdim=True).double().sum(dims, keepdim=True)


def _wide(field: torch.Tensor) -> torch.Tensor:
    return field if field.dtype in (torch.float32, torch.float64) else field.to(torch.float32)


def moments(field: torch.Tensor, dims: list[int], known: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the moments of a field (or of a crop) over `dims` (positive): `(4, *the other axes)`, float64.

    They are the count of its values, their mean, what rounding that has left, and the sum of squared differences from
    both.

    `known`: those of the whole image. They are returned, with the gradient that this crop's pixels have from them.
    """
    if field.device.type == "meta":
        kept = [size for dim, size in enumerate(field.shape) if dim not in dims]
        return field.new_empty([4, *kept], dtype=torch.float64)
    if not torch.is_grad_enabled():
        return _values(field, dims, known)
    result: torch.Tensor = _Moments.apply(field, dims, known)  # type: ignore[no-untyped-call]
    return result


def merged(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """Merge the moments of two crops."""
    (count, mean, rest, squares), (count_two, mean_two, rest_two, squares_two) = one, two
    total = count + count_two
    share, share_two = count / total, count_two / total
    both = share * mean + share_two * mean_two
    left = share * ((mean - both) + rest) + share_two * ((mean_two - both) + rest_two)
    between = (mean_two - mean) + (rest_two - rest)
    return torch.stack(
        [total, both, _finite(both, left), squares + squares_two + between * between * count * share_two]
    )


def grouped(moments: torch.Tensor) -> torch.Tensor:
    """Merge moments `(4, ..., channels)` of equally many values each over all channels: `(4, ...)`."""
    count, mean, rest, squares = moments
    both = mean.mean(-1, keepdim=True)
    left = (mean - both + rest).mean(-1, keepdim=True)
    within = squares + count * (mean - both + rest - left) ** 2
    left = _finite(both, left)
    return torch.stack([count.sum(-1), both.squeeze(-1), left.squeeze(-1), within.sum(-1)])


def average(moments: torch.Tensor) -> torch.Tensor:
    """Return the mean of the values that have these moments."""
    return moments[1] + moments[2]


def variance(moments: torch.Tensor, correction: float) -> torch.Tensor:
    """Return their variance, by the number of values less `correction`."""
    return moments[3] / (moments[0] - correction).clamp(min=0)


def running_mean(old: torch.Tensor, moments: torch.Tensor, momentum: float) -> torch.Tensor:
    """Return a running mean after a step, in its own dtype; it is computed in float64."""
    return _blended(old, average(moments), momentum)


def running_variance(old: torch.Tensor, moments: torch.Tensor, momentum: float) -> torch.Tensor:
    """Return a running variance after a step, as a mean; the new one is by the number of values less 1."""
    return _blended(old, variance(moments, 1), momentum)


def _blended(old: torch.Tensor, new: torch.Tensor, momentum: float) -> torch.Tensor:
    return (old.double() * (1 - momentum) + new * momentum).to(old.dtype)


class _MeanAndScale(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, moments: torch.Tensor, weight: torch.Tensor | None, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        root = (variance(moments, 0) + eps).rsqrt()
        ctx.save_for_backward(moments[0], root, weight)
        return torch.stack([average(moments), root if weight is None else root * weight]).to(dtype)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        count, root, weight = ctx.saved_tensors
        to_mean, to_scale = cotangents[0].double()
        to_root = to_scale if weight is None else to_scale * weight
        to_squares = -0.5 * to_root * root.pow(3) / count
        to_weight = (to_scale * root).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return torch.stack([torch.zeros_like(to_mean), to_mean, to_mean, to_squares]), to_weight, None, None


def mean_and_scale(moments: torch.Tensor, weight: torch.Tensor | None, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the mean of the values that have these moments, and what their differences from it are multiplied by in a
    norm, `weight / sqrt(variance + eps)`: `(2, C)` of moments `(4, C)`, computed in float64.
    """
    if moments.device.type == "meta":
        return moments.new_empty((2, *moments.shape[1:]), dtype=dtype)
    result: torch.Tensor = _MeanAndScale.apply(moments, weight, eps, dtype)  # type: ignore[no-untyped-call]
    return result


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, field: torch.Tensor, statistics: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
        output, *saved = _normalised(field, statistics, shift)
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        field, *saved = ctx.saved_tensors
        mean, scale, ones = map(_wide, saved)
        asked, cotangent = ctx.needs_input_grad[0], cotangents[0]
        apart = asked and _by_channel(field)
        if cotangent.stride() != field.stride():
            cotangent = torch.empty_like(field).copy_(cotangent)
        # Twice: CUDA's kernel asserts that what a forward in training mode would have saved is there.
        to_field, to_scale, to_shift = torch.ops.aten.native_batch_norm_backward(
            cotangent, field, scale, mean, ones, mean, ones, False, 0.0, [asked and not apart, True, True]
        )
        if apart:
            to_field = torch.batch_norm_elemt(cotangent, None, None, torch.zeros_like(scale), scale, 0.0)
        return (
            to_field if asked else None,
            torch.stack([-scale * to_shift, to_scale]),
            to_shift if ctx.needs_input_grad[2] else None,
        )


def _normalised(field: torch.Tensor, statistics: torch.Tensor, shift: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the normalised field, and what its gradient needs."""
    # The kernel reads them by pointer, and one value expanded to all channels has a stride of 0.
    (mean, scale), shift = statistics.contiguous(), None if shift is None else shift.contiguous()
    ones, field = torch.ones_like(mean), _standard(field)
    return [torch.native_batch_norm(field, scale, shift, mean, ones, False, 0.0, 0.0)[0], field, mean, scale, ones]


def _standard(field: torch.Tensor) -> torch.Tensor:
    """Copy a field, if need be, to the strides of one of the two memory formats.

    PyTorch's backward of batch norm is wrong on the CPU where field and cotangent are laid out differently and one of
    them has an unusual batch stride, as transposed tokens `(1, H W, C)` have (version 2.13; tests/graphs/
    test_statistics.py). So the kernel gets both in one standard layout.
    """
    last = field.ndim == 4 and field.stride(1) == 1 and field.shape[1] > 1
    layout = torch.channels_last if last else torch.contiguous_format
    return field if field.stride() == strides(field.shape, layout) else field.clone(memory_format=layout)


def normalise(field: torch.Tensor, statistics: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    """`(field - mean) * scale + shift` per channel (axis 1) of `(N, C, ...)`. `statistics`: mean and scale, `(2, C)`;
    shift `(C,)`, None for 0.
    """
    if field.device.type == "meta":
        return torch.empty_like(field)
    if not torch.is_grad_enabled():
        return _normalised(field, statistics, shift)[0]
    result: torch.Tensor = _Normalise.apply(field, statistics, shift)  # type: ignore[no-untyped-call]
    return result
