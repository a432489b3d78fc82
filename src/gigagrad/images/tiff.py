"""The fast path for TIFF and SVS: raw tiles by position, decoded by imagecodecs, several times OpenSlide's speed.

Reads tiled and striped files, pyramids as further pages or as SubIFDs, OME-TIFF, RGB, YCbCr (as JPEG) and greyscale,
any integer or float dtype. Tiles are read by position, so any number of threads may read at once.
"""

from __future__ import annotations

import io
import logging
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gigagrad.boxes import Box
from gigagrad.files import bytes_at
from gigagrad.images.image import Array, Image, Level, choose_level, fill_of, in_our_words, levels_of
from gigagrad.images.tiff_directory import base_mpp, better_by_openslide, check_kind, check_layout, is_colour
from gigagrad.images.tiff_segments import Segments, segments_of
from gigagrad.images.tiff_walk import walk_tiff
from gigagrad.images.tile_cache import DEFAULT_CACHE_BYTES, TileCache


class TiffImage(Image):
    """One level of a TIFF. Use `open_tiff`."""

    def __init__(
        self,
        path: Path,
        segments: Segments,
        *,
        channels: int,
        colour: bool,
        levels: tuple[Level, ...],
        mpp: float | None,
        cache_bytes: int,
        open_level: Callable[[int], Image],
    ) -> None:
        super().__init__(
            shape=(channels, *segments.shape),
            dtype=segments.dtype,
            name=path.stem,
            fill=fill_of(segments.dtype, channels, says_colour=colour),
            mpp=mpp,
            levels=levels,
            open_level=open_level,
            cache_bytes=min(cache_bytes, channels * segments.shape[0] * segments.shape[1] * segments.dtype.itemsize),
        )
        self._path = path
        self._segments = segments
        # A colour image's alpha channel, stored as the last sample or the last plane, is not read.
        self._planes = min(segments.planes, channels)
        self._kept = channels // self._planes
        self._cache = TileCache(cache_bytes)
        # A file object, which goes with an image that Ctrl-C lets nobody have.
        self._file = io.FileIO(path)
        # Runs at close, or when an image that nobody closed is collected.
        self._close_file = weakref.finalize(self, self._file.close)

    def _read_inside(self, box: Box) -> Array:
        height, width = self._segments.segment
        pixels_HWC = np.empty((*box.shape, self.channels), self._segments.dtype)
        for row in range(box.y0 // height, -(-box.y1 // height)):
            for column in range(box.x0 // width, -(-box.x1 // width)):
                y, x = row * height, column * width
                part = box.intersect(Box(y, x, y + height, x + width))
                to = part.shift(-box.y0, -box.x0)
                of = part.shift(-y, -x)
                for plane in range(self._planes):
                    target = pixels_HWC[to.y0 : to.y1, to.x0 : to.x1, plane * self._kept : (plane + 1) * self._kept]
                    if self._segments.counts[plane, row, column] == 0:
                        target[...] = self.fill
                    else:
                        tile = self._tile(plane, row, column)
                        target[...] = tile[of.y0 : of.y1, of.x0 : of.x1, : self._kept]
        return pixels_HWC.transpose(2, 0, 1)

    def _tile(self, plane: int, row: int, column: int) -> Array:
        return self._cache.get((plane, row, column), lambda: self._decode(plane, row, column))

    def _decode(self, plane: int, row: int, column: int) -> Array:
        count = int(self._segments.counts[plane, row, column])
        with in_our_words(
            f"cannot decode the tile in row {row}, column {column} of {self._path}",
            "the file is corrupt there, copy or download it again",
        ):
            data = bytes_at(self._file, count, int(self._segments.offsets[plane, row, column]))
            if len(data) != count:
                raise ValueError(f"it has {len(data)} of {count} bytes; the file shrank")
            tile = self._segments.decode(data, row, column)
            y, x = row * self._segments.segment[0], column * self._segments.segment[1]
            wanted = Box(0, 0, *self._segments.segment).clamp(self.height - y, self.width - x).shape
            if tile.shape[0] < wanted[0] or tile.shape[1] < wanted[1]:
                raise ValueError(f"it decodes to {tile.shape[:2]} px instead of {wanted}")
        return tile

    def _release(self) -> None:
        self._cache.clear()
        self._close_file()


def open_tiff(
    path: Path, *, level: int = 0, mpp: float | None = None, cache_bytes: int = DEFAULT_CACHE_BYTES
) -> TiffImage | None:
    """One level of a TIFF file; None where the file is a TIFF that had better be read by OpenSlide.

    `cache_bytes` bounds the decoded tiles that are kept (see `tile_cache`). Raises `ImageError` for a file that is
    corrupt, truncated (every tile of every level is checked against the file's length) or laid out unusably.
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
        check_layout(series, path.name)
        tables = [segments_of(entry, path.name, found) for entry in series.levels]
        colour = is_colour(series.keyframe)
        base = base_mpp(tif, series.keyframe, mpp, path.name)
    for table in tables:
        table.check_within(found.file_bytes, path.name)
    levels = levels_of([table.shape for table in tables])
    chosen = choose_level(levels, level, path.name)
    channels = tables[level].planes * tables[level].samples
    return TiffImage(
        path,
        tables[level],
        channels=3 if colour and channels == 4 else channels,
        colour=colour,
        levels=levels,
        mpp=None if base is None else base * chosen.downsample,
        cache_bytes=cache_bytes,
        open_level=lambda other: _open_again(path, other, base, cache_bytes),
    )


def _open_again(path: Path, level: int, mpp: float | None, cache_bytes: int) -> Image:
    image = open_tiff(path, level=level, mpp=mpp, cache_bytes=cache_bytes)
    assert image is not None
    return image
