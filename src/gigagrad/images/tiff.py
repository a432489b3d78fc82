"""The fast path for TIFF and SVS: raw tiles by position, decoded by imagecodecs, several times OpenSlide's speed.

Reads tiled and striped files, pyramids as further pages or as SubIFDs, OME-TIFF, RGB, YCbCr (as JPEG) and greyscale,
any integer or float dtype. Tiles are read by position, so any number of threads may read at once.
"""

from __future__ import annotations

import io
import logging
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box, tiles
from gigagrad.files import bytes_at
from gigagrad.images.image import Array, Image, Pixels, choose_level, fill_of, in_our_words, levels_of
from gigagrad.images.nodata import held_bytes, missing_in
from gigagrad.images.resampled import Resampled
from gigagrad.images.tiff_directory import (
    base_mpp,
    better_by_openslide,
    channel_names,
    check_kind,
    check_layout,
    georeference_of,
    is_colour,
    mask_levels,
    nodata_of,
)
from gigagrad.images.tiff_segments import Decode, Segments, segments_of
from gigagrad.images.tiff_walk import walk_tiff
from gigagrad.images.tile_cache import CACHE_BYTES, TileCache, grid_parts

_ROWS = 64
"""That are emptied at a time, so that next to nothing is held beside the pixels."""
_ALPHA = (1, 2)
"""Kinds of extra samples (TIFF 6.0, section 18): associated and unassociated alpha; 0 is unspecified."""


class TiffImage(Image):
    """One level of a TIFF. Use `open_tiff`."""

    def __init__(
        self,
        path: Path,
        tables: list[Segments],
        valid_tables: list[Segments],
        *,
        colour: bool,
        alpha: bool,
        level: int,
        mpp: float | None,
        channel_names: tuple[str, ...],
        ids: bool = False,
        **described: Any,
    ) -> None:
        """`valid_tables` are the levels of the mask that says where pixels hold data, none where there is no such mask;
        `described` is what `Image` is told beside, as the directory has it."""
        levels = levels_of([table.shape for table in tables])
        choose_level(levels, level, path.name)
        segments = tables[level]
        channels = segments.planes * segments.samples
        channels = 3 if alpha and channels == 4 else channels
        self._valid = _valid(path, valid_tables, segments.shape) if valid_tables else None
        held = min(CACHE_BYTES, channels * segments.shape[0] * segments.shape[1] * segments.dtype.itemsize)
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
            cache_bytes=held if self._valid is None else held + self._valid.cache_bytes,
            **described,
        )
        self._path = path
        self._segments = segments
        # A colour image's alpha channel, stored as the last sample or the last plane, is not read.
        self._planes = min(segments.planes, channels)
        self._kept = channels // self._planes
        self._cache = TileCache(CACHE_BYTES)
        # A file object, which goes with an image that Ctrl-C lets nobody have.
        self._file = io.FileIO(path)
        # Runs at close, or when an image that nobody closed is collected.
        self._close_file = weakref.finalize(self, self._file.close)

    def _read_inside(self, box: Box) -> Array:
        pixels_HWC = np.empty((*box.shape, self.channels), self._segments.dtype)
        for plane in range(self._planes):
            samples = slice(plane * self._kept, (plane + 1) * self._kept)
            self._read_plane(box, plane, self._segments.decode, pixels_HWC[..., samples])
        return self._emptied(box, pixels_HWC).transpose(2, 0, 1)

    def _read_grey(self, box: Box) -> Pixels:
        if self._segments.decode_luma is None:
            return super()._read_grey(box)
        pixels_HW1 = np.empty((*box.shape, 1), self._segments.dtype)
        self._read_plane(box, 0, self._segments.decode_luma, pixels_HW1)
        return self._emptied(box, pixels_HW1).transpose(2, 0, 1)

    def missing(self, box: Box) -> NDArray[np.bool_] | None:
        return super().missing(box) if self._valid is None else missing_in(self._valid, 0, box)

    @property
    def missing_bytes(self) -> int:
        return super().missing_bytes if self._valid is None else held_bytes(self._valid)

    def _emptied(self, box: Box, pixels_HWC: Array) -> Array:
        """The pixels, 0 where the mask says that there are none: what compression has left there means nothing."""
        for rows in tiles(*box.shape, _ROWS, box.width) if self._valid is not None else ():
            if (missing := self.missing(rows.shift(box.y0, box.x0))) is not None:
                pixels_HWC[rows.y0 : rows.y1][missing] = 0
        return pixels_HWC

    def _read_plane(self, box: Box, plane: int, decode: Decode, pixels_HWC: Array) -> None:
        height, width = self._segments.segment
        for cell, to, of in grid_parts(box, height, width):
            place = plane, cell.y0 // height, cell.x0 // width
            target = pixels_HWC[to.y0 : to.y1, to.x0 : to.x1]
            if self._segments.counts[place] == 0:
                target[...] = self.fill
            else:
                tile = self._cache.get((place, decode), self._decode)
                target[...] = tile[of.y0 : of.y1, of.x0 : of.x1, : target.shape[2]]

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
            y, x = row * self._segments.segment[0], column * self._segments.segment[1]
            wanted = Box(0, 0, *self._segments.segment).clamp(self.height - y, self.width - x).shape
            if tile.shape[0] < wanted[0] or tile.shape[1] < wanted[1]:
                raise ValueError(f"it decodes to {tile.shape[:2]} px instead of {wanted}")
        return tile

    def _release(self) -> None:
        if self._valid is not None:
            self._valid.close()
        self._cache.clear()
        self._close_file()


def _valid(path: Path, tables: list[Segments], shape: tuple[int, int]) -> Image:
    """The mask of a level of this shape, above 0 where there is data: its own, or the nearest pixels of the largest."""
    shapes = [table.shape for table in tables]
    level = shapes.index(shape) if shape in shapes else 0
    mask = TiffImage(path, tables, [], colour=False, alpha=False, level=level, mpp=None, channel_names=())
    return mask if shapes[level] == shape else Resampled(mask, *shape)


def open_tiff(path: Path, *, level: int = 0, mpp: float | None = None, ids: bool = False) -> TiffImage | None:
    """One level of a TIFF file; None where the file is a TIFF that had better be read by OpenSlide. Of `ids`, one with
    a palette is its indices.

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
        series = tif.series[0]
        check_layout(series, path.name, palette=ids)
        tables = [segments_of(entry, path.name, found) for entry in series.levels]
        valid_tables = [segments_of(entry, path.name, found) for entry in mask_levels(tif, path.name)]
        colour = is_colour(series.keyframe)
        # A fourth band that is not said to be alpha is a band as others, near infrared for one.
        alpha = colour and any(int(kind) in _ALPHA for kind in series.keyframe.extrasamples)
        # As in GDAL, a mask is right where there is a value of no data, too.
        nodata = None if valid_tables else nodata_of(series.keyframe)
        place = georeference_of(series.keyframe, path)
        base = base_mpp(tif, series.keyframe, mpp, path.name, place)
        names = channel_names(tif, series.keyframe, tables[0].planes * tables[0].samples)
    for table in (*tables, *valid_tables):
        table.check_within(found.file_bytes, path.name)
    return TiffImage(
        path,
        tables,
        valid_tables,
        colour=colour,
        alpha=alpha,
        level=level,
        mpp=base,
        channel_names=names,
        ids=ids,
        georeference=place,
        nodata=nodata,
    )
