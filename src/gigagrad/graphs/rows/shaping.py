"""Operators that move values without computing: concatenation, slicing, axis moves, pixel shuffle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from gigagrad.boxes import Span
from gigagrad.graphs.graph import Axes, Node, Ref
from gigagrad.graphs.rows.windows import require_nchw
from gigagrad.graphs.table import (
    Affine,
    Call,
    Gains,
    Layout,
    Refused,
    Saved,
    Site,
    Unmoved,
    common_axes,
    per_operand,
    register,
    single_field,
    sum_of_gains,
)


class Moving(Unmoved):
    """Base of the rows that keep every value as it is."""

    saved = Saved.NOTHING
    affine = Affine.JOINTLY


def _spatial_dim(call: Call) -> int | None:
    """0 or 1 if what an operator's `dim` names is y or x."""
    rank, axes = len(call.operands[0].shape), call.operands[0].axes
    assert axes is not None
    dim = call["dim"] % rank - rank
    return axes.index(dim) if dim in axes else None


class Concatenation(Moving):
    """`cat` along any axis; along a spatial one each operand answers for its own stretch of the output."""

    def axes(self, call: Call, rank: int) -> Axes:
        if len(call.fields) != len(call.operands):
            raise Refused("it joins a field with a value that has no spatial axes")
        return common_axes(call)

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        if _spatial_dim(call) != axis:
            return per_operand(call, lambda _: out)
        spans: list[Span | None] = []
        offset = 0
        for field in call.operands:
            size = field.size(axis)
            inside = Span(max(out.start - offset, 0), min(out.stop - offset, size))
            spans.append(None if inside.empty else inside)
            offset += size
        return tuple(spans)

    def run(self, call: Call, arguments: dict[str, Any], site: Site) -> torch.Tensor:
        crops: list[torch.Tensor] = [crop for crop in arguments["tensors"] if crop is not None]
        if len(crops) == 1:  # of another dtype, perhaps, than operands that this tile does not see
            return crops[0].to(call.node.dtype)
        return torch.cat([crop.to(call.node.dtype) for crop in crops], call["dim"])

    def error_gains(self, call: Call, read: Sequence[Gains], value: Callable[[Ref], torch.Tensor]) -> Gains | None:
        rank, channels = len(call.node.shape), [field.shape[1] for field in call.fields]
        if call["dim"] % rank != 1:
            return None
        before = accumulate(channels, initial=0)
        ends = [(start, sum(channels) - start - own) for start, own in zip(before, channels, strict=False)]
        return sum_of_gains({i: F.pad(g, end) for i, g in gain.items()} for gain, end in zip(read, ends, strict=True))


class Slicing(Moving):
    """`slice` along any axis, with a step."""

    pixelwise = False

    def axes(self, call: Call, rank: int) -> Axes:
        return common_axes(call)

    @staticmethod
    def _start(call: Call, size: int) -> int:
        start = call["start"] or 0
        return min(max(start + size if start < 0 else start, 0), size)

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        if _spatial_dim(call) != axis:
            return per_operand(call, lambda _: out)
        step = call["step"]

        def need(field: Node) -> Span:
            first = self._start(call, field.size(axis)) + out.start * step
            return Span(first, first + (out.length - 1) * step + 1)

        return per_operand(call, need)

    def run(self, call: Call, arguments: dict[str, Any], site: Site) -> torch.Tensor:
        crop: torch.Tensor = arguments["self"]
        axis = _spatial_dim(call)
        if axis is None:
            return super().run(call, arguments, site)
        step, dim = call["step"], call["dim"]
        return crop if step == 1 else torch.ops.aten.slice.Tensor(crop, dim, 0, crop.shape[dim], step)


class AxisMove(Moving):
    """permute, transpose, unsqueeze, squeeze: the spatial axes travel along; the batch axis of 1 may go."""

    def axes(self, call: Call, rank: int) -> Axes:
        field = single_field(call)
        in_rank = len(field.shape)
        assert field.axes is not None
        order = self._order(call, in_rank)
        y, x = (order.index(axis + in_rank) - rank for axis in field.axes)
        if len(order) != rank:
            raise Refused("it changes the number of axes in a way that has no row")
        if y > x:
            raise Refused("it swaps the image's two axes")
        return y, x

    @staticmethod
    def _order(call: Call, rank: int) -> list[int | None]:
        """For each output axis the input axis it shows; None for a new one."""
        name = call.node.op.split(".")[1]
        order: list[int | None] = list(range(rank))
        if name == "permute":
            return [dim % rank for dim in call["dims"]]
        if name == "transpose":
            a, b = call["dim0"] % rank, call["dim1"] % rank
            order[a], order[b] = b, a
        elif name == "unsqueeze":
            order.insert(call["dim"] % (rank + 1), None)
        elif name == "squeeze":
            dims = call["dim"]
            gone = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)}
            field = call.operands[0]
            assert field.axes is not None
            if gone & {axis + rank for axis in field.axes}:
                raise Refused("it squeezes an axis of the image")
            return [axis for axis in order if axis not in gone or field.shape[axis or 0] != 1]
        return order

    def layout(self, call: Call) -> Layout:
        return Layout.TURNED if call.node.op.split(".")[1] in ("permute", "transpose") else Layout.VIEW


class Select(Moving):
    """`select` of one index along an axis that is not spatial."""

    def axes(self, call: Call, rank: int) -> Axes:
        field = single_field(call)
        assert field.axes is not None
        in_rank = len(field.shape)
        dim = call["dim"] % in_rank - in_rank
        if dim in field.axes:
            raise Refused("it picks one row or column of the image")
        y, x = (axis + 1 if axis < dim else axis for axis in field.axes)
        return y, x


class Scatter(Moving):
    """`select_scatter` / `slice_scatter` along an axis that is not spatial."""

    def axes(self, call: Call, rank: int) -> Axes:
        field = call.operands[0]
        if not field.is_field or call["dim"] % rank - rank in (field.axes or ()):
            raise Refused("it writes along an axis of the image")
        if not call.operands[1].is_field:
            raise Refused("it writes a value without spatial axes into a field")
        assert field.axes is not None
        return field.axes


class Regroup(Moving):
    """view / reshape / expand that leaves the two trailing spatial axes whole."""

    def axes(self, call: Call, rank: int) -> Axes:
        field = single_field(call)
        if field.axes != (-2, -1) or rank < 2 or call.node.shape[-2:] != field.shape[-2:]:
            raise Refused("it folds an axis of the image into another axis")
        return -2, -1

    def run(self, call: Call, arguments: dict[str, Any], site: Site) -> torch.Tensor:
        crop: torch.Tensor = arguments[next(iter(arguments))]
        shape = [*call.node.shape[:-2], *crop.shape[-2:]]
        return crop.reshape(shape)

    def layout(self, call: Call) -> Layout:
        return Layout.PACKED


class Expansion(Regroup):
    """`expand` of axes that are not spatial."""

    def run(self, call: Call, arguments: dict[str, Any], site: Site) -> torch.Tensor:
        crop: torch.Tensor = arguments["self"]
        return crop.expand([*call.node.shape[:-2], *crop.shape[-2:]])

    def layout(self, call: Call) -> Layout:
        return Layout.VIEW


class PixelShuffle(Moving):
    """Depth to space: every input pixel becomes a block of `factor x factor` output pixels (Shi et al., 2016)."""

    pixelwise = False
    on_images = True

    def axes(self, call: Call, rank: int) -> Axes:
        return require_nchw(call)

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        factor = call["upscale_factor"]
        return per_operand(call, lambda _: Span(out.start // factor, -(-out.stop // factor)))

    def run(self, call: Call, arguments: dict[str, Any], site: Site) -> torch.Tensor:
        factor, inside = call["upscale_factor"], site.operands[0]
        assert inside is not None
        shuffled = torch.pixel_shuffle(arguments["self"], factor)
        for axis in (0, 1):
            start = site.out[axis].start - inside[axis].start * factor
            shuffled = shuffled.narrow(2 + axis, start, site.out[axis].length)
        return shuffled


class PixelUnshuffle(Moving):
    """Space to depth, the inverse of `PixelShuffle`."""

    pixelwise = False
    on_images = True

    def axes(self, call: Call, rank: int) -> Axes:
        return require_nchw(call)

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        factor = call["downscale_factor"]
        return per_operand(call, lambda _: Span(out.start * factor, out.stop * factor))

    def run(self, call: Call, arguments: dict[str, Any], site: Site) -> torch.Tensor:
        return torch.pixel_unshuffle(arguments["self"], call["downscale_factor"])


register(Concatenation(), ["aten.cat.default"])
register(Slicing(), ["aten.slice.Tensor"])
register(
    AxisMove(),
    [
        "aten.permute.default",
        "aten.transpose.int",
        "aten.unsqueeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
    ],
)
register(Select(), ["aten.select.int"])
register(Scatter(), ["aten.select_scatter.default", "aten.slice_scatter.default"])
register(Regroup(), ["aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"])
register(Expansion(), ["aten.expand.default"])
register(PixelShuffle(), ["aten.pixel_shuffle.default"])
register(PixelUnshuffle(), ["aten.pixel_unshuffle.default"])
