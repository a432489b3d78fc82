"""Draw what lies over a slide tile by tile: class ids in their colours or outlined, probabilities by a colour map."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from math import prod
from threading import Event
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box, tiles
from gigagrad.errors import ConfigError
from gigagrad.images import MaskClass
from gigagrad.images.pixels import Array
from gigagrad.masks.classes import IGNORED, as_bytes, mask_classes
from gigagrad.view.pyramids import AGREED, FALSE, MISSED, OTHER_CLASS, TILE, Pyramid

Picture = NDArray[np.uint8]

_LINE_PX: Final = 3
_EDGE: Final = (20, 20, 24)
"""The colour of the edge of a line, of one more pixel."""
_MOST_HIDDEN: Final = 255
_JPEG_QUALITY: Final = 90
_VIRIDIS: Final = (
    *((68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141)),
    *((39, 173, 129), (92, 200, 99), (170, 220, 50), (253, 231, 37)),
)
"""Matplotlib's colour map viridis (CC0) at nine places: as even in grey as in colours."""
_SEEN_FROM: Final = 0.25
"""Probabilities from here on are drawn opaque, and smaller ones the fainter the smaller they are."""

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


@dataclass(frozen=True, slots=True)
class Style:
    """Choices of whoever looks: filled or outlined, which classes are not drawn, which channel of probabilities is."""

    form: Literal["fill", "outline"] = "fill"
    hidden: frozenset[int] = frozenset()
    channel: int = 0

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Self:
        """Read the part of an address behind the question mark. Raises `ConfigError` for what is none of these."""
        form, hidden, channel = (query.get(name, "") for name in ("form", "hide", "channel"))
        if not (
            set(query) <= {"form", "hide", "channel"}
            and form in ("", "fill", "outline")
            and re.fullmatch(r"(\d{1,3}(,\d{1,3})*)?", hidden, re.ASCII)
            and re.fullmatch(r"\d{0,5}", channel, re.ASCII)
        ):
            raise ConfigError("unknown style of a tile; expected form=fill or outline, hide=1,2 and channel=0")
        numbers = frozenset(min(int(number), _MOST_HIDDEN) for number in filter(None, hidden.split(",")))
        return cls("outline" if form == "outline" else "fill", numbers, int(channel or 0))


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

    def picture(self, level: int, column: int, row: int, style: Style) -> bytes | None:
        """Draw a tile as a PNG with transparency, None for a tile that there is not. Raises `ImageError`."""
        margin = _LINE_PX + 1 if style.form == "outline" and self.kind != "probabilities" else 0
        box = self.pyramid.tile(level, column, row, margin)
        if box is None:
            return None
        pixels = self.pyramid.read(level, box)
        if self.kind == "probabilities":
            return png(as_levels(pixels[min(style.channel, len(pixels) - 1)]), colours_of_shares())
        ids = as_bytes(pixels[0])
        if style.form == "outline":
            return png(*_outlined(ids, margin, palette(self.classes, style.hidden)))
        return png(ids, palette(self.classes, style.hidden))

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
        return known or {0: "background", IGNORED: "ignored"}.get(number, f"class {number}")

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
            pixels = self.pyramid.read(0, boxes[index])
            shown = pixels[min(channel, len(pixels) - 1)]
            levels = as_levels(shown) if self.kind == "probabilities" else as_bytes(shown)
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


def palette(classes: Sequence[MaskClass], hidden: frozenset[int]) -> Picture:
    """Return red, green, blue and opacity for each of 256 ids: 0, what is ignored and what is hidden are not seen."""
    colours = np.zeros((256, 4), np.uint8)
    for kind in (*mask_classes(254), *classes):
        if kind.id not in (0, IGNORED):
            colours[kind.id] = (*kind.color, 255)
    colours[sorted(hidden), 3] = 0
    return colours


@cache
def colours_of_shares() -> Picture:
    """Return red, green, blue and opacity for each of 256 levels of probability."""
    at = np.linspace(0, len(_VIRIDIS) - 1, 256)
    colours = [np.interp(at, np.arange(len(_VIRIDIS)), channel) for channel in np.transpose(_VIRIDIS)]
    opacity = np.clip(np.linspace(0, 255 / _SEEN_FROM, 256), 0, 255)
    return np.stack([*colours, opacity], axis=1).round().astype(np.uint8)


def as_levels(shares: Array) -> Picture:
    """Turn probabilities, of 1 or of 255, into levels of 0 to 255."""
    if shares.dtype == np.uint8:
        return shares
    levels: Picture = np.clip(np.rint(np.nan_to_num(shares) * 255), 0, 255).astype(np.uint8)
    return levels


def _outlined(ids: Picture, margin: int, colours: Picture) -> tuple[Picture, Picture]:
    """Keep of each region the pixels near another one, with a dark edge inside, so that a line is seen over a filled
    class of the same colour; the margin around them is cut off. Return ids and the colours of all ids.
    """
    inner = ids[margin:-margin, margin:-margin]
    line = border = np.zeros(inner.shape, bool)
    height, width = inner.shape
    for offset in range(1, margin + 1):
        line, border = border, border.copy()
        for dy, dx in ((offset, 0), (-offset, 0), (0, offset), (0, -offset)):
            beside = ids[margin + dy : margin + dy + height, margin + dx : margin + dx + width]
            border |= beside != inner
    found = np.where(line & (inner != IGNORED), inner, np.uint8(0))
    found[border & ~line & (colours[inner, 3] > 0)] = IGNORED
    colours[IGNORED] = (*_EDGE, 255)
    return found, colours


def png(levels: Picture, colours: Picture, compress_level: int = 1) -> bytes:
    """Encode `(h, w)` levels with a palette of 256 colours, the opacity of each beside it."""
    from PIL import Image as Pillow

    picture = Pillow.fromarray(np.ascontiguousarray(levels))
    picture.putpalette(colours[:, :3].tobytes())
    file = io.BytesIO()
    picture.save(file, "PNG", transparency=colours[:, 3].tobytes(), compress_level=compress_level)
    return file.getvalue()


def jpeg(pixels_HWC: Picture) -> bytes:
    """Encode grey or RGB."""
    import imagecodecs

    return bytes(imagecodecs.jpeg_encode(np.ascontiguousarray(pixels_HWC), level=_JPEG_QUALITY))


@dataclass(frozen=True, slots=True)
class Shades:
    """Turns the samples of a slide into bytes to look at: between two values, the same for all of its channels."""

    low: float
    high: float

    def of(self, pixels: Array) -> Picture:
        """Turn `(C, h, w)` into `(h, w, 3)`, or `(h, w)` of one or two channels."""
        shown: Any = pixels[:3] if len(pixels) >= 3 else pixels[0]
        if shown.dtype != np.uint8 or (self.low, self.high) != (0, 255):
            inside = np.nan_to_num(np.clip(shown.astype(np.float32), self.low, self.high), nan=self.low)
            shown = np.rint((inside - self.low) * (255 / (self.high - self.low))).astype(np.uint8)
        picture: Picture = shown.transpose(1, 2, 0) if shown.ndim == 3 else shown
        return picture
