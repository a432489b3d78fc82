"""A picture of a slide with the outlines of its masks: what a person checks a prediction with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigagrad.files import replacing
from gigagrad.images import Image, MaskClass, thumbnail
from gigagrad.prediction.sampling import mask_thumbnail, require_mask

_TRUTH_COLOR = (255, 214, 10)
_CASING = (20, 20, 24)
_NARROW = 4
"""Specks and holes narrower than this many widths of a line get a hairline: of full lines there would be nothing else
to see."""
_Picture = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Layer:
    """One mask to outline, `label` as the legend names it. `color` is 8-bit RGB, `width_px` the line's width."""

    mask: Image
    class_id: int | None
    """The class to outline; None means every non-zero value."""
    label: str
    color: tuple[int, int, int]
    width_px: int


def layers(predicted: Image, classes: Sequence[MaskClass], truth: Image | None = None) -> tuple[Layer, ...]:
    """The usual picture: the true mask as a broad yellow band below, each predicted class as a thin line above.

    Raises `ImageError` if `predicted` is no mask of these classes.
    """
    several = len(classes) > 1
    require_mask(predicted, 1 if predicted.channels == 1 else len(classes))
    above = [
        Layer(*_place(predicted, kind), f"Predicted: {kind.name}" if several else "Predicted", kind.color, 3)
        for kind in classes
    ]
    # Of one class, any value is the foreground's.
    places: list[tuple[Image, int | None]] = []
    if truth is not None:
        places += [_place(truth, kind) for kind in classes] if several else [(truth, None)]
    return (*(Layer(*place, "True mask", _TRUTH_COLOR, 7) for place in places), *above)


def _place(mask: Image, kind: MaskClass) -> tuple[Image, int]:
    """Where a class is in a mask: a channel, and its value there."""
    return (mask, kind.id) if mask.channels == 1 else (mask.bands([kind.id]), 1)


def draw_overlay(slide: Image, drawn: Sequence[Layer], max_side: int = 2000) -> _Picture:
    """`(h, w, 3)` uint8: the slide scaled so that its longer side has at most `max_side` pixels, the outlines of
    `drawn` in order, and a legend below. The slide and the masks are read piece by piece.

    Raises `ImageError` if a mask is no mask or an image cannot be read.
    """
    import cv2

    picture = _as_rgb(thumbnail(slide, max_side))
    for layer in drawn:
        require_mask(layer.mask)
        pixels = mask_thumbnail(layer.mask, *picture.shape[:2])
        inside = pixels != 0 if layer.class_id is None else pixels == layer.class_id
        # A background border of 1 px lets contours at the picture's edge close there.
        framed = np.pad(inside.astype(np.uint8), 1)
        contours, _ = cv2.findContours(framed, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE, offset=(-1, -1))
        broad, narrow = list[Any](), list[Any]()
        for contour in contours:
            (narrow if min(cv2.boundingRect(contour)[2:]) < _NARROW * layer.width_px else broad).append(contour)
        for width_px, color in ((layer.width_px + 2, _CASING), (layer.width_px, layer.color)):
            cv2.polylines(picture, broad, isClosed=True, color=color, thickness=width_px, lineType=cv2.LINE_AA)
        cv2.polylines(picture, narrow, isClosed=True, color=layer.color, thickness=1)
    return np.concatenate([picture, _legend(drawn, picture.shape[1])])


def write_overlay(path: Path, picture: _Picture) -> None:
    """`picture` as a PNG, whole or not at all. Raises `WriteError`."""
    from PIL import Image as Pillow

    with replacing(path) as file:
        Pillow.fromarray(picture).save(file, format="PNG", optimize=True)


def _as_rgb(pixels: NDArray[Any]) -> _Picture:
    """A thumbnail of one or of many channels as something to look at."""
    pixels = pixels[:, :, : 3 if pixels.shape[2] >= 3 else 1]
    return np.array(np.broadcast_to(pixels, (*pixels.shape[:2], 3)), dtype=np.uint8, order="C")


def _legend(drawn: Sequence[Layer], width: int) -> _Picture:
    """A white band with one swatch and label per layer, broken into lines where they do not fit."""
    from PIL import Image as Pillow
    from PIL import ImageDraw, ImageFont

    size = 10 + math.ceil(min(width, 2000) / 200)
    font = ImageFont.load_default(size)
    line, gap, swatch = round(size * 2.2), size, size * 2
    placed: list[tuple[int, int, Layer]] = []
    x, y = gap, 0
    for layer in {layer.label: layer for layer in drawn}.values():
        needed = swatch + gap // 2 + math.ceil(font.getlength(layer.label)) + 2 * gap
        if x > gap and x + needed > width:
            x, y = gap, y + line
        placed.append((x, y, layer))
        x += needed
    band = Pillow.new("RGB", (width, y + line if placed else 0), "white")
    pen = ImageDraw.Draw(band)
    for x, y, layer in placed:
        middle = y + line / 2
        thick = layer.width_px + 2
        pen.line([(x, middle), (x + swatch, middle)], fill=_CASING, width=thick)
        pen.line([(x + 1, middle), (x + swatch - 1, middle)], fill=layer.color, width=layer.width_px)
        pen.text((x + swatch + gap // 2, middle), layer.label, fill=_CASING, font=font, anchor="lm")
    return np.asarray(band)
