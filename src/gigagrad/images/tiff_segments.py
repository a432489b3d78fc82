"""Find the tiles and strips of one TIFF level in the file, and decode them to pixels.

tifffile parses the directories and supplies the decoders; what is kept of it is only the tables below, so reading
needs no shared file position and no Python object per tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from gigagrad.errors import ImageError
from gigagrad.images.image import Array
from gigagrad.images.stream_check import JPEG_COMPRESSIONS, check_stream
from gigagrad.images.tiff_walk import LARGEST_SEGMENT_BYTES, Directories
from gigagrad.units import format_bytes

# Uncompressed strips may be as tall as the image; they are read in pieces of about this size.
_RAW_STRIP_BYTES = 2**20
_HEADER_BYTES = 8
_COPIES = 3
"""Copies of a segment's pixels while they are decoded."""
_BYTES_PER_SECOND = {1: 2e9, 5: 200e6, 8: 400e6, 32946: 400e6, 50000: 1e9} | dict.fromkeys(JPEG_COMPRESSIONS, 600e6)
"""The rate at which one thread decodes pixels, about, by the number of the compression."""
_OTHERS_PER_SECOND = 100e6

Decode: TypeAlias = Callable[[bytes, int, int], Array]


@dataclass(frozen=True, eq=False)
class Segments:
    """The tiles or strips of one level: a grid of them for each separately stored plane.

    Attributes:
        shape: `(height, width)` of the level, in pixels.
        segment: `(height, width)` of one tile or strip; those at the lower and right edge may be cut.
        samples: channels inside one segment; `channels = planes * samples`.
        dtype: of the decoded pixels, in native byte order.
        offsets, counts: where each segment begins and how many bytes it has, int64 `(planes, rows, columns)`;
            a count of 0 means that the file leaves the segment out.
        decode: `(data, row, column) -> pixels` of shape `(h, w, samples)`, at least as large as the part of
            the segment inside the image.
        bytes_per_second: of pixels, about what one thread decodes.
        decode_luma: the same for the luma alone, `(h, w, 1)`, where it is stored apart from the colours; else None.
    """

    shape: tuple[int, int]
    segment: tuple[int, int]
    samples: int
    dtype: np.dtype[Any]
    offsets: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    decode: Decode
    bytes_per_second: float
    decode_luma: Decode | None = None

    @property
    def planes(self) -> int:
        return self.offsets.shape[0]

    @property
    def thread_bytes(self) -> int:
        """Return what decoding one segment holds at most: its bytes, its pixels, and twice as much on the way to
        these."""
        height, width = self.segment
        return int(self.counts.max()) + _COPIES * height * width * self.samples * self.dtype.itemsize

    def check_within(self, file_bytes: int, name: str) -> None:
        """Raise `ImageError` if any segment lies (partly) beyond the end of the file."""
        beyond = (self.counts < 0) | (self.offsets < 0) | (self.counts > file_bytes)
        if ((self.counts > 0) & (self.offsets >= 0) & (self.offsets < _HEADER_BYTES)).any():
            raise ImageError(f"{name} is corrupt: a tile lies in the file's header; copy or download it again")
        beyond |= (self.counts > 0) & (self.offsets > file_bytes - np.minimum(self.counts, file_bytes))
        if missing := int(beyond.sum()):
            ends = self.offsets[beyond].astype(object) + self.counts[beyond]
            raise ImageError(
                f"{name} is truncated: it has {file_bytes} bytes, but {missing} of its {beyond.size} tiles lie beyond, "
                f"up to byte {ends.max()}; copy or download it again"
            )
        if (largest := int(self.counts.max())) > LARGEST_SEGMENT_BYTES:
            raise ImageError(
                f"{name} has a tile of {format_bytes(largest)}; expected at most {format_bytes(LARGEST_SEGMENT_BYTES)}"
                "; the file is corrupt, or write it again as a tiled TIFF"
            )


def segments_of(series: Any, name: str, found: Directories) -> Segments:
    """Find the segments of one tifffile series level. Raises `ImageError` for a layout or compression we cannot
    read."""
    page = series.keyframe
    if page.imagedepth != 1 or page.tiledepth != 1:
        raise ImageError(f"{name} has pixels in depth; expected a 2-D image; extract the plane you mean")
    if offset := series.dataoffset:  # 0 is the place of a strip that the file leaves out
        return _raw_strips(series, page, int(offset), name, found)
    return _file_segments(series, page, name, found)


def _raw_strips(series: Any, page: Any, offset: int, name: str, found: Directories) -> Segments:
    """Cut contiguous uncompressed pixels into strips of our own choosing."""
    height, width, samples = page.imagelength, page.imagewidth, page.shaped[-1]
    stored = np.dtype(page.parent.byteorder + page.dtype.char)
    native, row_bytes = stored.newbyteorder("="), width * samples * stored.itemsize
    planes = math.prod(series.shape) // (height * width * samples)
    if not 0 <= offset <= found.file_bytes - planes * height * row_bytes:
        raise ImageError(
            f"{name} is truncated: it has {found.file_bytes} bytes, but its {planes} planes of {height} x {width} px "
            f"take {planes * height * row_bytes} from byte {offset} on; copy or download it again"
        )
    rows = min(height, max(1, _RAW_STRIP_BYTES // row_bytes))
    starts = np.arange(0, height, rows, dtype=np.int64)
    lengths = np.minimum(rows, height - starts) * row_bytes
    offsets = offset + np.arange(planes, dtype=np.int64)[:, None] * (height * row_bytes) + starts * row_bytes

    def decode(data: bytes, row: int, column: int) -> Array:
        return np.frombuffer(data, stored).reshape(-1, width, samples).astype(native, copy=False)

    counts = np.broadcast_to(lengths, offsets.shape)
    tables = offsets[..., None], counts[..., None]
    return Segments((height, width), (rows, width), samples, native, *tables, decode, _BYTES_PER_SECOND[1])


def _file_segments(series: Any, page: Any, name: str, found: Directories) -> Segments:
    """Find the tiles or strips as they stand in the file, decoded by tifffile's decoder for this page."""
    height, width = page.imagelength, page.imagewidth
    segment = (page.tilelength, page.tilewidth) if page.is_tiled else (min(page.rowsperstrip, height), width)
    grid = (-(-height // segment[0]), -(-width // segment[1]))
    separate, samples = page.shaped[0], page.shaped[-1]
    dtype = np.dtype(page.dtype).newbyteorder("=")
    if (size := segment[0] * segment[1] * samples * dtype.itemsize) > LARGEST_SEGMENT_BYTES:
        raise ImageError(
            f"{name} is stored in pieces of {segment[0]} x {segment[1]} px that decode to {format_bytes(size)} each; "
            f"expected at most {format_bytes(LARGEST_SEGMENT_BYTES)}; write it again as a tiled TIFF"
        )
    if len(series) > found.count:
        raise ImageError(
            f"{name} declares {len(series)} planes, but has {found.count} directories; the file is corrupt"
        )
    pages = list(series.pages)
    if any(entry is None or entry.parent is not page.parent for entry in pages):
        raise ImageError(f"{name} keeps part of its pixels in other files; write it again as one file")
    expected = separate * grid[0] * grid[1]
    if any(len(entry.dataoffsets) != expected or len(entry.databytecounts) != expected for entry in pages):
        raise ImageError(f"{name} is corrupt: expected {expected} tiles or strips, its directory lists another number")
    table = (len(pages) * separate, *grid)
    offsets = np.array([entry.dataoffsets for entry in pages], np.int64).reshape(table)
    counts = np.array([entry.databytecounts for entry in pages], np.int64).reshape(table)
    compression = int(page.compression)
    checked = partial(_checked, compression, (height, width), segment, dtype)
    unpack, luma = _page_decoder(page), None
    if compression in JPEG_COMPRESSIONS:
        unpack = _jpeg_decoder(page, samples)
        luma = checked(_jpeg_decoder(page, 1, luma=True)) if samples == 3 and dtype == np.uint8 else None
    rate = _BYTES_PER_SECOND.get(compression, _OTHERS_PER_SECOND)
    return Segments((height, width), segment, samples, dtype, offsets, counts, checked(unpack), rate, luma)


def _checked(
    compression: int,
    shape: tuple[int, int],
    segment: tuple[int, int],
    dtype: np.dtype[Any],
    unpack: Callable[[bytes, int], Array],
) -> Decode:
    """Wrap `unpack`, which takes the number of a segment in its plane, so that every claim of the stream is looked
    at."""
    columns = -(-shape[1] // segment[1])

    def pixels_of(data: bytes, index: int) -> Array:
        pixels = unpack(data, index)
        if pixels.dtype.newbyteorder("=") != dtype:
            raise ValueError(f"it holds {pixels.dtype} instead of {dtype}")
        return pixels

    def decode(data: bytes, row: int, column: int) -> Array:
        corner = row * segment[0], column * segment[1]
        inside = (min(segment[0], shape[0] - corner[0]), min(segment[1], shape[1] - corner[1]))
        jpeg = check_stream(data, compression, whole=segment, inside=inside)
        index = row * columns + column
        pixels = pixels_of(data, index)
        if jpeg is not None:
            jpeg.check_ends(pixels, lambda other: pixels_of(other, index))
        return pixels.astype(dtype, copy=False)

    return decode


def _page_decoder(page: Any) -> Callable[[bytes, int], Array]:
    decode = page.decode
    return lambda data, index: np.asarray(decode(data, index)[0][0])


def _jpeg_decoder(page: Any, samples: int, *, luma: bool = False) -> Callable[[bytes, int], Array]:
    """Decode by imagecodecs' libjpeg-turbo itself: tifffile hands what that refuses to a decoder that believes every
    number."""
    import imagecodecs
    from tifffile.tifffile import jpeg_decode_colorspace

    tables = page.jpegtables
    stored, wanted = jpeg_decode_colorspace(page.photometric, page.planarconfig, page.extrasamples, page.is_jfif)
    wanted = "GRAYSCALE" if luma else wanted

    def decode(data: bytes, index: int) -> Array:
        pixels = imagecodecs.jpeg8_decode(data, tables=tables, colorspace=stored, outcolorspace=wanted)
        if pixels.size != pixels.shape[0] * pixels.shape[1] * samples:
            raise ValueError(f"it has pixels of shape {pixels.shape[2:]} instead of {samples} samples")
        return pixels.reshape(*pixels.shape[:2], samples)

    return decode
