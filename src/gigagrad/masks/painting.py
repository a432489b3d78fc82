"""The mask that outlines stand for, made box by box and never whole.

A pixel belongs to a polygon if its centre lies inside (even-odd rule). Where a horizontal edge or a corner passes
exactly through a centre, what is below and to the right counts as inside, so that polygons side by side neither
overlap nor leave a gap, and outlines along pixel edges give back the pixels that they were traced from. Every crossing
is computed from the polygon's own coordinates: a pixel is the same in whatever box it is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box
from gigagrad.images import Image
from gigagrad.masks.classes import IGNORED, ClassTable
from gigagrad.masks.outlines import Outlines, Points

_Bytes = NDArray[np.uint8]
_Numbers = NDArray[np.integer[Any]]
_COPIES = 3
"""Copies of the points: as read, while they are put together, and in pixels of the mask."""


class AnnotationMask(Image):
    """Class ids `(1, H, W)`, uint8, of outlines over a slide: a later polygon lies over an earlier one.

    Of several `labels` each has a channel, which is 1 where its class is, whatever lies over it. Polygons of a class
    that `table` does not name cover nothing. Where some are ignored, that is its nodata. Outside the image, as every
    mask, it is 0.
    """

    def __init__(self, outlines: Outlines, table: ClassTable, slide: Image, *, name: str, labels: int = 1) -> None:
        """Paint outlines on a mask; `slide` has the size and the level of the mask; outlines are in pixels of its level
        0.
        """
        shape = (labels, slide.height, slide.width)
        held = outlines.points.nbytes + outlines.closing.nbytes
        ids = dict(table.ids)
        by_class = np.array([ids.get(name, -1) for name in outlines.names], np.int64)
        of_polygon = by_class[outlines.class_of]
        super().__init__(
            shape=shape,
            dtype=np.dtype(np.uint8),
            name=name,
            nodata=IGNORED if (of_polygon == IGNORED).any() else None,
            cache_bytes=_COPIES * held,
        )
        full = slide.levels[0].shape
        scale = slide.width / full[1], slide.height / full[0]
        self._points, self._closing, self._starts = outlines.points * scale, outlines.closing, outlines.starts
        self._unlabelled = table.unlabelled
        self._painted = np.flatnonzero(of_polygon >= 0)
        self._ids = of_polygon[self._painted].astype(np.uint8)
        self._bounds = outlines.bounds()[self._painted] * (*scale, *scale)

    def _read_inside(self, box: Box) -> _Bytes:
        canvas = np.full(box.shape, self._unlabelled, np.uint8)
        labels = np.zeros((self.channels, *box.shape), np.uint8) if self.channels > 1 else canvas[:0]
        x0, y0, x1, y1 = self._bounds.T
        near = (x1 > box.x0) & (x0 < box.x1) & (y1 > box.y0) & (y0 < box.y1)
        for index in np.flatnonzero(near):
            polygon = slice(*self._starts[self._painted[index] :][:2])
            points, closing, number = self._points[polygon], self._closing[polygon], self._ids[index]
            paint(canvas, box, points, closing, number)
            if 0 < number <= len(labels):
                paint(labels[number - 1], box, points, closing, 1)
        if self.channels == 1:
            return canvas[None]
        labels[:, canvas == IGNORED] = IGNORED
        return labels


def paint(canvas: _Numbers, box: Box, points: Points, closing: NDArray[np.bool_], value: int) -> None:
    """Set the pixels of `canvas`, which shows `box`, whose centres lie inside the closed rings of `points` to `value`.

    `points` are `(n, 2)` as (x, y); `closing` is true at each ring's last point.
    """
    inner = ~closing[:-1]
    begin, end = points[:-1][inner], points[1:][inner]
    # Always from above to below, so that an edge that two polygons share is the same numbers for both.
    upper = np.where((begin[:, 1] <= end[:, 1])[:, None], begin, end)
    lower = np.where((begin[:, 1] <= end[:, 1])[:, None], end, begin)
    # Centres of rows y + 0.5 with upper <= y + 0.5 < lower.
    first = np.maximum(np.ceil(upper[:, 1] - 0.5), box.y0).astype(np.int64)
    stop = np.minimum(np.ceil(lower[:, 1] - 0.5), box.y1).astype(np.int64)
    near = (stop > first) & (np.minimum(upper[:, 0], lower[:, 0]) < box.x1)
    if not near.any():
        return
    upper, lower, first, count = upper[near], lower[near], first[near], (stop - first)[near]
    edge = np.repeat(np.arange(len(count)), count)
    row = np.arange(len(edge)) - np.repeat(np.cumsum(count) - count, count) + first[edge]
    slope = (lower[:, 0] - upper[:, 0]) / (lower[:, 1] - upper[:, 1])
    crossing = upper[edge, 0] + (row + 0.5 - upper[edge, 1]) * slope[edge]
    column = np.clip(np.ceil(crossing - 0.5), box.x0, box.x1).astype(np.int64) - box.x0
    right = int(np.clip(np.ceil(points[:, 0].max() - 0.5), box.x0, box.x1)) - box.x0
    _fill(canvas[:, :right], row - box.y0, column, value)


def _fill(canvas: _Numbers, row: NDArray[np.int64], column: NDArray[np.int64], value: int) -> None:
    """Fill each row from its first crossing to its second, from its third to its fourth, and so on."""
    kept = column < canvas.shape[1]
    row, column = row[kept], column[kept]
    if not len(row):
        return
    top, bottom, left = int(row.min()), int(row.max()) + 1, int(column.min())
    if not column.any() and len(row) == len(canvas) and (np.sort(row) == np.arange(len(canvas))).all():
        canvas[:] = value
        return
    crossed = np.zeros((bottom - top, canvas.shape[1] - left), np.uint8)
    # Two crossings at one place cancel out.
    np.bitwise_xor.at(crossed, (row - top, column - left), 1)
    inside = np.bitwise_xor.accumulate(crossed, axis=1).view(bool)
    canvas[top:bottom, left:][inside] = value
