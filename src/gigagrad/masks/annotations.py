"""Annotation files as `Outlines`: QuPath's GeoJSON and ASAP's XML, read as a stream.

GeoJSON (RFC 7946) as QuPath exports it: a collection of features, an array of them, one feature or one geometry; a
feature's class is `properties.classification`, a name or an object that has one. Where it has a `crs`, as GIS programs
write it, it is in coordinates on earth. ASAP's XML has a class for an annotation by its `PartOfGroup`. Only polygons
cover pixels: points and lines are counted as skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any
from xml.parsers import expat

from gigagrad.errors import ImageError
from gigagrad.masks.outlines import Outlines

_SUFFIXES = (".geojson", ".json", ".xml")
_AREAS = {"Polygon", "Spline", "Rectangle"}
"""ASAP's types of annotation that have an area: a spline's corners are many, and its curve is drawn through them."""

_HEAD = 4096
_CRS = re.compile(rb'"crs"\s*:\s*\{[^{}]*"properties"\s*:\s*\{\s*"name"\s*:\s*"([^"]*)"')
"""As GDAL and QGIS name a reference system, before the features."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Polygon = tuple[str | None, Sequence[Any]]


def is_annotation_file(path: Path) -> bool:
    """Whether a file of this name is read by `read_annotations`."""
    return path.suffix.lower() in _SUFFIXES


def read_annotations(path: str | Path) -> Outlines:
    """The outlines of a QuPath GeoJSON or ASAP XML file, in the order of the file.

    Held are the points, 17 bytes each, and one feature at a time. Raises `ImageError` for a file that is missing,
    damaged or of another kind.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if path.suffix.lower() == ".xml":
                return Outlines.pack(_asap(path, file), path.name)
            crs = _CRS.search(file.read(_HEAD))
            file.seek(0)
            outlines = Outlines.pack(_geojson(path, file), path.name)
            return outlines if crs is None else replace(outlines, crs=crs.group(1).decode("utf-8", "replace"))
    except OSError as error:
        raise ImageError(f"cannot read {path}: {error.strerror}") from error


def _geojson(path: Path, file: IO[bytes]) -> Iterator[Polygon]:
    import ijson

    head = file.read(_HEAD)
    begin = len(_BYTE_ORDER_MARK) if head.startswith(_BYTE_ORDER_MARK) else 0
    start = head[begin:].lstrip()[:1]
    file.seek(begin)
    if start not in (b"{", b"["):
        raise ImageError(f"{path} is no GeoJSON: it begins with {start!r}; export annotations as GeoJSON")
    try:
        found = 0
        for feature in ijson.items(file, "item" if start == b"[" else "features.item", use_float=True):
            found += 1
            yield from _of_feature(feature, path)
        if not found and start == b"{":
            file.seek(0)
            whole = next(ijson.items(file, "", use_float=True))
            if "features" not in whole:
                yield from _of_feature(whole, path)
    except (ijson.JSONError, UnicodeDecodeError, OverflowError) as error:
        raise ImageError(f"{path} is no GeoJSON ({' '.join(str(error).split())[:100]}); export it again") from error


def _of_feature(feature: object, path: Path) -> Iterator[Polygon]:
    if not isinstance(feature, Mapping) or not isinstance(feature.get("type"), str):
        raise ImageError(f"{path} is no GeoJSON: a feature of it has no type; export annotations as GeoJSON")
    if feature["type"] != "Feature":
        yield from ((None, rings) for rings in _of_geometry(feature, path))
        return
    properties = feature.get("properties")
    kind = properties.get("classification") if isinstance(properties, Mapping) else None
    name = kind.get("name") if isinstance(kind, Mapping) else kind
    for rings in _of_geometry(feature.get("geometry"), path):
        yield (name if isinstance(name, str) and name else None), rings


def _of_geometry(geometry: object, path: Path) -> Iterator[Sequence[Any]]:
    """The rings of each polygon in a geometry; none of one that has no area."""
    match geometry:
        case {"type": "Polygon", "coordinates": [*rings]}:
            yield _rings(rings, path)
        case {"type": "MultiPolygon", "coordinates": [*polygons]}:
            for polygon in polygons:
                yield _rings(polygon, path)
        case {"type": "GeometryCollection", "geometries": [*parts]}:
            for part in parts:
                yield from _of_geometry(part, path)
        case {"type": "Point" | "MultiPoint" | "LineString" | "MultiLineString"} | None:
            yield ()
        case _:
            raise ImageError(f"{path} has a feature without a geometry of GeoJSON; export annotations as GeoJSON")


def _rings(rings: object, path: Path) -> Sequence[Any]:
    if not isinstance(rings, list) or not all(isinstance(ring, list) for ring in rings):
        raise ImageError(f"{path} has a polygon whose coordinates are not lists of points; export it again")
    return rings


def _asap(path: Path, file: IO[bytes]) -> Iterator[Polygon]:
    found: list[Polygon] = []
    root = ""

    def begin(tag: str, attributes: Mapping[str, str]) -> None:
        nonlocal root
        root = root or tag
        if tag == "Annotation":
            group = attributes.get("PartOfGroup", "None")
            area = attributes.get("Type") in _AREAS
            found.append((None if group == "None" else group, [[]] if area else []))
        elif tag == "Coordinate" and found and found[-1][1]:
            try:
                found[-1][1][0].append((float(attributes["X"]), float(attributes["Y"])))
            except (KeyError, ValueError) as error:
                raise ImageError(f"{path} has a coordinate without numbers X and Y; save it again") from error

    def refuse(*_: object) -> None:
        raise ImageError(f"{path} defines entities of its own, which no annotation tool does; save it again with ASAP")

    parser = expat.ParserCreate()
    parser.StartElementHandler = begin
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.ParseFile(file)
    except expat.ExpatError as error:
        raise ImageError(f"{path} is no XML ({error}); save the annotations again") from error
    if root != "ASAP_Annotations":
        raise ImageError(f"{path} is XML of another kind ({root[:40]!r}); expected ASAP's ASAP_Annotations")
    return iter(found)
