"""The connected regions of a mask: how sure the network is of each, a table of them, and TIAToolbox's annotation store.

That is an SQLite file of polygons with an R-tree over their boxes, by the schema 1.0.1 of `SQLiteStore`
(tiatoolbox/annotation/storage.py): a polygon is Well-Known Binary packed by zlib, a property is JSON. The viewer
colours by the property `type`, or takes `color`, of numbers up to 1.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import tiles
from gigagrad.files import replacing, write_csv
from gigagrad.images import Image, MaskClass
from gigagrad.masks import paint
from gigagrad.prediction.polygons import Region, Traced, placed

COLUMNS: Final = (
    *("id", "class", "class_id", "area_px", "area_um2", "centroid_x", "centroid_y", "x0", "y0", "x1", "y1"),
    "mean_probability",
)
"""Ids are those of the GeoJSON. Pixels are those of the slide's level 0, boxes half open. No resolution, no um2; no
probabilities predicted, no mean."""
_PACKING: Final = 9
_METADATA: Final = {"version": "1.0.1", "compression": "zlib", "compression_level": _PACKING}
_SCHEMA: Final = """
CREATE TABLE metadata (key TEXT UNIQUE, value TEXT);
CREATE VIRTUAL TABLE rtree USING rtree (id, min_x, max_x, min_y, max_y);
CREATE TABLE annotations (
    id INTEGER PRIMARY KEY, key TEXT UNIQUE, objtype TEXT, cx FLOAT NOT NULL, cy FLOAT NOT NULL,
    geometry BLOB, properties TEXT, area FLOAT NOT NULL
);
"""
_BLOCK_PX: Final = 1024
"""Side of the blocks in which probabilities are read: some 20 bytes a pixel are held of one."""
_FULL: Final = 255
"""The byte of a probability of 1 (`outputs._probabilities`)."""


def write_instances(path: Path, traced: Traced, name: str, scale: tuple[float, float], mpp: float | None) -> None:
    """Write one line for each region, in the order of the GeoJSON (see `polygons.write_geojson`). Raises `WriteError`.

    `mpp` is of the mask, whose pixels are `scale` pixels of level 0 high and wide.
    """
    um2_per_px = None if mpp is None else mpp**2 / (scale[0] * scale[1])
    rows = []
    for region in placed(traced, name, scale):
        area, centre = region.polygon.area, region.polygon.centroid
        bounds = [round(side, 2) for side in region.polygon.bounds]
        um2 = "" if um2_per_px is None else round(area * um2_per_px, 3)
        where = (round(centre.x, 2), round(centre.y, 2), *bounds)
        mean = "" if region.probability is None else round(region.probability, 4)
        rows.append((region.id, region.kind.name, region.kind.id, area, um2, *where, mean))
    write_csv(path, [COLUMNS, *rows])


def write_annotations(path: Path, traced: Traced, name: str, scale: tuple[float, float] = (1, 1)) -> None:
    """Write the regions in level-0 pixels, under the ids of the GeoJSON (see `polygons.write_geojson`). Raises
    `WriteError`.

    The file is made in memory, where its polygons are, too.
    """
    with closing(sqlite3.connect(":memory:")) as store:
        store.executescript(_SCHEMA)
        store.executemany("INSERT INTO metadata VALUES (?, ?)", ((k, json.dumps(v)) for k, v in _METADATA.items()))
        for number, region in enumerate(placed(traced, name, scale), 1):
            polygon, kind = region.polygon, region.kind
            properties: dict[str, Any] = {"type": kind.name, "color": [part / 255 for part in kind.color]}
            if region.probability is not None:
                properties["mean_probability"] = round(region.probability, 4)
            geometry = zlib.compress(polygon.wkb, _PACKING)
            centre, (x0, y0, x1, y1) = polygon.centroid, polygon.bounds
            row = (number, region.id, polygon.geom_type, centre.x, centre.y, geometry, json.dumps(properties))
            store.execute("INSERT INTO annotations VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*row, polygon.area))
            store.execute("INSERT INTO rtree VALUES (?, ?, ?, ?, ?)", (number, x0, x1, y0, y1))
        store.commit()
        with replacing(path) as file:
            file.write(store.serialize())


def with_probabilities(traced: Traced, probabilities: Image, classes: Sequence[MaskClass]) -> Traced:
    """Give the regions the mean `probability` of their class over the pixels whose centres they cover.

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
    """Average `plane` `(1, H, W)` over each of the regions, which are disjoint."""
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
    """Return an outline as `paint` takes it: the points of all rings and which of them end one."""
    import shapely

    points, ring = shapely.get_coordinates(shapely.get_rings(region.polygon), return_index=True)
    return points, np.append(np.diff(ring) > 0, True)
