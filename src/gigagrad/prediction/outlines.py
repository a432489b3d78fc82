"""Exact outlines of a mask along its pixel edges, found block by block and never held as a plane; and a picture of a
slide with outlines, what a person checks a prediction with.

A rectilinear region is fixed by its corners: sorted along each row of the pixel lattice they pair up into horizontal
edges, sorted along each column into vertical ones (O'Rourke, "Uniqueness of orthogonal connect-the-dots", 1988).
Whether a lattice point is a corner depends on its four pixels only, so corners are gathered from small blocks, and
paired when all are there. Regions are 4-connected: pixels that touch at a point only do not belong together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box
from gigagrad.files import replacing
from gigagrad.images import Image, MaskClass, thumbnail
from gigagrad.images.views import Resampled
from gigagrad.masks.classes import IGNORED, as_bytes
from gigagrad.prediction.classes import require_mask

if TYPE_CHECKING:
    from PIL.Image import Image as Pictures

_Ints = NDArray[np.int64]
_Picture = NDArray[np.uint8]
Corners = NDArray[np.void]
NO_CORNERS: Corners = np.empty(
    0, [("y", np.int64), ("x", np.int64), ("to_right", bool), ("to_bottom", bool), ("leaves_sideways", bool)]
)
"""Corners of a region on the pixel lattice, here none.

Each has one horizontal arm (to its right, else to its left) and one vertical arm (down, else up). `leaves_sideways`
says which arm the walk takes when it goes around with the region on its right hand as seen on a screen (y down).
"""


def corners_in(inside: NDArray[np.bool_], y0: int, x0: int) -> Corners:
    """Find the corners among the lattice points `[y0, y0 + h) x [x0, x0 + w)`, where lattice point (y, x) is the
    upper left corner of pixel (y, x). `inside` is `(h + 1, w + 1)`: the pixels from (y0 - 1, x0 - 1) on.
    """
    upright = inside[:, 1:] ^ inside[:, :-1]
    level = inside[1:, :-1] ^ inside[:-1, :-1]
    up, down = upright[:-1], upright[1:]
    ys, xs = np.nonzero((up ^ down) | (up & down & level))
    nw, ne = inside[ys, xs], inside[ys, xs + 1]
    sw, se = inside[ys + 1, xs], inside[ys + 1, xs + 1]
    left, top, right, bottom = nw ^ sw, nw ^ ne, ne ^ se, sw ^ se
    # Where all four edges meet, two pixels touch at a point: two corners, each within one of the two pixels.
    arms = (
        (left & top & (~right | nw), False, False, nw),
        (right & top & (~left | ne), True, False, se),
        (left & bottom & (~right | ne), False, True, nw),
        (right & bottom & (~left | nw), True, True, se),
    )
    found = []
    for here, to_right, to_bottom, sideways in arms:
        part = np.empty(np.count_nonzero(here), NO_CORNERS.dtype)
        part["y"], part["x"] = ys[here] + y0, xs[here] + x0
        part["to_right"], part["to_bottom"], part["leaves_sideways"] = to_right, to_bottom, sideways[here]
        found.append(part)
    return np.concatenate(found)


def rings_of(corners: Corners) -> tuple[list[_Ints], NDArray[np.float64]]:
    """Walk around every ring of a whole region; return the points `(n, 2)`, as (x, y), of each, the first not repeated,
    and their areas in square pixels, negative for holes. About 140 bytes per corner are held meanwhile.

    Each ring begins at its first corner in reading order, and so do the rings among each other.
    """
    count = len(corners)
    if not count:
        return [], np.zeros(0)
    corners = corners[np.lexsort((corners["to_bottom"], corners["x"], corners["y"]))]
    y, x = corners["y"], corners["x"]
    sideways = _partners(y, x, corners["to_right"])
    lengthways = _partners(x, y, corners["to_bottom"])
    following: list[int] = np.where(corners["leaves_sideways"], sideways, lengthways).tolist()
    order, starts, passed = list[int](), [0], bytearray(count)
    for first in range(count):
        corner = first
        while not passed[corner]:
            passed[corner] = True
            order.append(corner)
            corner = following[corner]
        if len(order) > starts[-1]:
            starts.append(len(order))
    firsts, ends = np.array(starts[:-1]), np.array(starts[1:])
    points = np.stack((x[order], y[order]), axis=1)
    following_point = np.roll(points, -1, axis=0)
    following_point[ends - 1] = points[firsts]
    x, y = points.T
    twice = x * following_point[:, 1] - following_point[:, 0] * y
    return np.split(points, starts[1:-1]), np.add.reduceat(twice, firsts) / 2


def _partners(line: _Ints, along: _Ints, forward: NDArray[np.bool_]) -> _Ints:
    """Find for each corner the other end of its edge on `line`: sorted along a line, corners pair up two by two."""
    order = np.lexsort((forward, along, line))
    assert not len(order) % 2, "a closed region has an even number of corners"
    assert forward[order[::2]].all(), "an edge must open with an arm that points forward"
    assert not forward[order[1::2]].any(), "an edge must close with an arm that points back"
    partner = np.empty(len(order), np.int64)
    partner[order[::2]], partner[order[1::2]] = order[1::2], order[::2]
    return partner


_TRUTH_COLOR = (255, 214, 10)
_CASING = (20, 20, 24)
_NARROW = 4
"""Specks and holes narrower than this many widths of a line get a hairline: of full lines there would be nothing else
to see."""
_FINER = 2
"""Lines are drawn so many times as large, for soft edges."""
_STEP_PX = 0.75
"""The distance from a straight line that corners of a diagonal border have at most."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One mask to outline, `label` as the legend names it. `color` is 8-bit RGB, `width_px` the line's width."""

    mask: Image
    class_id: int | None
    """The class to outline; None means every value above 0 that the mask does not leave out (`IGNORED`)."""
    label: str
    color: tuple[int, int, int]
    width_px: int


def layers(predicted: Image, classes: Sequence[MaskClass], truth: Image | None = None) -> tuple[Layer, ...]:
    """Make the layers of the usual picture: the true mask as a broad yellow band below, each predicted class as a thin
    line above.

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
    """Return the channel of a mask that has a class, and its value there."""
    return (mask, kind.id) if mask.channels == 1 else (mask.bands([kind.id]), 1)


def draw_overlay(slide: Image, drawn: Sequence[Layer], max_side: int = 2000) -> _Picture:
    """Draw, as `(h, w, 3)` uint8, the slide scaled so that its longer side has at most `max_side` pixels, the outlines
    of `drawn` in order, and a legend below. The slide and the masks are read piece by piece.

    Raises `ImageError` if a mask is no mask or an image cannot be read.
    """
    from PIL import Image as Pillow
    from PIL import ImageDraw

    picture = Pillow.fromarray(_as_rgb(thumbnail(slide, max_side)))
    for layer in drawn:
        require_mask(layer.mask)
        pixels = mask_thumbnail(layer.mask, picture.height, picture.width)
        inside = _foreground(pixels, layer.mask) if layer.class_id is None else pixels == layer.class_id
        broad, narrow = list[_Ints](), list[_Ints]()
        for ring in rings_of(corners_in(np.pad(inside, 1), 0, 0))[0]:
            (broad if np.ptp(ring, axis=0).min() >= _NARROW * layer.width_px else narrow).append(ring)
        for width_px, color in ((layer.width_px + 2, _CASING), (layer.width_px, layer.color)):
            picture.paste(color, mask=_lines(broad, width_px, picture.size))
        pen = ImageDraw.Draw(picture)
        for ring in narrow:
            pen.line([*ring.ravel().tolist(), *ring[0].tolist()], layer.color)
    return np.concatenate([np.asarray(picture), _legend(drawn, picture.width)])


def _foreground(pixels: _Picture, mask: Image) -> NDArray[np.bool_]:
    """Return where a mask has any class: `IGNORED` is one where it is the only value above 0, and not no data."""
    inside: NDArray[np.bool_] = pixels != 0
    known = inside & (pixels != IGNORED)
    return known if mask.nodata == IGNORED or known.any() else inside


def mask_thumbnail(mask: Image, height: int, width: int) -> NDArray[np.uint8]:
    """Read the whole mask as `(height, width)` pixels, each the nearest to its centre: class ids are never averaged."""
    return as_bytes(np.asarray(Resampled(mask, height, width).read(Box.whole(height, width)))[0])


def _lines(rings: Sequence[_Ints], width_px: int, size: tuple[int, int]) -> Pictures:
    """Return how much of each pixel of a picture of this `(width, height)` the lines cover, of 255."""
    import shapely
    from PIL import Image as Pillow
    from PIL import ImageDraw

    fine = Pillow.new("L", (_FINER * size[0], _FINER * size[1]))
    pen = ImageDraw.Draw(fine)
    for ring in rings:
        # Steps of one pixel become a straight line.
        smooth = shapely.simplify(shapely.linearrings(ring), _STEP_PX, preserve_topology=False)
        points = shapely.get_coordinates(smooth) * _FINER
        pen.line([*points.ravel().tolist(), *points[1].tolist()], 255, _FINER * width_px, joint="curve")
    return fine.reduce(_FINER)


def write_overlay(path: Path, picture: _Picture) -> None:
    """Write `picture` as a PNG, whole or not at all. Raises `WriteError`."""
    from PIL import Image as Pillow

    with replacing(path) as file:
        Pillow.fromarray(picture).save(file, format="PNG", optimize=True)


def _as_rgb(pixels: NDArray[Any]) -> _Picture:
    """Turn a thumbnail of one or of many channels into colours to look at."""
    pixels = pixels[:, :, : 3 if pixels.shape[2] >= 3 else 1]
    return np.array(np.broadcast_to(pixels, (*pixels.shape[:2], 3)), dtype=np.uint8, order="C")


def _legend(drawn: Sequence[Layer], width: int) -> _Picture:
    """Draw a white band with one swatch and label per layer, broken into lines where they do not fit."""
    from PIL import Image as Pillow
    from PIL import ImageDraw, ImageFont

    size = 10 + math.ceil(min(width, 2000) / 100)
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
