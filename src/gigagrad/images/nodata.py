"""Find pixels that hold no data: satellites see strips, mosaics have corners, and files mark what is missing by a
value."""

from __future__ import annotations

import math
import re
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box
from gigagrad.images.image import Array, Image
from gigagrad.images.tile_cache import grid_parts

ZARR_NODATA: Final = "_FillValue"
"""The attribute of a Zarr array that names the value, as NetCDF calls it. What the array fills chunks with that are not
there says nothing: every array has that."""
_BLOCK_PX = 512
"""Side of the blocks in which pixels are looked at."""


def parse_nodata(text: str | None, dtype: np.dtype[Any]) -> int | float | None:
    """Read the value that GDAL's tag names, as samples of `dtype` hold it; None where none of them can."""
    text = (text or "").strip()
    try:
        value = float(text)
    except ValueError:
        return None
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return float(dtype.type(value))
    if dtype.kind not in "iub" or not value.is_integer():
        return None
    # Not by way of a float, which could round it.
    number = int(text) if re.fullmatch(r"[-+]?\d+", text) else int(value)
    least, most = _range(dtype)
    return number if least <= number <= most else None


def value_of_gaps(text: str | None, dtype: np.dtype[Any]) -> int | float:
    """Return what GDAL reads in blocks that a file leaves out: the value of no data as near as samples come to it, or
    0."""
    if (exact := parse_nodata(text, dtype)) is not None:
        return exact
    try:
        value = float((text or "").strip())
    except ValueError:
        return 0
    if dtype.kind not in "iub" or math.isnan(value):
        return 0
    least, most = _range(dtype)
    return most if value >= most else least if value <= least else math.trunc(value + math.copysign(0.5, value))


def _range(dtype: np.dtype[Any]) -> tuple[int, int]:
    return (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))


def is_nodata(pixels: Array, nodata: int | float) -> NDArray[np.bool_]:
    """Tell which samples hold no data; NaN does in no case."""
    empty: NDArray[np.bool_] = pixels == nodata
    return empty | np.isnan(pixels) if pixels.dtype.kind == "f" else empty


def missing_in(image: Image, nodata: int | float, box: Box) -> NDArray[np.bool_] | None:
    """Find what `Image.missing` tells of an image in which `nodata` says so."""
    empty = np.zeros(box.shape, bool)
    for cell, to, _ in grid_parts(box, _BLOCK_PX, _BLOCK_PX):
        pixels = np.asarray(image.read(box.intersect(cell)))
        empty[to.y0 : to.y1, to.x0 : to.x1] = is_nodata(pixels, nodata).all(axis=0)
    return empty if empty.any() else None


def held_bytes(image: Image) -> int:
    """Return the bytes that `missing_in` holds: a block, and what is known of its samples while it is found out."""
    assert isinstance(image.dtype, np.dtype), "tensors have data everywhere"
    return image.channels * _BLOCK_PX**2 * (image.dtype.itemsize + 3)
