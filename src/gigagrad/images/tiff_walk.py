"""Walk over a TIFF's directories before any library sees them: are its numbers those of a file of this size?

Libraries believe a directory. A count of 2**32 - 1 keeps them in a loop for minutes, a description that declares 10**8
planes costs gigabytes, and a chain of directories that bites its tail never ends. Here nothing is believed: every value
must lie inside the file, no directory may come twice, and an image may have only as many tiles as are listed.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple
from xml.etree import ElementTree

from gigagrad.errors import ImageError
from gigagrad.images.image import check_size
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

    @property
    def most_planes(self) -> int:
        """Return the most planes that may be in the file, whatever a description says."""
        return max(_PLANES_ANYBODY_MAY_DECLARE, self.count * self.samples)


def walk_tiff(path: Path) -> Directories:
    """Check every directory of a TIFF or BigTIFF. Raises `ImageError` that says which one is broken, and how."""
    try:
        with path.open("rb") as file:
            return _Walk(file).whole()
    except OSError as error:
        raise ImageError(f"cannot read {path}: {error.strerror}") from error
    except ImageError as error:
        raise ImageError(f"{path.name} cannot be read as a TIFF: {error}") from None
    except (_Broken, struct.error) as error:
        said = "it ends in its header" if isinstance(error, struct.error) else error
        raise ImageError(
            f"{path.name} cannot be read as a TIFF: {said}; the file is truncated or corrupt, copy or download it again"
        ) from None


class _Walk:
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
        for number, at in enumerate(self._values(entries, _SUBDIRECTORIES)):
            if at:
                inner, _ = self._directory(at, f"{name}.{number}")
                self._check_image(inner, f"{name}.{number}")
                self._descend(inner, f"{name}.{number}")
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


def _check_description(text: bytes, found: Directories) -> None:
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
            declared = _planes_declared(element, found)
        except ValueError as error:
            raise _Broken(f"its description has no number where one should be ({error})") from None
        if declared > found.most_planes:
            raise _Broken(f"its description declares {declared} planes, its directories are {found.count}")
        if element.tag.endswith("Along"):
            raise _Broken("its OME-XML splits an axis (ModuloAlong), so that it is no single image")
        # A share without a count of its own stands for every plane of the file.
        every += element.tag.endswith("TiffData") and not {"IFD", *_OME_COUNTS} & set(element.attrib)
    if every * found.count > max(_MOST_PLANES_LISTED, 4 * found.count):
        raise _Broken(f"its description lists the {found.count} planes of the file {every} times")


def _planes_declared(element: ElementTree.Element, found: Directories) -> int:
    """Count the planes that an element of OME-XML declares, in those of the largest image of the file."""
    if element.tag.endswith("Pixels"):
        px = math.prod(int(element.attrib.get(f"Size{axis}", 1)) for axis in "XYCZT")
        return -(-px // found.largest_px)
    if element.tag.endswith("TiffData"):
        return max(int(element.attrib.get(count, 0)) for count in _OME_COUNTS)
    return 0
