"""Paint a synthetic slide block by block: textures bent and blended by the layout, stained, scanned and marked.

Colour follows the Beer-Lambert law with one absorbance vector per stain (Ruifrok and Johnston, Anal Quant Cytol Histol
23, 2001): transmitted light is `exp(-(h * hematoxylin + e * eosin))`, looked up in a table of all 256 x 256 pairs.

The exact tissue mask is the outline itself. Vacuoles, lumens and slits inside it count as tissue (the paper's recipe
fills them); marker ink does not make glass into tissue. Ink on bare glass is what wiping leaves: a tint too light for
the recipe's threshold between thin dark rims that its median removes. On tissue the ink holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box, Span, split
from gigagrad.images.pixels import Array, grid_parts
from gigagrad.images.synthetic.layout import FAR, Layout, cells, make_layout, pen_half_width, upsample
from gigagrad.images.synthetic.textures import GRAIN_MEAN, PERIOD, Bytes, Textures
from gigagrad.threads import SideThreads

BLOCK_HEIGHT: Final = 256
BLOCK_WIDTH: Final = 512
_PAINTERS: Final = 2  # threads; nearly all time is spent in OpenCV and NumPy, which release the GIL
_GLASS: Final = np.array([238, 236, 238], np.float64)  # empty glass as scanned: 237, beside 255 where nothing was
_ROUGH_PX: Final = np.float32(3.5)
_RIM_PX: Final = 5.0
_INKS: Final = ((0.955, 1.0, 1.0), (0.97, 1.0, 0.985), (0.975, 0.98, 1.0))  # cyan, green, violet; mean 0.985


@dataclass(frozen=True, slots=True)
class Painter:
    """Everything that decides the pixels of one slide. Blocks may be painted in any order, by several threads."""

    layout: Layout
    textures: Textures
    colours: NDArray[np.uint32]
    ink: Array
    offset: tuple[float, float]
    turn: float

    def rows(self) -> Iterator[Bytes]:
        """Paint the slide from top to bottom as strips `(h, W, 3)` that share their memory."""
        strip = np.empty((BLOCK_HEIGHT, self.layout.width, 3), np.uint8)
        with SideThreads(_PAINTERS, "gigagrad-paint") as pool:
            for y in split(self.layout.height, BLOCK_HEIGHT):

                def fill(x: Span, y: Span = y) -> None:
                    strip[: y.length, x.start : x.stop] = self.paint(Box.of(y, x))

                for task in [pool.submit(fill, x) for x in split(self.layout.width, BLOCK_WIDTH)]:
                    task.result()
                yield strip[: y.length]

    def mask_rows(self) -> Iterator[Bytes]:
        """Yield the exact tissue mask as strips `(h, W)` of 0 and 1."""
        for y in split(self.layout.height, BLOCK_HEIGHT):
            boxes = [Box.of(y, x) for x in split(self.layout.width, BLOCK_WIDTH)]
            yield np.concatenate([self.tissue(box) for box in boxes], axis=1)

    def tissue(self, box: Box) -> Bytes:
        """Return the exact mask of one block, `(h, w)` of 0 and 1."""
        return np.broadcast_to(np.asarray(self._depth(box)) > 0, box.shape).astype(np.uint8)

    def paint(self, box: Box) -> Bytes:
        """Paint the pixels of one block, `(h, w, 3)`; its corner must lie on the layout's cells."""
        fields = list(self._fields(box))
        if all(level < 0 for level, _ in fields):
            pixels = np.full((*box.shape, 3), 255, np.uint8)
        else:
            index = self._stains(box).view(np.uint16)[..., 0]
            pixels = np.take(self.colours, index).view(np.uint8).reshape(*box.shape, 4)[..., :3]
            pixels = np.asarray(cv2.subtract(np.ascontiguousarray(pixels), _periodic(self.textures.grain, box)))
            _stitch(pixels, fields)
        if self.layout.pen is not None and cells(self.layout.pen, box).max() > -FAR:
            pixels = self._mark(pixels, box)
        return pixels

    def _depth(self, box: Box) -> NDArray[np.float32] | float:
        """Measure the distance to the ragged border in px; one number where a block is all tissue or glass."""
        near = cells(self.layout.outline, box)
        margin = 6 * float(_ROUGH_PX)
        if near.min() > margin or near.max() < -margin:
            return float(near.flat[0])
        depth = upsample(self.layout.outline, box)
        return np.asarray(depth + _ROUGH_PX * _periodic(self.textures.roughness, box), np.float32)

    def _stains(self, box: Box) -> Bytes:
        """Return the amounts of hematoxylin and eosin in every pixel, `(h, w, 2)`."""
        depth = self._depth(box)
        if isinstance(depth, float) and depth < 0:
            return np.zeros((*box.shape, 2), np.uint8)
        at = self._texture_coordinates(box)
        mixed = _fetch(self.textures.stroma, *at)
        for share, texture in (
            (self.layout.epithelium, self.textures.epithelium),
            (self.layout.fat, self.textures.fat),
        ):
            if cells(share, box).any():
                weight = upsample(share, box).astype(np.float32) * np.float32(1 / 255)
                mixed = np.asarray(cv2.blendLinear(_fetch(texture, *at), mixed, weight, 1 - weight))
        stained = cv2.multiply(mixed, np.ascontiguousarray(upsample(self.layout.stain, box)), scale=1 / 128)
        if not isinstance(depth, float):
            cover = np.clip(depth * 64 + 128, 0, 255).astype(np.uint8)
            stained = cv2.multiply(stained, cv2.merge([cover, cover]), scale=1 / 255)
        return np.asarray(stained, np.uint8)

    def _texture_coordinates(self, box: Box) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Find where in a texture each pixel looks, as `x` and `y` planes that begin near the first period.

        The textures lie turned by one angle on the whole slide. Their period is taken off the block's corner in
        double precision, so that far corners of large slides are as sharp as near ones.
        """
        cos, sin = math.cos(self.turn), math.sin(self.turn)
        y0 = (self.offset[0] + cos * box.y0 + sin * box.x0) % PERIOD
        x0 = (self.offset[1] + cos * box.x0 - sin * box.y0) % PERIOD
        down = np.arange(box.height, dtype=np.float32)[:, None]
        right = np.arange(box.width, dtype=np.float32)
        warp = upsample(self.layout.warp, box)
        y = warp[..., 0] + (np.float32(y0) + np.float32(cos) * down) + np.float32(sin) * right
        x = warp[..., 1] + (np.float32(x0) - np.float32(sin) * down) + np.float32(cos) * right
        return x, y

    def _fields(self, box: Box) -> Iterator[tuple[np.int16, Box]]:
        """Yield the layout's offset of each field of view that meets `box`, and the part of `box` that it is."""
        side, (y, x) = self.layout.field_px, self.layout.field_origin
        for field, here, _ in grid_parts(box.shift(-y, -x), side, side):
            yield self.layout.fields[field.y0 // side, field.x0 // side], here

    def _mark(self, pixels: Bytes, box: Box) -> Bytes:
        """Return the block with marker ink on it."""
        assert self.layout.pen is not None
        pen = upsample(self.layout.pen.astype(np.float32), box)
        depth = self._depth(box)
        held = np.clip(np.asarray(depth, np.float32) / 40, 0, 1)  # how much of the ink the surface holds
        body = np.clip(pen / 6, 0, 1) * (1 + 9 * held)
        # The rims of a stroke narrower than the recipe's median would add up to something it sees; so they fade.
        width = pen_half_width(min(self.layout.height, self.layout.width))
        rim = np.exp(-((pen / _RIM_PX) ** 2)) * 14 * min(1.0, max(0.0, width / 36 - 0.8))
        absorbance = (body + rim)[..., None] * -np.log(self.ink).astype(np.float32)
        return np.asarray(np.rint(pixels * np.exp(-absorbance)), np.uint8)


def make_painter(height: int, width: int, seed: int, textures: Textures) -> Painter:
    """Decide everything about a slide of `height x width` pixels from its seed."""
    rng = np.random.default_rng(seed)
    layout = make_layout(height, width, rng)
    hematoxylin = np.array([0.65, 0.70, 0.29]) * rng.normal(1, 0.04, 3) * 2.3
    eosin = np.array([0.14, 0.95, 0.42]) * rng.normal(1, 0.08, 3) * 1.5
    return Painter(
        layout=layout,
        textures=textures,
        colours=_colour_table(hematoxylin, eosin),
        ink=np.array(_INKS[rng.integers(len(_INKS))]),
        offset=(rng.uniform(0, PERIOD), rng.uniform(0, PERIOD)),
        turn=rng.uniform(0, 2 * math.pi),
    )


def _colour_table(hematoxylin: Array, eosin: Array) -> NDArray[np.uint32]:
    """Compute RGB (and an unused byte) for every pair of amounts, at index `hematoxylin + 256 * eosin`."""
    amount = np.arange(256) / 255
    absorbance = amount[:, None, None] * eosin + amount[None, :, None] * hematoxylin
    table = np.zeros((256, 256, 4), np.uint8)
    table[..., :3] = np.rint(np.minimum(_GLASS * np.exp(-absorbance) + GRAIN_MEAN, 255))
    return np.asarray(table.reshape(-1).view(np.uint32))


def _stitch(pixels: Bytes, fields: Iterable[tuple[np.int16, Box]]) -> None:
    """Give each field of view its brightness, and pure white where the scanner never was."""
    for level, here in fields:
        view = pixels[here.y0 : here.y1, here.x0 : here.x1]
        if level < 0:
            view[:] = 255
        elif level > 0:
            np.add(view, level.astype(np.uint8), out=view, where=view < 252)


def _periodic(texture: Array, box: Box) -> Array:
    """Lay out a texture without end, and cut it to `box`."""
    rows = np.arange(box.y0, box.y1) % PERIOD
    columns = np.arange(box.x0, box.x1) % PERIOD
    return np.take(texture[rows], columns, axis=1)


def _fetch(texture: Bytes, x: NDArray[np.float32], y: NDArray[np.float32]) -> Bytes:
    fetched = cv2.remap(texture, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP)
    return np.asarray(fetched, np.uint8)
