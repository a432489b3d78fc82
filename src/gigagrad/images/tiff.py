"""Read TIFF and SVS by a fast path: raw tiles by position, decoded by imagecodecs, several times OpenSlide's speed.

Reads tiled and striped files, pyramids as further pages or as SubIFDs, OME-TIFF, RGB, YCbCr (as JPEG) and greyscale,
any integer or float dtype. tifffile parses the directories and supplies the decoders; what is kept of it are tables of
where tiles lie, so that any number of threads may read them by position at once.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box, Span, tiles
from gigagrad.errors import ImageError
from gigagrad.files import bytes_at
from gigagrad.images.image import Image, View
from gigagrad.images.pixels import (
    CACHE_BYTES,
    ROWS_AT_ONCE,
    Array,
    Pixels,
    ReadOrder,
    TileCache,
    as_slice,
    choose_level,
    fill_of,
    in_our_words,
    levels_of,
    span_parts,
)
from gigagrad.images.stream_check import JPEG_2000_COMPRESSIONS, JPEG_COMPRESSIONS, check_stream, jpeg_2000_halvings
from gigagrad.images.tiff_directory import (
    LARGEST_SEGMENT_BYTES,
    Directories,
    better_by_openslide,
    check_alone,
    check_layout,
    described,
    mask_levels,
    walk_tiff,
)
from gigagrad.images.views import Resampled
from gigagrad.threads import side_by_side
from gigagrad.units import format_bytes

_DTYPES_OF_ALPHA = (np.uint8, np.uint16)
# Uncompressed strips may be as tall as the image; they are read in pieces of about this size.
_RAW_STRIP_BYTES = 2**20
_HEADER_BYTES = 8
_COPIES = 3
"""Copies of a segment's pixels while they are decoded."""
_VECTOR_BYTES = 32
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
        halved: makes a `decode` of what is stored of it with both sides halved so often; None where nothing is.
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
    halved: Callable[[int], Decode] | None = None

    @property
    def planes(self) -> int:
        return self.offsets.shape[0]

    @property
    def thread_bytes(self) -> int:
        """Return what decoding one segment holds: its bytes, its pixels, and twice as much on the way to these."""
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


def segments_of(series: Any, name: str, directories: Directories) -> Segments:
    """Find the segments of one tifffile series level. Raises `ImageError` for a layout that we cannot read."""
    page = series.keyframe
    if page.imagedepth != 1 or page.tiledepth != 1:
        raise ImageError(f"{name} has pixels in depth; expected a 2-D image; extract the plane you mean")
    if offset := series.dataoffset:  # 0 is the place of a strip that the file leaves out
        found = _raw_strips(series, page, int(offset), name, directories)
    else:
        found = _file_segments(series, page, name, directories)
    found.check_within(directories.file_bytes, name)
    return found


def _raw_strips(series: Any, page: Any, offset: int, name: str, directories: Directories) -> Segments:
    """Cut contiguous uncompressed pixels into strips of our own choosing."""
    height, width, samples = page.imagelength, page.imagewidth, page.shaped[-1]
    stored = np.dtype(page.parent.byteorder + page.dtype.char)
    native, row_bytes = stored.newbyteorder("="), width * samples * stored.itemsize
    planes = math.prod(series.shape) // (height * width * samples)
    if not 0 <= offset <= directories.file_bytes - planes * height * row_bytes:
        raise ImageError(
            f"{name} is truncated: it has {directories.file_bytes} bytes, but its {planes} planes of {height} x "
            f"{width} px take {planes * height * row_bytes} from byte {offset} on; copy or download it again"
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


def _file_segments(series: Any, page: Any, name: str, directories: Directories) -> Segments:
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
    if len(series) > directories.count:
        raise ImageError(
            f"{name} declares {len(series)} planes, but has {directories.count} directories; the file is corrupt"
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
        colours = samples == 3 and dtype == np.uint8
        unpack = _jpeg_decoder(page, samples, size if colours else None)
        luma = checked(_jpeg_decoder(page, 1, luma=True)) if colours else None
    rate = _BYTES_PER_SECOND.get(compression, _OTHERS_PER_SECOND)
    halved: Callable[[int], Decode] | None = None
    if compression in JPEG_2000_COMPRESSIONS and dtype == np.uint8 and samples in (1, 3):
        halved = lambda halvings: checked(partial(_halved_jpeg_2000, halvings, samples))  # noqa: E731
    return Segments((height, width), segment, samples, dtype, offsets, counts, checked(unpack), rate, luma, halved)


def _checked(
    compression: int,
    shape: tuple[int, int],
    segment: tuple[int, int],
    dtype: np.dtype[Any],
    unpack: Callable[[bytes, int], Array],
) -> Decode:
    """Wrap `unpack`, which takes a segment's number in its plane, so that every claim of the stream is checked."""
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


def _jpeg_decoder(
    page: Any, samples: int, nbytes: int | None = None, *, luma: bool = False
) -> Callable[[bytes, int], Array]:
    """Decode by libjpeg-turbo itself: tifffile hands what that refuses to a decoder that believes all numbers.

    Given the `nbytes` of the largest tile, its pixels begin where that writes them fastest.
    """
    import imagecodecs
    from tifffile.tifffile import jpeg_decode_colorspace

    tables = page.jpegtables
    stored, wanted = jpeg_decode_colorspace(page.photometric, page.planarconfig, page.extrasamples, page.is_jfif)
    wanted = "GRAYSCALE" if luma else wanted

    def decode(data: bytes, index: int) -> Array:
        out = None if nbytes is None else _between_vectors(nbytes)
        pixels = imagecodecs.jpeg8_decode(
            data,
            tables=tables,
            colorspace=stored,
            outcolorspace=wanted,
            out=out,  # type: ignore[arg-type]  # which may be a buffer
        )
        if pixels.size != pixels.shape[0] * pixels.shape[1] * samples:
            raise ValueError(f"it has pixels of shape {pixels.shape[2:]} instead of {samples} samples")
        return pixels.reshape(*pixels.shape[:2], samples)

    return decode


def _between_vectors(nbytes: int) -> memoryview:
    """Return memory that begins in the middle of one of the processor's vectors.

    Where rows of colours begin with a vector, libjpeg-turbo writes them past the caches (`vmovntdq` in its
    jdcolext-avx2.asm): whoever decodes waits for memory, and whoever reads the pixels does so again.
    """
    memory = np.empty(nbytes + _VECTOR_BYTES, np.uint8)
    begin = (_VECTOR_BYTES // 2 - memory.__array_interface__["data"][0]) % _VECTOR_BYTES
    return memory.data[begin : begin + nbytes]


def _halved_jpeg_2000(halvings: int, samples: int, data: bytes, index: int) -> Array:
    """Decode without the finest wavelets, by Pillow: imagecodecs decodes them all."""
    import PIL.Image

    picture: Any = PIL.Image.open(io.BytesIO(data), formats=("JPEG2000",))
    stored = min(halvings, jpeg_2000_halvings(data))
    picture.reduce = stored
    pixels = np.asarray(picture).reshape(*picture.size[::-1], -1)
    if pixels.shape[2] != samples:
        raise ValueError(f"it has {pixels.shape[2]} samples instead of {samples}")
    step = 1 << (halvings - stored)  # of a tile that stores fewer sizes than the first one
    return pixels[::step, ::step]


class TiffImage(Image):
    """A level of a TIFF. Use `open_tiff`."""

    def __init__(
        self,
        path: Path,
        tables: list[Segments],
        mask: Callable[[tuple[int, int]], Image] | None,
        *,
        colour: bool,
        alpha: bool,
        gaps: int | float | None,
        level: int,
        mpp: float | None,
        channel_names: tuple[str, ...],
        ids: bool = False,
        **described: Any,
    ) -> None:
        """Read a level: `mask` opens what says where pixels of a level of a shape hold data, None where there is no
        such mask; if `alpha`, the last sample does (of a dtype in which it does for GDAL). `gaps` is what is in
        segments that the file leaves out; None says that this is a slide, in which they are as outside. `described` is
        what `Image` is told beside, as the directory has it."""
        levels = levels_of([table.shape for table in tables])
        choose_level(levels, level, path.name)
        segments = tables[level]
        stored = channels = segments.planes * segments.samples
        channels = 3 if colour and alpha else channels
        self._valid = None if mask is None else mask(segments.shape)
        nbytes = stored * segments.shape[0] * segments.shape[1] * segments.dtype.itemsize
        held, of_mask = min(CACHE_BYTES, nbytes), (0, 0, 0.0)
        if self._valid is not None:
            of_mask = self._valid.cache_bytes, self._valid.looking_bytes, self._valid.decode_seconds
        super().__init__(
            shape=(channels, *segments.shape),
            dtype=segments.dtype,
            name=path.stem,
            fill=fill_of(segments.dtype, channels, says_colour=colour),
            mpp=mpp,
            levels=levels,
            level=level,
            channel_names=channel_names[:channels],
            open_level=partial(open_tiff, path, mpp=mpp, ids=ids),
            cache_bytes=held + of_mask[0],
            thread_bytes=segments.thread_bytes + of_mask[1],
            decode_seconds=nbytes / segments.bytes_per_second + of_mask[2],
            **described,
        )
        self._path = path
        self._segments = segments
        self._slide = gaps is None
        self._gaps = self.fill if gaps is None else gaps
        # As for rasterio: of a value of no data that of alpha tells, unless alpha is a channel as others.
        decides = alpha and segments.dtype in _DTYPES_OF_ALPHA if self.nodata is None else channels < stored
        self._alpha = stored - 1 if decides and self._valid is None else None
        self._cache = TileCache(CACHE_BYTES)
        self._walk = ReadOrder(*segments.shape)
        # A file object, which goes with an image that Ctrl-C lets nobody have.
        self._file = io.FileIO(path)
        # Runs at close, or when an image that nobody closed is collected.
        self._close_file = weakref.finalize(self, self._file.close)

    @property
    def block_shape(self) -> tuple[int, int]:
        return self._segments.segment

    def _read_inside(self, box: Box) -> Array:
        return self._read_channels(box, range(self.channels))

    def _read_channels(self, box: Box, channels: Sequence[int]) -> Array:
        return self._emptied(box, self._read_stored(box, channels)).transpose(2, 0, 1)

    def _read_stored(self, box: Box, channels: Sequence[int]) -> Array:
        """Read channels, among them alpha, which is stored as the last: `(h, w, len(channels))`."""
        pixels_HWC = np.empty((*box.shape, len(channels)), self._segments.dtype)
        by_plane: dict[int, tuple[list[int], list[int]]] = {}
        for index, channel in enumerate(channels):
            plane, sample = divmod(channel, self._segments.samples)
            at, samples = by_plane.setdefault(plane, ([], []))
            at.append(index)
            samples.append(sample)
        for plane, (at, samples) in by_plane.items():
            self._read_plane(box, plane, self._segments.decode, pixels_HWC, at, samples)
        return pixels_HWC

    def halved(self, halvings: int) -> Image | None:
        segments, factor = self._segments, 1 << halvings
        plain = self._validity is None and self.nodata is None
        if segments.halved is None or not plain or any(side % factor for side in segments.segment):
            return None
        place = next(zip(*segments.counts.nonzero(), strict=True), None)
        if place is None or jpeg_2000_halvings(self._stream(place)) < halvings:
            return None
        (height, width), segment = segments.shape, segments.segment
        small = dataclasses.replace(
            segments,
            shape=(-(-height // factor), -(-width // factor)),
            segment=(segment[0] // factor, segment[1] // factor),
            decode=segments.halved(halvings),
            decode_luma=None,
            halved=None,
        )
        gaps, names = None if self._slide else self._gaps, self.channel_names
        colour = bool(self.fill)
        image = TiffImage(
            self._path, [small], None, colour=colour, alpha=False, gaps=gaps, level=0, mpp=None, channel_names=names
        )
        return Centred(image, halvings)

    @property
    def lends_blocks(self) -> bool:
        segments = self._segments
        return segments.planes == 1 and segments.samples == self.channels and self._valid is None

    def block(self, row: int, column: int) -> Array:
        self._require_open()
        segments, place = self._segments, (0, row, column)
        if segments.counts[place] == 0:
            return np.full((*segments.segment, segments.samples), self._gaps, segments.dtype)
        return self._decode((place, segments.decode))

    @property
    def _grey_seconds(self) -> float:
        return super()._grey_seconds / (1 if self._segments.decode_luma is None else 2)

    def _read_grey(self, box: Box) -> Pixels:
        if self._segments.decode_luma is None:
            return super()._read_grey(box)
        pixels_HW1 = np.empty((*box.shape, 1), self._segments.dtype)
        self._read_plane(box, 0, self._segments.decode_luma, pixels_HW1, [0], [0])
        return self._emptied(box, pixels_HW1).transpose(2, 0, 1)

    def missing(self, box: Box) -> NDArray[np.bool_] | None:
        return super().missing(box) if (valid := self._validity) is None else valid.missing_by(self.nodata or 0, box)

    @property
    def missing_bytes(self) -> int:
        return super().missing_bytes if (valid := self._validity) is None else valid.looking_bytes

    @property
    def _validity(self) -> Image | None:
        """Return what alone says where there is data: the mask, or alpha; None where all channels do."""
        return self._valid if self._alpha is None else _Alpha(self)

    def _emptied(self, box: Box, pixels_HWC: Array) -> Array:
        """Set pixels to 0 where the mask says that there are none: what compression has left there means nothing."""
        for rows in tiles(*box.shape, ROWS_AT_ONCE, box.width) if self._valid is not None else ():
            if (missing := self.missing(rows.shift(box.y0, box.x0))) is not None:
                pixels_HWC[rows.y0 : rows.y1][missing] = 0
        return pixels_HWC

    def _read_plane(
        self, box: Box, plane: int, decode: Decode, pixels_HWC: Array, at: list[int], samples: list[int]
    ) -> None:
        """Read `samples` of a plane into the channels `at` of `pixels_HWC`."""
        height, width = self._segments.segment
        channels, chosen = as_slice(at), as_slice(samples)
        down, right = self._walk.settled(box)

        def read(part: tuple[tuple[int, Span, Span], tuple[int, Span, Span]]) -> None:
            (y, to_y, of_y), (x, to_x, of_x) = part
            place = plane, y // height, x // width
            target = pixels_HWC[slice(*to_y), slice(*to_x)]
            # OpenSlide looks at the first plane alone.
            if self._segments.counts[place] == 0 or (self._slide and self._segments.counts[0, *place[1:]] == 0):
                target[..., channels] = self._gaps
            else:
                tile = self._cache.get((place, decode), self._decode)
                target[..., channels] = tile[slice(*of_y), slice(*of_x), chosen]
                if y + height <= down and x + width <= right:
                    self._cache.settle((place, decode))

        # No boxes: while one thread works on them, others that decode wait for the interpreter.
        side_by_side(read, [*product(span_parts(box.y, height), span_parts(box.x, width))])

    def _decode(self, key: tuple[tuple[int, int, int], Decode]) -> Array:
        place, decode = key
        _, row, column = place
        with in_our_words(
            f"cannot decode the tile in row {row}, column {column} of {self._path}",
            "the file is corrupt there, copy or download it again",
        ):
            tile = decode(self._stream(place), row, column)
            height, width = self._segments.segment
            wanted = min(height, self.height - row * height), min(width, self.width - column * width)
            if tile.shape[0] < wanted[0] or tile.shape[1] < wanted[1]:
                raise ValueError(f"it decodes to {tile.shape[:2]} px instead of {wanted}")
        return tile

    def _stream(self, place: tuple[int, int, int]) -> bytes:
        """Read the bytes of a segment as they are stored."""
        count = int(self._segments.counts[place])
        data = bytes_at(self._file, count, int(self._segments.offsets[place]))
        if len(data) != count:
            raise ValueError(f"it has {len(data)} of {count} bytes; the file shrank")
        return data

    def _release(self) -> None:
        if self._valid is not None:
            self._valid.close()
        self._cache.clear()
        self._close_file()


class Centred(View):
    """A picture of wavelets with its pixels centred as means of squares are.

    What a wavelet transform leaves of two pixels lies at the first of them: after `h` halvings `(2**h - 1) / 2` px of
    the whole picture above and to the left of the middle of its square. Linear interpolation puts it there. Closing it
    closes the picture.
    """

    def __init__(self, image: Image, halvings: int) -> None:
        super().__init__(image)
        self._halvings = halvings

    def _read_inside(self, box: Box) -> Array:
        further = Box(box.y0, box.x0, box.y1 + 1, box.x1 + 1).clamp(self.height, self.width)
        lacking = [(0, 0), (0, box.y1 + 1 - further.y1), (0, box.x1 + 1 - further.x1)]
        pixels = np.pad(np.asarray(self._image.read(further)), lacking, mode="edge").astype(np.uint16)
        one, following = 2 << self._halvings, (1 << self._halvings) - 1
        for axis in (1, 2):
            first, second = (pixels[(slice(None),) * axis + (part,)] for part in (slice(-1), slice(1, None)))
            pixels = first * np.uint16(one - following)
            pixels += second * np.uint16(following)
            pixels += np.uint16(one // 2)
            pixels >>= self._halvings + 1
        return pixels.astype(np.uint8)

    def _release(self) -> None:
        self._image.close()


class _Alpha(View):
    """The sample of a TIFF that says how opaque its pixels are."""

    def __init__(self, image: TiffImage) -> None:
        super().__init__(image, (1, *image.shape[1:]), nodata=None, channel_names=())

    def _read_inside(self, box: Box) -> Pixels:
        assert isinstance(self._image, TiffImage)
        self._image._require_open()
        assert self._image._alpha is not None
        return self._image._read_stored(box, [self._image._alpha]).transpose(2, 0, 1)


def _valid(path: Path, tables: list[Segments], shape: tuple[int, int]) -> Image:
    """Open the mask of a level of this shape, above 0 where there is data: its own, or the largest resampled."""
    shapes = [table.shape for table in tables]
    level = shapes.index(shape) if shape in shapes else 0
    mask = TiffImage(path, tables, None, colour=False, alpha=False, gaps=0, level=level, mpp=None, channel_names=())
    if mask.channels != 1:
        mask.close()
        raise ImageError(f"{path.name} has {mask.channels} masks, one of each band; expected one of all bands")
    return mask if shapes[level] == shape else Resampled(mask, *shape)


def _tables(path: Path) -> list[Segments]:
    """Read the levels of a mask in a file of its own."""
    import tifffile

    directories = walk_tiff(path)
    with in_our_words(f"cannot read {path} as a TIFF"), path.open("rb") as file, tifffile.TiffFile(file) as tif:
        check_layout(tif.series[0], path.name)
        return [segments_of(entry, path.name, directories) for entry in tif.series[0].levels]


def open_tiff(path: Path, *, level: int = 0, mpp: float | None = None, ids: bool = False) -> TiffImage | None:
    """Open one level of a TIFF file; None where the file is a TIFF that had better be read by OpenSlide. Of `ids`, one
    with a palette is its indices.

    Raises `ImageError` for a file that is corrupt, truncated (every tile of every level is checked against the file's
    length) or laid out unusably.
    """
    import tifffile

    directories = walk_tiff(path)
    # A file's oddities are told in our own errors; as a library, leave tifffile's log to those who configure one.
    logging.getLogger("tifffile").addHandler(logging.NullHandler())
    # What the walk does not look at can still make the parser fail anywhere, with any exception.
    # The file is ours to close: a parser that Ctrl-C ends keeps its own in cycles until garbage is collected.
    with (
        in_our_words(f"cannot read {path} as a TIFF"),
        path.open("rb") as file,
        tifffile.TiffFile(file, _multifile=False) as tif,
    ):
        if better_by_openslide(tif):
            return None
        check_alone(tif, path)
        series = tif.series[0]
        check_layout(series, path.name, palette=ids)
        tables = [segments_of(entry, path.name, directories) for entry in series.levels]
        mask_tables = [segments_of(entry, path.name, directories) for entry in mask_levels(tif, path.name)]
        mask = partial(_valid, path, mask_tables) if mask_tables else None
        # As for GDAL, one in a file of its own comes first.
        if (beside := path.with_name(f"{path.name}.msk")).is_file():
            mask = partial(_valid, beside, _tables(beside))
        channels = tables[0].planes * tables[0].samples
        said = described(tif, path, channels, mpp, masked=mask is not None)
    return TiffImage(path, tables, mask, level=level, ids=ids, **said)
