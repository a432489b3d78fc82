"""Rules of views that split and join axes, an image's own and those of its patches among them.

An axis of H pixels split in `(H / p, p)` counts blocks of p pixels; joined again it counts pixels. The two axes of such
blocks, joined in front of all others, are one axis of patches, row by row, as a batch: its items are what a network
takes apart from each other. Windows of an image (`unfold`) are patches likewise.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from gigagrad.boxes import Span
from gigagrad.graphs.crops import bound_pad, bound_view
from gigagrad.graphs.graph import IMAGE_AXES, Axes, Patches
from gigagrad.graphs.op_rules import (
    Affine,
    Bound,
    Call,
    Layout,
    NotTileable,
    Pointwise,
    Saved,
    Site,
    aten,
    register,
    require_nchw,
    shape_on,
    single_field,
)
from gigagrad.graphs.ops.windows import Window, WindowRule, pair


@dataclass(frozen=True, slots=True)
class Regrouping:
    """Places of the spatial axes after a view. Along y and x, either `joined` positions come of one that it reads, or
    one comes of `split` positions.
    """

    axes: Axes
    patches: Patches | None
    joined: tuple[int, int] = (1, 1)
    split: tuple[int, int] = (1, 1)


@lru_cache(maxsize=1024)
def regrouped(old: tuple[int, ...], axes: Axes, patches: Patches | None, new: tuple[int, ...]) -> Regrouping:
    """Find where a view of a field takes its axes. Raises `NotTileable` where it mixes them with others."""
    if axes == IMAGE_AXES and len(new) >= 2 and new[-2:] == old[-2:]:
        return Regrouping(axes, None)
    y, x = (axis + len(old) for axis in axes)
    if 0 in old or min(old[y], old[x]) == 1:
        raise NotTileable("it regroups an axis of one pixel")
    # Along y and x: the axis of the view, and what is joined and split.
    found: dict[int, tuple[int, int, int]] = {}
    for before, after in _groups(old, new):
        own = {place for place in (y, x) if place in before}
        if not own:
            continue
        if patches is not None:
            ahead, behind = (prod(old[place] for place in before if (place < y) == first) for first in (True, False))
            return _of_patches(patches, (ahead, behind // old[y]), after, new)
        if before[0] != y and before[0] != x:
            raise NotTileable("it folds an axis of the image into another axis")
        first = new[after[0]]
        rest = prod(old[place] for place in before) // prod(old[place] for place in own)
        if len(own) == 2:
            return _as_patches((old[y], old[x]), rest, (before, (y, x)), after, new)
        size, axis = old[before[0]], 0 if before[0] == y else 1
        if first % size == 0 and rest % (first // size) == 0:
            found[axis] = after[0] - len(new), first // size, 1
        elif size % first == 0:
            found[axis] = after[0] - len(new), 1, size // first
        else:
            raise NotTileable("it folds an axis of the image into another axis")
    (y_axis, *y_times), (x_axis, *x_times) = found[0], found[1]
    return Regrouping((y_axis, x_axis), None, *zip(y_times, x_times, strict=True))


def _as_patches(
    size: tuple[int, int], rest: int, before: tuple[list[int], tuple[int, int]], after: list[int], new: tuple[int, ...]
) -> Regrouping:
    """Join rows and columns: in front of all other axes they are a batch."""
    joined, left = divmod(new[after[0]], prod(size))
    if before[0][:2] != [*before[1]] or left or not joined or rest % joined or after[0] != 0:
        raise NotTileable("it folds the axes of the image into one that is no batch")
    return Regrouping((-len(new), -len(new)), Patches(*size, joined), (1, joined))


def _of_patches(patches: Patches, beside: tuple[int, int], after: list[int], new: tuple[int, ...]) -> Regrouping:
    """Join an axis of patches with those of so many positions before and behind it, or split it."""
    rows, columns, items, before = patches
    (_, width), count, before, rest = patches.size, rows * patches.size[1], before * beside[0], beside[1]
    first = new[after[0]]
    if before > 1 and first % (before * count) == 0 and rest % (joined := first // (before * count)) == 0:
        axis = after[0] - len(new)
        return Regrouping((axis, axis), Patches(rows, columns, items * joined, before), (1, joined))
    while before > 1 and after and before % new[after[0]] == 0:
        before //= new[after.pop(0)]
    if before > 1 or not after:
        raise NotTileable("it divides the patches otherwise than in rows")
    first, axis = new[after[0]], after[0] - len(new)
    if first % count == 0 and rest % (first // count) == 0:
        joined = first // count
        return Regrouping((axis, axis), Patches(rows, columns, items * joined), (1, joined))
    if items == 1 < columns and first == rows and len(after) > 1 and new[after[1]] == columns:
        return Regrouping((axis, after[1] - len(new)), None)
    split = count // first
    if count % first == 0 and items % split == 0:
        return Regrouping((axis, axis), Patches(rows, columns, items // split), split=(1, split))
    if count % first == 0 and width % split == 0 and split % items == 0:
        return Regrouping((axis, axis), Patches(rows, width // split), split=(1, split))
    if count % first == 0 and split % width == 0:
        return Regrouping((axis, axis), Patches(first, 1), split=(split // width, width))
    raise NotTileable("it divides the patches otherwise than in rows")


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the axes that hold the same values before and after, as few together as can be; axes of 1 in none."""
    before, after = ([place for place, size in enumerate(shape) if size > 1] for shape in (old, new))
    while before:
        own, its = [before.pop(0)], [after.pop(0)]
        while (given := prod(old[place] for place in own)) != (made := prod(new[place] for place in its)):
            if given < made:
                own.append(before.pop(0))
            else:
                its.append(after.pop(0))
        yield own, its


class Regroup(Pointwise):
    """view / reshape: spatial axes stay, are split or joined; two may become one axis of patches, and apart again."""

    saved = Saved.NOTHING
    affine = Affine.JOINTLY
    lies = Layout.PACKED

    def axes(self, call: Call, rank: int) -> Axes:
        return self._of(call).axes

    def patches(self, call: Call) -> Patches:
        patches = self._of(call).patches
        assert patches is not None
        return patches

    def _of(self, call: Call) -> Regrouping:
        field = single_field(call)
        return regrouped(field.shape, field.spatial, field.patches, call.node.shape)

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        found = self._of(call)
        joined, split = found.joined[axis], found.split[axis]
        return (Span(out.start * split // joined, -(-out.stop * split // joined)),)

    def bind(self, call: Call, site: Site) -> Bound:
        found, node = self._of(call), call.node
        made = tuple(self._made(found, axis, site.inside[axis]) for axis in (0, 1))
        shape = shape_on(node, (made[0], made[1]))
        starts = [out.start - whole.start for out, whole in zip(site.out, made, strict=True)]
        sizes = [[span.length for span in spans] for spans in (site.out, made)]
        trim = bound_view(node.spatial, starts, *sizes)

        def run(operands: Sequence[Any]) -> torch.Tensor:
            crop: torch.Tensor = operands[0].reshape(shape)
            return crop if trim is None else trim(crop)

        return run

    def form(self, call: Call, axis: int, out: Span, operands: tuple[Span | None, ...]) -> Hashable | None:
        assert operands[0] is not None
        return out.start - self._made(self._of(call), axis, operands[0]).start

    @staticmethod
    def _made(found: Regrouping, axis: int, inside: Span) -> Span:
        """Return the span of the view that a span of the field holds."""
        joined, split = found.joined[axis], found.split[axis]
        return Span(inside.start * joined // split, inside.stop * joined // split)


class Expansion(Pointwise):
    """`expand` of axes that are not spatial."""

    saved = Saved.NOTHING
    affine = Affine.JOINTLY
    lies = Layout.VIEW

    def axes(self, call: Call, rank: int) -> Axes:
        field = single_field(call)
        if any(call.node.shape[axis] != field.shape[axis] for axis in field.spatial):
            raise NotTileable("it expands an axis of the image")
        return field.spatial

    def bind(self, call: Call, site: Site) -> Bound:
        shape = shape_on(call.node, site.out)

        def run(operands: Sequence[Any]) -> torch.Tensor:
            crop: torch.Tensor = operands[0]
            return crop.expand(shape)

        return run


class Unfolding(Pointwise):
    """`unfold`: the windows of an axis, one after another; what they hold is the last axis."""

    pixelwise = False
    saved = Saved.NOTHING
    affine = Affine.JOINTLY

    def axes(self, call: Call, rank: int) -> Axes:
        field = single_field(call)
        if field.patches is not None and self._axis(call) is not None:
            raise NotTileable("it takes windows of patches")
        y, x = field.spatial
        return y - 1, x - 1

    @staticmethod
    def _axis(call: Call) -> int | None:
        """Return 0 or 1 where the windows are along y or x."""
        field = call.operands[0]
        dim = call["dimension"] % len(field.shape) - len(field.shape)
        return field.spatial.index(dim) if dim in field.spatial else None

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        if self._axis(call) != axis:
            return (out,)
        return (Window(call["size"], call["step"], 0, 1).reads(out),)


class Columns(WindowRule):
    """`im2col` (`F.unfold`): every window is a column; their axis is one of patches."""

    saved = Saved.NOTHING
    affine = Affine.JOINTLY
    on_images = False

    def axes(self, call: Call, rank: int) -> Axes:
        require_nchw(call)
        return -1, -1

    def patches(self, call: Call) -> Patches:
        return Patches(self._count(call, 0), self._count(call, 1))

    def _count(self, call: Call, axis: int) -> int:
        window = self.window(call, axis)
        return (call.operands[0].size(axis) + 2 * window.padding - window.reach) // window.stride + 1

    def bind(self, call: Call, site: Site) -> Bound:
        kernel, dilation, stride = (pair(call[name]) for name in ("kernel_size", "dilation", "stride"))
        filled = bound_pad(IMAGE_AXES, self.missing(call, site))

        def run(operands: Sequence[Any]) -> torch.Tensor:
            x_NCHW = operands[0] if filled is None else filled(operands[0])
            return F.unfold(x_NCHW, kernel, dilation, 0, stride)

        return run


register(Regroup(), aten("view reshape _unsafe_view"))
register(Expansion(), aten("expand"))
register(Unfolding(), aten("unfold"))
register(Columns(), aten("im2col"))
