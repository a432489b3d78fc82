"""Rule of transposed convolution: on crops by PyTorch's own kernel, or as one matrix product over blocks of the output.

With stride s and kernel k, output `o = s q + r - p` gets from input `q - t` the tap `t s + r` (r < s, t < ceil(k / s)).
All outputs of a block q are thus one matrix product of the few inputs around it, which few-channel, large-stride layers
run about twice as fast as the direct kernel, whose vectors are mostly padding there
(docs/decisions/0003-block-product.md). On a GPU those of few channels run by kernels of our own (`few_channels.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from gigagrad.boxes import Span
from gigagrad.graphs.crops import bound_pad, crop_view
from gigagrad.graphs.graph import IMAGE_AXES
from gigagrad.graphs.op_rules import Bound, Call, Site, aten, register
from gigagrad.graphs.ops import few_channels
from gigagrad.graphs.ops.windows import (
    GROUPED,
    OfWeight,
    Window,
    WindowRule,
    filled,
    pair,
    reordered_bytes,
    trim,
)

_BLOCK_CHANNELS = 8
_BLOCK_STRIDE = 4


@dataclass(frozen=True, slots=True)
class _Cut:
    """Arithmetic that makes the output of a crop exactly a tile's, along one axis, in pixels of the output.

    The operator itself can cut `padding` pixels at both ends and give back up to stride - 1 at the far end; only what
    is left over has to be sliced (`crop`, negative: filled) or filled (`extend`), which costs a copy in the backward
    pass.
    """

    padding: int
    output_padding: int
    crop: int
    extend: int

    @classmethod
    def of(cls, window: Window, out: Span, inside: Span) -> _Cut:
        first = inside.start * window.stride - window.padding
        last = (inside.stop - 1) * window.stride - window.padding + window.reach
        before, after = out.start - first, last - out.stop
        trim = max(0, min(before, after + window.stride - 1))
        back = max(0, min(window.stride - 1, trim - after))
        crop = before - trim
        return cls(trim, back, crop, max(0, out.length - (last - first - 2 * trim + back - crop)))


class TransposedConvolution(OfWeight, WindowRule):
    """2-D transposed convolution: stride, dilation, groups, padding and output padding."""

    def reading(self, call: Call, axis: int) -> Callable[[Span], Span]:
        return self.window(call, axis).writers

    def flops(self, call: Call) -> float:
        """Count channels as the vectors that they fill, but where they are columns of one product."""
        field, weight = call.operands[0], call.operands[1].shape
        pixels = prod(field.shape) // field.shape[1]
        out = weight[1] if self.suits_blocks(call) else filled(weight[1])
        return 2.0 * pixels * weight[0] * out * prod(weight[2:])

    def workspace_bytes(self, call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
        return reordered_bytes(call, out_pixels, operands)

    def compiled_for(self, call: Call, axis: int, out: Span, operands: tuple[Span | None, ...]) -> tuple[int, ...]:
        if self.suits_blocks(call):
            return ()
        inside = operands[0]
        assert inside is not None
        cut = _Cut.of(self.window(call, axis), out, inside)
        return inside.length, cut.padding, cut.output_padding

    def bind(self, call: Call, site: Site) -> Bound:
        bound = self._by_blocks(call, site) if self.suits_blocks(call) else self._by_kernel(call, site)
        stride, dilation, weight = pair(call["stride"]), pair(call["dilation"]), call.operands[1].shape
        if not few_channels.wins(weight, stride, dilation, call["groups"], call.node.dtype):
            return bound
        (y, x), size = (self._before(call, site, axis) for axis in (0, 1)), [span.length for span in site.out]

        def run(operands: Sequence[Any]) -> torch.Tensor:
            if not few_channels.runs_on(operands[0]):
                return bound(operands)
            x_NCHW, weight, bias = operands if len(operands) == 3 else (*operands, None)
            return few_channels.transposed(x_NCHW, weight, bias, stride, (y, x), (size[0], size[1]))

        return run

    def _before(self, call: Call, site: Site, axis: int) -> int:
        """Count the pixels that a crop's inputs reach before the output begins."""
        window = self.window(call, axis)
        return site.out[axis].start + window.padding - site.inside[axis].start * window.stride

    def form(self, call: Call, axis: int, out: Span, operands: tuple[Span | None, ...]) -> Hashable | None:
        assert operands[0] is not None
        return out.start - operands[0].start * self.window(call, axis).stride

    @staticmethod
    def suits_blocks(call: Call) -> bool:
        """Tell whether this use runs as one matrix product."""
        weight, (y, x) = call.operands[1], pair(call["stride"])
        plain = (
            call.node.shape[0] == call["groups"] == 1 and pair(call["dilation"]) == (1, 1) and weight.dtype in GROUPED
        )
        return plain and y == x >= _BLOCK_STRIDE and max(weight.shape[:2]) <= _BLOCK_CHANNELS

    def _by_blocks(self, call: Call, site: Site) -> Bound:
        """Bind the product over blocks; what the bias alone reaches comes out right by itself."""
        stride, inside = pair(call["stride"])[0], site.inside
        (channels_in, channels_out, *kernel), blocks_axes = call.operands[1].shape, (-3, -2)
        taps, pads, starts = [], [], []
        for axis in (0, 1):
            window = self.window(call, axis)
            taps.append(-(-window.kernel // stride))
            first = (site.out[axis].start + window.padding) // stride
            last = (site.out[axis].stop - 1 + window.padding) // stride
            pads.append((inside[axis].start - (first - taps[-1] + 1), last + 1 - inside[axis].stop))
            starts.append(site.out[axis].start + window.padding - first * stride)
        (taps_y, taps_x), (y, x) = taps, pads
        filled = bound_pad(IMAGE_AXES, (y, x))
        height, width = (span.length + sum(pad) - own + 1 for span, pad, own in zip(inside, pads, taps, strict=True))
        padding = [0, taps_x * stride - kernel[1], 0, taps_y * stride - kernel[0]]
        size = [span.length for span in site.out]

        def run(operands: Sequence[Any]) -> torch.Tensor:
            x_NCHW, weight, bias = operands if len(operands) == 3 else (*operands, None)
            x_NCHW = x_NCHW if filled is None else filled(x_NCHW)
            padded = F.pad(weight, padding)
            split = padded.reshape(channels_in, channels_out, taps_y, stride, taps_x, stride).flip(2, 4)
            matrix = split.permute(0, 2, 4, 3, 5, 1).reshape(channels_in * taps_y * taps_x, -1)
            windows = F.unfold(x_NCHW, (taps_y, taps_x))[0].t()
            product = windows @ matrix if bias is None else torch.addmm(bias.repeat(stride * stride), windows, matrix)
            blocks = product.reshape(height, width, stride, stride, channels_out).permute(0, 2, 1, 3, 4)
            y_HWC = blocks.reshape(height * stride, width * stride, channels_out)
            return crop_view(y_HWC, blocks_axes, starts, size).permute(2, 0, 1)[None]

        return run

    def _by_kernel(self, call: Call, site: Site) -> Bound:
        """Bind PyTorch's kernel. Where no input reaches, the output is the bias alone: it fills with zeros first and
        adds the bias to everything last.
        """
        cuts = y, x = [_Cut.of(self.window(call, axis), site.out[axis], site.inside[axis]) for axis in (0, 1)]
        fills = any(cut.extend or cut.crop < 0 for cut in cuts)
        filled = bound_pad(IMAGE_AXES, ((max(0, -y.crop), y.extend), (max(0, -x.crop), x.extend)))
        starts = [max(0, cut.crop) for cut in cuts]
        padding, more = [cut.padding for cut in cuts], [cut.output_padding for cut in cuts]
        stride, groups, dilation = call["stride"], call["groups"], call["dilation"]

        def run(operands: Sequence[Any]) -> torch.Tensor:
            x_NCHW, weight, bias = operands if len(operands) == 3 else (*operands, None)
            own = None if fills else bias
            y_NCHW = torch.conv_transpose2d(x_NCHW, weight, own, stride, padding, more, groups, dilation)
            y_NCHW = trim(y_NCHW if filled is None else filled(y_NCHW), starts, site.out)
            return y_NCHW + bias.reshape(1, -1, 1, 1) if fills and bias is not None else y_NCHW

        return run


register(TransposedConvolution(), aten("conv_transpose2d.input"))
