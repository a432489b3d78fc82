"""Make small pictures of large images, without ever holding the large one, and show them in notebooks."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from gigagrad.boxes import Box, spread, tiles
from gigagrad.errors import ImageError
from gigagrad.images.pixels import Array, is_nodata

if TYPE_CHECKING:
    from gigagrad.images.image import Image

_BLOCK = 1024
_SAMPLES, _SAMPLE_PX = 8, 32
"""Boxes of samples along each axis, and their sides."""
_NOTEBOOK_SIDE_PX = 320
_MOST_PIXELS = 2**24
"""The most pixels of the level that a notebook's picture is made from; a larger one would be read for seconds."""


def thumbnail(image: Image, max_side: int) -> Array:
    """Shrink the image to at most `max_side` px high and wide, by averaging areas: `(h, w, C)` uint8; never enlarged.

    Takes the smallest level that is still large enough (but none above the image's own), and reads it in blocks of
    about 1024 x 1024 px. Integers other than uint8 are scaled from their dtype's range, floats are taken to be 0 to 1;
    where they vary within a quarter of that or beyond it, from their 2nd percentile to their 98th: of colours all of
    them, of stains and bands each by itself. No data is 0.

    Raises `ImageError` for a `max_side` below 1.
    """
    if max_side < 1:
        raise ImageError(f"a thumbnail needs at least 1 px a side, got {max_side}")
    with _coarse(image, max_side) as coarse:
        return _averaged(coarse, max_side)


@contextmanager
def _coarse(image: Image, side: int) -> Iterator[Image]:
    """Open the smallest level, `image` or below it, that is still `side` px high or wide."""
    here = next(index for index, level in enumerate(image.levels) if level.shape == image.shape[1:])
    enough = [index for index, level in enumerate(image.levels) if index >= here and max(level.shape) >= side]
    if enough and enough[-1] != here:
        with image.at_level(enough[-1]) as smaller:
            yield smaller
    else:
        yield image


def _averaged(image: Image, max_side: int) -> Array:
    scale = min(1.0, max_side / max(image.height, image.width))
    height, width = max(1, round(image.height * scale)), max(1, round(image.width * scale))
    # Output pixel i averages the source rows from y[i] up to y[i + 1].
    y = np.arange(height + 1) * image.height // height
    x = np.arange(width + 1) * image.width // width
    step = max(1, int(_BLOCK * scale))
    image = image.filled()
    bytes_already = str(image.dtype).endswith("uint8")
    small_HWC = np.empty((height, width, image.channels), np.uint8 if bytes_already else np.float32)
    for out in tiles(height, width, step, step):
        rows, columns = y[out.y0 : out.y1 + 1], x[out.x0 : out.x1 + 1]
        box = Box(int(rows[0]), int(columns[0]), int(rows[-1]), int(columns[-1]))
        pixels = np.asarray(image.read(box))
        exact = np.float64 if pixels.dtype.kind == "f" else np.int64
        sums = np.add.reduceat(pixels, columns[:-1] - columns[0], axis=2, dtype=exact)
        sums = np.add.reduceat(sums, rows[:-1] - rows[0], axis=1)
        means = sums / (np.diff(rows)[:, None] * np.diff(columns))
        small_HWC[out.y0 : out.y1, out.x0 : out.x1] = (np.rint(means) if bytes_already else means).transpose(1, 2, 0)
    if bytes_already:
        return small_HWC
    small_HWC = np.nan_to_num(small_HWC, copy=False)
    apart = [small_HWC] if image.fill else np.moveaxis(small_HWC, 2, 0)
    low, high = np.array([range_shown(values, pixels.dtype) for values in apart]).T
    shown: Array = np.clip(np.rint((small_HWC - low) * (255 / (high - low))), 0, 255).astype(np.uint8)
    return shown


def samples(image: Image) -> list[Array]:
    """Sample some 65,000 values of each channel, all over the smallest level of 256 px or more; none of no data."""
    with _coarse(image, _SAMPLES * _SAMPLE_PX) as coarse:
        read = []
        for box in spread(coarse.height, coarse.width, _SAMPLES, _SAMPLE_PX):
            missing = coarse.missing(box)
            there = np.ones(box.shape, bool) if missing is None else ~missing
            read.append(np.asarray(coarse.read(box))[:, there])
    channels = np.concatenate(read, axis=1)
    return [each if image.nodata is None else each[~is_nodata(each, image.nodata)] for each in channels]


def names_shown(image: Image) -> list[str]:
    """Name each channel for a person: as the file does, else by its colour or its number; the only one is a "value"."""
    usual = {1: ("value",), 3: ("red", "green", "blue")}.get(image.channels, ("",) * image.channels)
    names = image.channel_names or usual
    return [name or f"channel {number}" for number, name in enumerate(names, 1)]


def full_range(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return intensities 0 and 1 where nothing else is known: 0 and the largest integer, or 1 for floats."""
    return 0.0, float(np.iinfo(dtype).max) if dtype.kind in "iu" else 1.0


def range_shown(values: Array, dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return `full_range`; where values vary within a quarter of it or beyond it, their 2nd and 98th percentile."""
    low, high = full_range(dtype)
    darkest, brightest = (float(value) for value in np.percentile(values, (2, 98))) if values.size else (low, high)
    if darkest < brightest and (darkest < low or not high / 4 < brightest <= high):
        return darkest, brightest
    return low, high


def image_html(image: Image) -> str:
    """Return the image's text, and a thumbnail unless it is closed, unreadable or without a small level."""
    text = f"<div><code>{html.escape(repr(image))}</code></div>"
    smallest = min((height * width for height, width in (level.shape for level in image.levels)), default=0)
    if min(smallest, image.height * image.width) > _MOST_PIXELS:
        return text
    try:
        data = base64.b64encode(_png(thumbnail(image, _NOTEBOOK_SIDE_PX))).decode()
    except ImageError:
        return text
    return f'{text}<img alt="{html.escape(image.name)}" src="data:image/png;base64,{data}">'


def _png(pixels_HWC: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """Encode the first three channels, else the first in grey; a mask of few values is stretched to be seen."""
    import imagecodecs

    shown = pixels_HWC[..., :3] if pixels_HWC.shape[2] >= 3 else pixels_HWC[..., 0]
    if shown.ndim == 2 and 0 < int(shown.max()) < 32:
        shown = (shown.astype(np.uint16) * 255 // int(shown.max())).astype(np.uint8)
    return bytes(imagecodecs.png_encode(np.ascontiguousarray(shown)))
