"""Masks over slides with gaps: where a slide holds no data, nothing is true of it."""

from __future__ import annotations

from typing import Final

import numpy as np

from gigagrad.boxes import Box
from gigagrad.images.image import Array, Image, Pixels, View
from gigagrad.masks.classes import IGNORED

_SIGNED: Final = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}


def ignoring_missing(mask: Image, slide: Image) -> Image:
    """`mask`, `IGNORED` where `slide`, of the same size, has no data; itself where all is there.

    Closing it leaves both open.
    """
    return IgnoringMissing(mask, slide) if slide.missing_bytes else mask


class IgnoringMissing(View):
    """Use `ignoring_missing`."""

    def __init__(self, mask: Image, slide: Image) -> None:
        held = mask.cache_bytes + slide.missing_bytes
        super().__init__(mask, dtype=room_for_ignored(mask), nodata=IGNORED, cache_bytes=held)
        self._slide = slide

    def _read_inside(self, box: Box) -> Array:
        pixels = np.asarray(self._image.read(box)).astype(room_for_ignored(self), copy=False)
        if (missing := self._slide.missing(box)) is not None:
            pixels[:, missing] = IGNORED
        return pixels

    def _blank(self, height: int, width: int) -> Pixels:
        return Image._blank(self, height, width)


def mask_dtype(mask: Image) -> np.dtype[np.generic]:
    """The dtype of a mask as arrays; signed and wider where PyTorch has next to no operators for it."""
    name = str(mask.dtype).removeprefix("torch.")
    return np.dtype(_SIGNED.get(name, name))


def room_for_ignored(mask: Image) -> np.dtype[np.generic]:
    """`mask_dtype`, or a wider one that holds `IGNORED`, too."""
    return np.promote_types(mask_dtype(mask), np.uint8)
