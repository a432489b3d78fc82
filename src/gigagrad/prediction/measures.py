"""What is measured of regions: how sure the network is of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import tiles
from gigagrad.images import Image, MaskClass
from gigagrad.masks import paint
from gigagrad.prediction.polygons import Region, Traced

_BLOCK_PX: Final = 1024
"""Side of the blocks in which probabilities are read: some 20 bytes a pixel are held of one."""
_FULL: Final = 255
"""What stands for a probability of 1 (`outputs.Probabilities`)."""


def with_probabilities(traced: Traced, probabilities: Image, classes: Sequence[MaskClass]) -> Traced:
    """The regions with the mean `probability` of their class over the pixels whose centres they cover.

    `probabilities` `(C, H, W)` are bytes of the mask's size, a channel for each of `classes`. Raises `ImageError`.
    """
    means: dict[int, float] = {}
    for channel, kind in enumerate(classes, 1):
        own = [index for index, region in enumerate(traced.regions) if region.kind == kind]
        found = _means([traced.regions[index] for index in own], probabilities.bands([channel]))
        means |= zip(own, found, strict=True)
    regions = (replace(region, probability=means.get(index)) for index, region in enumerate(traced.regions))
    return replace(traced, regions=tuple(regions))


def _means(regions: Sequence[Region], plane: Image) -> list[float]:
    """Of `plane` `(1, H, W)` over each of the regions, which are disjoint."""
    outlines = [_outline(region) for region in regions]
    x0, y0, x1, y1 = np.array([region.polygon.bounds for region in regions]).reshape(-1, 4).T
    sums, pixels = np.zeros(len(regions) + 1), np.zeros(len(regions) + 1)
    for box in tiles(plane.height, plane.width, _BLOCK_PX, _BLOCK_PX):
        near = np.flatnonzero((x1 > box.x0) & (x0 < box.x1) & (y1 > box.y0) & (y0 < box.y1))
        if not len(near):
            continue
        canvas = np.zeros(box.shape, np.int32)
        for index in near:
            paint(canvas, box, *outlines[index], int(index) + 1)
        if (missing := plane.missing(box)) is not None:
            canvas[missing] = 0
        values = np.asarray(plane.read(box))[0]
        sums += np.bincount(canvas.ravel(), values.ravel(), len(sums))
        pixels += np.bincount(canvas.ravel(), minlength=len(sums))
    means: list[float] = (sums[1:] / pixels[1:] / _FULL).tolist()
    return means


def _outline(region: Region) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """As `paint` takes it: the points of all rings and which of them end one."""
    import shapely

    points, ring = shapely.get_coordinates(shapely.get_rings(region.polygon), return_index=True)
    return points, np.append(np.diff(ring) > 0, True)
