"""Resample an image to another size by its nearest pixels, as class ids need it, which must never be averaged."""

from __future__ import annotations

import numpy as np

from gigagrad.boxes import Box, Span, tiles
from gigagrad.images.image import Array, Image

_BLOCK_PX = 2048
"""Side of the blocks in which the source is read, in its own pixels: a few MB each."""


class Resampled(Image):
    """`image` as `(C, height, width)`: each pixel is the one of `image` nearest to its centre.

    Where `image` shows a `part` only of what is `full` `(height, width)` large, in pixels of that, the rest is fill.
    For images whose pixels are arrays. Closing it closes `image`.
    """

    def __init__(
        self, image: Image, height: int, width: int, part: Box | None = None, full: tuple[int, int] = (1, 1)
    ) -> None:
        super().__init__(
            shape=(image.channels, height, width),
            dtype=image.dtype,
            name=image.name,
            fill=image.fill,
            mpp=None if image.mpp is None or part is not None else image.mpp * image.height / height,
            cache_bytes=image.cache_bytes,
            thread_bytes=image.thread_bytes + image.channels * _BLOCK_PX**2,
            decode_seconds=image.decode_seconds,
        )
        self._image = image
        self._part, self._full = part or Box.whole(*full), full

    def _read_inside(self, box: Box) -> Array:
        pixels = np.asarray(self._blank(*box.shape))
        side_y = max(1, _BLOCK_PX * self.height // self._image.height)
        side_x = max(1, _BLOCK_PX * self.width // self._image.width)
        for part in tiles(*box.shape, side_y, side_x):
            rows = _nearest(part.y.shift(box.y0), self._image.height, self.height, self._part.y, self._full[0])
            columns = _nearest(part.x.shift(box.x0), self._image.width, self.width, self._part.x, self._full[1])
            # What lies outside of the source is its fill.
            source = Box(int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1)
            read = np.asarray(self._image.read(source))
            at = (slice(None), slice(part.y0, part.y1), slice(part.x0, part.x1))
            pixels[at] = read[:, rows[:, None] - source.y0, columns[None] - source.x0]
        return pixels

    def _release(self) -> None:
        self._image.close()


def _nearest(span: Span, source: int, size: int, part: Span, full: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Find the pixels of an axis of `source` pixels, which are those of `part` of `full` ones, at the centres of `span`
    of the same axis in `size` pixels."""
    twice = 2 * np.arange(span.start, span.stop, dtype=np.int64) + 1
    return (twice * full - 2 * part.start * size) * source // (2 * size * part.length)
