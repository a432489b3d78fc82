"""Tiles in, full-width strips out: what stands between a plan's tile order and a file's row order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box
from gigagrad.errors import ModelError


def assemble(tiles: Iterable[tuple[Box, NDArray[Any]]], height: int, width: int) -> Iterator[NDArray[Any]]:
    """Join tiles into strips `(h_i, width, ...)` that cover `[0, height)` from top to bottom.

    `tiles` are disjoint boxes with their `(h, w)` or `(h, w, C)` arrays, row by row and left to right, all of one row
    equally high. One strip (a row of tiles) is held at a time; a strip is a fresh array, so the receiver may keep it.
    A strip leaves only when the next tile is there or there is none, so `tiles` has come to its end before the last
    strip is given away: a receiver that stops asking then, as TIFF writers do, cuts nothing off.

    Raises `ModelError` when the tiles cover another area, as those of a model do that changes the image's size.
    """
    y0 = x0 = 0
    strip: NDArray[Any] | None = None
    for box, pixels in tiles:
        assert pixels.shape[:2] == box.shape, f"tile {box} came with pixels of shape {pixels.shape}"
        if strip is not None and x0 == width:
            yield strip
            y0, x0, strip = y0 + len(strip), 0, None
        if strip is None:
            strip = np.empty((box.height, width, *pixels.shape[2:]), pixels.dtype)
        if (box.y0, box.x0, box.height) != (y0, x0, len(strip)) or box.x1 > width or box.y1 > height:
            raise _wrong_size(f"tile {box} where row {y0}, column {x0} comes next", height, width)
        strip[:, box.x0 : box.x1] = pixels
        x0 = box.x1
    if strip is None or x0 < width or y0 + len(strip) < height:
        raise _wrong_size(f"nothing from row {y0}, column {x0} on", height, width)
    yield strip


def _wrong_size(found: str, height: int, width: int) -> ModelError:
    return ModelError(
        f"the model's output does not cover the {height} x {width} px slide pixel for pixel (got {found}); "
        "prediction needs a model whose output is as high and wide as its input"
    )
