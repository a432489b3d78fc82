"""Rule of convolution: by PyTorch's operator on crops; of few channels with several pixels of a row as one, or on a GPU
by kernels of our own (`few_channels.py`).

oneDNN fills a vector register with the channels of one pixel, so of few channels most of it is padding. In channels
last g s pixels of a row that lie side by side are one of g s times the channels, which is a view, and make g outputs at
stride s; the weights are spread over them, with some zeros more (docs/decisions/0023-few-channels.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from gigagrad.allowances import LANES
from gigagrad.boxes import Span
from gigagrad.graphs.crops import bound_pad
from gigagrad.graphs.graph import IMAGE_AXES, Axes
from gigagrad.graphs.op_rules import Bound, Call, NotTileable, Site, Whole, aten, register, require_nchw
from gigagrad.graphs.ops import few_channels
from gigagrad.graphs.ops.windows import (
    GROUPED,
    OfWeight,
    WindowRule,
    filled,
    padded_groups_bytes,
    pair,
    reordered_bytes,
    trim,
)

_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
_SMALL_CROP = 20480
"""Numbers up to which PyTorch keeps a convolution for itself."""
_LEAST_STRIDE = 4
"""In pixels; at a smaller one the gradient of the weights takes longer with pixels as one."""

Convolved = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, tuple[int, int]], torch.Tensor]
"""Makes the output of an input, a weight, a bias and a stride."""


def by_groups(
    x_NCHW: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: tuple[int, int],
    outputs: int,
    convolved: Convolved,
) -> torch.Tensor:
    """Convolve a crop in channels last with nothing padded, `outputs` of a row as one; its width is a multiple of what
    these step over. Values that are not finite reach some pixels further: weights between are zeros.
    """
    (channels_out, channels_in, height, width), (_, _, rows, columns) = weight.shape, x_NCHW.shape
    pixels = outputs * stride[1]
    taps = -(-((outputs - 1) * stride[1] + width) // pixels)
    grouped = x_NCHW.permute(0, 2, 3, 1).reshape(1, rows, columns // pixels, pixels * channels_in).permute(0, 3, 1, 2)
    before = [own * stride[1] for own in range(outputs)]
    shifted = torch.stack([F.pad(weight, (first, taps * pixels - width - first)) for first in before])
    split = shifted.reshape(outputs, channels_out, channels_in, height, taps, pixels).permute(0, 1, 5, 2, 3, 4)
    spread = split.reshape(outputs * channels_out, pixels * channels_in, height, taps).contiguous()
    made = convolved(grouped, spread, None if bias is None else bias.repeat(outputs), (stride[0], 1))
    y_NHWC = made.permute(0, 2, 3, 1).reshape(1, made.shape[2], outputs * made.shape[3], channels_out)
    return y_NHWC.permute(0, 3, 1, 2)


def _outputs_as_one(call: Call) -> int:
    """Count the outputs of a row that are computed as one; 0 where one by one is faster."""
    weight, stride = call.operands[1], pair(call["stride"])[1]
    plain = (*pair(call["dilation"]), call["groups"], call.node.shape[0]) == (1, 1, 1, 1)
    if not plain or weight.dtype not in GROUPED or weight.shape[1] > LANES // 2:
        return 0
    if stride == 1:
        return 2 if weight.shape[0] <= LANES // 2 and weight.shape[3] > 1 else 0
    return 1 if _LEAST_STRIDE <= stride <= weight.shape[3] else 0


def _lies_in_rows(x_NCHW: torch.Tensor) -> bool:
    """Tell whether pixels side by side in a row lie as one, and oneDNN computes with them."""
    return x_NCHW.permute(0, 2, 3, 1).is_contiguous() and _ONEDNN and x_NCHW.device.type == "cpu"


def _convolved(
    x_NCHW: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    *,
    values: bool,
) -> torch.Tensor:
    """Run PyTorch's operator; without `values` make zeros that have its gradient."""
    if values:
        return torch.conv2d(x_NCHW, weight, bias, stride, padding, dilation, groups)
    size = (
        (x_NCHW.shape[2 + axis] + 2 * padding[axis] - dilation[axis] * (weight.shape[2 + axis] - 1) - 1) // stride[axis]
        + 1
        for axis in (0, 1)
    )
    silent: torch.Tensor = _BackwardOnly.apply(  # type: ignore[no-untyped-call]
        x_NCHW, weight, bias, (x_NCHW.shape[0], weight.shape[0], *size), (stride, padding, dilation, groups)
    )
    return silent


class _BackwardOnly(torch.autograd.Function):
    """A convolution of which only the vector-Jacobian product is wanted: that needs its input, not its output."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NCHW: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        shape: tuple[int, ...],
        settings: tuple[Any, ...],
    ) -> torch.Tensor:
        ctx.save_for_backward(x_NCHW, weight)
        ctx.bias = None if bias is None else list(bias.shape)
        ctx.settings = settings
        return x_NCHW.new_zeros(()).expand(shape)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_NCHW, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.settings
        found = torch.ops.aten.convolution_backward(
            cotangents[0], x_NCHW, weight, ctx.bias, stride, padding, dilation, False, [0, 0], groups,
            list(ctx.needs_input_grad[:3]),
        )  # fmt: skip
        return (*found, None, None)


class Convolution(OfWeight, WindowRule):
    """2-D convolution: stride, dilation, groups, asymmetric padding and the `'same'` / `'valid'` forms."""

    backward_without_output = True
    errors_reach_weight = True

    def axes(self, call: Call, rank: int) -> Axes:
        if call["padding"] == "same" and pair(call["stride"]) != (1, 1):
            raise NotTileable("padding='same' with a stride")
        return require_nchw(call)

    def reading(self, call: Call, axis: int) -> Callable[[Span], Span]:
        """Read the window's span, along x a multiple of the pixels that are one, as far as there are so many."""
        reads = super().reading(call, axis)
        if axis == 0 or not _outputs_as_one(call):
            return reads

        def whole_groups(out: Span) -> Span:
            start = reads(out).start
            return Span(start, start + self._columns(call, out))

        return whole_groups

    def _columns(self, call: Call, out: Span) -> int:
        """Count the columns that `out` is computed from; whole groups of outputs and of pixels where these are one."""
        window, outputs = self.window(call, 1), _outputs_as_one(call)
        if not outputs:
            return window.reads(out).length
        pixels, groups = outputs * window.stride, -(-out.length // outputs)
        return -(-((groups * outputs - 1) * window.stride + window.kernel) // pixels) * pixels

    def flops(self, call: Call) -> float:
        """Count channels as the vectors that they fill."""
        weight, groups, outputs = call.operands[1].shape, call["groups"], _outputs_as_one(call)
        pixels = prod(call.node.shape) // call.node.shape[1]
        if outputs:
            stride = pair(call["stride"])[1]
            width = outputs * stride * -(-((outputs - 1) * stride + weight[3]) // (outputs * stride))
            return 2.0 * pixels / outputs * weight[1] * weight[2] * width * filled(outputs * weight[0])
        if weight[1] == 1 and groups > 1:  # depthwise: channels side by side
            return float(2 * pixels * prod(weight[2:]) * filled(weight[0]))
        return float(2 * pixels * groups * prod(weight[1:]) * filled(weight[0] // groups))

    def contiguous_only(self, call: Call) -> bool:
        """Return True in double precision; and in bfloat16 with dilation, where oneDNN's gradient can end the process
        (24 channels in, PyTorch 2.13: a segmentation fault).
        """
        dilated = max(pair(call["dilation"])) > 1
        return super().contiguous_only(call) or (call.node.dtype == torch.bfloat16 and dilated)

    def workspace_bytes(self, call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
        inside = operands[0]
        assert inside is not None
        padded = padded_groups_bytes(call, out_pixels, inside[0].length * inside[1].length)
        return reordered_bytes(call, out_pixels, operands) + padded

    def compiled_for(self, call: Call, axis: int, out: Span, operands: tuple[Span | None, ...]) -> tuple[int, ...]:
        """Return the output's length: at the image's border crops are padded to the shape they have elsewhere."""
        return (out.length,)

    def bind(self, call: Call, site: Site) -> Bound:
        one_by_one, in_groups = self._one_by_one(call, site), self._in_groups(call, site)
        if in_groups is None:
            return one_by_one

        def run(operands: Sequence[Any]) -> torch.Tensor:
            return (in_groups if _lies_in_rows(operands[0]) else one_by_one)(operands)

        return run

    def _in_groups(self, call: Call, site: Site) -> Bound | None:
        """Bind it with several outputs of a row as one, for crops that lie in rows; None where that is not faster."""
        outputs, stride = _outputs_as_one(call), pair(call["stride"])
        (top, bottom), (left, _) = self.missing(call, site)
        # With what is missing, so that crops of one shape get one kernel in the middle and at the border.
        (height, width), columns = (span.length for span in site.inside), self._columns(call, site.out[1])
        if not outputs or call.operands[0].shape[1] * (height + top + bottom) * columns <= _SMALL_CROP:
            return None
        filled = bound_pad(IMAGE_AXES, ((top, bottom), (left, columns - width - left)))

        def convolved(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, s: tuple[int, int]) -> torch.Tensor:
            return _convolved(x, w, b, s, (0, 0), (1, 1), 1, values=site.values)

        def run(operands: Sequence[Any]) -> torch.Tensor:
            x_NCHW, weight, bias = operands if len(operands) == 3 else (*operands, None)
            x_NCHW = x_NCHW if filled is None else filled(x_NCHW)
            return trim(by_groups(x_NCHW, weight, bias, stride, outputs, convolved), (0, 0), site.out)

        return run

    def _one_by_one(self, call: Call, site: Site) -> Bound:
        """Bind it as PyTorch computes it. Along an axis where both borders cut alike the operator pads by itself."""
        stride, dilation, groups, values = pair(call["stride"]), pair(call["dilation"]), call["groups"], site.values
        missing = self.missing(call, site)
        y, x = (before if before == after and before > 0 else 0 for before, after in missing)
        (top, bottom), (left, right) = missing
        filled = bound_pad(IMAGE_AXES, ((top - y, bottom - y), (left - x, right - x)))
        few = few_channels.wins(call.operands[1].shape, stride, dilation, groups, call.node.dtype)
        size = site.out[0].length, site.out[1].length
        dense = call.operands[1].shape[2:] == (1, 1) and groups == 1 and _ONEDNN

        def run(operands: Sequence[Any]) -> torch.Tensor:
            x_NCHW, weight, bias = operands if len(operands) == 3 else (*operands, None)
            if few and few_channels.runs_on(x_NCHW):
                return few_channels.convolved(x_NCHW, weight, bias, stride, (top, left), size, values=values)
            x_NCHW = x_NCHW if filled is None else filled(x_NCHW)
            # To a kernel of one pixel dilation makes no difference, but with one thread PyTorch gives it to oneDNN only
            # if it is strided or dilated, and else takes a kernel of half the speed
            # (docs/decisions/0016-one-pixel-kernels.md).
            fast = dense and x_NCHW.dtype == torch.float32 and x_NCHW.numel() > _SMALL_CROP
            apart = (2, 2) if fast and x_NCHW.device.type == "cpu" else dilation
            return _convolved(x_NCHW, weight, bias, stride, (y, x), apart, groups, values=values)

        return run


register(Convolution(), aten("conv2d conv2d.padding"))
register(
    Whole(compiled=True),
    aten("conv1d conv1d.padding conv3d conv3d.padding conv_transpose1d conv_transpose3d.input convolution"),
)
