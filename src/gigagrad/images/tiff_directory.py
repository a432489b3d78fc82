"""Read a TIFF's directories: are their numbers those of a file of this size, and what do they say of the slide?

Libraries believe a directory. A count of 2**32 - 1 keeps them in a loop for minutes, a description that declares 10**8
planes costs gigabytes, and a chain of directories that bites its tail never ends. So `walk_tiff` comes before any
library, and believes nothing: every value must lie inside the file, no directory may come twice, and an image may have
only as many tiles as are listed.
"""

from __future__ import annotations

import html
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple
from xml.etree import ElementTree

import numpy as np

from gigagrad.errors import ImageError
from gigagrad.images.georeference import (
    GDAL_NODATA,
    TAGS,
    Georeference,
    PixelSize,
    choose_mpp,
    micrometres,
    number,
    world_file,
)
from gigagrad.images.pixels import check_size, parse_nodata, value_of_gaps
from gigagrad.images.stream_check import JPEG_2000_COMPRESSIONS, JPEG_COMPRESSIONS
from gigagrad.units import format_bytes

# A compressed strip or tile must be decoded whole; beyond this, bounded memory is a broken promise.
LARGEST_SEGMENT_BYTES = 256 * 2**20

_KINDS_OF_BYTES: Final = {1: (1, 2, 6, 7), 2: (3, 8), 4: (4, 9, 11, 13), 8: (5, 10, 12, 16, 17, 18)}
_BYTES_OF: Final = {kind: size for size, kinds in _KINDS_OF_BYTES.items() for kind in kinds}
_WHOLE_NUMBERS: Final = {1: "B", 3: "H", 4: "L", 13: "L", 16: "Q", 18: "Q"}
_WIDTH, _LENGTH, _BITS, _DESCRIPTION, _STRIPS, _SAMPLES, _ROWS, _PLANAR = 256, 257, 258, 270, 273, 277, 278, 284
_TILE_WIDTH, _TILE_LENGTH, _TILES, _SUBDIRECTORIES = 322, 323, 324, 330
_WITHOUT_PIXELS: Final = (34665, 34853, 40965)  # EXIF, GPS, interoperability
_NDPI = 65420  # Hamamatsu's classic TIFF has 8 bytes for the way from directory to directory
_SEPARATE = 2
# What a reader of pixels goes by: whole numbers all of them, and these the values that the few with a choice may have.
_PLAIN: Final = (*range(256, 260), 262, 266, 273, 277, 278, 279, 284, 317, *range(322, 326), 330, 339)
_FILL_ORDER, _PREDICTOR, _FORMAT = 266, 317, 339
_CHOICES: Final = {_PLANAR: (1, 2), _FILL_ORDER: (1, 2), _PREDICTOR: (1, 2, 3), _FORMAT: (1, 2, 3, 4, 5, 6)}
_MOST_ENTRIES = 4096
_MOST_SUBDIRECTORIES = 1024
_DEEPEST = 8
_MOST_BITS = 128
# A file may be one of a set and declare the whole set's planes; so many cost a library next to nothing.
_PLANES_ANYBODY_MAY_DECLARE = 2**16

_OME_COUNTS: Final = ("NumPlanes", "PlaneCount")
_MOST_PLANES_LISTED = 2**20
_PADDING: Final = b"\0 \t\r\n"
_APERIO_YCBCR = 33003  # JPEG 2000 whose colour transform is left to the reader
_ALPHA = (1, 2)
"""Kinds of extra samples (TIFF 6.0, section 18): associated and unassociated alpha; 0 is unspecified."""
_MINISBLACK, _RGB, _PALETTE, _YCBCR = 1, 2, 3, 6
_COLOURS = (_RGB, _YCBCR)
_INCH, _CENTIMETRE = 2, 3
_RESOLUTIONS: Final = ("XResolution", "YResolution")
_PHYSICAL_SIZES: Final = ("PhysicalSizeX", "PhysicalSizeY")
_IS_MASK = 4
_GDAL_METADATA = 42112
_SLIDE_TAGS = (270, 282)  # a description, the resolution
_OPENSLIDE_CODECS = frozenset({1, 5, 8, 32773, 32946, 33005, 50000, *JPEG_COMPRESSIONS})
_GDAL_TAGS = (*TAGS, GDAL_NODATA, _GDAL_METADATA)
_MOST_NAMES, _LONGEST_NAME = 8, 100
_MOST_VALUES = 2**20
"""The most values of a tag that is no table of tiles: what a file claims costs nothing before it is read."""

# Scans whose tiles overlap, are missing or do not form one plain grid; their vendors' rules are OpenSlide's knowledge.
_VENDORS_FOR_OPENSLIDE = ("is_ndpi", "is_bif", "is_scn", "is_philips")
_TRESTLE_SOFTWARE, _PHILIPS_SOFTWARE, _PHILIPS_ROOT = "MedScan", "Philips", "<DataObject"
_XMP, _ORIENTATION = 700, 274

# Stacks of microscopes in layouts of their own. Their readers walk tables of the file (and other files) that nobody has
# checked, and what they hold is rarely one plane.
_STACKS = (
    *("is_lsm", "is_mmstack", "is_ndtiff", "is_fluoview", "is_stk", "is_sis", "is_scanimage", "is_nih", "is_mdgel"),
    *("is_avs", "is_eer"),
)

# An allow list, since one changed byte of a JPEG XR tile is a division by zero that ends the process: codecs that are
# tested against hostile streams year in, year out, that write no more than the tile's size or tell before they decode
# how large a picture they hold (`stream_check.check_stream`), and that notice an early end (CCITT does not).
_CODECS = frozenset(
    {
        *JPEG_COMPRESSIONS,
        *JPEG_2000_COMPRESSIONS,
        *(1, 5, 8, 32773, 32946),  # none, LZW, deflate, PackBits, deflate
        *(34925, 34926, 50000),  # LZMA, Zstandard
        *(34927, 50001),  # WebP
        34933,  # PNG
    }
)

# What may stand before the axes Y and X: channels, samples, or the unnamed first axis of a (C, H, W) array.
_CHANNEL_AXES = ("", "C", "S", "Q")


class _Entry(NamedTuple):
    """A value of a directory: its TIFF type, how many, and where in the file they stand."""

    kind: int
    values: int
    at: int


class _Broken(Exception):
    """The complaint about a file, without its name."""


@dataclass(slots=True)
class Directories:
    """The findings of a sound walk: the file's length, how many directories, the most samples and the largest image."""

    file_bytes: int
    count: int = 0
    samples: int = 1
    largest_px: int = 1


def walk_tiff(path: Path) -> Directories:
    """Check every directory of a TIFF or BigTIFF. Raises `ImageError` that says which one is broken, and how."""
    try:
        with path.open("rb") as file:
            return _DirectoryReader(file).whole()
    except OSError as error:
        raise ImageError(f"cannot read {path}: {error.strerror}") from error
    except ImageError as error:
        raise ImageError(f"{path.name} cannot be read as a TIFF: {error}") from None
    except (_Broken, struct.error) as error:
        complaint = "it ends in its header" if isinstance(error, struct.error) else error
        raise ImageError(
            f"{path.name} cannot be read as a TIFF: {complaint}; the file is truncated or corrupt, copy or download it "
            "again"
        ) from None


class _DirectoryReader:
    """The state of one walk: the file, how it writes numbers, where we have been and what was found."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._found = Directories(file.seek(0, 2))
        self._seen: set[int] = set()
        self._entry_bytes = 0
        self._ndpi = False
        head = self._bytes(0, 8)
        self._order = "<" if head[:2] == b"II" else ">"
        self._big = head[2:4] in (b"+\0", b"\0+")

    def whole(self) -> Directories:
        descriptions: list[bytes] = []
        (at,) = self._numbers("Q", 8, 1) if self._big else self._numbers("L", 4, 1)
        while at:
            name = f"directory {self._found.count}"
            entries, at = self._directory(at, name)
            self._check_image(entries, name)
            self._descend(entries, name)
            if text := entries.get(_DESCRIPTION):
                descriptions.append(self._bytes(text.at, text.values))
        if not self._found.count:
            raise _Broken("it has no directory")
        for text_bytes in descriptions:
            # Readers disagree where a text with zeros in it ends.
            for share in {text_bytes.strip(_PADDING), text_bytes.partition(b"\0")[0].strip(_PADDING)}:
                _check_description(share, self._found)
        return self._found

    def _bytes(self, at: int, count: int) -> bytes:
        self._file.seek(at)
        return self._file.read(count)

    def _numbers(self, code: str, at: int, count: int) -> tuple[int, ...]:
        form = f"{self._order}{count}{code}"
        return struct.unpack(form, self._bytes(at, struct.calcsize(form)))

    def _directory(self, at: int, name: str) -> tuple[dict[int, _Entry], int]:
        """Read the entries of the directory at byte `at`, each inside the file, and where the next directory stands."""
        if at in self._seen:
            raise _Broken(f"{name} comes twice")
        self._seen.add(at)
        self._found.count += 1
        head, form = (8, "HHQQ") if self._big else (2, "HHLL")
        size, room = struct.calcsize(self._order + form), 8 if self._big else 4
        if not 0 < at <= self._found.file_bytes - head - room:
            raise _Broken(f"{name} should be at byte {at} of {self._found.file_bytes}")
        (count,) = self._numbers("Q" if self._big else "H", at, 1)
        self._entry_bytes += head + count * size
        # Directories that overlap could be more than the file has bytes for.
        if count > _MOST_ENTRIES or max(at + head + count * size + room, self._entry_bytes) > self._found.file_bytes:
            raise _Broken(f"{name} claims to have {count} entries")
        entries: dict[int, _Entry] = {}
        block = self._bytes(at + head, count * size)
        for index, (tag, kind, values, value) in enumerate(struct.iter_unpack(self._order + form, block)):
            if (unit := _BYTES_OF.get(kind)) is None:
                continue
            begin = at + head + index * size + size - room if values * unit <= room else value
            if begin + values * unit > self._found.file_bytes:
                raise _Broken(f"tag {tag} of {name} has {values} values at byte {begin} of {self._found.file_bytes}")
            entries.setdefault(tag, _Entry(kind, values, begin))
        self._ndpi |= _NDPI in entries
        end = at + head + count * size
        wide = self._big or (self._ndpi and end + 8 <= self._found.file_bytes)
        (following,) = self._numbers("Q" if wide else "L", end, 1)
        return entries, following

    def _descend(self, entries: dict[int, _Entry], name: str) -> None:
        """Check the directories below one: smaller levels, which are images, and others, which only have entries."""
        below = entries.get(_SUBDIRECTORIES)
        if name.count(".") > _DEEPEST:
            raise _Broken(f"{name} lies too deep below the first")
        if below and below.values > _MOST_SUBDIRECTORIES:
            raise _Broken(f"{name} claims to have {below.values} directories below it")
        for index, at in enumerate(self._values(entries, _SUBDIRECTORIES)):
            if at:
                inner, _ = self._directory(at, f"{name}.{index}")
                self._check_image(inner, f"{name}.{index}")
                self._descend(inner, f"{name}.{index}")
        for tag in _WITHOUT_PIXELS:
            for at in filter(None, self._values(entries, tag)[:1]):
                inner, _ = self._directory(at, f"{name}.{tag}")
                self._descend({tag: entry for tag, entry in inner.items() if tag in _WITHOUT_PIXELS}, f"{name}.{tag}")

    def _values(self, entries: dict[int, _Entry], tag: int, most: int | None = None) -> tuple[int, ...]:
        """Read the whole numbers under a tag, `most` of them at most; none where there are none."""
        entry = entries.get(tag)
        if entry is None or entry.kind not in _WHOLE_NUMBERS:
            return ()
        return self._numbers(_WHOLE_NUMBERS[entry.kind], entry.at, min(entry.values, most or entry.values))

    def _check_image(self, entries: dict[int, _Entry], name: str) -> None:
        """Raise if the image is no possible one, or has not as many tiles or strips as its size asks for."""

        def one(tag: int, default: int) -> int:
            return (*self._values(entries, tag, 1), default)[0]

        for tag in _PLAIN:
            entry = entries.get(tag)
            if entry and (entry.kind not in _WHOLE_NUMBERS or not entry.values):
                raise _Broken(f"tag {tag} of {name} is no whole number (its type is {entry.kind})")
            if entry and tag in _CHOICES and one(tag, 1) not in _CHOICES[tag]:
                raise _Broken(f"tag {tag} of {name} is {one(tag, 1)}")
        height, width, samples = one(_LENGTH, 0), one(_WIDTH, 0), one(_SAMPLES, 1)
        if min(height, width, samples) < 1:
            raise _Broken(f"{name} describes no image ({samples} samples of {height} x {width} px)")
        check_size((samples, height, width), name)
        bits = max(self._values(entries, _BITS, samples), default=1)
        if not 1 <= bits <= _MOST_BITS:
            raise _Broken(f"{name} has {bits} bits in a sample")
        self._found.samples = max(self._found.samples, samples)
        self._found.largest_px = max(self._found.largest_px, height * width)
        tiled = _TILE_WIDTH in entries or _TILE_LENGTH in entries
        rows = one(_TILE_LENGTH, 0) if tiled else min(one(_ROWS, height) or height, height)
        columns = one(_TILE_WIDTH, 0) if tiled else width
        if min(rows, columns) < 1:
            raise _Broken(f"{name} has tiles of {rows} x {columns} px")
        separate = samples if one(_PLANAR, 1) == _SEPARATE else 1
        size = rows * columns * (samples // separate) * bits // 8
        if tiled and size > LARGEST_SEGMENT_BYTES:
            raise _Broken(f"{name} has tiles of {rows} x {columns} px, which are {format_bytes(size)} each")
        expected = math.ceil(height / rows) * math.ceil(width / columns) * separate
        listed = max((entries[tag].values for tag in (_TILES, _STRIPS) if tag in entries), default=0)
        if listed < expected:
            raise _Broken(f"{name} is {height} x {width} px, {expected} tiles or strips, but lists {listed}")


def _check_description(text: bytes, directories: Directories) -> None:
    """Raise if OME-XML declares more planes than a file can have, or lists them without end."""
    if b"<!DOCTYPE" in text:
        raise _Broken("its description is XML with definitions of its own (DOCTYPE), which may grow without bound")
    try:
        # What is no XML is nothing that a library would walk.
        root = ElementTree.fromstring(text.decode("utf-8", "replace"))  # noqa: S314 - nothing is defined, see above
    except ElementTree.ParseError:
        return
    every = 0
    for element in root.iter():
        try:
            declared = _planes_declared(element, directories)
        except ValueError as error:
            raise _Broken(f"its description has no number where one should be ({error})") from None
        if declared > max(_PLANES_ANYBODY_MAY_DECLARE, directories.count * directories.samples):
            raise _Broken(f"its description declares {declared} planes, its directories are {directories.count}")
        if element.tag.endswith("Along"):
            raise _Broken("its OME-XML splits an axis (ModuloAlong), so that it is no single image")
        # A share without a count of its own stands for every plane of the file.
        every += element.tag.endswith("TiffData") and not {"IFD", *_OME_COUNTS} & set(element.attrib)
    if every * directories.count > max(_MOST_PLANES_LISTED, 4 * directories.count):
        raise _Broken(f"its description lists the {directories.count} planes of the file {every} times")


def _planes_declared(element: ElementTree.Element, directories: Directories) -> int:
    """Count the planes that an element of OME-XML declares, in those of the largest image of the file."""
    if element.tag.endswith("Pixels"):
        px = math.prod(int(element.attrib.get(f"Size{axis}", 1)) for axis in "XYCZT")
        return -(-px // directories.largest_px)
    if element.tag.endswith("TiffData"):
        return max(int(element.attrib.get(count, 0)) for count in _OME_COUNTS)
    return 0


def better_by_openslide(tif: Any) -> bool:
    """Return whether this tifffile.TiffFile is of a kind whose pixels only OpenSlide puts together rightly."""
    page = tif.pages[0]
    return (
        any(getattr(tif, vendor) for vendor in _VENDORS_FOR_OPENSLIDE)
        or str(page.software).startswith(_TRESTLE_SOFTWARE)
        or (str(page.software).startswith(_PHILIPS_SOFTWARE) and _PHILIPS_ROOT in str(page.description))
        or _NDPI in page.tags
        or "iScan" in str(_value(page, _XMP))
        or int(page.compression) == _APERIO_YCBCR
        or (int(page.photometric) == _YCBCR and int(page.compression) in JPEG_2000_COMPRESSIONS)
        or (tif.is_svs and page.dtype == "u1" and _is_slide(page) and _unlike_aperio(tif))
    )


def _unlike_aperio(tif: Any) -> bool:
    """Return whether smaller levels leave out tiles, which are made of the larger one's, or are elsewhere than Aperio
    has them: OpenSlide takes every page that is in tiles."""
    tiled = [page for page in tif.pages if page.is_tiled]
    levels = {level.shape[-3:] for level in tif.series[0].levels}
    return any(0 in page.databytecounts for page in tiled[1:]) or {page.shape for page in tiled} != levels


def check_alone(tif: Any, path: Path) -> None:
    """Raise `ImageError` for a microscope's stack, before its tables are read, and for one of several files of an
    OME-TIFF, whose channels and pixel size are those of all.

    As for Bio-Formats, a plane is in this file if it has its UUID or its name, or if there is but one file, renamed.
    """
    if kinds := [flag.removeprefix("is_") for flag in _STACKS if getattr(tif, flag)]:
        raise ImageError(
            f"{path.name} is a microscope's stack ({kinds[0].upper()}), not one image; extract the plane you mean into "
            "a TIFF of its own"
        )
    xml = tif.ome_metadata or ""
    binary_only = _elements(xml, "BinaryOnly")
    described_by = _file_name(binary_only[0][0].get("MetadataFile", "")) if binary_only else ""
    if described_by and (beside := path.with_name(described_by)).is_file() and beside.suffix == ".ome":
        with beside.open("rb") as file:
            xml = file.read(_MOST_VALUES).decode("utf-8", "replace")
    own = next((root.get("UUID") for root, _ in _elements(xml, "OME")), None)
    named = {(uuid.strip(), _file_name(of.get("FileName", uuid))) for of, uuid in _elements(xml, "UUID")}
    others = {name for uuid, name in named if name and uuid != own and name.lower() != path.name.lower()}
    if len(named) == 1 and own is None and not any(path.with_name(name).exists() for name in others):
        others = set()
    if others or described_by:
        listed = ", ".join(sorted(others)[:_MOST_NAMES]) + (" ..." if len(others) > _MOST_NAMES else "")
        rest = " and ".join(filter(None, [listed, described_by and f"{described_by}, which describes them"]))
        raise ImageError(
            f"{path.name} is one file of an OME-TIFF of several, beside {rest}; join them into one, for instance by "
            f"`bfconvert {path.name} joined.ome.tif` of Bio-Formats"
        )


def check_layout(series: Any, name: str, *, palette: bool = False) -> None:
    """Raise `ImageError` unless the series is a 2-D image of channels, or of indices of a `palette`."""
    if not series.shape or 0 in series.shape:
        raise ImageError(f"{name} describes no image in its directory; the file is truncated or corrupt")
    axes = str(series.axes)
    if axes.removesuffix("S").removesuffix("YX") not in _CHANNEL_AXES or "YX" not in axes:
        raise ImageError(
            f"{name} holds an array with axes {axes} of shape {series.shape}; expected one 2-D image with channels "
            "(axes YX, YXS, CYX); extract the plane you mean into its own file"
        )
    page = series.keyframe
    if page.dtype is None or page.dtype.kind not in "buif":
        kind = page.dtype or f"{page.bitspersample} bits"
        raise ImageError(f"{name} has pixels of {kind}; expected integers or floats")
    colours = (_MINISBLACK, _RGB, _YCBCR) if int(page.compression) in JPEG_COMPRESSIONS else (_MINISBLACK, _RGB)
    if int(page.photometric) not in (*colours, *((_PALETTE,) if palette else ())):
        raise ImageError(
            f"{name} stores its colours as {getattr(page.photometric, 'name', page.photometric)}; expected RGB or "
            "MINISBLACK (or YCBCR as JPEG); convert it to RGB"
        )
    turned = int(_value(page, _ORIENTATION) or 1)
    if turned != 1 and _is_slide(page) and int(page.compression) not in JPEG_COMPRESSIONS:
        raise ImageError(
            f"{name} is a slide that is turned or mirrored by its orientation tag ({turned}), which readers understand "
            "differently; write it again upright"
        )
    _check_codec(page, name)


def _check_codec(page: Any, name: str) -> None:
    """Raise `ImageError` for a compression that cannot be decoded, or not safely."""
    if int(page.compression) not in _CODECS:
        label = getattr(page.compression, "name", int(page.compression))
        raise ImageError(
            f"{name} is compressed as {label}, which cannot be decoded here, as it is not safe against damaged files; "
            "convert it to a tiled TIFF with JPEG or deflate"
        )
    import tifffile

    try:
        tifffile.TIFF.DECOMPRESSORS[int(page.compression)]
    # The look-up imports the codec, and imagecodecs has an error of its own for one that it was built without.
    except Exception as error:
        raise ImageError(
            f"{name} is compressed as {page.compression.name}, which this installation of imagecodecs cannot decode "
            f"({error}); convert it to a tiled TIFF with JPEG or deflate"
        ) from error


def _has_alpha(page: Any) -> bool:
    """Return whether the last of two or four samples is alpha; one that is not said to be is a band as others, near
    infrared for one. GDAL's metadata may say otherwise than the tag."""
    kinds, samples = page.extrasamples, page.samplesperpixel
    role = _of_samples(page, "colorinterp").get(samples - 1, "alpha").casefold()
    return samples in (2, 4) and bool(kinds) and int(kinds[-1]) in _ALPHA and role == "alpha"


def mask_levels(tif: Any, name: str) -> list[Any]:
    """Return the levels of the mask inside a file that says where its pixels hold data, as GDAL keeps it; the largest
    first.

    Raises `ImageError` for one that cannot be decoded.
    """
    levels: list[Any] = next((series.levels for series in tif.series if series.keyframe.subfiletype & _IS_MASK), [])
    for level in levels:
        _check_codec(level.keyframe, name)
    return levels


def described(tif: Any, path: Path, channels: int, mpp: float | None, *, masked: bool) -> dict[str, Any]:
    """Read what `TiffImage` is told of a file beside its tiles; of `masked` ones a mask says where there is data.

    Level 0's micrometres per pixel are `mpp`, else those of georeference, OME-XML, Aperio description or resolution
    tags; the georeference is that of the tags, else of the world file. Raises `ImageError` for a damaged one.
    """
    page = tif.series[0].keyframe
    place = Georeference.of_tags({tag: value for tag in TAGS if (value := _value(page, tag)) is not None})
    place = world_file(path) if place is None else place
    # The resolution is asked for before the guess, so an Aperio file's objective counts only where nothing else does.
    description = str(page.description or "")
    claims = [PixelSize(_aperio(description, "MPP")), _ome(tif.ome_metadata), _resolution_tags(page)]
    text = _value(page, GDAL_NODATA)
    text = text if isinstance(text, str) else None
    slide = _is_slide(page) and place is None and not masked
    return {
        "colour": int(page.photometric) in _COLOURS,
        "alpha": _has_alpha(page),
        "georeference": place,
        "mpp": choose_mpp(mpp, path.name, claims, _aperio(description, "AppMag"), georeference=place),
        "channel_names": _channel_names(tif, page, channels),
        # As in GDAL, a mask is right where there is a value of no data, too.
        "nodata": None if masked else parse_nodata(text, np.dtype(page.dtype)),
        "gaps": None if slide else value_of_gaps(text, np.dtype(page.dtype)),
    }


def _is_slide(page: Any) -> bool:
    """Return whether OpenSlide's word counts, for which what is not there is transparent, and not GDAL's: colours in
    tiles, none of GDAL's tags, but one that says how large a pixel is or what this is, which GDAL does not write
    unasked."""
    colours = (
        int(page.photometric) in _COLOURS
        and (page.samplesperpixel == 3 or _has_alpha(page))
        and page.dtype in ("u1", "u2")
    )
    opened = page.is_tiled and int(page.compression) in _OPENSLIDE_CODECS
    opened = opened and (page.parent.byteorder == "<" or page.parent.is_bigtiff)
    described = any(tag in page.tags for tag in _SLIDE_TAGS) and not any(tag in page.tags for tag in _GDAL_TAGS)
    return bool(colours and opened and described)


def _channel_names(tif: Any, page: Any, channels: int) -> tuple[str, ...]:
    """Read the names by OME-XML or GDAL's metadata, "" for a channel without a name; empty where none has one."""
    names: dict[int, str] = {}
    if tif.ome_metadata:
        pixels = re.search(r"<(?:\w+:)?Pixels\b.*?</(?:\w+:)?Pixels>", tif.ome_metadata, re.DOTALL)
        elements = _elements(pixels.group(), "Channel") if pixels else []
        if len(elements) == channels:  # a channel of OME may be several of ours, red, green and blue
            names = {number: element.get("Name", "") for number, (element, _) in enumerate(elements)}
    else:
        names = _of_samples(page, "description")
    named = tuple(names.get(number, "").strip() for number in range(channels))
    return named if any(named) else ()


def _of_samples(page: Any, role: str) -> dict[int, str]:
    """Read what GDAL's metadata say of single samples, counted from 0."""
    texts = {}
    for element, text in re.findall(r"<Item\b([^>]*)>([^<]*)</Item>", str(_value(page, _GDAL_METADATA) or "")):
        item = _attributes(element)
        if item.get("role") == role and item.get("sample", "").isdecimal():
            texts[int(item["sample"])] = html.unescape(html.unescape(text))  # GDAL escapes twice
    return texts


def _value(page: Any, tag: int) -> Any:
    """Return what stands under a tag; None where it is missing or longer than anything honest."""
    entry = page.tags.get(tag)
    return None if entry is None or entry.count > _MOST_VALUES else entry.value


def _aperio(description: str, key: str) -> float | None:
    match = re.search(rf"\|\s*{key}\s*=\s*([^|]+)", description)
    return number(match.group(1)) if match else None


def _ome(xml: str | None) -> PixelSize:
    for pixels, _ in _elements(xml or "", "Pixels")[:1]:
        sides = ((number(pixels.get(key, "")), pixels.get(f"{key}Unit", "um")) for key in _PHYSICAL_SIZES)
        return PixelSize(*(micrometres(*side) for side in sides))
    return PixelSize(None)


def _file_name(text: str) -> str:
    """Return the last part of a path of any system, fit for a message."""
    return " ".join(re.split(r"[\\/]", text)[-1].replace("\0", " ").split())[:_LONGEST_NAME]


def _elements(xml: str, name: str) -> list[tuple[dict[str, str], str]]:
    """Find the attributes of all elements of this name in unchecked XML, each with the text behind its tag."""
    first, *commented = xml.split("<!--")
    plain = first + "".join(text.partition("-->")[2] for text in commented)
    elements = re.findall(rf"<(?:\w+:)?{name}\b([^<>]*)>([^<]*)", plain)
    return [(_attributes(attributes), html.unescape(text)) for attributes, text in elements]


def _attributes(element: str) -> dict[str, str]:
    attributes = re.findall(r"""(\w+)\s*=\s*(?:"([^"]*)"|'([^']*)')""", element)
    return {name: html.unescape(double or single) for name, double, single in attributes}


def _resolution_tags(page: Any) -> PixelSize:
    unit = {_INCH: 25_400.0, _CENTIMETRE: 10_000.0}.get(int(page.resolutionunit))
    values = [page.tags[name].value if name in page.tags else None for name in _RESOLUTIONS]
    ratios = [value if isinstance(value, tuple) and len(value) == 2 else (0, 0) for value in values]
    return PixelSize(*(unit * below / above if unit and above else None for above, below in ratios))
