"""The eight ways to lay a slide on the table: quarter turns, and their mirror images, as views that move no pixels.

A turn is applied to the box of a read and to the few pixels that come back, so a turned gigapixel slide costs nothing
to make, and the slide and its mask turn exactly alike.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gigagrad.boxes import Box
from gigagrad.images import Image
from gigagrad.images.georeference import Georeference
from gigagrad.images.image import Pixels, View

TURNS = 8

# Tags that keep the streams of random numbers apart; 3 is that of colours. NumPy pads seeds with zeros, so none is 0.
_ORDER, _TURN, _DRAWS = 1, 2, 4


class Turned(View):
    """`image` mirrored left to right if `turn >= 4`, then turned `turn % 4` quarters counter-clockwise (`np.rot90`).

    Turn 0 is the image as it is. Odd turns exchange height and width.
    """

    def __init__(self, image: Image, turn: int) -> None:
        if not 0 <= turn < TURNS:
            raise ValueError(f"a turn is a number from 0 to {TURNS - 1}, got {turn}")
        self._quarters, self._mirrored = turn % 4, turn >= 4
        if turn % 2:
            channels, height, width = image.shape
            levels = tuple(dataclasses.replace(level, shape=level.shape[::-1]) for level in image.levels)
            super().__init__(image, (channels, width, height), levels, georeference=self._place(image), bounds=None)
        else:
            super().__init__(image, georeference=self._place(image), bounds=None)

    def _place(self, image: Image) -> Georeference | None:
        place, (height, width) = image.georeference, image.shape[1:]
        if place is not None and self._mirrored:
            place = place.of_pixels((-1, 0, width, 0, 1, 0))
        for _ in range(self._quarters):
            # As in `source_box`, from the image towards this one.
            place = place and place.of_pixels((0, -1, width, 1, 0, 0))
            height, width = width, height
        return place

    def _read_inside(self, box: Box) -> Pixels:
        pixels = self._image.read(self.source_box(box))
        if not isinstance(pixels, np.ndarray):
            flipped = pixels.flip(-1) if self._mirrored else pixels
            return flipped.rot90(self._quarters, (-2, -1))
        if self._mirrored:
            pixels = pixels[..., ::-1]
        turned = np.rot90(pixels, self._quarters, axes=(-2, -1))
        # Torch takes no negative strides; order "K" keeps channels last where the reader gave them so.
        return turned.copy(order="K")

    def source_box(self, box: Box) -> Box:
        """The box of the underlying image that lands on `box` of this one."""
        height, width = self.height, self.width
        for _ in range(self._quarters):
            # One quarter back: row y of the turned image is column (height - 1 - y) of the image before.
            box = Box(box.x0, height - box.y1, box.x1, height - box.y0)
            height, width = width, height
        if self._mirrored:
            box = Box(box.y0, width - box.x1, box.y1, width - box.x0)
        return box


def order_of(seed: int, epoch: int, count: int) -> list[int]:
    """The order of `count` slides in an epoch: a permutation that depends on nothing but these numbers."""
    return [int(index) for index in np.random.default_rng((seed, epoch, _ORDER)).permutation(count)]


def turn_of(seed: int, epoch: int, index: int) -> int:
    """Which of the eight turns slide `index` gets in an epoch; depends on nothing but these numbers."""
    return int(np.random.default_rng((seed, epoch, _TURN, index)).integers(TURNS))


def draws_of(seed: int, epoch: int, index: int) -> int:
    """The seed of what random operators draw for slide `index` in an epoch; depends on nothing but these numbers."""
    return int(np.random.default_rng((seed, epoch, _DRAWS, index)).integers(2**63))
