"""Where the tiles and strips of one TIFF level lie in the file, and how each becomes pixels.

tifffile parses the directories and supplies the decoders; what is kept of it is only the tables below, so reading
needs no shared file position and no Python object per tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gigagrad.errors import ImageError
from gigagrad.images.image import Array
from gigagrad.images.stream_check import JPEG_COMPRESSIONS, stream_fault
from gigagrad.units import format_bytes

# Uncompressed strips may be as tall as the image; they are read in pieces of about this size.
_RAW_STRIP_BYTES = 2**20
# A compressed strip or tile must be decoded whole; beyond this, bounded memory is a broken promise.
_LARGEST_SEGMENT_BYTES = 256 * 2**20


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
    """

    shape: tuple[int, int]
    segment: tuple[int, int]
    samples: int
    dtype: np.dtype[Any]
    offsets: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    decode: Callable[[bytes, int, int], Array]

    @property
    def planes(self) -> int:
        return self.offsets.shape[0]

    def check_within(self, file_bytes: int, name: str) -> None:
        """Raises `ImageError` if any segment lies (partly) beyond the end of the file."""
        ends = np.where(self.counts > 0, self.offsets + self.counts, 0)
        missing = int((ends > file_bytes).sum())
        if missing:
            raise ImageError(
                f"{name} is truncated: it has {file_bytes} bytes, but {missing} of its {ends.size} tiles lie beyond, "
                f"up to byte {int(ends.max())}; copy or download it again"
            )


def segments_of(series: Any, name: str) -> Segments:
    """The segments of one tifffile series level. Raises `ImageError` for a layout or compression we cannot read."""
    page = series.keyframe
    raw_offset = series.dataoffset
    if raw_offset is not None:
        return _raw_strips(series, page, int(raw_offset))
    return _file_segments(series, page, name)


def _raw_strips(series: Any, page: Any, offset: int) -> Segments:
    """Contiguous uncompressed pixels, cut into strips of our own choosing."""
    height, width, samples = page.imagelength, page.imagewidth, page.shaped[-1]
    stored = np.dtype(page.parent.byteorder + page.dtype.char)
    row_bytes = width * samples * stored.itemsize
    rows = min(height, max(1, _RAW_STRIP_BYTES // row_bytes))
    planes = int(np.prod(series.shape)) // (height * width * samples)
    starts = np.arange(0, height, rows, dtype=np.int64)
    lengths = np.minimum(rows, height - starts) * row_bytes
    offsets = offset + np.arange(planes, dtype=np.int64)[:, None] * (height * row_bytes) + starts * row_bytes

    def decode(data: bytes, row: int, column: int) -> Array:
        return np.frombuffer(data, stored).reshape(-1, width, samples).astype(stored.newbyteorder("="), copy=False)

    return Segments(
        shape=(height, width),
        segment=(rows, width),
        samples=samples,
        dtype=stored.newbyteorder("="),
        offsets=offsets[:, :, None],
        counts=np.broadcast_to(lengths, offsets.shape)[:, :, None],
        decode=decode,
    )


def _file_segments(series: Any, page: Any, name: str) -> Segments:
    """The tiles or strips as they stand in the file, decoded by tifffile's decoder for this page."""
    height, width = page.imagelength, page.imagewidth
    segment = (page.tilelength, page.tilewidth) if page.is_tiled else (min(page.rowsperstrip, height), width)
    grid = (-(-height // segment[0]), -(-width // segment[1]))
    separate, samples = page.shaped[0], page.shaped[-1]
    dtype = np.dtype(page.dtype).newbyteorder("=")
    if (size := segment[0] * segment[1] * samples * dtype.itemsize) > _LARGEST_SEGMENT_BYTES:
        raise ImageError(
            f"{name} is stored in pieces of {segment[0]} x {segment[1]} px that decode to {format_bytes(size)} each; "
            f"expected at most {format_bytes(_LARGEST_SEGMENT_BYTES)}; write it again as a tiled TIFF"
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
    page_decode = page.decode
    compression = int(page.compression)
    extra = {"jpegtables": page.jpegtables} if compression in JPEG_COMPRESSIONS else {}

    def decode(data: bytes, row: int, column: int) -> Array:
        if fault := stream_fault(data, compression):
            raise ValueError(fault)
        pixels, _, _ = page_decode(data, row * grid[1] + column, **extra)
        return np.asarray(pixels[0]).astype(dtype, copy=False)

    return Segments((height, width), segment, samples, dtype, offsets, counts, decode)
