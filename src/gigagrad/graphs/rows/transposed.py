"""Transposed convolution: on crops by PyTorch's own kernel, or as one matrix product over blocks of the output.

With stride s and kernel k, output `o = s q + r - p` gets from input `q - t` the tap `t s + r` (r < s, t < ceil(k / s)).
All outputs of a block q are thus one matrix product of the few inputs around it, which few-channel, large-stride layers
run about twice as fast as the direct kernel, whose vectors are mostly padding there
(docs/decisions/0003-block-product.md).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from gigagrad.boxes import Span
from gigagrad.graphs.rows.windows import Window, WindowRow, fit, inside_or_nearest, pair, reordered_bytes
from gigagrad.graphs.table import Call, Site, per_operand, register

_BLOCK_CHANNELS = 8
_BLOCK_STRIDE = 4


class TransposedConvolution(WindowRow):
    """2-D transposed convolution: stride, dilation, groups, padding and output padding."""

    def window(self, call: Call, axis: int) -> Window:
        return Window(
            call.operands[1].shape[2 + axis],
            pair(call["stride"])[axis],
            pair(call["padding"])[axis],
            pair(call["dilation"])[axis],
        )

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        window = self.window(call, axis)
        return per_operand(call, lambda field: inside_or_nearest(window.writers(out), field.size(axis)))

    def contiguous_only(self, call: Call) -> bool:
        return call.node.dtype == torch.float64

    def workspace_bytes(self, call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
        return reordered_bytes(call, out_pixels, operands)

    def run(self, call: Call, arguments: dict[str, Any], site: Site) -> torch.Tensor:
        if self.suits_blocks(call):
            return self._by_blocks(call, arguments, site)
        return self._by_kernel(call, arguments, site)

    @staticmethod
    def suits_blocks(call: Call) -> bool:
        """Whether this use runs as one matrix product."""
        weight, (y, x) = call.operands[1], pair(call["stride"])
        plain = (
            call.node.shape[0] == call["groups"] == 1
            and pair(call["dilation"]) == (1, 1)
            and weight.dtype == torch.float32
        )
        return plain and y == x >= _BLOCK_STRIDE and max(weight.shape[:2]) <= _BLOCK_CHANNELS

    def _by_blocks(self, call: Call, arguments: dict[str, Any], site: Site) -> torch.Tensor:
        """The product over blocks; what the bias alone reaches comes out right by itself."""
        weight, stride = arguments["weight"], pair(call["stride"])[0]
        channels_in, channels_out = weight.shape[:2]
        inside = site.operands[0]
        assert inside is not None
        taps, pads, starts = [], [], []
        for axis in (1, 0):
            window = self.window(call, axis)
            taps.append(-(-window.kernel // stride))
            first = (site.out[axis].start + window.padding) // stride
            last = (site.out[axis].stop - 1 + window.padding) // stride
            pads += [inside[axis].start - (first - taps[-1] + 1), last + 1 - inside[axis].stop]
            starts.append(site.out[axis].start + window.padding - first * stride)
        (taps_x, taps_y), (start_x, start_y) = taps, starts
        x_NCHW = fit(arguments["input"], pads) if any(pads) else arguments["input"]
        height, width = x_NCHW.shape[2] - taps_y + 1, x_NCHW.shape[3] - taps_x + 1

        padded = F.pad(weight, [0, taps_x * stride - weight.shape[3], 0, taps_y * stride - weight.shape[2]])
        split = padded.reshape(channels_in, channels_out, taps_y, stride, taps_x, stride).flip(2, 4)
        matrix = split.permute(0, 2, 4, 3, 5, 1).reshape(channels_in * taps_y * taps_x, -1)
        windows = F.unfold(x_NCHW, (taps_y, taps_x))[0].t()
        if arguments["bias"] is None:
            product = windows @ matrix
        else:
            product = torch.addmm(arguments["bias"].repeat(stride * stride), windows, matrix)
        blocks = product.reshape(height, width, stride, stride, channels_out).permute(0, 2, 1, 3, 4)
        y_HWC = blocks.reshape(height * stride, width * stride, channels_out)
        y_HWC = y_HWC[start_y : start_y + site.out[0].length, start_x : start_x + site.out[1].length]
        return y_HWC.permute(2, 0, 1)[None]

    def _by_kernel(self, call: Call, arguments: dict[str, Any], site: Site) -> torch.Tensor:
        inside = site.operands[0]
        assert inside is not None
        padding, output_padding, crop, extend = [], [], [], []
        for axis in (0, 1):
            window = self.window(call, axis)
            first = inside[axis].start * window.stride - window.padding
            last = (inside[axis].stop - 1) * window.stride - window.padding + window.reach
            before = site.out[axis].start - first
            after = last - site.out[axis].stop
            # The operator itself can cut `trim` pixels at both ends and give back up to stride - 1 at the far end;
            # only what is left over has to be sliced or filled, which costs a copy in the backward pass.
            trim = max(0, min(before, after + window.stride - 1))
            back = max(0, min(window.stride - 1, trim - after))
            padding.append(trim)
            output_padding.append(back)
            crop.append(before - trim)
            extend.append(max(0, site.out[axis].length - (last - first - 2 * trim + back - (before - trim))))
        # Where no input reaches, the output is the bias alone: fill with zeros first, add the bias to everything last.
        filled = any(extend) or any(before < 0 for before in crop)
        y_NCHW = torch.conv_transpose2d(
            arguments["input"],
            arguments["weight"],
            None if filled else arguments["bias"],
            stride=arguments["stride"],
            padding=padding,
            output_padding=output_padding,
            groups=arguments["groups"],
            dilation=arguments["dilation"],
        )
        if filled:
            fill = [max(0, -crop[1]), extend[1], max(0, -crop[0]), extend[0]]
            y_NCHW = F.pad(y_NCHW, fill)
            crop = [max(0, before) for before in crop]
        for axis in (0, 1):
            length = site.out[axis].length
            if crop[axis] or y_NCHW.shape[2 + axis] != length:
                y_NCHW = y_NCHW.narrow(2 + axis, crop[axis], length)
        if filled and arguments["bias"] is not None:
            y_NCHW = y_NCHW + arguments["bias"].reshape(1, -1, 1, 1)
        return y_NCHW


register(TransposedConvolution(), ["aten.conv_transpose2d.input"])
