"""Draw and paint a synthetic slide: what lies where, once from the seed, and then its pixels, block by block.

What lies where stands on planes of one sixteenth of the slide's size. They have one cell more than the slide on every
side, so that any block can be interpolated from its neighbourhood alone and no pixel depends on how the slide is cut
into blocks or strips. Blocks are textures bent and blended by these planes, stained, scanned and marked.

Colour follows the Beer-Lambert law with one absorbance vector per stain (Ruifrok and Johnston, Anal Quant Cytol Histol
23, 2001): transmitted light is `exp(-(h * hematoxylin + e * eosin))`, looked up in a table of all 256 x 256 pairs.

The exact tissue mask is the outline itself. Vacuoles, lumens and slits inside it count as tissue (the paper's recipe
fills them); marker ink does not make glass into tissue. Ink on bare glass is what wiping leaves: a tint too light for
the recipe's threshold between thin dark rims that its median removes. On tissue the ink holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box, Span, split
from gigagrad.images.pixels import Array, grid_parts
from gigagrad.images.synthetic.textures import GRAIN_MEAN, PERIOD, Bytes, Plane, Textures, as_bytes
from gigagrad.threads import SideThreads

STEP: Final = 16  # px per cell; a power of two keeps interpolated positions exact
_FAR: Final = 120  # px; distances to pen strokes are kept up to here
_SMALLEST_PIECE: Final = 120  # px; radius below which a fragment would be dust
_SHORTEST_LOBE: Final = 160  # px; the recipe's median sees nothing finer than about 56 px
_WARP_PX: Final = 48.0  # px; more would stretch cells visibly
_BLOCK_HEIGHT: Final = 256
_BLOCK_WIDTH: Final = 512
_PAINTERS: Final = 2  # threads; nearly all time is spent in OpenCV and NumPy, which release the GIL
_GLASS: Final = np.array([238, 236, 238], np.float64)  # empty glass as scanned: 237, beside 255 where nothing was
_ROUGH_PX: Final = np.float32(3.5)
_RIM_PX: Final = 5.0
_INKS: Final = ((0.955, 1.0, 1.0), (0.97, 1.0, 0.985), (0.975, 0.98, 1.0))  # cyan, green, violet; mean 0.985


class Painter:
    """Everything that decides the pixels of a slide of `height x width` pixels, from its seed and the textures.

    Blocks may be painted in any order, by several threads.

    Attributes (planes have shape `(ceil(height / STEP) + 2, ceil(width / STEP) + 2[, n])`):
        outline: float32, signed distance to the tissue's border in pixels, positive inside.
        epithelium, fat: uint8, share of these in the tissue (0..255); the rest is stroma.
        stain: uint8 pairs, local factor of hematoxylin and eosin (128 is 1), folds included.
        warp: float32 pairs, displacement in pixels (y, x) at which the textures are looked up.
        pen: int8, signed distance to pen strokes in pixels, positive inside, clipped to +-`_FAR`; None without pen.
        fields: int16 brightness offset of each scanned field of view, -1 where the scanner left pure white.
        field_px, field_origin: side of the fields and `(y, x)` of the first one's corner (not positive).
    """

    def __init__(self, height: int, width: int, seed: int, textures: Textures) -> None:
        self.height, self.width, self.textures = height, width, textures
        rng = np.random.default_rng(seed)
        shape = -(-height // STEP) + 2, -(-width // STEP) + 2
        self.outline = _outline(shape, height, width, rng)
        self.epithelium = as_bytes(128 + 900 * (_noise(shape, (2200, 700, 260, 90), rng) - 0.12))
        # Fat keeps away from the tissue's border and the slide's, so that it is enclosed and the recipe fills its
        # vacuoles.
        y, x = _positions(shape)
        to_edge = np.minimum(np.minimum(y, height - y)[:, None], np.minimum(x, width - x)[None])
        depth = np.clip((np.minimum(self.outline, to_edge) - 140) / 90, 0, 1)
        self.fat = as_bytes((128 + 2500 * (_noise(shape, (800, 250), rng) - 1.4)) * depth)
        folds = _folds(shape, rng) * np.clip(self.outline / 60, 0, 1)
        self.stain = np.empty((*shape, 2), np.uint8)
        for channel, strength in enumerate(rng.uniform(104, 128, 2)):
            self.stain[..., channel] = as_bytes(
                strength * (1 + 0.13 * _noise(shape, (4000, 1100, 300), rng)) * (1 + 0.85 * folds)
            )
        self.warp = np.stack([_WARP_PX * _noise(shape, (2600, 1200), rng) for _ in range(2)], axis=-1)
        self.fields, self.field_px, self.field_origin = _fields(self.outline, height, width, rng)
        self.pen = _pen(shape, self.outline, min(height, width), rng)
        hematoxylin = np.array([0.65, 0.70, 0.29]) * rng.normal(1, 0.04, 3) * 2.3
        eosin = np.array([0.14, 0.95, 0.42]) * rng.normal(1, 0.08, 3) * 1.5
        self._colours = _colour_table(hematoxylin, eosin)
        self._ink = np.array(_INKS[rng.integers(len(_INKS))])
        self._offset = rng.uniform(0, PERIOD), rng.uniform(0, PERIOD)
        self._turn = rng.uniform(0, 2 * math.pi)

    def rows(self) -> Iterator[Bytes]:
        """Paint the slide from top to bottom as strips `(h, W, 3)` that share their memory."""
        strip = np.empty((_BLOCK_HEIGHT, self.width, 3), np.uint8)
        with SideThreads(_PAINTERS, "gigagrad-paint") as pool:
            for y in split(self.height, _BLOCK_HEIGHT):

                def fill(x: Span, y: Span = y) -> None:
                    strip[: y.length, x.start : x.stop] = self.paint(Box.of(y, x))

                for task in [pool.submit(fill, x) for x in split(self.width, _BLOCK_WIDTH)]:
                    task.result()
                yield strip[: y.length]

    def mask_rows(self) -> Iterator[Bytes]:
        """Yield the exact tissue mask as strips `(h, W)` of 0 and 1."""
        for y in split(self.height, _BLOCK_HEIGHT):
            boxes = [Box.of(y, x) for x in split(self.width, _BLOCK_WIDTH)]
            yield np.concatenate([self.tissue(box) for box in boxes], axis=1)

    def tissue(self, box: Box) -> Bytes:
        """Return the exact mask of one block, `(h, w)` of 0 and 1."""
        return np.broadcast_to(np.asarray(self._depth(box)) > 0, box.shape).astype(np.uint8)

    def paint(self, box: Box) -> Bytes:
        """Paint the pixels of one block, `(h, w, 3)`; its corner must lie on the planes' cells."""
        fields = list(self._views(box))
        if all(level < 0 for level, _ in fields):
            pixels = np.full((*box.shape, 3), 255, np.uint8)
        else:
            index = self._stains(box).view(np.uint16)[..., 0]
            pixels = np.take(self._colours, index).view(np.uint8).reshape(*box.shape, 4)[..., :3]
            pixels = np.asarray(cv2.subtract(np.ascontiguousarray(pixels), _periodic(self.textures.grain, box)))
            for level, here in fields:  # each field of view has its brightness
                view = pixels[here.y0 : here.y1, here.x0 : here.x1]
                if level < 0:
                    view[:] = 255
                elif level > 0:
                    np.add(view, level.astype(np.uint8), out=view, where=view < 252)
        if self.pen is not None and _cells(self.pen, box).max() > -_FAR:
            pixels = self._mark(pixels, box)
        return pixels

    def _depth(self, box: Box) -> NDArray[np.float32] | float:
        """Measure the distance to the ragged border in px; one number where a block is all tissue or glass."""
        near = _cells(self.outline, box)
        margin = 6 * float(_ROUGH_PX)
        if near.min() > margin or near.max() < -margin:
            return float(near.flat[0])
        depth = upsample(self.outline, box)
        return np.asarray(depth + _ROUGH_PX * _periodic(self.textures.roughness, box), np.float32)

    def _stains(self, box: Box) -> Bytes:
        """Return the amounts of hematoxylin and eosin in every pixel, `(h, w, 2)`."""
        depth = self._depth(box)
        if isinstance(depth, float) and depth < 0:
            return np.zeros((*box.shape, 2), np.uint8)
        at = self._texture_coordinates(box)
        mixed = _fetch(self.textures.stroma, *at)
        for share, texture in (
            (self.epithelium, self.textures.epithelium),
            (self.fat, self.textures.fat),
        ):
            if _cells(share, box).any():
                weight = upsample(share, box).astype(np.float32) * np.float32(1 / 255)
                mixed = np.asarray(cv2.blendLinear(_fetch(texture, *at), mixed, weight, 1 - weight))
        stained = cv2.multiply(mixed, np.ascontiguousarray(upsample(self.stain, box)), scale=1 / 128)
        if not isinstance(depth, float):
            cover = np.clip(depth * 64 + 128, 0, 255).astype(np.uint8)
            stained = cv2.multiply(stained, cv2.merge([cover, cover]), scale=1 / 255)
        return np.asarray(stained, np.uint8)

    def _texture_coordinates(self, box: Box) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Find where in a texture each pixel looks, as `x` and `y` planes that begin near the first period.

        The textures lie turned by one angle on the whole slide. Their period is taken off the block's corner in
        double precision, so that far corners of large slides are as sharp as near ones.
        """
        cos, sin = math.cos(self._turn), math.sin(self._turn)
        y0 = (self._offset[0] + cos * box.y0 + sin * box.x0) % PERIOD
        x0 = (self._offset[1] + cos * box.x0 - sin * box.y0) % PERIOD
        down = np.arange(box.height, dtype=np.float32)[:, None]
        right = np.arange(box.width, dtype=np.float32)
        warp = upsample(self.warp, box)
        y = warp[..., 0] + (np.float32(y0) + np.float32(cos) * down) + np.float32(sin) * right
        x = warp[..., 1] + (np.float32(x0) - np.float32(sin) * down) + np.float32(cos) * right
        return x, y

    def _views(self, box: Box) -> Iterator[tuple[np.int16, Box]]:
        """Yield the offset of each field of view that meets `box`, and the part of `box` that it is."""
        side, (y, x) = self.field_px, self.field_origin
        for field, here, _ in grid_parts(box.shift(-y, -x), side, side):
            yield self.fields[field.y0 // side, field.x0 // side], here

    def _mark(self, pixels: Bytes, box: Box) -> Bytes:
        """Return the block with marker ink on it."""
        assert self.pen is not None
        pen = upsample(self.pen.astype(np.float32), box)
        depth = self._depth(box)
        held = np.clip(np.asarray(depth, np.float32) / 40, 0, 1)  # how much of the ink the surface holds
        body = np.clip(pen / 6, 0, 1) * (1 + 9 * held)
        # The rims of a stroke narrower than the recipe's median would add up to something it sees; so they fade.
        width = _pen_half_width(min(self.height, self.width))
        rim = np.exp(-((pen / _RIM_PX) ** 2)) * 14 * min(1.0, max(0.0, width / 36 - 0.8))
        absorbance = (body + rim)[..., None] * -np.log(self._ink).astype(np.float32)
        return np.asarray(np.rint(pixels * np.exp(-absorbance)), np.uint8)


def upsample(plane: Array, box: Box) -> Array:
    """Upsample a plane to full resolution inside `box` (its corner a multiple of `STEP`), bilinear: `(h, w[, n])`."""
    assert box.y0 % STEP == box.x0 % STEP == 0, box
    near = _cells(plane, box)
    size = near.shape[1] * STEP, near.shape[0] * STEP
    full = cv2.resize(np.ascontiguousarray(near), size, interpolation=cv2.INTER_LINEAR)
    return np.asarray(full)[STEP : STEP + box.height, STEP : STEP + box.width]


def _cells(plane: Array, box: Box) -> Array:
    """Return every cell of a plane that `upsample` would use for `box`."""
    return plane[box.y0 // STEP : -(-box.y1 // STEP) + 2, box.x0 // STEP : -(-box.x1 // STEP) + 2]


def _pen_half_width(short: int) -> float:
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
    y, x = _positions(shape)
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
    half_width = _pen_half_width(short)
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
    return np.asarray(np.clip(np.rint(signed), -_FAR, _FAR), np.int8)


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
        if _cells(outline, grown).max(initial=-np.inf) > 0:
            table[row, column] = rng.integers(0, 4)
    return table, side, origin


def _positions(shape: tuple[int, int]) -> tuple[Plane, Plane]:
    """Return the positions of cells along y and x, in px."""
    y, x = (np.arange(side, dtype=np.float32) * STEP - STEP / 2 for side in shape)
    return y, x


def _colour_table(hematoxylin: Array, eosin: Array) -> NDArray[np.uint32]:
    """Compute RGB (and an unused byte) for every pair of amounts, at index `hematoxylin + 256 * eosin`."""
    amount = np.arange(256) / 255
    absorbance = amount[:, None, None] * eosin + amount[None, :, None] * hematoxylin
    table = np.zeros((256, 256, 4), np.uint8)
    table[..., :3] = np.rint(np.minimum(_GLASS * np.exp(-absorbance) + GRAIN_MEAN, 255))
    return np.asarray(table.reshape(-1).view(np.uint32))


def _periodic(texture: Array, box: Box) -> Array:
    """Lay out a texture without end, and cut it to `box`."""
    rows = np.arange(box.y0, box.y1) % PERIOD
    columns = np.arange(box.x0, box.x1) % PERIOD
    return np.take(texture[rows], columns, axis=1)


def _fetch(texture: Bytes, x: NDArray[np.float32], y: NDArray[np.float32]) -> Bytes:
    fetched = cv2.remap(texture, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP)
    return np.asarray(fetched, np.uint8)
