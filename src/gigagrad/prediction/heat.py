"""Maps of how much each place of a slide counts: sums over small blocks as a pyramid, and a picture with a legend."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gigagrad.boxes import Box
from gigagrad.execution.assemble import assemble
from gigagrad.execution.sinks import OutputField, Pieces, Sink
from gigagrad.images import Image, thumbnail

_LOW, _HIGH = 50, 99.5
"""The percentiles of a map's pixels between which colours differ: most of a slide matters little, and few pixels are
far above the rest."""
_CELLS = 200
"""Along the longer side of a picture, the map's means that are shown: single blocks are noise to the eye."""
_COLOURS = (
    *((0, 0, 4), (33, 12, 74), (87, 16, 110), (138, 34, 106), (188, 55, 84)),
    *((228, 90, 49), (249, 142, 9), (249, 203, 53), (252, 255, 164)),
)
"""Inferno (Smith and van der Walt, 2015) at nine places; lightness grows steadily, also for the colour-blind."""
_FADED = 0.55
"""The share of white in the slide, so that colours mean the map and nothing else."""
_INK = (20, 20, 24)
_Picture = NDArray[np.uint8]


class Blocks(Sink):
    """A pyramidal TIFF of float32 whose pixels are sums over blocks of `side x side` pixels, what is left of them at
    the far borders. `values` makes `(h, w)` of a crop `(1, C, h, w)`; `options` are `write_pyramid`'s.

    Raises WriteError.
    """

    def __init__(self, path: Path, side: int, values: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> None:
        self._path, self._side, self._values, self._options = path, side, values, options
        self.kind = f"sums over blocks of {side} px"

    def held_bytes(self, tile_height: int, shape: tuple[int, ...]) -> int:
        from gigagrad.images.write import pyramid_bytes

        (height, width), dtype = shape[-2:], np.dtype(np.float32)
        # What `values` makes of a strip, and one that is assembled while the one before it is summed up.
        strips = (shape[1] + 3) * min(tile_height, height) * width * dtype.itemsize
        return strips + pyramid_bytes(self._path, (*_blocks((height, width), self._side), 1), dtype)

    def take(self, pieces: Pieces, field: OutputField) -> Path:
        from gigagrad.images.write import write_pyramid

        height, width = field.shape[-2:]
        values = ((box, self._values(crop).to("cpu", torch.float32).numpy()) for box, crop in pieces)
        rows = block_rows(assemble(values, height, width), height, self._side)
        shape = (*_blocks((height, width), self._side), 1)
        return write_pyramid(self._path, rows, shape=shape, dtype=np.float32, nearest=False, **self._options)


def _blocks(size: tuple[int, ...], side: int) -> tuple[int, int]:
    return -(-size[0] // side), -(-size[1] // side)


def block_rows(strips: Iterable[NDArray[Any]], height: int, side: int) -> Iterator[NDArray[np.float32]]:
    """Yield sums over blocks as rows `(n, columns)`, of strips `(h, W)` of any height that are `height` px high
    together.
    """
    begun: NDArray[np.float64] | None = None
    y = 0
    for strip in strips:
        across = np.add.reduceat(strip, np.arange(0, strip.shape[1], side), axis=1, dtype=np.float64)
        starts = [0, *range(side - y % side, len(strip), side)]
        sums = np.add.reduceat(across, starts, axis=0)
        if begun is not None:
            sums[0] += begun
        y += len(strip)
        whole = y % side == 0 or y == height
        begun = None if whole else sums[-1]
        if whole or len(sums) > 1:
            yield (sums if whole else sums[:-1]).astype(np.float32)


def draw_heat(slide: Image, heat: Image, title: str, max_side: int = 2000) -> _Picture:
    """Draw, as `(h, w, 3)` uint8, the slide in pale grey at most `max_side` px long, the upper half of the map's values
    over it in colours that grow stronger with them, and a legend with `title` below. Both are read piece by piece; the
    map is averaged to 200 cells along its longer side.
    """
    grey = thumbnail(slide, max_side).mean(2, keepdims=True)
    values = _averaged(heat)
    low, high = np.percentile(values, (_LOW, _HIGH))
    share = np.clip((values - low) / ((high - low) or (values.max() - low) or 1), 0, 1)
    height, width = grey.shape[:2]
    share = np.clip(_resized(share, (width, height), smooth=True), 0, 1)
    picture = _blended(grey + (255 - grey) * _FADED, share)
    return np.concatenate([picture, _legend(title, width)])


def _blended(grey: NDArray[np.float64], share: NDArray[Any]) -> _Picture:
    """Blend colours of shares `(h, w)` over a picture `(h, w, 1)`; the smaller the share, the less of them."""
    strength = np.sqrt(share)[..., None]  # so that half the value is well seen
    stops = np.linspace(0, 1, len(_COLOURS))
    colours = np.stack([np.interp(share, stops, channel) for channel in zip(*_COLOURS, strict=True)], -1)
    blended: _Picture = np.rint(grey * (1 - strength) + colours * strength).astype(np.uint8)
    return blended


def _averaged(heat: Image) -> NDArray[np.float32]:
    """Read a map at most `_CELLS` px high and wide, `(h, w)`, from its smallest level that is as large."""
    enough = [index for index, level in enumerate(heat.levels) if max(level.shape) >= _CELLS]
    with heat.at_level(enough[-1] if enough else 0) as level:
        values = np.asarray(level.read(Box.whole(level.height, level.width)))[0].astype(np.float32)
    scale = min(1.0, _CELLS / max(values.shape))
    height, width = (max(1, round(side * scale)) for side in values.shape)
    return _resized(values, (width, height), smooth=False)


def _resized(values: NDArray[np.float32], size: tuple[int, int], *, smooth: bool) -> NDArray[np.float32]:
    """Resize values by linear interpolation, or by averaging areas."""
    from PIL import Image as Pillow

    how = Pillow.Resampling.BILINEAR if smooth else Pillow.Resampling.BOX
    return np.asarray(Pillow.fromarray(values.astype(np.float32)).resize(size, how))


def _legend(title: str, width: int) -> _Picture:
    """Draw a white band with the colours from 0 to the percentile, and the title in as many lines as it takes."""
    from PIL import Image as Pillow
    from PIL import ImageDraw, ImageFont

    size = 10 + math.ceil(min(width, 2000) / 200)
    font, line = ImageFont.load_default(size), round(size * 2.2)
    most = max(8, int((width - 2 * size) / (font.getlength(title) / max(1, len(title)))))
    texts = ["median", f"{_HIGH:g}th percentile", *textwrap.wrap(title, most)]
    begin = size + math.ceil(font.getlength(texts[0])) + size // 2
    bar = max(size, min(size * 12, width - begin - 2 * size - math.ceil(font.getlength(texts[1]))))
    band = Pillow.new("RGB", (width, line * (len(texts) - 1)), "white")
    shown = _blended(np.full((size, bar, 1), 255.0), np.linspace(0, 1, bar)[None])
    band.paste(Pillow.fromarray(shown), (begin, (line - size) // 2))
    pen = ImageDraw.Draw(band)
    places = [(size, line / 2), (begin + bar + size // 2, line / 2)]
    places += [(size, line * (number + 0.4)) for number in range(1, len(texts) - 1)]
    for place, text in zip(places, texts, strict=True):
        pen.text(place, text, fill=_INK, font=font, anchor="lm")
    return np.asarray(band)
