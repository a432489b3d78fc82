"""Parts of crops, and crops in a frame, each written once.

PyTorch's gradient of a slice clears a whole crop and writes the slice into it, its padding clears the whole output and
writes the crop into it, and the gradient of that is a copy. Here a frame is the gradient of a part and a part that of a
frame: a part is a view, and of a frame every pixel is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gigagrad.graphs.graph import Axes

Frame = tuple[tuple[int, int], tuple[int, int]]
"""Pixels before and after, along y and x."""


def part(crop: torch.Tensor, axes: Axes, starts: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """`size` pixels from `starts` on, along the spatial axes: a view, the crop itself where that is all of it."""
    y, x = ((start, crop.shape[axis] - start - n) for axis, start, n in zip(axes, starts, size, strict=True))
    assert min(*y, *x) >= 0, (tuple(crop.shape), starts, size)
    if not any((*y, *x)):
        return crop
    result: torch.Tensor = _Part.apply(crop, axes, (y, x))  # type: ignore[no-untyped-call]
    return result


def fit(crop: torch.Tensor, axes: Axes, frame: Frame, value: float = 0.0) -> torch.Tensor:
    """The crop with pixels of `value` around it; where there are fewer than none, without its own there.

    All padding first, then all cropping, so that no size is negative between.
    """
    more: Frame = tuple((max(0, before), max(0, after)) for before, after in frame)  # type: ignore[assignment]
    if any(map(any, more)):
        crop = _Framed.apply(crop, axes, more, value)  # type: ignore[no-untyped-call]
    size = [
        crop.shape[axis] + min(0, before) + min(0, after) for axis, (before, after) in zip(axes, frame, strict=True)
    ]
    return part(crop, axes, [max(0, -before) for before, _ in frame], size)


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, crop: torch.Tensor, axes: Axes, frame: Frame) -> torch.Tensor:
        ctx.axes, ctx.frame = axes, frame
        return _part(crop, axes, frame)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _framed(cotangents[0], ctx.axes, ctx.frame, 0.0), None, None


class _Framed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, crop: torch.Tensor, axes: Axes, frame: Frame, value: float) -> torch.Tensor:
        ctx.axes, ctx.frame = axes, frame
        return _framed(crop, axes, frame, value)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _part(cotangents[0], ctx.axes, ctx.frame), None, None, None


def _part(crop: torch.Tensor, axes: Axes, frame: Frame) -> torch.Tensor:
    for axis, (before, after) in zip(axes, frame, strict=True):
        if before or after:
            crop = crop.narrow(axis, before, crop.shape[axis] - before - after)
    return crop


def _framed(crop: torch.Tensor, axes: Axes, frame: Frame, value: float) -> torch.Tensor:
    shape = list(crop.shape)
    for axis, (before, after) in zip(axes, frame, strict=True):
        shape[axis] += before + after
    # In the order in which the crop lies; a part of a larger one has gaps, which the result does not.
    order = sorted(range(crop.ndim), key=lambda axis: (-crop.stride()[axis], axis))
    result = torch.empty_permuted(shape, order, dtype=crop.dtype, device=crop.device)
    rest = result
    for axis, (before, after) in zip(axes, frame, strict=True):
        length = rest.shape[axis]
        if before:
            rest.narrow(axis, 0, before).fill_(value)
        if after:
            rest.narrow(axis, length - after, after).fill_(value)
        rest = rest.narrow(axis, before, length - before - after)
    rest.copy_(crop)
    return result
