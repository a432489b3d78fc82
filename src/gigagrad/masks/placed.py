"""Outlines as files have them, in pixels of the slide: counted from where it was scanned, or on earth where it lies."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from gigagrad.errors import TargetError
from gigagrad.extras import extra
from gigagrad.images import Image
from gigagrad.images.georeference import Georeference
from gigagrad.masks.outlines import Outlines, Points

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
