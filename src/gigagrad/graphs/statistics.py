"""The two halves of every normalisation: the moments of a field, and the pixels normalised by given statistics.

Moments of tiles are added up over the image, so they must be sums; yet a sum of squares minus the square of a sum loses
its digits where the mean is large beside the deviation. So a tile's own mean and variance are computed stably first
(Chan, Golub and LeVeque, 1983), and their sums are in float64; the gradient is centred likewise, on the tile's mean or
on that of some of its pixels.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

_EVERY = 4
"""Pixels along an axis of which one is looked at where only a centre is wanted."""


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, field: torch.Tensor, dims: list[int], values: bool) -> torch.Tensor:
        ctx.dims = dims
        if not values:
            some = _wide(field[tuple(slice(None, None, _EVERY if dim in dims else None) for dim in range(field.ndim))])
            ctx.save_for_backward(field, _mean(some, dims).to(some.dtype))
            return field.new_zeros([2, *_kept(field, dims)], dtype=torch.float64)
        wide = _wide(field)
        mean = _mean(wide, dims)
        centre = mean.to(wide.dtype)
        difference = wide - centre
        count = _count(field, dims)
        variance = _total(difference.mul_(difference), dims) / count - (mean - centre) ** 2
        ctx.save_for_backward(field, centre)
        return torch.stack([count * mean, count * (variance + mean * mean)]).flatten(1).reshape(2, *_kept(field, dims))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        field, centre = ctx.saved_tensors
        first, second = cotangents[0].reshape(2, *centre.shape)
        constant, slope = first + 2 * centre.double() * second, 2 * second
        wide = _wide(field)
        found = torch.addcmul(constant.to(wide.dtype), wide - centre, slope.to(wide.dtype))
        return found.to(field.dtype), None, None


def _total(values: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Sums over `dims`, kept as axes of 1, in float64: short sums first, which is ten times as fast as
    `torch.var_mean` on one thread (8 to 14 GB/s instead of 0.8) and closer to the truth.
    """
    if values.ndim == 4 and values.shape[1] > 1 and values.stride(1) == 1:  # channels last
        order = (0, 2, 3, 1)
        return _total(values.permute(order), [order.index(dim) for dim in dims]).permute(0, 3, 1, 2)
    return values.sum(dims[-1], keepdim=True).double().sum(dims, keepdim=True)


def _mean(values: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return _total(values, dims) / _count(values, dims)


def _count(field: torch.Tensor, dims: list[int]) -> int:
    return field.numel() // max(prod(_kept(field, dims)), 1)


def _wide(field: torch.Tensor) -> torch.Tensor:
    return field if field.dtype in (torch.float32, torch.float64) else field.to(torch.float32)


def _kept(field: torch.Tensor, dims: list[int]) -> list[int]:
    return [size for dim, size in enumerate(field.shape) if dim not in dims]


def moments(field: torch.Tensor, dims: list[int], values: bool = True) -> torch.Tensor:
    """Sums of a field (or of a crop) and of its square over `dims` (positive): `(2, *the other axes)`, float64.

    Without `values`, zeros that have its gradient.
    """
    if field.device.type == "meta":
        return field.new_empty([2, *_kept(field, dims)], dtype=torch.float64)
    result: torch.Tensor = _Moments.apply(field, dims, values)  # type: ignore[no-untyped-call]
    return result


def variance(square: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """From the mean square and the mean; infinite, not NaN, where finite values have squares beyond float64."""
    beyond = square.isinf() & mean.isfinite()
    return torch.where(beyond, square, square - torch.where(beyond, 0.0, mean).square())


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, field: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
    ) -> torch.Tensor:
        # The kernel reads them by pointer, and one value expanded to all channels has a stride of 0.
        mean, scale, shift = mean.contiguous(), scale.contiguous(), shift.contiguous()
        ones = torch.ones_like(mean)
        field = _standard(field)
        ctx.save_for_backward(field, mean, scale, ones)
        output: torch.Tensor = torch.native_batch_norm(field, scale, shift, mean, ones, False, 0.0, 0.0)[0]
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        field, mean, scale, ones = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], True, True]
        cotangent = cotangents[0]
        if cotangent.stride() != field.stride():
            cotangent = torch.empty_like(field).copy_(cotangent)
        # Twice: CUDA's kernel asserts that what a forward in training mode would have saved is there.
        to_field, to_scale, to_shift = torch.ops.aten.native_batch_norm_backward(
            cotangent, field, scale, mean, ones, _wide(mean), _wide(ones), False, 0.0, wanted
        )
        return (to_field if wanted[0] else None), -scale * to_shift, to_scale, to_shift


def _standard(field: torch.Tensor) -> torch.Tensor:
    """With the strides of one of the two memory formats.

    PyTorch's backward of batch norm is wrong on the CPU where field and cotangent are laid out differently and one of
    them has an unusual batch stride, as transposed tokens `(1, H W, C)` have (version 2.13; tests/graphs/
    test_statistics.py). So the kernel gets both in one standard layout.
    """
    last = field.ndim == 4 and field.stride(1) == 1 and field.shape[1] > 1
    layout = torch.channels_last if last else torch.contiguous_format
    strides = torch.empty(field.shape, device="meta", memory_format=layout).stride()
    return field if field.stride() == strides else field.clone(memory_format=layout)


def normalise(field: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """`(field - mean) * scale + shift` per channel (axis 1) of `(N, C, ...)`; the statistics have shape `(C,)`."""
    if field.device.type == "meta":
        return torch.empty_like(field)
    result: torch.Tensor = _Normalise.apply(field, mean, scale, shift)  # type: ignore[no-untyped-call]
    return result
