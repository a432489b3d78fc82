"""Cut images into the tiles that a page asks for: of the levels that a file has, and of coarser ones made of them.

A level that no file has is decoded from a part of what a compression stores (JPEG 2000), or made of the level above
it: means of 2 x 2 px of colours, every second pixel of class ids.
Coarse tiles of a file without a pyramid are kept, so that it is decoded once for all views of it; what is held of each
level is bounded, and each is a quarter of the one above it.
"""

from __future__ import annotations

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box, Span
from gigagrad.images import Image
from gigagrad.images.pixels import CACHE_BYTES, Array, TileCache, grid_parts
from gigagrad.images.views import Resampled
from gigagrad.masks import AnnotationMask, ClassTable, Outlines
from gigagrad.masks.classes import IGNORED

TILE: Final = 512
"""Side of a tile in pixels: few requests for a screen, and few pixels that nobody sees."""
Ids = NDArray[np.uint8]
Shapes = tuple[tuple[int, int], ...]

_KEPT_BYTES: Final = 48 * 2**20
"""The most that made tiles of one level take: those of an eighth of the size of a gigapixel in colours do."""
_WORTH_KEEPING: Final = 4
"""From this many pixels a side on that a tile is made of, it is kept; finer ones are made again."""
_NEXT_LEVEL: Final = 2.9
"""From this ratio on to the next level of a file, one is made between them."""


class Pyramid(ABC):
    """A picture at several sizes. `shapes` are `(height, width)` of each level, the largest first."""

    shapes: Shapes

    @abstractmethod
    def read(self, level: int, box: Box) -> Array:
        """Read the pixels of a box of a level, `(C, box.height, box.width)`; thread-safe."""

    def level_of(self, side: int) -> int:
        """Return the smallest level that is `side` pixels high or wide at least, the first where none is."""
        return max(index for index, shape in enumerate(self.shapes) if not index or max(shape) >= side)

    def tile(self, level: int, column: int, row: int, margin: int = 0) -> Box | None:
        """Return the box of a tile with so many pixels around it, None for a tile that there is not."""
        if not (0 <= level < len(self.shapes) and column >= 0 and row >= 0):
            return None
        box = Box(row * TILE, column * TILE, (row + 1) * TILE, (column + 1) * TILE).clamp(*self.shapes[level])
        return None if box.empty else Box(box.y0 - margin, box.x0 - margin, box.y1 + margin, box.x1 + margin)


class ImagePyramid(Pyramid):
    """The levels of an image, and those between and below them that it lacks.

    `ids`: its pixels are class ids, of which none is between two others. Levels of a file are opened when they are
    first asked for; closing this closes them, not the image.
    """

    def __init__(self, image: Image, *, ids: bool = False, coarsest: int | None = None) -> None:
        """Make `coarsest` the last level, in halvings of the first one; None goes on until one tile holds it all."""
        self._image, self._ids = image, ids
        self._stored: list[tuple[int, int]] = []
        """The level of the file that each level comes from, and how often it is halved."""
        self._opened: dict[int, Image | None] = {}
        self._lock = threading.RLock()
        shapes = self._shapes()
        if coarsest is not None:
            shapes = shapes[: coarsest + 1]
        self.shapes = tuple(shapes)
        self._made = [TileCache(_KEPT_BYTES) for _ in shapes]

    def _shapes(self) -> list[tuple[int, int]]:
        first = next(i for i, level in enumerate(self._image.levels) if level.shape == self._image.shape[1:])
        found: list[tuple[int, int]] = []
        following = list(enumerate(self._image.levels))[first:]
        while True:
            height, width = found[-1] if found else (0, 0)
            while following and found and max(following[0][1].shape) * 1.1 >= max(height, width):
                following.pop(0)  # of the same size, or larger again
            ratio = max(height, width) / max(following[0][1].shape) if following else 0
            if following and (not found or ratio < _NEXT_LEVEL):
                index, level = following.pop(0)
                found.append(level.shape)
                self._stored.append((index, 0))
            elif max(height, width) > TILE:
                found.append((-(-height // 2), -(-width // 2)))
                index, halvings = self._stored[-1]
                self._stored.append((index, halvings + 1))
            else:
                return found

    def read(self, level: int, box: Box) -> Array:
        source = self._source(level)
        if source is not None:
            return np.asarray(source.read(box))
        height, width = self.shapes[level]
        inside = box.clamp(height, width)
        if inside != box or box.height > TILE or box.width > TILE or (box.y0 % TILE or box.x0 % TILE):
            return self._pieced(level, box)
        if 1 << self._stored[level][1] < _WORTH_KEEPING:
            return self._halved(level, box)
        return self._made[level].get((level, box), lambda key: self._halved(*key))

    def _pieced(self, level: int, box: Box) -> Array:
        """Put a box together from tiles; what lies outside is 0 of ids, and the image's fill otherwise."""
        canvas = np.full((self._image.channels, *box.shape), 0 if self._ids else self._image.fill, self._dtype)
        inside = canvas[:, max(0, -box.y0) :, max(0, -box.x0) :]
        for tile, to, of in grid_parts(box.clamp(*self.shapes[level]), TILE, TILE):
            pixels = self.read(level, tile.clamp(*self.shapes[level]))
            inside[:, to.y0 : to.y1, to.x0 : to.x1] = pixels[:, of.y0 : of.y1, of.x0 : of.x1]
        return canvas

    def _halved(self, level: int, box: Box) -> Array:
        """Make a tile of four of the level above."""
        finer = Box(2 * box.y0, 2 * box.x0, 2 * box.y1, 2 * box.x1).clamp(*self.shapes[level - 1])
        pixels = self.read(level - 1, finer)
        return pixels[:, ::2, ::2] if self._ids else _means(pixels)

    @property
    def _dtype(self) -> np.dtype[Any]:
        assert isinstance(self._image.dtype, np.dtype)
        return self._image.dtype

    def _source(self, level: int) -> Image | None:
        """Return the image that is read for a level; None for a level that is made of the one before it."""
        stored, halvings = self._stored[level]
        if not halvings and self._image.levels[stored].shape == self._image.shape[1:]:
            return self._image
        with self._lock:
            if level not in self._opened:
                self._opened[level] = self._reduced(level) if halvings else self._image.at_level(stored)
            return self._opened[level]

    def _reduced(self, level: int) -> Image | None:
        """Open what a compression stores of a stored level at this size; None where it stores nothing, and where the
        level before stays in memory once it was read."""
        halvings = self._stored[level][1]
        height, width = self.shapes[level - 1]
        held = height * width * self._image.channels * self._dtype.itemsize <= CACHE_BYTES
        of = None if self._ids or (held and halvings > 1) else self._source(level - halvings)
        return None if of is None else of.halved(halvings)

    def close(self) -> None:
        with self._lock:
            while self._opened:
                if (image := self._opened.popitem()[1]) is not None:
                    image.close()


class OutlinePyramid(Pyramid):
    """Class ids of outlines over a slide, painted at every size, so that thin regions are seen from afar, too."""

    def __init__(
        self, outlines: Outlines, table: ClassTable, slide: Image, shapes: tuple[tuple[int, int], ...]
    ) -> None:
        """Take outlines in pixels of the slide's level 0."""
        self.shapes = shapes
        self._outlines, self._table, self._slide = outlines, table, slide
        self._painted: dict[int, AnnotationMask] = {}
        self._lock = threading.Lock()

    def read(self, level: int, box: Box) -> Array:
        with self._lock:
            mask = self._painted.get(level) or self._painted.setdefault(level, self._at(*self.shapes[level]))
        return np.asarray(mask.read(box))

    def _at(self, height: int, width: int) -> AnnotationMask:
        full = self._slide.levels[0].shape
        points = self._outlines.points * (width / full[1], height / full[0])
        scaled = dataclasses.replace(self._outlines, points=points)
        return AnnotationMask(scaled, self._table, Resampled(self._slide, height, width), name=self._slide.name)


class MadePyramid(Pyramid):
    """Pixels made of those of several pyramids, at the sizes of the first one: of the others the nearest pixels."""

    def __init__(self, make: Callable[..., Array], first: Pyramid, *others: Pyramid) -> None:
        self._make, self._first, self._others = make, first, others
        self.shapes = first.shapes

    def read(self, level: int, box: Box) -> Array:
        shape = self.shapes[level]
        return self._make(self._first.read(level, box), *(nearest(other, shape, box) for other in self._others))


class PlacedPyramid(Pyramid):
    """Class ids of a `part` of a slide on the pixels of a picture of what is `shown` of it, at its `shapes`: the
    nearest ones; 0 outside of the part. Both are boxes in pixels of the slide's level 0.
    """

    def __init__(self, ids: Pyramid, part: Box, shown: Box, shapes: Shapes) -> None:
        self.shapes = shapes
        self._ids, self._part, self._shown = ids, part, shown

    def read(self, level: int, box: Box) -> Array:
        shape, (part, shown) = self.shapes[level], (self._part, self._shown)
        source = self._ids.level_of(max(shape) * max(part.shape) // max(shown.shape))
        height, width = self._ids.shapes[source]
        rows = _placed(box.y, shape[0], shown.y, part.y, height)
        columns = _placed(box.x, shape[1], shown.x, part.x, width)
        down, across = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)
        if not (down.any() and across.any()):
            return np.zeros((1, *box.shape), np.uint8)
        rows, columns = rows.clip(0, height - 1), columns.clip(0, width - 1)
        read = Box(int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1)
        ids = self._ids.read(source, read)[:, rows[:, None] - read.y0, columns - read.x0]
        return np.where(down[:, None] & across, ids, 0)


def _placed(span: Span, size: int, shown: Span, part: Span, source: int) -> NDArray[np.int64]:
    """Find the pixels of an axis of `source` pixels, which show `part`, at the centres of `span` of one of `size`
    pixels, which show `shown`."""
    twice = 2 * np.arange(span.start, span.stop, dtype=np.int64) + 1
    return (twice * shown.length + 2 * (shown.start - part.start) * size) * source // (2 * size * part.length)


def nearest(pyramid: Pyramid, shape: tuple[int, int], box: Box) -> Array:
    """Read a box of a picture as if it were `shape` `(height, width)` large, by its nearest pixels; 0 outside of it."""
    level = pyramid.level_of(max(shape))
    height, width = pyramid.shapes[level]
    if (height, width) == shape:
        return pyramid.read(level, box)
    inside = box.clamp(*shape)
    rows = (2 * np.arange(inside.y0, inside.y1) + 1) * height // (2 * shape[0])
    columns = (2 * np.arange(inside.x0, inside.x1) + 1) * width // (2 * shape[1])
    source = Box(int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1)
    read = pyramid.read(level, source)[:, rows[:, None] - source.y0, columns[None] - source.x0]
    return np.pad(read, [(0, 0), (inside.y0 - box.y0, box.y1 - inside.y1), (inside.x0 - box.x0, box.x1 - inside.x1)])


AGREED, MISSED, FALSE, OTHER_CLASS = 1, 2, 3, 4
"""Ids of what a prediction is beside a label: right, background where a class is, a class where none is, another."""


def errors(predicted: Array, label: Array) -> Ids:
    """Compare class ids `(1, h, w)` pixel by pixel; 0 where both are background, or the label is ignored."""
    neither = ((predicted == 0) & (label == 0)) | (predicted == IGNORED) | (label == IGNORED)
    both = np.where(predicted == label, AGREED, OTHER_CLASS)
    one = np.where(label == 0, FALSE, MISSED)
    return np.where(neither, 0, np.where((predicted == 0) | (label == 0), one, both)).astype(np.uint8)


def _means(pixels: Array) -> Array:
    """Average 2 x 2 px, at odd edges those that there are; integers are rounded, halves up."""
    if pixels.dtype == np.uint8 and len(pixels) in (1, 3):
        from PIL import Image as Pillow

        pixels_HWC = np.ascontiguousarray(pixels.transpose(1, 2, 0))
        picture = Pillow.fromarray(pixels_HWC[..., 0] if len(pixels) == 1 else pixels_HWC)
        small = np.asarray(picture.reduce(2))
        return small[None] if small.ndim == 2 else small.transpose(2, 0, 1)
    odd = [(0, 0), *((0, size % 2) for size in pixels.shape[1:])]
    if any(after for _, after in odd):
        pixels = np.pad(pixels, odd, mode="edge")
    exact = np.float64 if pixels.dtype.kind == "f" else np.int64
    rows = np.add(pixels[:, ::2], pixels[:, 1::2], dtype=exact)
    sums = rows[:, :, ::2] + rows[:, :, 1::2]
    means: Array = (sums / 4 if pixels.dtype.kind == "f" else (sums + 2) // 4).astype(pixels.dtype)
    return means
