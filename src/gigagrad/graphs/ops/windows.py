"""Rules of sliding windows: their arithmetic, which convolutions share, and max and average pooling.

Along one axis a window operator with kernel k, stride s, padding p and dilation d reads for output o the inputs
`o s - p + j d, 0 <= j < k` (Dumoulin and Visin, A guide to convolution arithmetic for deep learning, 2016). The span it
needs is cut at the image's border; what was cut is padded back when the crop runs, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
import torch.nn.functional as F

from gigagrad.allowances import LANES
from gigagrad.boxes import Span
from gigagrad.graphs.crops import Frame, bound_pad, crop_view, pad
from gigagrad.graphs.graph import IMAGE_AXES, Axes, Ref
from gigagrad.graphs.op_rules import (
    Bound,
    Call,
    Gains,
    OpRule,
    Site,
    aten,
    register,
    require_nchw,
    scaled_gains,
)
from gigagrad.work import Work

GROUPED = (torch.float32, torch.bfloat16)
"""Types in which few channels are put together to fill it (docs/decisions/0023-few-channels.md)."""


@dataclass(frozen=True, slots=True)
class Window:
    """Window arithmetic along one axis, in pixels of the input."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def reach(self) -> int:
        """Count the pixels from the first to one past the last tap."""
        return self.dilation * (self.kernel - 1) + 1

    def reads(self, out: Span) -> Span:
        """Return the input span that output span `out` reads, before the border cuts it."""
        first = out.start * self.stride - self.padding
        return Span(first, first + (out.length - 1) * self.stride + self.reach)

    def writers(self, out: Span) -> Span:
        """Return the input span that contributes to output span `out` of the transposed operator, before cutting."""
        first = -((self.reach - 1 - out.start - self.padding) // self.stride)
        return Span(first, (out.stop - 1 + self.padding) // self.stride + 1)


def inside_or_nearest(span: Span, size: int) -> Span:
    """Return the part of a span inside `[0, size)`, or the pixel nearest to it where there is none.

    An output that sees only padding, or that no input reaches, still needs one pixel: the operator's shape stays legal.
    """
    if 0 <= span[0] < span[1] <= size:
        return span
    inside = span.clamp(size)
    if not inside.empty:
        return inside
    nearest = min(max(span.start, 0), size - 1)
    return Span(nearest, nearest + 1)


def trim(x_NCHW: torch.Tensor, starts: Sequence[int], out: tuple[Span, Span]) -> torch.Tensor:
    """Take as many pixels as `out` has, from `starts` on: the tensor itself where those are all."""
    return crop_view(x_NCHW, IMAGE_AXES, starts, [span.length for span in out])


def select(crop: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Take rows or columns by index: `crop.index_select(dim, index)` for `dim` -1 or -2 of NCHW, -2 or -3 of NHWC.

    Along the middle of three axes, as they lie in memory, PyTorch is up to five times as fast as along one of four.
    """
    last = crop.ndim == 4 and dim > -3 and crop.is_contiguous(memory_format=torch.channels_last)
    laid, axis = (crop.permute(0, 2, 3, 1), dim - 1) if last else (crop, dim)
    before, after = laid.shape[:axis], laid.shape[axis:][1:]
    flat = laid.reshape(prod(before), -1, prod(after)) if after else laid.reshape(prod(before), -1)
    found = flat.index_select(1, index).reshape(*before, len(index), *after)
    return found.permute(0, 3, 1, 2) if last else found


def pair(value: Any) -> tuple[int, int]:
    """Return an operator's per-axis argument as `(y, x)`; ATen allows one number for both."""
    values = [value] if isinstance(value, int) else list(value)
    return values[0], values[-1]


class WindowRule(OpRule):
    """Rule whose geometry is one `Window` per axis."""

    on_images = True

    def axes(self, call: Call, rank: int) -> Axes:
        return require_nchw(call)

    def window(self, call: Call, axis: int) -> Window:
        """Return the window of a use. Pools name their kernel's size, and without a stride it is that; a convolution's
        is its weight's.
        """
        given = call.node.arguments
        kernel = pair(given["kernel_size"])[axis] if "kernel_size" in given else call.operands[1].shape[2 + axis]
        dilation, padding = pair(given.get("dilation", 1))[axis], given["padding"]
        if isinstance(padding, str):  # of an odd number of pixels that keep the size, PyTorch puts one more at the end
            padding = dilation * (kernel - 1) // 2 if padding == "same" else 0
        return Window(kernel, pair(given["stride"] or kernel)[axis], pair(padding)[axis], dilation)

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        return self.needing(call, axis)(out)

    def needing(self, call: Call, axis: int) -> Callable[[Span], tuple[Span | None, ...]]:
        reads, size, others = self.reading(call, axis), call.operands[0].size(axis), (None,) * (len(call.operands) - 1)
        return lambda out: (inside_or_nearest(reads(out), size), *others)

    def reading(self, call: Call, axis: int) -> Callable[[Span], Span]:
        """Make the function that returns what an output span reads, before the border cuts it."""
        return self.window(call, axis).reads

    def missing(self, call: Call, site: Site) -> Frame:
        """Count the pixels that the border cut off, along y and x."""
        return self._missing(call, 0, site.out[0], site.inside[0]), self._missing(call, 1, site.out[1], site.inside[1])

    def _missing(self, call: Call, axis: int, out: Span, inside: Span | None) -> tuple[int, int]:
        """Count them before and after, along an axis; negative: read beyond the need."""
        assert inside is not None
        reads = self.window(call, axis).reads(out)
        return inside.start - reads.start, reads.stop - inside.stop

    def form(self, call: Call, axis: int, out: Span, operands: tuple[Span | None, ...]) -> Hashable | None:
        return self._missing(call, axis, out, operands[0])


class OfWeight(OpRule):
    """Part of the rules of convolutions, of images and of patches: their weight says what kind of work they are."""

    compiled = True

    def work_of(self, call: Call) -> Work:
        return Work.of_convolution(call.operands[1].shape, call["groups"])

    def weight_work_of(self, call: Call) -> Work:
        return Work.of_convolution(call.operands[1].shape, call["groups"], of_weight=True)

    def contiguous_only(self, call: Call) -> bool:
        return call.node.dtype == torch.float64


def filled(channels: int) -> int:
    """Count channels as kernels compute them: in vectors, the last one filled up."""
    return -(-channels // LANES) * LANES


def reordered_bytes(call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
    """Count the bytes that a convolution allocates on the side.

    In float32 and shorter types the library may reorder its input and its output into its own layout. Double precision
    runs as a matrix product over unfolded windows.
    """
    inside = operands[0]
    assert inside is not None
    pixels = inside[0].length * inside[1].length
    weight = call.operands[1].shape
    if call.node.dtype == torch.float64:
        taps = weight[1] * weight[2] * weight[3]
        return 8 * taps * max(out_pixels, pixels)
    channels_in, channels_out = call.operands[0].shape[1], call.node.shape[1]
    return 4 * (channels_in * pixels + channels_out * out_pixels)


def padded_groups_bytes(call: Call, out_pixels: int, in_pixels: int) -> int:
    """Count what the backward of a depthwise convolution allocates where the library has no kernel of its own for it.

    For large or dilated kernels it runs as a grouped one, whose groups are padded to vectors: weights to blocks of 16 x
    16 and, in half precisions, both fields to 16 channels a group (oneDNN; docs/decisions/0013-whole-process-
    accounting.md).
    """
    weight = call.operands[1].shape
    usual = max(weight[2:]) <= 3 and max(pair(call["dilation"])) == 1
    if weight[1] != 1 or call["groups"] == 1 or usual:
        return 0
    blocks = prod(weight[2:]) * weight[0] * LANES * LANES
    if call.node.dtype.itemsize >= 4:
        return 4 * blocks
    channels_in, channels_out = call.operands[0].shape[1], call.node.shape[1]
    return (2 + 4) * blocks + 2 * LANES * (channels_in * in_pixels + channels_out * out_pixels)


class MaxPooling(WindowRule):
    """2-D max pooling, ceil_mode included: whatever the border cuts can never be the maximum.

    Of equal values the first counts. So a window of -inf (of integers, of their lowest) must not begin with padding of
    ours: before the image the operator pads by itself, and what it then pools beyond the tile is cut off.
    """

    work = Work.WINDOWS

    def bind(self, call: Call, site: Site) -> Bound:
        (top, bottom), (left, right) = self.missing(call, site)
        dtype = call.operands[0].dtype
        lowest = -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min
        filled = bound_pad(IMAGE_AXES, ((0, max(0, bottom - top)), (0, max(0, right - left))), value=lowest)
        windows = [self.window(call, axis) for axis in (0, 1)]
        kernel, stride, dilation = ([getattr(w, name) for w in windows] for name in ("kernel", "stride", "dilation"))

        def run(operands: Sequence[Any]) -> torch.Tensor:
            x_NCHW = operands[0] if filled is None else filled(operands[0])
            return trim(torch.max_pool2d(x_NCHW, kernel, stride, (top, left), dilation), (0, 0), site.out)

        return run

    def error_gains(self, call: Call, read: Sequence[Gains], value: Callable[[Ref], torch.Tensor]) -> Gains | None:
        windows = [self.window(call, axis) for axis in (0, 1)]
        return scaled_gains(read[0], prod(ceil(window.kernel / window.stride) for window in windows) ** 0.5)


class AveragePooling(WindowRule):
    """2-D average pooling with ceil_mode, count_include_pad and divisor_override."""

    work = Work.WINDOWS

    def bind(self, call: Call, site: Site) -> Bound:
        divisor: int | None = call["divisor_override"]
        windows = [self.window(call, axis) for axis in (0, 1)]
        kernel, stride = [w.kernel for w in windows], [w.stride for w in windows]
        missing = self.missing(call, site)
        if not any(map(any, missing)):
            return lambda operands: F.avg_pool2d(operands[0], kernel, stride, divisor_override=divisor)

        def run(operands: Sequence[Any]) -> torch.Tensor:
            total = F.avg_pool2d(pad(operands[0], IMAGE_AXES, missing), kernel, stride, divisor_override=1)
            if divisor:
                return total / divisor
            y, x = (self._counts(call, axis, site.out[axis], total) for axis in (0, 1))
            return total / (y[:, None] * x[None, :])

        return run

    def form(self, call: Call, axis: int, out: Span, operands: tuple[Span | None, ...]) -> Hashable | None:
        """Return what is missing, and at the border the place: it says how many pixels are averaged over."""
        missing = self._missing(call, axis, out, operands[0])
        return (missing, out) if any(missing) else missing

    def _counts(self, call: Call, axis: int, out: Span, like: torch.Tensor) -> torch.Tensor:
        """Count the pixels that each output averages over along one axis."""
        window, size = self.window(call, axis), call.operands[0].size(axis)
        margin = window.padding if call["count_include_pad"] else 0
        first = torch.arange(out.start, out.stop, device=like.device) * window.stride - window.padding
        last = (first + window.kernel).clamp(max=size + window.padding)
        return (last.clamp(max=size + margin) - first.clamp(min=-margin)).to(like.dtype)


register(MaxPooling(), aten("max_pool2d"))
register(AveragePooling(), aten("avg_pool2d"))
