"""Read annotation files as `Outlines`, as a stream of bounded length: QuPath's GeoJSON and ASAP's XML.

They may be compressed (`.geojson.gz`, `.zip`).

GeoJSON (RFC 7946) as QuPath exports it: a collection of features, an array of them, one feature or one geometry; a
feature's class is `properties.classification`, a name or an object that has one, or several `names`, which QuPath shows
as "Tumor: Positive". Where a member `crs` names a reference system, as GIS programs write it, coordinates are on earth;
where it is null, they are not. ASAP's XML has a class for an annotation by its `PartOfGroup`. Only polygons cover
pixels: points and lines are counted as skipped.
"""

from __future__ import annotations

import gzip
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import IO, Any, Final
from xml.parsers import expat

from gigagrad.errors import ImageError
from gigagrad.files import size_of
from gigagrad.masks.outlines import Outlines

_AREAS = {"Polygon", "Spline", "Rectangle"}
"""ASAP's types of annotation that have an area: a spline's corners are many, and its curve is drawn through them."""

_SUFFIXES: Final = (".geojson", ".json", ".xml")
_MOST_TIMES: Final = 100
"""Times that a file may grow when it is unpacked; annotations become ten times as long, twenty at most."""
_LEAST_BYTES: Final = 1 << 26
"""That any compressed file may become, however small it is."""
_CHUNK: Final = 1 << 16
_HEAD = 4096
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Polygon = tuple[str | None, Sequence[Any]]


def is_annotation_file(path: Path) -> bool:
    """Return whether `read_annotations` reads files of this name; that of a `.zip` says no more."""
    name = path.name.lower()
    return name.endswith(".zip") or PurePath(name.removesuffix(".gz")).suffix in _SUFFIXES


def read_annotations(path: str | Path) -> Outlines:
    """Read the outlines of a QuPath GeoJSON or ASAP XML file, as it is or in `.gz` or `.zip`, in the order of the file.

    Held are the points, 17 bytes each, and one feature at a time. Raises `ImageError` for a file that is missing,
    damaged or of another kind.
    """
    path = Path(path)
    try:
        with _opened(path) as (suffix, file):
            if suffix == ".xml":
                return Outlines.pack(_asap(path, file), path.name)
            references = _References(path)
            return references.of(Outlines.pack(_geojson(path, file, references), path.name))
    except OSError as error:
        raise ImageError(f"cannot read {path}: {error.strerror}") from error


@dataclass(slots=True)
class _References:
    """A GeoJSON's words on its coordinates: the reference systems it names, None for one that is null, and whether
    QuPath wrote it."""

    path: Path
    systems: set[str | None] = field(default_factory=set)
    by_qupath: bool = False

    def add(self, crs: object) -> None:
        """Read a member `crs`, of a file, a feature or a geometry. Raises `ImageError` for one that names no system."""
        match crs:
            case None:
                self.systems.add(None)
            case {"type": "name", "properties": {"name": str(name)}}:
                self.systems.add(name)
            case {"type": "EPSG", "properties": {"code": int(code)}}:
                self.systems.add(f"EPSG:{code}")
            case _:
                raise ImageError(
                    f"{self.path} has a 'crs' that names no reference system; write it as "
                    '{"type": "name", "properties": {"name": "EPSG:32633"}}, or null where coordinates are pixels'
                )

    def of(self, outlines: Outlines) -> Outlines:
        """Return `outlines` with what was said of them. Raises `ImageError` where that contradicts itself."""
        if len(self.systems) > 1:
            raise ImageError(f"{self.path} names several reference systems; write it in one, for all of its features")
        crs = next(iter(self.systems), None)
        return replace(outlines, crs=crs, origin="scan" if self.systems or self.by_qupath else "unsaid")


def _geojson(path: Path, file: IO[bytes], references: _References) -> Iterator[Polygon]:
    import ijson

    head = file.read(_HEAD)
    begin = len(_BYTE_ORDER_MARK) if head.startswith(_BYTE_ORDER_MARK) else 0
    start = head[begin:].lstrip()[:1]
    file.seek(begin)
    if start not in (b"{", b"["):
        found = f"begins with {start.decode('ascii', 'replace')!r}" if start else "is empty"
        raise ImageError(f"{path} is no GeoJSON: it {found}, expected a brace, in UTF-8; export annotations as GeoJSON")
    try:
        features = 0
        for feature in ijson.items(file, "item" if start == b"[" else "features.item", use_float=True):
            features += 1
            yield from _of_feature(feature, references)
        file.seek(begin)
        if features and start == b"{":
            for crs in ijson.items(file, "crs", use_float=True):
                references.add(crs)
        elif start == b"{":
            whole = next(ijson.items(file, "", use_float=True))
            if "features" not in whole:
                yield from _of_feature(whole, references)
    except (ijson.JSONError, UnicodeDecodeError, OverflowError) as error:
        raise ImageError(f"{path} is no GeoJSON ({' '.join(str(error).split())[:100]}); export it again") from error


def _of_feature(feature: object, references: _References) -> Iterator[Polygon]:
    """Yield the polygons of a feature or a geometry, and of what lies inside it in QuPath's hierarchy."""
    if not isinstance(feature, Mapping) or not isinstance(feature.get("type"), str):
        raise ImageError(f"{references.path} is no GeoJSON: a feature of it has no type; export annotations as GeoJSON")
    if feature["type"] != "Feature":
        yield from ((None, rings) for rings in _of_geometry(feature, references))
        return
    if "crs" in feature:
        references.add(feature["crs"])
    found = feature.get("properties")
    properties = found if isinstance(found, Mapping) else {}
    kind = properties.get("classification")
    # Before QuPath 0.3 what is now `objectType` was the id.
    references.by_qupath |= "objectType" in properties or isinstance(kind, Mapping) or _is_qupaths(feature.get("id"))
    for rings in _of_geometry(feature.get("geometry"), references):
        yield _name_of(kind), rings
    children = properties.get("childObjects")
    for child in children if isinstance(children, list) else ():
        yield from _of_feature(child, references)


def _is_qupaths(name: object) -> bool:
    return isinstance(name, str) and name.startswith("Path") and name.endswith("Object")


def _name_of(kind: object) -> str | None:
    """Name a class as QuPath shows it: of several parts as "Tumor: Positive"."""
    if isinstance(kind, Mapping):
        names = kind.get("names")
        kind = kind.get("name") or (": ".join(map(str, names)) if isinstance(names, list) else None)
    return kind if isinstance(kind, str) and kind else None


def _of_geometry(geometry: object, references: _References) -> Iterator[Sequence[Any]]:
    """Yield the rings of each polygon in a geometry; none of one that has no area."""
    path = references.path
    if isinstance(geometry, Mapping) and "crs" in geometry:
        references.add(geometry["crs"])
    match geometry:
        case {"type": "Polygon", "coordinates": [*rings]}:
            yield _rings(rings, path)
        case {"type": "MultiPolygon", "coordinates": [*polygons]}:
            for polygon in polygons:
                yield _rings(polygon, path)
        case {"type": "GeometryCollection", "geometries": [*parts]}:
            for part in parts:
                yield from _of_geometry(part, references)
        case {"type": "Point" | "MultiPoint" | "LineString" | "MultiLineString"} | None:
            yield ()
        case _:
            raise ImageError(f"{path} has a feature without a geometry of GeoJSON; export annotations as GeoJSON")


def _rings(rings: object, path: Path) -> Sequence[Any]:
    if not isinstance(rings, list) or not all(isinstance(ring, list) for ring in rings):
        raise ImageError(f"{path} has a polygon whose coordinates are not lists of points; export it again")
    return rings


def _asap(path: Path, file: IO[bytes]) -> Iterator[Polygon]:
    polygons: list[Polygon] = []
    root = ""

    def begin(tag: str, attributes: Mapping[str, str]) -> None:
        nonlocal root
        root = root or tag
        if tag == "Annotation":
            group = attributes.get("PartOfGroup", "None")
            area = attributes.get("Type") in _AREAS
            polygons.append((None if group == "None" else group, [[]] if area else []))
        elif tag == "Coordinate" and polygons and polygons[-1][1]:
            try:
                polygons[-1][1][0].append((float(attributes["X"]), float(attributes["Y"])))
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
    return iter(polygons)


def annotation_stem(path: Path) -> str:
    """Return the file's name without its suffix, of a compressed one without both."""
    inner = PurePath(path.name[:-3]) if path.suffix.lower() == ".gz" else path
    return inner.stem


@contextmanager
def _opened(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Open what the file holds: the suffix of its kind, and the bytes, to be read in pieces and from the start again.

    Raises `ImageError` for a file that is damaged, or longer than a compressed one may become, as it is read; `OSError`
    where it cannot be opened.
    """
    suffix = path.suffix.lower()
    most = max(_LEAST_BYTES, _MOST_TIMES * size_of(path))
    with ExitStack() as opened:
        file = opened.enter_context(path.open("rb"))
        if suffix == ".gz":
            unpacked: Any = gzip.GzipFile(fileobj=file)
            inner: Any = _Bounded(path, opened.enter_context(unpacked), most)
            yield PurePath(path.stem).suffix.lower(), inner
        elif suffix == ".zip":
            with _unpacking(path):
                archive = opened.enter_context(zipfile.ZipFile(file))
                member = _member(path, archive)
                inner = _Bounded(path, opened.enter_context(archive.open(member)), most)
            yield PurePath(member.filename).suffix.lower(), inner
        else:
            yield suffix, file


def _member(path: Path, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    """Find the one annotation file inside; what macOS adds is none."""
    held = [entry for entry in archive.infolist() if not entry.is_dir() and not entry.filename.startswith("__MACOSX/")]
    if len(held) != 1 or PurePath(held[0].filename).suffix.lower() not in _SUFFIXES:
        names = ", ".join(entry.filename[:80] for entry in held[:3]) or "nothing"
        raise ImageError(f"{path} holds {len(held)} files ({names}); expected one, GeoJSON or ASAP's XML; unpack it")
    if held[0].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or held[0].flag_bits & 1:
        raise ImageError(f"{path} is encrypted, or compressed in a way that is not read; unpack it")
    return held[0]


@contextmanager
def _unpacking(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        if isinstance(error, ImageError):
            raise
        reason = " ".join(str(error).split())[:100]
        raise ImageError(f"{path} cannot be unpacked ({reason}); it is damaged, copy it again") from error


class _Bounded:
    """The bytes that come out of a compressed file, as far as an honest one goes."""

    def __init__(self, path: Path, file: IO[bytes], most: int) -> None:
        self._path, self._file, self._most = path, file, most

    def read(self, size: int = -1) -> bytes:
        with _unpacking(self._path):
            data = self._file.read(size if 0 <= size < _CHUNK else _CHUNK)
            if self._file.tell() > self._most:
                raise ImageError(
                    f"{self._path} becomes more than {_MOST_TIMES} times as long, which annotations do not; unpack it "
                    "yourself if that is right"
                )
            return data

    def seek(self, place: int) -> None:
        with _unpacking(self._path):
            self._file.seek(place)
