"""Say which part of a prediction is wanted, and which tiles of which segments that takes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gigagrad.boxes import Box, Span
from gigagrad.errors import ConfigError
from gigagrad.execution.prepared import Prepared
from gigagrad.plans import Grid

Needed = dict[int, NDArray[np.bool_]]
"""Tiles that are computed, by segment, in the rows and columns of its grid."""


class Within:
    """The part of an output field `(1, C, H, W)` that is wanted: where the nearest of some cells is true.

    The cells show all of the field, at whatever resolution. Raises `ConfigError` for others.
    """

    def __init__(self, cells: Any, shape: tuple[int, ...]) -> None:
        self._cells: NDArray[np.bool_] = np.asarray(cells) != 0
        if self._cells.ndim != 2 or not self._cells.size:
            raise ConfigError(f"within= takes a mask of two axes, (rows, columns), got {self._cells.shape}")
        self._size = shape[-2:]

    def wants(self, box: Box) -> bool:
        """Say whether any pixel of a box is wanted."""
        rows, columns = (self._nearest(axis, span) for axis, span in enumerate((box.y, box.x)))
        return not box.empty and bool(self._cells[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].any())

    def only(self, box: Box, crop: torch.Tensor) -> torch.Tensor:
        """Return the crop `(1, C, h, w)` of a box with NaN where it is not wanted, or 0 of integers."""
        rows, columns = (self._nearest(axis, span) for axis, span in enumerate((box.y, box.x)))
        wanted = self._cells[rows[:, None], columns]
        if wanted.all():
            return crop
        return torch.where(torch.from_numpy(wanted).to(crop.device), crop, blank_of(crop.dtype))

    def _nearest(self, axis: int, span: Span) -> NDArray[np.int64]:
        nearest: NDArray[np.int64] = np.arange(span.start, span.stop) * self._cells.shape[axis] // self._size[axis]
        return nearest


def blank_of(dtype: torch.dtype) -> float | int:
    """Return the value of what is not computed."""
    return math.nan if dtype.is_floating_point else 0


def needed_tiles(prepared: Prepared, within: Within) -> Needed:
    """Find the tiles that the wanted part of the output takes: those that meet it, and of earlier segments those that
    compute what later ones read; all of a segment where sums over the image or whole-field operators take its fields.
    """
    graph, needed = prepared.graph, Needed()
    for segment in reversed(prepared.segments):
        grid = prepared.grid(segment)
        whole = segment.reductions or any(graph.gathers(i) for i in segment.kept)
        tiles = np.full(grid.shape, bool(whole))
        if segment.output is not None:
            own = (within.wants(grid[tile].wanted(segment.output)) for tile in range(len(grid)))
            tiles |= np.fromiter(own, bool, len(grid)).reshape(grid.shape)
        for later in prepared.segments[segment.index + 1 :]:
            for field in {*segment.kept} & {*later.reads}:
                rows, columns = (_axis_overlaps(grid, prepared.grid(later), axis, field) for axis in (0, 1))
                tiles |= rows @ needed[later.index] @ columns.T
        needed[segment.index] = tiles
    return needed


def _axis_overlaps(own: Grid, later: Grid, axis: int, field: int) -> NDArray[np.bool_]:
    """Say which rows (or columns) of tiles compute what those of a later segment read of a field."""
    shares = [own.wanted(axis, i)[field] for i in range(own.shape[axis])]
    read = [later.axis_geometry(axis, i).spans.get(field) for i in range(later.shape[axis])]
    return np.array([[span is not None and share.meets(span) for span in read] for share in shares])
