"""Pack outlines with class names into a few arrays, place them on a slide, and paint the mask that they stand for.

The mask is made box by box and never whole.

A pixel belongs to a polygon if its centre lies inside (even-odd rule). Where a horizontal edge or a corner passes
exactly through a centre, what is below and to the right counts as inside, so that polygons side by side neither
overlap nor leave a gap, and outlines along pixel edges give back the pixels that they were traced from. Every crossing
is computed from the polygon's own coordinates: a pixel is the same in whatever box it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box
from gigagrad.errors import ImageError, TargetError, extra
from gigagrad.images import Image
from gigagrad.images.georeference import Georeference
from gigagrad.masks.classes import IGNORED, UNCLASSIFIED, ClassTable

Points = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Outlines:
    """Polygons in level-0 pixels, x to the right and y down, (0, 0) the upper left corner of the first pixel.

    Polygon `k` consists of the points `starts[k]` to `starts[k + 1]` of `points`, `(n, 2)` as (x, y): its rings one
    after the other, each closed; `closing` is true at the last point of every ring. A point lies inside where a ray
    from it crosses the rings an odd number of times, so that rings within rings are holes. `class_of[k]` is an index
    into `names`. `skipped` counts what has no area: points, lines and the like.

    As read from a file, coordinates may be others yet (`in_pixels`). Where `crs` names a reference system, they
    are that's. Else `origin` says where their zero is: the "corner" of the slide, as ASAP has it, or that of what was
    scanned ("scan"), as QuPath has it; "unsaid" is GeoJSON of which nobody knows whether it is in pixels at all.
    """

    points: Points
    closing: NDArray[np.bool_]
    starts: NDArray[np.int64]
    class_of: NDArray[np.int64]
    names: tuple[str, ...]
    skipped: int = 0
    crs: str | None = None
    origin: Literal["corner", "scan", "unsaid"] = "corner"

    def __len__(self) -> int:
        return len(self.class_of)

    @classmethod
    def pack(cls, polygons: Iterable[tuple[str | None, Sequence[Any]]], where: str) -> Self:
        """Pack outlines `(class name, rings)`, in order; a ring is a sequence of (x, y), closed or not.

        None is a polygon without a class, and one without rings is counted as skipped. Raises `ImageError` for points
        that are no finite numbers.
        """
        points: list[Points] = []
        closing: list[NDArray[np.bool_]] = []
        starts, class_of, skipped = [0], [], 0
        names: dict[str, int] = {}
        for name, rings in polygons:
            held = [ring for ring in (_ring(ring, where) for ring in rings) if len(ring) > 3]
            if not held:
                skipped += 1
                continue
            points += held
            closing += [np.arange(len(ring)) == len(ring) - 1 for ring in held]
            starts.append(starts[-1] + sum(map(len, held)))
            class_of.append(names.setdefault((name or "").strip() or UNCLASSIFIED, len(names)))
        return cls(
            np.concatenate(points) if points else np.empty((0, 2)),
            np.concatenate(closing) if closing else np.empty(0, bool),
            np.array(starts, np.int64),
            np.array(class_of, np.int64),
            tuple(names),
            skipped,
        )

    def bounds(self) -> Points:
        """Return `(len, 4)`: smallest x and y, largest x and y of each polygon."""
        if not len(self):
            return np.empty((0, 4))
        first = self.starts[:-1]
        return np.concatenate(
            (np.minimum.reduceat(self.points, first), np.maximum.reduceat(self.points, first)), axis=1
        )


def _ring(ring: Sequence[Any], where: str) -> Points:
    try:
        points = np.array([(point[0], point[1]) for point in ring], np.float64).reshape(-1, 2)
    except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise ImageError(f"{where} has an outline whose points are not pairs of numbers; export it again") from error
    if not np.isfinite(points).all():
        raise ImageError(f"{where} has an outline with a point that is no finite number; export it again")
    closed = len(points) > 1 and bool((points[0] == points[-1]).all())
    return points if closed else np.concatenate((points, points[:1]))


_WGS84 = 4326
_OF_OGC = {"CRS84": _WGS84, "CRS83": 4269, "CRS27": 4267}
"""Reference systems of OGC that are EPSG's with the longitude first, as GeoJSON has it anyway."""
_AT_ONCE = 1 << 16
"""Points that are transformed at a time, as lists of numbers."""
_REMEDY = 'name their reference system in a member "crs", or write "crs": null where they are pixels'


def in_pixels(outlines: Outlines, slide: Image) -> Outlines:
    """Convert `outlines` to pixels of the slide's level 0, counted from its corner.

    GeoJSON that neither names a reference system nor is QuPath's is in longitude and latitude over an image that lies
    on earth, as RFC 7946 has it and as GDAL and QGIS read it, and in pixels over others. Raises `TargetError` where
    nothing leads from the outlines' reference system to the slide's, and where those coordinates may be either.
    """
    place = slide.georeference and slide.georeference.resized(slide.shape[1:], slide.levels[0].shape)
    if outlines.crs is not None:
        return _from_earth(outlines, outlines.crs, slide, place)
    if outlines.origin == "unsaid" and place is not None:
        return _unsaid(outlines, slide, place)
    if outlines.origin == "corner" or slide.bounds is None:
        return replace(outlines, origin="corner")
    corner = (slide.bounds.x0, slide.bounds.y0)
    return replace(outlines, points=outlines.points + corner, origin="corner")


def overlaps(outlines: Outlines, slide: Image) -> bool:
    """Return whether outlines in pixels have a place in the slide."""
    height, width = slide.levels[0].shape
    x0, y0, x1, y1 = outlines.bounds().T
    return bool(((x1 > 0) & (y1 > 0) & (x0 < width) & (y0 < height)).any())


def span(outlines: Outlines) -> str:
    """Write from where to where outlines lie, for messages."""
    (x0, y0), (x1, y1) = outlines.points.min(axis=0), outlines.points.max(axis=0)
    return f"from ({x0:g}, {y0:g}) to ({x1:g}, {y1:g})"


def _unsaid(outlines: Outlines, slide: Image, place: Georeference) -> Outlines:
    """Take coordinates for longitude and latitude where they can be, else pixels."""
    if (np.abs(outlines.points) <= (180, 90)).all():
        found = _from_earth(outlines, f"EPSG:{_WGS84}", slide, place)
        if overlaps(found, slide):
            return found
        raise TargetError(
            f"the outlines, {span(outlines)}, name no reference system, so they are longitudes and latitudes "
            f"(RFC 7946), which lie outside of {slide.name}; {_REMEDY}"
        )
    if overlaps(replace(outlines, points=place.pixels(outlines.points)), slide):
        raise TargetError(
            f"the outlines, {span(outlines)}, name no reference system, and {slide.name} lies there in its own, "
            f"{_name(place)}; {_REMEDY}"
        )
    return replace(outlines, origin="corner")


def _from_earth(outlines: Outlines, crs: str, slide: Image, place: Georeference | None) -> Outlines:
    epsg = epsg_of(crs)
    if place is None or place.epsg is None or epsg is None:
        if place is None:
            remedy = 'give them in pixels, with "crs": null'
        elif place.epsg is None:
            remedy = 'say it by a code of EPSG (gdal_edit -a_srs), or give them in pixels, with "crs": null'
        else:
            remedy = f"reproject them: ogr2ogr -t_srs {_name(place)}"
        raise TargetError(
            f"the outlines are in the reference system {crs!r}, that of {slide.name} is {_name(place)}; {remedy}"
        )
    points = outlines.points if epsg == place.epsg else _reprojected(outlines, epsg, place.epsg)
    return replace(outlines, points=place.pixels(points), crs=None, origin="corner")


def _name(place: Georeference | None) -> str:
    return "none" if place is None or place.epsg is None else f"EPSG:{place.epsg}"


def _reprojected(outlines: Outlines, source: int, target: int) -> Points:
    """Convert points from the reference system of EPSG's code `source` to that of `target`. Raises `TargetError`."""
    with extra("geo"):
        from rasterio.crs import CRS
        from rasterio.warp import transform
    parts = range(0, len(outlines.points), _AT_ONCE)
    try:
        systems = CRS.from_epsg(source), CRS.from_epsg(target)
        moved = [transform(*systems, *outlines.points[start : start + _AT_ONCE].T) for start in parts]
        points = np.concatenate([np.array(axes, np.float64).T for axes in moved])
        if not np.isfinite(points).all():
            raise ValueError("a point has no place there")
    except Exception as error:  # GDAL's errors have no class in common that rasterio shows
        raise TargetError(
            f"the outlines, {span(outlines)}, cannot be brought from EPSG:{source} to EPSG:{target} ({error}); "
            f"{_REMEDY}"
        ) from error
    return points


def epsg_of(name: str) -> int | None:
    """Find EPSG's code in a name of a reference system, as GeoJSON has it; x before y."""
    ogc = re.fullmatch(r"(?:urn:ogc:def:crs:|https?://www\.opengis\.net/def/crs/)?OGC[:/][\d.]*[:/]?(CRS\d+)", name)
    if ogc:
        return _OF_OGC.get(ogc.group(1))
    code = re.fullmatch(
        r"(?:(?:urn:(?:x-)?ogc:def:crs:)?EPSG:(?:[\d.]*:)?|https?://www\.opengis\.net/def/crs/EPSG/[\d.]+/)(\d+)",
        name,
        re.IGNORECASE,
    )
    return int(code.group(1)) if code else None


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
