"""Colours that differ from scanner to scanner and stain to stain, drawn anew for each slide in each epoch.

Every pixel is changed by itself, by numbers that are the slide's: whatever the tiles, the slide looks the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box
from gigagrad.errors import ConfigError
from gigagrad.images import Image
from gigagrad.images.image import Array, View

_STAINS = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
"""Optical densities of haematoxylin, eosin and DAB in red, green and blue (Ruifrok and Johnston, 2001)."""
_STREAM = 3
"""Keeps these random numbers apart from those of `augment`."""
_ROWS = 64
"""Converted at a time, so that few floats are held beside the pixels."""


@dataclass(frozen=True, slots=True)
class Jitter:
    """How far colours go. Both are 0 to 1.

    `stain`: each stain's density becomes `a * density + b`, `a` within 1 +- `stain` and `b` within +- `stain`
    (Tellez et al., 2018). `colour`: intensities, in 0..1, become `gain * (x - 1/2) + 1/2 + shift` in each channel,
    `gain` within 1 +- `colour` and `shift` within +- `colour` / 2.
    """

    stain: float = 0.0
    colour: float = 0.0

    def of(self, slide: Image, seed: int, epoch: int, index: int) -> Image:
        """`slide` in the colours of slide `index` in an epoch. Closing the result leaves `slide` open.

        Raises `ConfigError` for a slide whose colours are not known.
        """
        if not self.stain and not self.colour:
            return slide
        if str(slide.dtype) != "uint8":
            raise ConfigError(f"colours can be varied of slides of uint8, and {slide.name} has {slide.dtype}")
        if self.stain and slide.channels != 3:
            raise ConfigError(f"stain_jitter needs red, green and blue, and {slide.name} has {slide.channels} channels")

        draw = np.random.default_rng((seed, epoch, _STREAM, index))
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
