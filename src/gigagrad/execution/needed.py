"""Say which part of a prediction is wanted, and which parts of which tiles that takes."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from gigagrad.boxes import Box, Span
from gigagrad.errors import ConfigError
from gigagrad.execution.prepared import Prepared
from gigagrad.graphs import lookup
from gigagrad.plans import Grid, TileGeometry, estimate
from gigagrad.plans.geometry import lattice
from gigagrad.plans.memory import compiled_for_tiles, whole_compiled_convolutions
from gigagrad.plans.plan import amount_of
from gigagrad.stores import crop_shape

_FINEST: Final = 16
"""A tile is computed in so many parts of its side, or fewer where what they are compiled to would not fit."""

Needed = dict[int, dict[int, TileGeometry]]
"""The tiles that are computed, by segment and number: each whole, or cropped."""


class Within:
    """The part of an output field `(1, C, H, W)` that is wanted: where the nearest of some cells is true.

    The cells show all of the field, at whatever resolution. `whole_tiles`: tiles are not computed in parts. Raises
    `ConfigError` for other cells.
    """

    def __init__(self, cells: Any, shape: tuple[int, ...], *, whole_tiles: bool = False) -> None:
        self._cells: NDArray[np.bool_] = np.asarray(cells) != 0
        if self._cells.ndim != 2 or not self._cells.size:
            raise ConfigError(f"within= takes a mask of two axes, (rows, columns), got {self._cells.shape}")
        self._shape, self.whole_tiles = shape, whole_tiles

    def hull(self, box: Box) -> Box | None:
        """Return the smallest box of all pixels of a box that are wanted; None where none is."""
        if box.empty:
            return None
        rows, columns = (self._nearest(axis, span) for axis, span in enumerate((box.y, box.x)))
        cells, spans = self._cells[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1], []
        for axis, nearest in enumerate((rows, columns)):
            lines: NDArray[np.bool_] = np.asarray(cells.any(1 - axis))
            (wanted,) = np.nonzero(lines[nearest - nearest[0]])
            if not wanted.size:
                return None
            spans.append(Span(int(wanted[0]), int(wanted[-1]) + 1))
        return Box.of(*spans).shift(box.y0, box.x0)

    def piece(self, box: Box, computed: Box, crop: torch.Tensor) -> torch.Tensor:
        """Return the crop `(1, C, h, w)` of a box, of which only a part is `computed`: NaN where it is not wanted, or 0
        of integers.
        """
        rows, columns = (self._nearest(axis, span) for axis, span in enumerate((computed.y, computed.x)))
        wanted = self._cells[rows[:, None], columns]
        if wanted.all():
            return crop if computed == box else self._placed(box, computed, crop)
        only = torch.where(torch.from_numpy(wanted).to(crop.device), crop, _blank(crop.dtype))
        return only if computed == box else self._placed(box, computed, only)

    def blank(self, box: Box, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the crop of a box of which nothing is computed."""
        return torch.full(crop_shape(self._shape, (-2, -1), box), _blank(dtype), dtype=dtype, device=device)

    def _placed(self, box: Box, computed: Box, crop: torch.Tensor) -> torch.Tensor:
        piece, own = self.blank(box, crop.dtype, crop.device), computed.shift(-box.y0, -box.x0)
        piece[..., own.y0 : own.y1, own.x0 : own.x1] = crop
        return piece

    def _nearest(self, axis: int, span: Span) -> NDArray[np.int64]:
        size = self._shape[axis - 2]
        nearest: NDArray[np.int64] = np.arange(span.start, span.stop) * self._cells.shape[axis] // size
        return nearest


def _blank(dtype: torch.dtype) -> float | int:
    """Return the value of what is not computed."""
    return math.nan if dtype.is_floating_point else 0


def needed_tiles(prepared: Prepared, within: Within) -> Needed:
    """Find what the wanted part of the output takes: of each tile the smallest part with all that is wanted of it, or
    that is read of it by later segments; all of a segment where sums over the image or whole-field operators take its
    fields.

    Parts begin and end at few places, so that few convolutions are compiled: where those would not fit in the budget
    beside the plan, tiles are computed in coarser parts, and at last as a whole.
    """
    parts = 1 if within.whole_tiles else _FINEST
    while True:
        needed = _needed(prepared, within, parts)
        if parts == 1 or _fits(prepared, needed):
            return needed
        parts //= 2


def _needed(prepared: Prepared, within: Within, parts: int) -> Needed:
    graph, needed = prepared.graph, Needed()
    for segment in reversed(prepared.segments):
        grid, hulls = prepared.grid(segment), dict[tuple[int, int], Box]()
        if segment.reductions or any(graph.gathers(i) for i in segment.kept):
            needed[segment.index] = {tile: grid[tile] for tile in range(len(grid))}
            continue
        if segment.output is not None:
            own = ((tile, within.hull(grid[tile].wanted(segment.output))) for tile in range(len(grid)))
            hulls = {(tile, segment.output): box for tile, box in own if box is not None}
        for later in prepared.segments[segment.index + 1 :]:
            for field in {*segment.kept} & {*later.reads}:
                read = (tile.box(field) for tile in needed[later.index].values())
                for tile, box in _shares(grid, field, (box for box in read if box is not None)):
                    known = hulls.get((tile, field))
                    hulls[tile, field] = box if known is None else known.hull(box)
        found = dict[int, Box]()
        for (tile, field), box in hulls.items():
            crop = _cropped(grid, tile, field, box, parts)
            found[tile] = crop.hull(found.get(tile, crop))
        needed[segment.index] = {tile: grid.cropped(tile, crop) for tile, crop in found.items()}
    return needed


def _shares(grid: Grid, field: int, boxes: Iterator[Box]) -> Iterator[tuple[int, Box]]:
    """Yield of each box of a field the tiles that compute a part of it, and that part."""
    shares = [[grid.wanted(axis, i)[field] for i in range(grid.shape[axis])] for axis in (0, 1)]
    starts, stops = ([[span[end] for span in axis] for axis in shares] for end in (0, 1))
    for box in boxes:
        rows, columns = (
            range(bisect_right(stops[axis], span.start), bisect_left(starts[axis], span.stop))
            for axis, span in enumerate((box.y, box.x))
        )
        for row in rows:
            for column in columns:
                share = Box.of(shares[0][row], shares[1][column]).intersect(box)
                if not share.empty:
                    yield row * grid.shape[1] + column, share


def _cropped(grid: Grid, tile: int, field: int, box: Box, parts: int) -> Box:
    """Return the part of a tile that computes a box of one of its fields, in pixels of the reference field."""
    here, there = (grid.graph[i].extent for i in (field, grid.reference))
    box, steps, place = box.resized(here, there), lattice(grid.graph, grid.segment), divmod(tile, grid.shape[1])
    spans = []
    for axis, span in enumerate((box.y, box.x)):
        step, own = steps[axis] * -(-grid.tile[axis] // (parts * steps[axis])), grid.axes[axis][place[axis]]
        start, stop = span.start // step * step, -(-span.stop // step) * step
        spans.append(Span(max(start, own.start), min(stop, own.stop)))
    return Box.of(*spans)


def _fits(prepared: Prepared, needed: Needed) -> bool:
    """Say whether the convolutions of these parts, compiled, fit in the budget beside all else."""
    graph, plan = prepared.graph, prepared.plan
    if plan.budget_bytes is None:
        return True
    count = whole_compiled_convolutions(graph, backward=False)
    count += sum(compiled_for_tiles(prepared.grid(s), needed[s.index].values()) for s in prepared.segments)
    room = plan.budget_bytes - plan.predicted_peak_bytes + amount_of(plan.fixed, estimate.COMPILED)
    dtypes = {node.dtype for node in graph.nodes if lookup(node.op).compiled}
    return prepared.device.compiled_bytes(count, dtypes) <= room
