"""Class regions of a mask as polygons, how sure the network is of each, and files of them: GeoJSON in pixels, as QuPath
has it, or in coordinates on earth; a table; TIAToolbox's annotation store.

Outlines follow the pixel edges exactly. Memory and the size of the file grow with the number of corners, not with the
slide, and both are bounded: a mask with more than `max_corners` corners (noise, mostly) is traced again from every
second pixel, then every fourth, and so on; the result says which. QuPath's conventions: one `Feature` per region, a
UUID as `id`, `objectType` "annotation", and a classification with both name and colour.

The annotation store is an SQLite file of polygons with an R-tree over their boxes, by the schema 1.0.1 of `SQLiteStore`
(tiatoolbox/annotation/storage.py): a polygon is Well-Known Binary packed by zlib, a property is JSON. The viewer
colours by the property `type`, or takes `color`, of numbers up to 1.
"""

from __future__ import annotations

import json
import math
import sqlite3
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box, tiles
from gigagrad.files import replacing, write_csv
from gigagrad.images import Image, MaskClass
from gigagrad.images.georeference import Georeference
from gigagrad.masks import paint
from gigagrad.masks.classes import as_bytes
from gigagrad.prediction.classes import require_mask
from gigagrad.prediction.outlines import NO_CORNERS, Corners, corners_in, rings_of

if TYPE_CHECKING:
    from shapely import Polygon

Points = NDArray[np.float64]

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "gigagrad/annotation")
_BLOCK_PX = 2048
"""Side of the blocks in which a mask is read, in its own pixels: a few MB each, and a few file tiles of 512."""


class Pixels(NamedTuple):
    """The pixels of a mask that are of a region's class, inside of its outline: how many, and the mean of their middles
    in pixels of the mask.
    """

    area: int
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Region:
    """A connected region of one class. `polygon` is valid, in pixels of the mask, or of level 0 where it is `placed`.

    It encloses small holes, which are not of the class. `pixels` are those that are, and `probability` the mean of the
    class over them; None where nobody has measured them (`measured`).
    """

    kind: MaskClass
    polygon: Polygon
    pixels: Pixels | None = None
    probability: float | None = None
    id: str = ""
    """A UUID that follows from names alone, where it is placed."""


@dataclass(frozen=True, slots=True)
class Traced:
    """All regions of a mask; `downsample` is 1 where the outlines are exact (see `trace`)."""

    regions: tuple[Region, ...]
    downsample: int


def trace(mask: Image, classes: Sequence[MaskClass], *, min_area_px: float = 256, max_corners: int = 1 << 20) -> Traced:
    """Trace the regions of each class, 4-connected, with their holes; block by block, in bounded memory.

    `mask` has class ids, or a channel of 0 and 1 for each of several classes (see `classes.Channels`).
    `min_area_px`: regions and holes smaller than this many square pixels of the mask are left out (1 keeps everything).
    `max_corners`: the most corners to hold, about 100 bytes each; beyond it the mask is traced at 1/2, 1/4, ...

    Raises `ImageError` if `mask` is no mask or cannot be read.
    """
    require_mask(mask, 1 if mask.channels == 1 else len(classes))
    downsample = 1
    while (found := _corners(mask, classes, downsample, max_corners)) is None:
        downsample *= 2
    limits = np.array([mask.shape[2], mask.shape[1]])
    regions = [
        Region(kind, polygon)
        for kind in classes
        for polygon in _polygons(*rings_of(found[kind.id]), downsample, limits, min_area_px)
    ]
    return Traced(tuple(regions), downsample)


def placed(traced: Traced, name: str, scale: tuple[float, float] = (1, 1)) -> Iterator[Region]:
    """Yield the regions of the slide `name` in pixels of level 0; ids depend on that and the regions' order only.

    `scale` is how many level-0 pixels of the slide a pixel of the mask is high and wide.
    """
    import shapely

    for index, region in enumerate(traced.regions):
        polygon = shapely.transform(region.polygon, lambda points: points * (scale[1], scale[0]))
        yield replace(region, polygon=polygon, id=str(uuid.uuid5(_NAMESPACE, f"{name}/{index}")))


def write_geojson(
    path: Path,
    traced: Traced,
    name: str,
    scale: tuple[float, float] = (1, 1),
    place: Georeference | None = None,
    bounds: Box | None = None,
) -> None:
    """Write a QuPath `FeatureCollection` of the regions as `placed` has them. Raises `WriteError`.

    Pixels are counted from the corner of the slide's `bounds`, as QuPath does. With the `place` of the mask,
    coordinates are its reference system's, which the member `crs` names as GeoJSON did before RFC 7946 left WGS 84 as
    the only one, and as GDAL and QGIS read it; where that has no name, numbers in it would be taken for others.
    """
    if place is not None and place.crs_name is not None:
        named = f'"crs": {json.dumps({"type": "name", "properties": {"name": place.crs_name}})}, '
        regions, write = placed(traced, name), partial(_on_earth, place=place)
    else:
        named, corner = "", (0, 0) if bounds is None else (bounds.x0, bounds.y0)
        regions, write = placed(traced, name, scale), partial(_in_pixels, corner=corner)
    with replacing(path) as file:
        file.write(f'{{"type": "FeatureCollection", {named}"features": ['.encode())
        for index, region in enumerate(regions):
            file.write(b",\n" if index else b"\n")
            file.write(json.dumps(_feature(region, write), separators=(",", ":")).encode())
        file.write(b"\n]}\n")


def _corners(mask: Image, classes: Sequence[MaskClass], downsample: int, max_corners: int) -> dict[int, Corners] | None:
    """Find the corners by class id, or None as soon as there are too many of them."""
    height, width = sampled_shape(mask, downsample)
    side = block_side(downsample)
    parts: dict[int, list[Corners]] = {kind.id: [NO_CORNERS] for kind in classes}
    planes = [(mask, {kind.id: kind.id for kind in classes})]
    if mask.channels > 1:
        planes = [(mask.bands([kind.id]), {kind.id: 1}) for kind in classes]
    count = 0
    for box in tiles(height + 1, width + 1, side, side):
        for plane, values in planes:
            pixels = read_sampled(plane, Box(box.y0 - 1, box.x0 - 1, box.y1, box.x1), downsample)
            if pixels.min() == pixels.max():
                continue
            for class_id, value in values.items():
                corners = corners_in(pixels == value, box.y0, box.x0)
                parts[class_id].append(corners)
                count += len(corners)
        if count > max_corners and min(height, width) > 1:
            return None
    return {class_id: np.concatenate(held) for class_id, held in parts.items()}


def block_side(downsample: int) -> int:
    """Return a side for blocks of the downsampled mask that reads about `_BLOCK_PX` px a side of the mask itself."""
    return max(16, _BLOCK_PX // downsample)


def sampled_shape(mask: Image, downsample: int) -> tuple[int, int]:
    """Return `(height, width)` of `mask` when every `downsample`-th pixel is kept; a remainder counts as a pixel."""
    _, height, width = mask.shape
    return math.ceil(height / downsample), math.ceil(width / downsample)


def read_sampled(mask: Image, box: Box, downsample: int) -> NDArray[np.uint8]:
    """Read `box` of the downsampled mask, `(h, w)`: the pixel at the middle of each `downsample x downsample` block.

    A block cut off by the image's border gives its nearest pixel inside; outside the downsampled mask all is 0.
    """
    height, width = sampled_shape(mask, downsample)
    inside = box.clamp(height, width)
    result = np.zeros(box.shape, np.uint8)
    if inside.empty:
        return result
    rows, columns = (
        np.minimum(np.arange(first, stop) * downsample + downsample // 2, size - 1)
        for first, stop, size in ((inside.y0, inside.y1, mask.height), (inside.x0, inside.x1, mask.width))
    )
    read = Box(int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1)
    pixels = as_bytes(np.asarray(mask.read(read))[0][np.ix_(rows - read.y0, columns - read.x0)])
    at = inside.shift(-box.y0, -box.x0)
    result[at.y0 : at.y1, at.x0 : at.x1] = pixels
    return result


def _polygons(rings: Sequence[Any], areas: Any, downsample: int, limits: Any, min_area_px: float) -> Iterator[Polygon]:
    """Make valid polygons of each outer ring with its holes, in the mask's pixels and cut at the image's border."""
    import shapely

    kept = np.abs(areas) * downsample**2 >= min_area_px
    outer, holes = np.flatnonzero(kept & (areas > 0)), np.flatnonzero(kept & (areas < 0))
    children: dict[int, list[int]] = {}
    for hole, parent in zip(holes, _parents(rings, areas, outer, holes), strict=True):
        children.setdefault(int(parent), []).append(int(hole))

    def ring(index: int) -> Any:
        return np.minimum(rings[index] * downsample, limits)

    for shell in outer.tolist():
        polygon = shapely.Polygon(ring(shell), [ring(hole) for hole in children.get(shell, [])])
        # A ring may touch itself at a point (two pixels corner to corner); splitting it there makes it valid.
        whole = polygon if polygon.is_valid else shapely.make_valid(polygon, method="structure", keep_collapsed=False)
        yield from (part for part in shapely.get_parts(whole) if part.area > 0)


def _parents(rings: Sequence[Any], areas: Any, outer: Any, holes: Any) -> Any:
    """Find for each hole the smallest outer ring around it."""
    import shapely

    if not len(holes):
        return holes
    # A ring begins at its first corner in reading order, and the pixel there lies inside the hole.
    inside: Any = shapely.points(np.array([rings[hole][0] for hole in holes]) + 0.5)
    by_area = outer[np.argsort(areas[outer], kind="stable")]
    shells = [shapely.Polygon(rings[index]) for index in by_area]
    which_shell, which_hole = shapely.STRtree(inside).query(shells, predicate="contains")
    first = np.full(len(holes), len(by_area))
    np.minimum.at(first, which_hole, which_shell)
    return by_area[first]


def _feature(region: Region, write: Callable[[Points], list[list[float]]]) -> dict[str, Any]:
    import shapely

    rings = (region.polygon.exterior, *region.polygon.interiors)
    properties: dict[str, Any] = {
        "objectType": "annotation",
        "classification": {"name": region.kind.name, "color": list(region.kind.color)},
    }
    if region.probability is not None:
        properties["measurements"] = {"Mean probability": round(region.probability, 4)}
    return {
        "type": "Feature",
        "id": region.id,
        "geometry": {"type": "Polygon", "coordinates": [write(shapely.get_coordinates(ring)) for ring in rings]},
        "properties": properties,
    }


def _in_pixels(points: Points, corner: tuple[int, int]) -> list[list[float]]:
    """Write `[x, y]` points, the first one repeated; whole pixels as integers, others to a hundredth of a pixel."""
    points = points - corner
    whole = points.astype(np.int64)
    written: list[list[float]] = (whole if np.array_equal(whole, points) else points.round(2)).tolist()
    return written


def _on_earth(points: Points, place: Georeference) -> list[list[float]]:
    """Write `[x, y]` points to a hundredth of a pixel at least, the first one repeated; mirrored where y points up, so
    that outer rings are still counter-clockwise, as RFC 7946 has it.
    """
    a, b, _, d, e, _ = place.transform
    digits = 2 - math.floor(math.log10(min(math.hypot(a, b), math.hypot(d, e))))
    written: list[list[float]] = place.points(points[::-1] if a * e < b * d else points).round(digits).tolist()
    return written


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
_MEANS_BLOCK_PX: Final = 1024
"""Side of the blocks in which masks and probabilities are read: some 50 bytes a pixel are held of one."""
_FULL: Final = 255
"""The byte of a probability of 1 (`outputs._probabilities`)."""


def write_instances(path: Path, traced: Traced, name: str, scale: tuple[float, float], mpp: float | None) -> None:
    """Write one line for each region that was `measured`, in the order of the GeoJSON (see `polygons.write_geojson`).
    Raises `WriteError`.

    `mpp` is of the mask, whose pixels are `scale` pixels of level 0 high and wide.
    """
    rows = []
    for region in placed(traced, name, scale):
        assert region.pixels is not None
        count, x, y = region.pixels
        area = count * scale[0] * scale[1]
        bounds = [round(side, 2) for side in region.polygon.bounds]
        um2 = "" if mpp is None else round(count * mpp**2, 3)
        where = (round(x * scale[1], 2), round(y * scale[0], 2), *bounds)
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


def measured(traced: Traced, mask: Image, classes: Sequence[MaskClass], probabilities: Image | None = None) -> Traced:
    """Give the regions traced from `mask` their `pixels`, and the mean `probability` of their class over these.

    `probabilities` `(C, H, W)` are bytes of the mask's size, a channel for each of `classes`. Raises `ImageError`.
    """
    regions = list(traced.regions)
    for channel, kind in enumerate(classes, 1):
        own = [index for index, region in enumerate(regions) if region.kind == kind]
        plane, value = (mask, kind.id) if mask.channels == 1 else (mask.bands([kind.id]), 1)
        chances = None if probabilities is None else probabilities.bands([channel])
        sums = _sums([regions[index] for index in own], plane, value, chances)
        for index, (count, x, y, known, chance) in zip(own, sums.tolist(), strict=True):
            regions[index] = replace(
                regions[index],
                pixels=Pixels(int(count), x / count, y / count),
                probability=chance / known / _FULL if known else None,
            )
    return replace(traced, regions=tuple(regions))


def _sums(regions: Sequence[Region], plane: Image, value: int, chances: Image | None) -> NDArray[np.float64]:
    """Add up the pixels `value` of a mask in each of the regions, which are disjoint: how many there are, their x and
    y, how many of them have a probability, and these.
    """
    outlines = [_outline(region) for region in regions]
    x0, y0, x1, y1 = np.array([region.polygon.bounds for region in regions]).reshape(-1, 4).T
    sums = np.zeros((5, len(regions) + 1))
    for box in tiles(plane.height, plane.width, _MEANS_BLOCK_PX, _MEANS_BLOCK_PX):
        near = np.flatnonzero((x1 > box.x0) & (x0 < box.x1) & (y1 > box.y0) & (y0 < box.y1))
        if not len(near):
            continue
        canvas = np.zeros(box.shape, np.int32)
        for index in near:
            paint(canvas, box, *outlines[index], int(index) + 1)
        y, x = np.nonzero((canvas > 0) & (np.asarray(plane.read(box))[0] == value))
        of = canvas[y, x]
        sums[:3] += [np.bincount(of, each, sums.shape[1]) for each in (None, x + box.x0 + 0.5, y + box.y0 + 0.5)]
        if chances is not None:
            missing, read = chances.missing(box), np.asarray(chances.read(box))[0, y, x]
            there = slice(None) if missing is None else ~missing[y, x]
            sums[3:] += [np.bincount(of[there], each, sums.shape[1]) for each in (None, read[there])]
    return sums[:, 1:].T


def _outline(region: Region) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return an outline as `paint` takes it: the points of all rings and which of them end one."""
    import shapely

    points, ring = shapely.get_coordinates(shapely.get_rings(region.polygon), return_index=True)
    return points, np.append(np.diff(ring) > 0, True)
