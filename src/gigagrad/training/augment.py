"""Slides turned, mirrored and in other colours, drawn anew for each slide in each epoch, as views that copy no slide.

A transform of the square's symmetry group D4 is applied to the box of a read and to the few pixels that come back, so
the slide and its mask turn exactly alike. Colours differ from scanner to scanner and stain to stain: every pixel is
changed by itself, by numbers that are the slide's, so that it looks the same whatever the tiles.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box
from gigagrad.errors import ConfigError
from gigagrad.images import Image
from gigagrad.images.georeference import Georeference
from gigagrad.images.image import View
from gigagrad.images.pixels import Array, Pixels

D4_TRANSFORMS = 8

# Tags that keep the streams of random numbers apart. NumPy pads seeds with zeros, so none is 0.
_ORDER, _TRANSFORM, _COLOURS, _DRAWS = 1, 2, 3, 4

_STAINS = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
"""Optical densities of haematoxylin, eosin and DAB in red, green and blue (Ruifrok and Johnston, 2001)."""
_ROWS = 64
"""Converted at a time, so that few floats are held beside the pixels."""


class D4View(View):
    """`image` mirrored left to right if `transform >= 4`, then turned `transform % 4` quarters counter-clockwise
    (`np.rot90`).

    Transform 0 is the image as it is. Odd ones exchange height and width.
    """

    def __init__(self, image: Image, transform: int) -> None:
        if not 0 <= transform < D4_TRANSFORMS:
            raise ValueError(f"a transform is a number from 0 to {D4_TRANSFORMS - 1}, got {transform}")
        self._quarters, self._mirrored = transform % 4, transform >= 4
        if transform % 2:
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
        """Return the box of the underlying image that lands on `box` of this one."""
        height, width = self.height, self.width
        for _ in range(self._quarters):
            # One quarter back: row y of the turned image is column (height - 1 - y) of the image before.
            box = Box(box.x0, height - box.y1, box.x1, height - box.y0)
            height, width = width, height
        if self._mirrored:
            box = Box(box.y0, width - box.x1, box.y1, width - box.x0)
        return box


def order_of(seed: int, epoch: int, count: int) -> list[int]:
    """Draw the order of `count` slides in an epoch: a permutation that depends on nothing but these numbers."""
    return [int(index) for index in np.random.default_rng((seed, epoch, _ORDER)).permutation(count)]


def transform_of(seed: int, epoch: int, index: int) -> int:
    """Draw which of the eight transforms slide `index` gets in an epoch; depends on nothing but these numbers."""
    return int(np.random.default_rng((seed, epoch, _TRANSFORM, index)).integers(D4_TRANSFORMS))


def draws_of(seed: int, epoch: int, index: int) -> int:
    """Draw the seed of random operators for slide `index` in an epoch; depends on nothing but these numbers."""
    return int(np.random.default_rng((seed, epoch, _DRAWS, index)).integers(2**63))


@dataclass(frozen=True, slots=True)
class Jitter:
    """The range in which colours vary. Both are 0 to 1.

    `stain`: each stain's density becomes `a * density + b`, `a` within 1 +- `stain` and `b` within +- `stain`
    (Tellez et al., 2018). `colour`: intensities, in 0..1, become `gain * (x - 1/2) + 1/2 + shift` in each channel,
    `gain` within 1 +- `colour` and `shift` within +- `colour` / 2.
    """

    stain: float = 0.0
    colour: float = 0.0

    def of(self, slide: Image, seed: int, epoch: int, index: int) -> Image:
        """Show `slide` in the colours of slide `index` in an epoch. Closing the result leaves `slide` open.

        Raises `ConfigError` for a slide whose colours are not known.
        """
        if not self.stain and not self.colour:
            return slide
        if str(slide.dtype) != "uint8":
            raise ConfigError(f"colours can be varied of slides of uint8, and {slide.name} has {slide.dtype}")
        if self.stain and slide.channels != 3:
            raise ConfigError(f"stain_jitter needs red, green and blue, and {slide.name} has {slide.channels} channels")

        draw = np.random.default_rng((seed, epoch, _COLOURS, index))
        mixing, offset = np.eye(3), np.zeros(3)
        if self.stain:
            apart = np.linalg.inv(_STAINS)
            mixing = apart @ np.diag(draw.uniform(1 - self.stain, 1 + self.stain, 3)) @ _STAINS
            offset = draw.uniform(-self.stain, self.stain, 3) @ _STAINS
        gain = draw.uniform(1 - self.colour, 1 + self.colour, (slide.channels, 1))
        shift = draw.uniform(-self.colour / 2, self.colour / 2, (slide.channels, 1))
        levels = (np.arange(256) / 255 - 0.5) * gain + 0.5 + shift
        table = (255 * levels).round().clip(0, 255).astype(np.uint8)
        return Coloured(slide, table, mixing if self.stain else None, offset)


class Coloured(View):
    """A slide of uint8 in other colours. Use `Jitter.of`.

    Optical densities `d` become `d @ mixing + offset` where `mixing` is given; then every channel's bytes those in its
    row of `table_C256`. Outside the slide nothing changes.
    """

    def __init__(
        self,
        image: Image,
        table_C256: NDArray[np.uint8],
        mixing: NDArray[np.float64] | None,
        offset: NDArray[np.float64],
    ) -> None:
        super().__init__(image)
        self._table, self._mixing, self._offset = table_C256, mixing, offset.astype(np.float32)
        self._density = (-np.log(np.maximum(np.arange(256), 1) / 255)).astype(np.float32)

    def _read_inside(self, box: Box) -> Array:
        pixels = np.asarray(self._image.read(box))
        if self._mixing is not None:
            for row in range(0, box.height, _ROWS):
                rows = slice(row, row + _ROWS)
                pixels[:, rows] = self._restained(pixels[:, rows], self._mixing)
        for channel, levels in enumerate(self._table):
            pixels[channel] = levels[pixels[channel]]
        return pixels

    def _restained(self, pixels: Array, mixing: NDArray[np.float64]) -> Array:
        density = self._density[pixels]
        # Sums in a fixed order, pixel by pixel: a product of matrices would round by the shape of the tile.
        mixed = [
            sum((density[k] * np.float32(mixing[k, channel]) for k in range(3)), self._offset[channel])
            for channel in range(3)
        ]
        light: Array = (255 * np.exp(-np.stack(mixed))).round().clip(0, 255).astype(np.uint8)
        return light
