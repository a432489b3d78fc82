"""Tell a page what lies over a slide, tile by tile: class ids and levels of probability, which it draws in colours."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from threading import Event
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box, tiles
from gigagrad.images import MaskClass
from gigagrad.images.pixels import Array
from gigagrad.masks.classes import IGNORED, as_bytes, mask_classes
from gigagrad.view.pyramids import AGREED, FALSE, MISSED, OTHER_CLASS, TILE, Pyramid

Picture = NDArray[np.uint8]

_JPEG_QUALITY: Final = 90

LEFT: ContextVar[Event | None] = ContextVar("LEFT", default=None)
"""Set where whoever asked for a picture has left: what is not begun need not be computed."""

ERRORS: Final = (
    MaskClass(AGREED, "right", (0, 158, 115)),
    MaskClass(MISSED, "missed (labelled, not predicted)", (230, 159, 0)),
    MaskClass(FALSE, "false (predicted, not labelled)", (0, 114, 178)),
    MaskClass(OTHER_CLASS, "another class", (204, 121, 167)),
)
"""Kinds of pixels of a prediction beside a label, in colours of Okabe and Ito (2008)."""

_COUNTED_PX: Final = 2**28
"""The most pixels that are counted: smaller levels would tell other shares, where predictions have a pattern."""


def differences(one: str, other: str) -> tuple[MaskClass, ...]:
    """Return the kinds of pixels of two predictions, by the names of what predicted them."""
    names = ("the same class", f"only in {other}", f"only in {one}", "another class")
    return tuple(MaskClass(kind.id, name, kind.color) for kind, name in zip(ERRORS, names, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A picture over a slide: `classes`, `errors` (ids of `ERRORS`) or `probabilities`, a channel for each of classes.

    `name` is what a person calls it; `part` is where it lies, in pixels of the slide's level 0, None for all of it.
    `live`: tiles are computed when they are asked for, by a network. `of`: what predicted it, where several did;
    `between`: the two that it compares.
    """

    name: str
    kind: Literal["classes", "errors", "probabilities"]
    pyramid: Pyramid
    classes: tuple[MaskClass, ...]
    part: Box | None = None
    live: bool = False
    of: str = ""
    between: tuple[str, ...] = ()

    def tile(self, level: int, column: int, row: int, channel: int = 0, margin: int = 0) -> bytes | None:
        """Return the levels of a tile with so many pixels around it, row by row and deflated; None for a tile that
        there is not. Raises `ImageError`."""
        box = self.pyramid.tile(level, column, row, margin)
        return None if box is None else deflated(self.levels(self.pyramid.read(level, box), channel))

    def levels(self, pixels: Array, channel: int = 0) -> Picture:
        """Return class ids, or probabilities of a channel in levels of 0 to 255, of what was read of the pyramid."""
        shown = pixels[min(channel, len(pixels) - 1)]
        return as_levels(shown) if self.kind == "probabilities" else as_bytes(shown)

    def value(self, y: float, x: float) -> str:
        """Say what is at a place, in shares of the height and width: a class, or probabilities."""
        height, width = self.pyramid.shapes[0]
        row, column = min(int(y * height), height - 1), min(int(x * width), width - 1)
        found = self.pyramid.read(0, Box(row, column, row + 1, column + 1))[:, 0, 0]
        if self.kind == "probabilities":
            shares = found / 255 if found.dtype == np.uint8 else found
            named = [kind.name for kind in self.classes] if len(self.classes) == len(shares) else []
            return ", ".join(
                f"{f'{named[number]} ' if named and len(shares) > 1 else ''}{share:.3f}"
                for number, share in enumerate(shares.tolist())
            )
        number = int(found[0])
        known = next((kind.name for kind in self.classes if kind.id == number), None)
        nothing = "background" if self.kind == "classes" else "none"
        return known or {0: nothing, IGNORED: "ignored"}.get(number, f"class {number}")

    def counts(self, channel: int = 0) -> dict[str, Any] | None:
        """Count the pixels of each class id, or of each of 256 levels of probability, of a large slide in tiles that
        are drawn at random: `shares` of the pixels, and which part of them was `counted`. None for what is predicted
        now.
        """
        if self.live:
            return None
        shape, counts = self.pyramid.shapes[0], np.zeros(256, np.int64)
        boxes = list(tiles(*shape, TILE, TILE))
        chosen = np.random.default_rng(0).permutation(len(boxes))[: max(1, len(boxes) * _COUNTED_PX // prod(shape))]
        for index in sorted(chosen.tolist()):
            levels = self.levels(self.pyramid.read(0, boxes[index]), channel)
            counts += np.bincount(levels.reshape(-1), minlength=256)
        total = int(counts.sum())
        return {"shares": (counts / total).tolist(), "pixels": prod(shape), "counted": total / prod(shape)}


def apart(one: Array, other: Array) -> Picture:
    """Return by how much probabilities of two pictures differ, in levels of 0 to 255."""
    return np.maximum(as_levels(one), as_levels(other)) - np.minimum(as_levels(one), as_levels(other))


def classes_in(ids: Array, known: Sequence[MaskClass] = ()) -> tuple[MaskClass, ...]:
    """Return the classes of a mask: those that are known, and those of which pixels are seen."""
    names = {kind.id: kind for kind in known}
    numbers = (set(np.unique(as_bytes(ids)).tolist()) | set(names)) - {0, IGNORED}
    usual = mask_classes(max(numbers, default=0)) if numbers else ()
    return tuple(names.get(number, usual[number - 1]) for number in sorted(numbers))


def as_levels(shares: Array) -> Picture:
    """Turn probabilities, of 1 or of 255, into levels of 0 to 255."""
    if shares.dtype == np.uint8:
        return shares
    levels: Picture = np.clip(np.rint(np.nan_to_num(shares) * 255), 0, 255).astype(np.uint8)
    return levels


def deflated(levels: Picture, effort: int = 1) -> bytes:
    """Compress pixels row by row, in the format of zlib (RFC 1950)."""
    return zlib.compress(np.ascontiguousarray(levels), effort)


def jpeg(pixels_HWC: Picture) -> bytes:
    """Encode grey or RGB."""
    import imagecodecs

    return bytes(imagecodecs.jpeg_encode(np.ascontiguousarray(pixels_HWC), level=_JPEG_QUALITY))


@dataclass(frozen=True, slots=True)
class Shades:
    """Turns the samples of a slide into bytes to look at: between the two values of `ranges`, one pair for all of its
    channels or one for each that is drawn.
    """

    ranges: tuple[tuple[float, float], ...]

    def of(self, pixels: Array) -> Picture:
        """Turn `(C, h, w)` into `(h, w, 3)`, or `(h, w)` of one or two channels."""
        shown: Any = pixels[: 3 if len(pixels) >= 3 else 1]
        if shown.dtype != np.uint8 or self.ranges != ((0, 255),):
            low, high = np.array(self.ranges, np.float32).T[..., None, None]
            inside = np.clip(shown.astype(np.float32), low, high)
            inside = np.where(np.isnan(inside), low, inside)
            shown = np.rint((inside - low) * (255 / (high - low))).astype(np.uint8)
        picture: Picture = shown.transpose(1, 2, 0) if len(shown) > 1 else shown[0]
        return picture
