"""An image at another size by its nearest pixels, as class ids need it, which must never be averaged."""

from __future__ import annotations

import numpy as np

from gigagrad.boxes import Box, tiles
from gigagrad.images.image import Array, Image

_BLOCK_PX = 2048
"""Side of the blocks in which the source is read, in its own pixels: a few MB each."""


class Resampled(Image):
    """`image` as `(C, height, width)`: each pixel is the one of `image` nearest to its centre.

    For images whose pixels are arrays. Closing it closes `image`.
    """

    def __init__(self, image: Image, height: int, width: int) -> None:
        super().__init__(
            shape=(image.channels, height, width),
            dtype=image.dtype,
            name=image.name,
            fill=image.fill,
            mpp=None if image.mpp is None else image.mpp * image.height / height,
            cache_bytes=image.cache_bytes + image.channels * _BLOCK_PX**2,
        )
        self._image = image

    def _read_inside(self, box: Box) -> Array:
        pixels = np.asarray(self._blank(*box.shape))
        side_y = max(1, _BLOCK_PX * self.height // self._image.height)
        side_x = max(1, _BLOCK_PX * self.width // self._image.width)
        for part in tiles(*box.shape, side_y, side_x):
            rows = _nearest(part.y0 + box.y0, part.y1 + box.y0, self._image.height, self.height)
            columns = _nearest(part.x0 + box.x0, part.x1 + box.x0, self._image.width, self.width)
            source = Box(int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1)
            read = np.asarray(self._image.read(source))
            at = (slice(None), slice(part.y0, part.y1), slice(part.x0, part.x1))
            pixels[at] = read[:, rows[:, None] - source.y0, columns[None] - source.x0]
        return pixels

    def _release(self) -> None:
        self._image.close()


def _nearest(start: int, stop: int, source: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Pixels of an axis of `source` pixels at the centres of `start` to `stop` of the same axis in `size` pixels."""
    twice = 2 * np.arange(start, stop, dtype=np.int64) + 1
    return twice * source // (2 * size)
