"""Operators that move values without computing: concatenation, slicing, axis moves, pixel shuffle."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from gigagrad.boxes import Span
from gigagrad.graphs.graph import Axes, Ref
from gigagrad.graphs.op_rules import (
    Affine,
    Bound,
    Call,
    Gains,
    Layout,
    NotTileable,
    Pointwise,
    Saved,
    Site,
    aten,
    axes_without,
    common_axes,
    register,
    require_nchw,
    single_field,
    sum_of_gains,
)
from gigagrad.graphs.ops.windows import trim


class Moving(Pointwise):
    """Base of the rules that keep every value as it is."""

    saved = Saved.NOTHING
    affine = Affine.JOINTLY


def _spatial_dim(call: Call) -> int | None:
    """Return 0 or 1 if an operator's `dim` names y or x."""
    rank, field = len(call.operands[0].shape), call.operands[0]
    dim = call["dim"] % rank - rank
    if dim in field.spatial and field.patches is not None:
        raise NotTileable("it takes some of the patches, or joins them with others")
    return field.spatial.index(dim) if dim in field.spatial else None


class Concatenation(Moving):
    """`cat` along any axis; along a spatial one each operand answers for its own stretch of the output."""

    def axes(self, call: Call, rank: int) -> Axes:
        if len(call.fields) != len(call.operands):
            raise NotTileable("it joins a field with a value that has no spatial axes")
        _spatial_dim(call)
        return common_axes(call)

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        if _spatial_dim(call) != axis:
            return tuple([out for _ in call.operands])
        spans: list[Span | None] = []
        offset = 0
        for field in call.operands:
            size = field.size(axis)
            inside = Span(max(out.start - offset, 0), min(out.stop - offset, size))
            spans.append(None if inside.empty else inside)
            offset += size
        return tuple(spans)

    def needs_alike(self, call: Call, axis: int) -> bool:
        return _spatial_dim(call) != axis

    def bind(self, call: Call, site: Site) -> Bound:
        dtype, dim = call.node.dtype, call["dim"]

        def run(operands: Sequence[Any]) -> torch.Tensor:
            crops: list[torch.Tensor] = [crop.to(dtype) for crop in operands if crop is not None]
            return torch.cat(crops, dim) if len(crops) > 1 else crops[0]

        return run

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
        _spatial_dim(call)
        return common_axes(call)

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        if _spatial_dim(call) != axis:
            return (out,)
        start, _, step = slice(call["start"], None, call["step"]).indices(call.operands[0].size(axis))
        first = start + out.start * step
        return (Span(first, first + (out.length - 1) * step + 1),)

    def needs_alike(self, call: Call, axis: int) -> bool:
        return _spatial_dim(call) != axis

    def bind(self, call: Call, site: Site) -> Bound:
        if _spatial_dim(call) is None:
            return super().bind(call, site)
        step, dim = call["step"], call["dim"]

        def run(operands: Sequence[Any]) -> torch.Tensor:
            crop: torch.Tensor = operands[0]
            return crop if step == 1 else torch.ops.aten.slice.Tensor(crop, dim, 0, crop.shape[dim], step)

        return run


class AxisPermutation(Moving):
    """permute, transpose: the spatial axes travel along."""

    lies = Layout.TURNED

    def axes(self, call: Call, rank: int) -> Axes:
        order = list(range(-rank, 0))
        if "permute" in call.node.op:
            order = [order[dim] for dim in call["dims"]]
        else:
            one, other = call["dim0"], call["dim1"]
            order[one], order[other] = order[other], order[one]
        y, x = (order.index(axis) - rank for axis in single_field(call).spatial)
        if y > x:
            raise NotTileable("it swaps the image's two axes")
        return y, x


class Unsqueeze(Moving):
    """One axis more."""

    def axes(self, call: Call, rank: int) -> Axes:
        new = call["dim"] % rank - rank
        y, x = (axis - 1 if axis <= new else axis for axis in single_field(call).spatial)
        return y, x


class Removal(Moving):
    """squeeze, select: axes go that are not spatial, such as the batch axis of 1."""

    def axes(self, call: Call, rank: int) -> Axes:
        field, dims = single_field(call), call["dim"]
        in_rank = len(field.shape)
        gone = {dim % in_rank - in_rank for dim in ([dims] if isinstance(dims, int) else dims)}
        selects = "select" in call.node.op
        if not gone.isdisjoint(field.spatial):
            raise NotTileable(f"it {'picks one row or column' if selects else 'squeezes an axis'} of the image")
        return axes_without({dim for dim in gone if selects or field.shape[dim] == 1}, field.spatial)


class Scatter(Moving):
    """`select_scatter` / `slice_scatter` along an axis that is not spatial."""

    def axes(self, call: Call, rank: int) -> Axes:
        field = call.operands[0]
        if not field.is_field or call["dim"] % rank - rank in field.spatial:
            raise NotTileable("it writes along an axis of the image")
        if not call.operands[1].is_field:
            raise NotTileable("it writes a value without spatial axes into a field")
        return field.spatial


class PixelShuffle(Moving):
    """Depth to space: every input pixel becomes a block of `factor x factor` output pixels (Shi et al., 2016)."""

    pixelwise = False
    on_images = True

    def axes(self, call: Call, rank: int) -> Axes:
        return require_nchw(call)

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        factor = call["upscale_factor"]
        return (Span(out.start // factor, -(-out.stop // factor)),)

    def bind(self, call: Call, site: Site) -> Bound:
        factor = call["upscale_factor"]
        starts = [out.start - inside.start * factor for out, inside in zip(site.out, site.inside, strict=True)]
        return lambda operands: trim(torch.pixel_shuffle(operands[0], factor), starts, site.out)

    def form(self, call: Call, axis: int, out: Span, operands: tuple[Span | None, ...]) -> Hashable | None:
        assert operands[0] is not None
        factor: int = call["upscale_factor"]
        return out.start - operands[0].start * factor


class PixelUnshuffle(Moving):
    """Space to depth, the inverse of `PixelShuffle`."""

    pixelwise = False
    on_images = True

    def axes(self, call: Call, rank: int) -> Axes:
        return require_nchw(call)

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        factor = call["downscale_factor"]
        return (Span(out.start * factor, out.stop * factor),)


register(Concatenation(), aten("cat"))
register(Slicing(), aten("slice.Tensor"))
register(AxisPermutation(), aten("permute transpose.int"))
register(Unsqueeze(), aten("unsqueeze"))
register(Removal(), aten("squeeze.dim squeeze.dims select.int"))
register(Scatter(), aten("select_scatter slice_scatter"))
register(PixelShuffle(), aten("pixel_shuffle"))
register(PixelUnshuffle(), aten("pixel_unshuffle"))
