"""Take parts of crops and put crops in a frame, each written once; lay crops out as kernels read them, and patches in
one axis or in two.

PyTorch's gradient of a slice clears a whole crop and writes the slice into it, its padding clears the whole output and
writes the crop into it, and the gradient of that is a copy. Here a frame is the gradient of a part and a part that of a
frame: a part is a view, and of a frame every pixel is written once.

Kernels choose by strides, those of axes of length 1 too, and by addresses how they add up, and so the last bits. Where
a crop comes from, a whole field, a window of it or a file, must not show in them (`laid_out`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from gigagrad.boxes import Box
from gigagrad.graphs.graph import Axes, Node

Frame = tuple[tuple[int, int], tuple[int, int]]
"""Pixels before and after, along y and x."""
View = Callable[[torch.Tensor], torch.Tensor]
"""Makes one crop of another."""
_ALIGNED_BYTES = 64
"""PyTorch's own allocations begin at multiples of this."""


class OnDevices:
    """Hold a small tensor of the host with its copies on the devices that asked for one."""

    def __init__(self, value: torch.Tensor) -> None:
        self._there = {value.device: value}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the copy there; while a GPU records a step, one cannot be made."""
        found = self._there.get(device)
        if found is None:
            found = self._there[device] = next(iter(self._there.values())).to(device)
        return found


@lru_cache(maxsize=4096)
def strides(shape: tuple[int, ...], layout: torch.memory_format) -> tuple[int, ...]:
    """Return the strides of a new tensor of this shape."""
    return torch.empty(shape, device="meta", memory_format=layout).stride()


def laid_out(value: torch.Tensor, layout: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    """Return a value as a new tensor of its shape would lie, in this layout where it has four axes; itself where it
    does.
    """
    if value.ndim != 4 or (value.shape[1] == 1 and value.stride(1) != 1):  # one channel lies in either layout
        layout = torch.contiguous_format
    value = aligned(value.contiguous(memory_format=layout))
    usual = strides(value.shape, layout)
    return value if value.stride() == usual else value.as_strided(value.shape, usual)


def aligned(value: torch.Tensor) -> torch.Tensor:
    """Return a value without gaps at an address such as new tensors have. Of integers every sum is exact."""
    return value.clone() if value.is_floating_point() and value.data_ptr() % _ALIGNED_BYTES else value


def crop_view(crop: torch.Tensor, axes: Axes, starts: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Take `size` pixels from `starts` on, along the spatial axes: a view, the crop itself where that is all of it."""
    view = bound_view(axes, starts, size, [crop.shape[axis] for axis in axes])
    return crop if view is None else view(crop)


def box_view(crop: torch.Tensor, axes: Axes, box: Box, of: Box) -> torch.Tensor:
    """Return a view of a box in a crop on another one that holds it, outside of autograd."""
    y, x = axes
    return crop.narrow(y, box.y0 - of.y0, box.height).narrow(x, box.x0 - of.x0, box.width)


def pad(crop: torch.Tensor, axes: Axes, frame: Frame, value: float = 0.0) -> torch.Tensor:
    """Put pixels of `value` around the crop; where there are fewer than none, take of its own away.

    All padding first, then all cropping, so that no size is negative between.
    """
    more: Frame = tuple((max(0, before), max(0, after)) for before, after in frame)  # type: ignore[assignment]
    if any(map(any, more)):
        crop = _Padded.apply(crop, axes, more, value)  # type: ignore[no-untyped-call]
    size = [
        crop.shape[axis] + min(0, before) + min(0, after) for axis, (before, after) in zip(axes, frame, strict=True)
    ]
    return crop_view(crop, axes, [max(0, -before) for before, _ in frame], size)


def bound_view(axes: Axes, starts: Sequence[int], size: Sequence[int], whole: Sequence[int]) -> View | None:
    """Bind `crop_view` for crops of height and width `whole`, or so many rows and columns of patches; None where it
    takes all of them.
    """
    frame: Frame = tuple(  # type: ignore[assignment]
        (start, all_ - start - n) for start, n, all_ in zip(starts, size, whole, strict=True)
    )
    assert min(map(min, frame)) >= 0, (whole, starts, size)
    if not any(map(any, frame)):
        return None
    if axes[0] == axes[1]:
        return _bound_view_of_patches(axes[0], frame, whole)

    def view(crop: torch.Tensor) -> torch.Tensor:
        if not (crop.requires_grad and torch.is_grad_enabled()):
            return _narrowed(crop, axes, frame)
        result: torch.Tensor = _CropView.apply(crop, axes, frame)  # type: ignore[no-untyped-call]
        return result

    return view


def _bound_view_of_patches(axis: int, frame: Frame, whole: Sequence[int]) -> View:
    (above, below), (left, right) = frame
    rows, columns = whole

    def view(crop: torch.Tensor) -> torch.Tensor:
        before = crop.shape[axis] // (rows * columns)
        if before == 1 and not left and not right:  # they lie side by side
            return crop.narrow(axis, above * columns, (rows - above - below) * columns)
        in_rows: torch.Tensor = crop.unflatten(axis, (before, rows, columns))  # type: ignore[no-untyped-call]
        part: torch.Tensor = _CropView.apply(in_rows, (axis - 1, axis), frame)  # type: ignore[no-untyped-call]
        return part.flatten(axis - 2, axis)

    return view


def as_stored(crop: torch.Tensor, node: Node, size: Sequence[int]) -> torch.Tensor:
    """Lay a crop of a field out as it is stored: patches in rows and columns, so many of each."""
    if node.patches is None:
        return crop
    before = [node.patches.before] if node.patches.before > 1 else []
    in_rows: torch.Tensor = crop.unflatten(node.spatial[0], (*before, *size))  # type: ignore[no-untyped-call]
    return in_rows


def batched(crop: torch.Tensor, node: Node) -> torch.Tensor:
    """Lay a crop of a field out as operators take it: patches, row by row, in one axis."""
    if node.patches is None:
        return crop
    y, x = node.stored_axes
    return crop.flatten(y - (node.patches.before > 1), x)


def bound_pad(axes: Axes, frame: Frame, value: float = 0.0) -> View | None:
    """Bind `pad`; None where it leaves crops as they are."""
    return partial(pad, axes=axes, frame=frame, value=value) if any(map(any, frame)) else None


class _CropView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, crop: torch.Tensor, axes: Axes, frame: Frame) -> torch.Tensor:
        ctx.axes, ctx.frame = axes, frame
        return _narrowed(crop, axes, frame)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _padded(cotangents[0], ctx.axes, ctx.frame, 0.0), None, None


class _Padded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, crop: torch.Tensor, axes: Axes, frame: Frame, value: float) -> torch.Tensor:
        ctx.axes, ctx.frame = axes, frame
        return _padded(crop, axes, frame, value)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _narrowed(cotangents[0], ctx.axes, ctx.frame), None, None, None


def _narrowed(crop: torch.Tensor, axes: Axes, frame: Frame) -> torch.Tensor:
    for axis, (before, after) in zip(axes, frame, strict=True):
        if before or after:
            crop = crop.narrow(axis, before, crop.shape[axis] - before - after)
    return crop


def _padded(crop: torch.Tensor, axes: Axes, frame: Frame, value: float) -> torch.Tensor:
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
