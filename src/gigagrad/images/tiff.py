"""Read TIFF and SVS by a fast path: raw tiles by position, decoded by imagecodecs, several times OpenSlide's speed.

Reads tiled and striped files, pyramids as further pages or as SubIFDs, OME-TIFF, RGB, YCbCr (as JPEG) and greyscale,
any integer or float dtype. Tiles are read by position, so any number of threads may read at once.
"""

from __future__ import annotations

import io
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box, tiles
from gigagrad.errors import ImageError
from gigagrad.files import bytes_at
from gigagrad.images.image import Array, Image, Pixels, View, as_slice, choose_level, fill_of, in_our_words, levels_of
from gigagrad.images.nodata import held_bytes, missing_in
from gigagrad.images.resampled import Resampled
from gigagrad.images.tiff_directory import (
    base_mpp,
    better_by_openslide,
    channel_names,
    check_kind,
    check_layout,
    check_whole,
    gaps_of,
    georeference_of,
    has_alpha,
    is_colour,
    is_slide,
    mask_levels,
    nodata_of,
)
from gigagrad.images.tiff_segments import Decode, Segments, segments_of
from gigagrad.images.tiff_walk import walk_tiff
from gigagrad.images.tile_cache import CACHE_BYTES, TileCache, Walk, grid_parts
from gigagrad.threads import side_by_side

_ROWS = 64
"""Rows that are emptied at a time, so that next to nothing is held beside the pixels."""
_DTYPES_OF_ALPHA = (np.uint8, np.uint16)


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
            of_mask = self._valid.cache_bytes, held_bytes(self._valid), self._valid.decode_seconds
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
        # A colour image's alpha channel, stored as the last sample or the last plane, is not read.
        self._planes = min(segments.planes, channels)
        self._kept = channels // self._planes
        self._slide = gaps is None
        self._gaps = self.fill if gaps is None else gaps
        # As for rasterio: of a value of no data that of alpha tells, unless alpha is a channel as others.
        decides = alpha and segments.dtype in _DTYPES_OF_ALPHA if self.nodata is None else channels < stored
        self._alpha = stored - 1 if decides and self._valid is None else None
        self._cache = TileCache(CACHE_BYTES)
        self._walk = Walk(*segments.shape)
        # A file object, which goes with an image that Ctrl-C lets nobody have.
        self._file = io.FileIO(path)
        # Runs at close, or when an image that nobody closed is collected.
        self._close_file = weakref.finalize(self, self._file.close)

    def _read_inside(self, box: Box) -> Array:
        return self._read_channels(box, range(self.channels))

    def _read_channels(self, box: Box, channels: Sequence[int]) -> Array:
        pixels_HWC = np.empty((*box.shape, len(channels)), self._segments.dtype)
        by_plane: dict[int, tuple[list[int], list[int]]] = {}
        for index, channel in enumerate(channels):
            at, samples = by_plane.setdefault(channel // self._kept, ([], []))
            at.append(index)
            samples.append(channel % self._kept)
        for plane, (at, samples) in by_plane.items():
            self._read_plane(box, plane, self._segments.decode, pixels_HWC, at, samples)
        return self._emptied(box, pixels_HWC).transpose(2, 0, 1)

    def _read_alpha(self, box: Box) -> Array:
        assert self._alpha is not None
        plane, sample = divmod(self._alpha, self._segments.samples)
        alpha_HW1 = np.empty((*box.shape, 1), self._segments.dtype)
        self._read_plane(box, plane, self._segments.decode, alpha_HW1, [0], [sample])
        return alpha_HW1.transpose(2, 0, 1)

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
        return super().missing(box) if (valid := self._validity) is None else missing_in(valid, self.nodata or 0, box)

    @property
    def missing_bytes(self) -> int:
        return super().missing_bytes if (valid := self._validity) is None else held_bytes(valid)

    @property
    def _validity(self) -> Image | None:
        """Return what alone is looked at for 0, or the value of no data: the mask, or alpha; None where all channels
        are."""
        return self._valid if self._alpha is None else _Alpha(self)

    def _emptied(self, box: Box, pixels_HWC: Array) -> Array:
        """Set pixels to 0 where the mask says that there are none: what compression has left there means nothing."""
        for rows in tiles(*box.shape, _ROWS, box.width) if self._valid is not None else ():
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

        def read(part: tuple[Box, Box, Box]) -> None:
            cell, to, of = part
            place = plane, cell.y0 // height, cell.x0 // width
            target = pixels_HWC[to.y0 : to.y1, to.x0 : to.x1]
            # OpenSlide looks at the first plane alone.
            if self._segments.counts[place] == 0 or (self._slide and self._segments.counts[0, *place[1:]] == 0):
                target[..., channels] = self._gaps
            else:
                tile = self._cache.get((place, decode), self._decode)
                target[..., channels] = tile[of.y0 : of.y1, of.x0 : of.x1, chosen]
                if cell.y1 <= down and cell.x1 <= right:
                    self._cache.settle((place, decode))

        side_by_side(read, [*grid_parts(box, height, width)])

    def _decode(self, key: tuple[tuple[int, int, int], Decode]) -> Array:
        place, decode = key
        _, row, column = place
        count = int(self._segments.counts[place])
        with in_our_words(
            f"cannot decode the tile in row {row}, column {column} of {self._path}",
            "the file is corrupt there, copy or download it again",
        ):
            data = bytes_at(self._file, count, int(self._segments.offsets[place]))
            if len(data) != count:
                raise ValueError(f"it has {len(data)} of {count} bytes; the file shrank")
            tile = decode(data, row, column)
            height, width = self._segments.segment
            wanted = min(height, self.height - row * height), min(width, self.width - column * width)
            if tile.shape[0] < wanted[0] or tile.shape[1] < wanted[1]:
                raise ValueError(f"it decodes to {tile.shape[:2]} px instead of {wanted}")
        return tile

    def _release(self) -> None:
        if self._valid is not None:
            self._valid.close()
        self._cache.clear()
        self._close_file()


class _Alpha(View):
    """The sample of a TIFF that says how opaque its pixels are."""

    def __init__(self, image: TiffImage) -> None:
        super().__init__(image, (1, *image.shape[1:]), nodata=None, channel_names=())

    def _read_inside(self, box: Box) -> Pixels:
        assert isinstance(self._image, TiffImage)
        self._image._require_open()
        return self._image._read_alpha(box)

    def _blank(self, height: int, width: int) -> Pixels:
        return super()._blank(height, width)[:1]


def _valid(path: Path, tables: list[Segments], shape: tuple[int, int]) -> Image:
    """Open the mask of a level of this shape, above 0 where there is data: its own, or the nearest pixels of the
    largest."""
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

    found = walk_tiff(path)
    with in_our_words(f"cannot read {path} as a TIFF"), path.open("rb") as file, tifffile.TiffFile(file) as tif:
        check_layout(tif.series[0], path.name)
        tables = [segments_of(entry, path.name, found) for entry in tif.series[0].levels]
    for table in tables:
        table.check_within(found.file_bytes, path.name)
    return tables


def open_tiff(path: Path, *, level: int = 0, mpp: float | None = None, ids: bool = False) -> TiffImage | None:
    """Open one level of a TIFF file; None where the file is a TIFF that had better be read by OpenSlide. Of `ids`, one
    with a palette is its indices.

    Raises `ImageError` for a file that is corrupt, truncated (every tile of every level is checked against the file's
    length) or laid out unusably.
    """
    import tifffile

    found = walk_tiff(path)
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
        check_kind(tif, path.name)
        check_whole(tif, path)
        series = tif.series[0]
        check_layout(series, path.name, palette=ids)
        tables = [segments_of(entry, path.name, found) for entry in series.levels]
        mask_tables = [segments_of(entry, path.name, found) for entry in mask_levels(tif, path.name)]
        mask = partial(_valid, path, mask_tables) if mask_tables else None
        # As for GDAL, one in a file of its own comes first.
        if (beside := path.with_name(f"{path.name}.msk")).is_file():
            mask = partial(_valid, beside, _tables(beside))
        colour = is_colour(series.keyframe)
        alpha = has_alpha(series.keyframe)
        # As in GDAL, a mask is right where there is a value of no data, too.
        nodata = None if mask else nodata_of(series.keyframe)
        place = georeference_of(series.keyframe, path)
        slide = is_slide(series.keyframe) and place is None and not mask
        base = base_mpp(tif, series.keyframe, mpp, path.name, place)
        names = channel_names(tif, series.keyframe, tables[0].planes * tables[0].samples)
    for table in (*tables, *mask_tables):
        table.check_within(found.file_bytes, path.name)
    return TiffImage(
        path,
        tables,
        mask,
        colour=colour,
        alpha=alpha,
        gaps=None if slide else gaps_of(series.keyframe),
        level=level,
        mpp=base,
        channel_names=names,
        ids=ids,
        georeference=place,
        nodata=nodata,
    )
