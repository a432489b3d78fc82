"""A mask at a lower resolution by its nearest pixels: class ids must never be averaged. Read block by block."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images.image import Image
from gigagrad.images.resampled import Resampled

_BLOCK_PX = 2048
"""Side of the blocks in which a mask is read, in its own pixels: a few MB each, and a few file tiles of 512."""


def require_mask(mask: Image, planes: int = 1) -> None:
    """Raise `ImageError` unless `mask` has so many channels of integers or booleans."""
    probe = np.asarray(mask.read(Box.whole(1, 1)))
    if mask.shape[0] != planes or probe.dtype.kind not in "bui":
        expected = "one channel of class ids" if planes == 1 else f"{planes} channels, one of each label"
        raise ImageError(f"{mask.name} is no mask: {mask.shape[0]} channels of {mask.dtype}; expected {expected}")


def sampled_shape(mask: Image, downsample: int) -> tuple[int, int]:
    """Return `(height, width)` of `mask` when every `downsample`-th pixel is kept; a remainder counts as a pixel."""
    _, height, width = mask.shape
    return math.ceil(height / downsample), math.ceil(width / downsample)


def read_sampled(mask: Image, box: Box, downsample: int) -> NDArray[np.uint8]:
    """Read `box` of the downsampled mask, `(h, w)`: the pixel at the middle of each `downsample x downsample` block.

    A block cut off by the image's border gives its nearest pixel inside; outside the downsampled mask all is 0.
    """
    height, width = sampled_shape(mask, downsample)
    inside = box.clamp(height, width)
    result = np.zeros(box.shape, np.uint8)
    if inside.empty:
        return result
    rows = _centres(inside.y0, inside.y1, downsample, mask.shape[1])
    columns = _centres(inside.x0, inside.x1, downsample, mask.shape[2])
    pixels = _read(mask, rows, columns)
    at = inside.shift(-box.y0, -box.x0)
    result[at.y0 : at.y1, at.x0 : at.x1] = pixels
    return result


def mask_thumbnail(mask: Image, height: int, width: int) -> NDArray[np.uint8]:
    """Read the whole mask as `(height, width)` pixels, each the nearest to its centre."""
    return _bytes(np.asarray(Resampled(mask, height, width).read(Box.whole(height, width)))[0])


def block_side(downsample: int) -> int:
    """Return a side for blocks of the downsampled mask that reads about `_BLOCK_PX` px a side of the mask itself."""
    return max(16, _BLOCK_PX // downsample)


def _centres(start: int, stop: int, downsample: int, size: int) -> NDArray[np.int64]:
    return np.minimum(np.arange(start, stop) * downsample + downsample // 2, size - 1)


def _read(mask: Image, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Read the pixels at `rows x columns`, both ascending; values beyond a byte count as its nearest."""
    box = Box(int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1)
    return _bytes(np.asarray(mask.read(box))[0][np.ix_(rows - box.y0, columns - box.x0)])


def _bytes(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    return np.asarray(pixels if pixels.dtype == np.uint8 else pixels.clip(0, 255), np.uint8)
