"""Draw what lies where on a synthetic slide, once from the seed, on planes of one sixteenth of the slide's size.

The planes have one cell more than the slide on every side, so that any block can be interpolated from its
neighbourhood alone and no pixel depends on how the slide is cut into blocks or strips.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box
from gigagrad.images.pixels import Array
from gigagrad.images.synthetic.textures import Bytes, Plane, as_bytes

STEP: Final = 16  # px per cell; a power of two keeps interpolated positions exact
FAR: Final = 120  # px; distances to pen strokes are kept up to here
_SMALLEST_PIECE: Final = 120  # px; radius below which a fragment would be dust
_SHORTEST_LOBE: Final = 160  # px; the recipe's median sees nothing finer than about 56 px
_WARP_PX: Final = 48.0  # px; more would stretch cells visibly


@dataclass(frozen=True, slots=True)
class Layout:
    """The anatomy of one slide. Planes have shape `(ceil(height / STEP) + 2, ceil(width / STEP) + 2[, n])`.

    Attributes:
        height, width: of the slide in pixels.
        outline: float32, signed distance to the tissue's border in pixels, positive inside.
        epithelium, fat: uint8, share of these in the tissue (0..255); the rest is stroma.
        stain: uint8 pairs, local factor of hematoxylin and eosin (128 is 1), folds included.
        warp: float32 pairs, displacement in pixels (y, x) at which the textures are looked up.
        pen: int8, signed distance to pen strokes in pixels, positive inside, clipped to +-`FAR`; None without pen.
        fields: int16 brightness offset of each scanned field of view, -1 where the scanner left pure white.
        field_px, field_origin: side of the fields and `(y, x)` of the first one's corner (not positive).
    """

    height: int
    width: int
    outline: Plane
    epithelium: Bytes
    fat: Bytes
    stain: Bytes
    warp: Plane
    pen: NDArray[np.int8] | None
    fields: NDArray[np.int16]
    field_px: int
    field_origin: tuple[int, int]


def make_layout(height: int, width: int, rng: np.random.Generator) -> Layout:
    """Draw the anatomy of a slide of `height x width` pixels."""
    shape = -(-height // STEP) + 2, -(-width // STEP) + 2
    outline = _outline(shape, height, width, rng)
    epithelium = as_bytes(128 + 900 * (_noise(shape, (2200, 700, 260, 90), rng) - 0.12))
    # Fat keeps away from the tissue's border and the slide's, so that it is enclosed and the recipe fills its vacuoles.
    y, x = (np.arange(side, dtype=np.float32) * STEP - STEP / 2 for side in shape)
    to_edge = np.minimum(np.minimum(y, height - y)[:, None], np.minimum(x, width - x)[None])
    depth = np.clip((np.minimum(outline, to_edge) - 140) / 90, 0, 1)
    fat = as_bytes((128 + 2500 * (_noise(shape, (800, 250), rng) - 1.4)) * depth)
    folds = _folds(shape, rng) * np.clip(outline / 60, 0, 1)
    stain = np.empty((*shape, 2), np.uint8)
    for channel, strength in enumerate(rng.uniform(104, 128, 2)):
        stain[..., channel] = as_bytes(
            strength * (1 + 0.13 * _noise(shape, (4000, 1100, 300), rng)) * (1 + 0.85 * folds)
        )
    warp = np.stack([_WARP_PX * _noise(shape, (2600, 1200), rng) for _ in range(2)], axis=-1)
    fields, field_px, origin = _fields(outline, height, width, rng)
    return Layout(
        height=height,
        width=width,
        outline=outline,
        epithelium=epithelium,
        fat=fat,
        stain=stain,
        warp=warp,
        pen=_pen(shape, outline, min(height, width), rng),
        fields=fields,
        field_px=field_px,
        field_origin=origin,
    )


def upsample(plane: Array, box: Box) -> Array:
    """Upsample a plane to full resolution inside `box` (its corner a multiple of `STEP`), bilinear: `(h, w[, n])`."""
    assert box.y0 % STEP == box.x0 % STEP == 0, box
    near = cells(plane, box)
    size = near.shape[1] * STEP, near.shape[0] * STEP
    full = cv2.resize(np.ascontiguousarray(near), size, interpolation=cv2.INTER_LINEAR)
    return np.asarray(full)[STEP : STEP + box.height, STEP : STEP + box.width]


def cells(plane: Array, box: Box) -> Array:
    """Return every cell of a plane that `upsample` would use for `box`."""
    return plane[box.y0 // STEP : -(-box.y1 // STEP) + 2, box.x0 // STEP : -(-box.x1 // STEP) + 2]


def pen_half_width(short: int) -> float:
    """Return half the width of a marker stroke in px, on a slide whose shorter side is `short` px."""
    return float(np.clip(0.022 * short, 12, 420))  # up to a marker's true tip of about half a millimetre


def _noise(shape: tuple[int, int], wavelengths_px: tuple[float, ...], rng: np.random.Generator) -> Plane:
    """Draw smooth noise with mean 0 and standard deviation about 1; each shorter wavelength is weaker in proportion."""
    total = np.zeros(shape, np.float32)
    weights = [(wave / wavelengths_px[0]) ** 0.8 for wave in wavelengths_px]
    for wave, weight in zip(wavelengths_px, weights, strict=True):
        knots = tuple(math.ceil(side * STEP / wave * 2) + 2 for side in shape)
        grid = rng.standard_normal(knots, np.float32)
        total += np.float32(weight * 1.4) * cv2.resize(grid, shape[::-1], interpolation=cv2.INTER_CUBIC)
    return np.asarray(total / np.float32(math.hypot(*weights)), np.float32)


def _outline(shape: tuple[int, int], height: int, width: int, rng: np.random.Generator) -> Plane:
    """Draw the signed distance in pixels to the border of a few lobed pieces of tissue, with fragments."""
    short, long = min(height, width), max(height, width)
    count = min(6, max(1, round(long / short)))
    pitch = long / count
    y, x = (np.arange(side, dtype=np.float32) * STEP - STEP / 2 for side in shape)
    shares = (0.6, 0.3, 0.15, 0.07, 0.035)
    lobes = _noise(
        shape, tuple(short * share for share in shares if short * share > _SHORTEST_LOBE or share > 0.2), rng
    )
    field = np.full(shape, -np.inf, np.float32)

    def add(along: float, across: float, radius: float, stretch: float) -> None:
        centre_y, centre_x = (along, across) if height > width else (across, along)
        turn = rng.uniform(0, math.pi)
        dy, dx = (y - centre_y)[:, None] / radius, (x - centre_x)[None] / radius
        u = (math.cos(turn) * dx + math.sin(turn) * dy) / stretch
        v = (math.cos(turn) * dy - math.sin(turn) * dx) * stretch
        np.maximum(field, (1 - np.hypot(u, v)) * np.float32(radius), out=field)

    for index in range(count):
        radius = min(short, pitch) * rng.uniform(0.34, 0.43)
        along = pitch * (index + 0.5 + rng.uniform(-0.06, 0.06))
        add(along, short * rng.uniform(0.45, 0.55), radius, rng.uniform(1.0, 1.25))
        for _ in range(int(rng.integers(0, 3))):
            size = short * rng.uniform(0.03, 0.07)
            if size > _SMALLEST_PIECE:
                add(along + pitch * rng.uniform(-0.5, 0.5), short * rng.uniform(0.06, 0.94), size, 1.2)
    inside = (field + lobes * np.float32(0.055 * short) > 0).astype(np.uint8)
    # The truth has no whiskers, dust or holes: the recipe would erase the first two and fill the last.
    smallest = min(_SMALLEST_PIECE, short / 8)
    brush = max(1, int(smallest / 24)) | 1  # cells
    inside = cv2.morphologyEx(inside, cv2.MORPH_OPEN, cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (brush, brush)))
    borders, _ = cv2.findContours(inside, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    large = [border for border in borders if cv2.contourArea(border) * STEP**2 > smallest**2]
    inside = np.asarray(cv2.drawContours(np.zeros_like(inside), large, -1, 1, cv2.FILLED))
    return np.asarray(cv2.GaussianBlur(_distance(inside) - _distance(1 - inside), (0, 0), 1.2), np.float32)


def _distance(region: Bytes) -> Plane:
    """Measure the distance in pixels from inside `region` to its border, 0 outside."""
    cells_away = np.asarray(cv2.distanceTransform(region, cv2.DIST_L2, cv2.DIST_MASK_5), np.float32)
    # Without a border to be away from, OpenCV answers with the largest float.
    return np.asarray(np.clip(cells_away - 0.5, 0, 10_000) * STEP, np.float32)


def _folds(shape: tuple[int, int], rng: np.random.Generator) -> Plane:
    """Draw where the section lies double, 0..1: stretches of a winding line some 40 px wide."""
    line = _noise(shape, (6000, 1500), rng)
    steepness = np.maximum(np.hypot(*np.gradient(line)), 1e-6)
    distance_px = np.abs(line) / steepness * STEP
    only_here = np.clip(3 * (_noise(shape, (2500,), rng) - 0.5), 0, 1)
    return np.asarray(np.clip(1.6 - distance_px / 18, 0, 1) * only_here, np.float32)


def _pen(shape: tuple[int, int], outline: Plane, short: int, rng: np.random.Generator) -> NDArray[np.int8] | None:
    """Draw the signed distance to one or two marker strokes that cross a border of the tissue."""
    border = np.argwhere(np.abs(outline) < STEP)
    if not len(border):
        return None
    half_width = pen_half_width(short)
    near = np.full(shape, np.inf, np.float32)
    for _ in range(int(rng.integers(1, 3))):
        start = border[rng.integers(len(border))][::-1].astype(np.float64)
        heading, turning = rng.uniform(0, 2 * math.pi), rng.normal(0, 0.05)
        points = [start]
        for _ in range(40):
            turning = 0.9 * turning + rng.normal(0, 0.02)
            heading += turning
            points.append(points[-1] + 0.014 * short / STEP * np.array([math.cos(heading), math.sin(heading)]))
        path = np.array(points) + start - points[15]  # so that it begins on one side of the border
        stroke = np.ones(shape, np.uint8)
        cv2.polylines(stroke, [np.rint(path * 8).astype(np.int32)], False, 0, 1, cv2.LINE_8, 3)
        near = np.minimum(near, np.asarray(cv2.distanceTransform(stroke, cv2.DIST_L2, cv2.DIST_MASK_5)) * STEP)
    ragged = half_width * (1 + 0.06 * _noise(shape, (40 * half_width, 4 * half_width), rng)) - near
    signed = cv2.GaussianBlur(ragged.astype(np.float32), (0, 0), 1.5)
    return np.asarray(np.clip(np.rint(signed), -FAR, FAR), np.int8)


def _fields(
    outline: Plane, height: int, width: int, rng: np.random.Generator
) -> tuple[NDArray[np.int16], int, tuple[int, int]]:
    """Draw the scanner's fields of view: those near tissue were scanned, the others are stitched in as pure white."""
    side = int(np.clip(min(height, width) // 6, 64, 2000))
    origin = -int(rng.integers(0, side)), -int(rng.integers(0, side))
    table = np.full((-(-(height - origin[0]) // side), -(-(width - origin[1]) // side)), -1, np.int16)
    for row, column in np.ndindex(table.shape):
        corner = Box.whole(side, side).shift(origin[0] + row * side, origin[1] + column * side).clamp(height, width)
        reach = max(2 * STEP, side // 16)
        grown = Box(corner.y0 - reach, corner.x0 - reach, corner.y1 + reach, corner.x1 + reach).clamp(height, width)
        if cells(outline, grown).max(initial=-np.inf) > 0:
            table[row, column] = rng.integers(0, 4)
    return table, side, origin
