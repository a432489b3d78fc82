"""Outlines in coordinates on earth, as GIS programs save them, in the pixels of a slide that lies there."""

from __future__ import annotations

import re
from dataclasses import replace

from gigagrad.errors import TargetError
from gigagrad.images import Image
from gigagrad.masks.outlines import Outlines


def in_pixels(outlines: Outlines, slide: Image) -> Outlines:
    """`outlines` in pixels of the slide's level 0, as they are already where they name no reference system.

    Raises `TargetError` where that is not the slide's.
    """
    if outlines.crs is None:
        return outlines
    place = slide.georeference
    epsg = epsg_of(outlines.crs)
    if place is None or epsg is None or place.epsg != epsg:
        theirs = "none" if place is None or place.epsg is None else f"EPSG:{place.epsg}"
        remedy = f"reproject them: ogr2ogr -t_srs {theirs}" if theirs != "none" else "give them in pixels, without crs"
        raise TargetError(
            f"the outlines are in the reference system {outlines.crs!r}, that of {slide.name} is {theirs}; {remedy}"
        )
    full = place.resized(slide.shape[1:], slide.levels[0].shape)
    return replace(outlines, points=full.pixels(outlines.points), crs=None)


def epsg_of(name: str) -> int | None:
    """EPSG's code in a name of a reference system, as GeoJSON has it; x before y."""
    if re.fullmatch(r"urn:ogc:def:crs:OGC:[\d.]*:CRS84", name):
        return 4326
    code = re.fullmatch(r"(?:urn:ogc:def:crs:)?EPSG:(?:[\d.]*:)?(\d+)", name, re.IGNORECASE)
    return int(code.group(1)) if code else None
