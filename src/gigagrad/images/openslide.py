"""Read what OpenSlide knows and no fast path covers: MIRAX, Hamamatsu, Leica, Ventana, Philips, Zeiss, DICOM."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images.georeference import PixelSize, choose_mpp, number
from gigagrad.images.image import Image
from gigagrad.images.pixels import (
    CACHE_BYTES,
    Array,
    Level,
    TileCache,
    check_size,
    choose_level,
    grid_parts,
    in_our_words,
)
from gigagrad.threads import side_by_side

_WHITE = 255
_BLOCK = 512
_COPIES = 3
_PX_PER_SECOND = 50e6
"""The rate at which one thread reads; measured on tiles of JPEG."""


class OpenSlideImage(Image):
    """A level of a slide read by OpenSlide, `(3, H, W)` uint8, transparent pixels over white. Use `open_openslide`.

    OpenSlide addresses lower levels in level-0 pixels, and where the downsample is not a whole number it resamples
    them by a fraction that depends on where the read began. So that a pixel does not depend on the box it was read
    with, lower levels are read in blocks of one fixed grid.
    """

    def __init__(self, path: Path, slide: Any, *, level: int, mpp: float | None) -> None:
        import openslide

        with in_our_words(f"cannot open {path}"):
            # OpenSlide says (width, height).
            levels = tuple(
                Level((height, width), float(downsample))
                for (width, height), downsample in zip(slide.level_dimensions, slide.level_downsamples, strict=True)
            )
            chosen = choose_level(levels, level, path.name)
            sides = openslide.PROPERTY_NAME_MPP_X, openslide.PROPERTY_NAME_MPP_Y
            claim = PixelSize(*(number(slide.properties.get(side, "")) for side in sides))
            power = number(slide.properties.get(openslide.PROPERTY_NAME_OBJECTIVE_POWER, ""))
            check_size((3, *chosen.shape), path.name)
            paths = number(slide.properties.get("dicom.NumberOfOpticalPaths", ""))
        if paths is not None and paths > 1:
            raise ImageError(
                f"{path} holds {paths:g} optical paths, of which OpenSlide reads the first alone; write the one that "
                "you mean as a slide of its own"
            )
        base = choose_mpp(mpp, path.name, [claim], power)
        super().__init__(
            shape=(3, *chosen.shape),
            dtype=np.dtype(np.uint8),
            # Instances of DICOM have numbers for names, and several of them are one slide.
            name=path.parent.name if path.suffix.lower() == ".dcm" else path.stem,
            fill=_WHITE,
            mpp=base,
            bounds=_bounds(slide, levels[0]),
            levels=levels,
            level=level,
            open_level=partial(open_openslide, path, mpp=base),
            cache_bytes=CACHE_BYTES,
            thread_bytes=_COPIES * _BLOCK**2 * 4,
            decode_seconds=math.prod(chosen.shape) / _PX_PER_SECOND,
        )
        self.series: str = slide.properties.get("dicom.SeriesInstanceUID", "")
        """The series whose instances of DICOM are one slide; "" of other formats."""
        self._path = path
        self._slide = slide
        self._downsample = chosen.downsample
        self._cache = TileCache(CACHE_BYTES)

    @property
    def block_shape(self) -> tuple[int, int]:
        return _BLOCK, _BLOCK

    def _read_inside(self, box: Box) -> Array:
        pixels_HWC = np.empty((*box.shape, 3), np.uint8)

        def read(part: tuple[Box, Box, Box]) -> None:
            block, to, of = part
            target = pixels_HWC[to.y0 : to.y1, to.x0 : to.x1]
            if self._level == 0:
                target[...] = self._region(box.intersect(block))
            else:
                pixels = self._cache.get(block.clamp(self.height, self.width), self._region)
                target[...] = pixels[of.y0 : of.y1, of.x0 : of.x1]

        side_by_side(read, [*grid_parts(box, _BLOCK, _BLOCK)])
        return pixels_HWC.transpose(2, 0, 1)

    def _region(self, box: Box) -> Array:
        """Read `(h, w, 3)` straight from OpenSlide."""
        corner = (round(box.x0 * self._downsample), round(box.y0 * self._downsample))
        with in_our_words(f"cannot read {box} of {self._path}", "the file is corrupt there, copy or download it again"):
            rgba = np.asarray(self._slide.read_region(corner, self._level, (box.width, box.height)))
        alpha = rgba[..., 3:]
        if alpha.min() == _WHITE:
            return rgba[..., :3].copy()
        return np.where(alpha == 0, np.uint8(_WHITE), rgba[..., :3])

    def _release(self) -> None:
        self._cache.clear()
        self._slide.close()


def _bounds(slide: Any, level: Level) -> Box | None:
    """Return what was scanned, None where that is the whole of level 0."""
    import openslide

    names = (openslide.PROPERTY_NAME_BOUNDS_Y, openslide.PROPERTY_NAME_BOUNDS_X)
    sizes = (openslide.PROPERTY_NAME_BOUNDS_HEIGHT, openslide.PROPERTY_NAME_BOUNDS_WIDTH)
    edges = [slide.properties.get(name, "") for name in (*names, *sizes)]
    if not all(text.isdecimal() for text in edges):
        return None
    y, x, height, width = map(int, edges)
    box = Box(y, x, y + height, x + width).clamp(*level.shape)
    return None if box.empty or box == Box.whole(*level.shape) else box


def open_openslide(path: Path, *, level: int = 0, mpp: float | None = None) -> OpenSlideImage | None:
    """Open one level of a slide through OpenSlide; None if OpenSlide does not know the format.

    Raises `ImageError` for a file of a known format that is damaged, and for a level that is not there.
    """
    import openslide

    with in_our_words(f"cannot open {path}"):
        if openslide.OpenSlide.detect_format(path) is None:
            return None
        slide = openslide.OpenSlide(path)
    try:
        return OpenSlideImage(path, slide, level=level, mpp=mpp)
    except BaseException:
        slide.close()
        raise
