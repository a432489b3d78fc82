"""Label tissue by the recipe of the founding experiment (Remedios et al., MIDL 2023), strip by strip.

    downsample by 8 -> 1 x 1 tiles with mean intensity over 230 set to 0 -> greyscale -> non-zero to 255
    -> median blur -> erosion -> dilation -> hole filling -> upsample to full size -> above 0 to 255 -> binarise

What the paper leaves open is decided here:

- *Downsample* takes the mean of each 8 x 8 block of the chosen level (of the pixels that exist, at a right or lower
  border that is no multiple of 8), so that a label does not depend on which pyramid levels a file happens to have.
- *Mean intensity* of a 1 x 1 tile is the mean of its three channels. The rule removes the grey (about 237) that
  scanners stitch into white as well as white itself.
- Kernel sizes: median 7, erosion and dilation 3 x 3, all at the low resolution.
- *Hole filling* fills what the outer contours enclose: everything that cannot be reached from the border by steps
  up, down, left or right.
- *Upsample* gives every pixel the label of the block whose mean decided it (nearest neighbour). Linear interpolation
  followed by "above 0" would widen the tissue by half a block, 4 pixels, on all sides.

Only the plane at one eighth (2000 x 8000 for 16000 x 64000) is ever held; `label_image` upsamples as it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from gigagrad.boxes import Box, tiles
from gigagrad.errors import ConfigError, ImageError
from gigagrad.images.georeference import geotiff_tags
from gigagrad.images.image import Image
from gigagrad.images.pixels import LUMA_BT601, Array
from gigagrad.images.regions import fill_holes
from gigagrad.images.views import ArrayImage
from gigagrad.images.write import write_pyramid

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A multiple of the tile sides that slides have (240, 256, 512), so that most tiles of a file are decoded once; 8 MiB.
_READ_HEIGHT: Final = 768
_READ_WIDTH: Final = 3840
_WRITE_HEIGHT: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The numbers of the recipe; kernel sides are in pixels of the downsampled plane.

    Attributes:
        downsample: side of the blocks that are averaged, in pixels of the image.
        threshold: blocks whose mean intensity (0..255) is higher are background.
        median, erode, dilate: odd sides of the square kernels; 1 leaves a step out.

    Raises `ConfigError` for a size that is even or below 1, or a threshold outside 0..255.
    """

    downsample: int = 8
    threshold: int = 230
    median: int = 7
    erode: int = 3
    dilate: int = 3

    def __post_init__(self) -> None:
        if self.downsample < 1:
            raise ConfigError(f"got downsample {self.downsample}, expected 1 or more (the paper's is 8)")
        if not 0 <= self.threshold <= 255:
            raise ConfigError(f"got threshold {self.threshold}, expected 0 to 255 (the paper's is 230)")
        for name in ("median", "erode", "dilate"):
            side = getattr(self, name)
            if side < 1 or side % 2 == 0:
                raise ConfigError(f"got {name} {side}, expected an odd number of pixels, 1 or more")


PAPER_RECIPE: Final = Recipe()


def tissue_mask(image: Image, recipe: Recipe = PAPER_RECIPE) -> NDArray[np.uint8]:
    """Find the tissue of an RGB or grey uint8 slide at low resolution: `(ceil(H / 8), ceil(W / 8))` of 0 and 1.

    Raises `ImageError` for another dtype or number of channels.
    """
    if image.shape[0] not in (1, 3) or str(image.dtype) not in ("uint8", "torch.uint8"):
        raise ImageError(
            f"cannot label {image.name}: got {image.shape[0]} channels of {image.dtype}, expected 1 or 3 of uint8; the "
            "tissue recipe is for stained slides in bytes: choose channels with --bands, give this image a mask of its "
            "own, or convert it"
        )
    return clean(foreground(image, recipe), recipe)


def foreground(image: Image, recipe: Recipe) -> NDArray[np.uint8]:
    """Apply the recipe up to "non-zero to 255": which blocks are neither bright nor black, as 0 and 255."""
    _, height, width = image.shape
    step = recipe.downsample
    plane = np.zeros((-(-height // step), -(-width // step)), np.uint8)
    across = max(step, _READ_HEIGHT // step * step), max(step, _READ_WIDTH // step * step)
    for box in tiles(height, width, *across):
        small_HWC = block_means(np.asarray(image.read(box)).transpose(1, 2, 0), step)
        channels = small_HWC.shape[2]
        bright = small_HWC.sum(axis=2, dtype=np.int32) > recipe.threshold * channels
        small_HWC[bright] = 0
        # Grey is above 0 from half a level on.
        seen = small_HWC @ np.array(LUMA_BT601) >= 0.5 if channels == 3 else small_HWC[..., 0] > 0
        y, x = box.y0 // step, box.x0 // step
        plane[y : y + seen.shape[0], x : x + seen.shape[1]] = np.where(seen, 255, 0)
    return plane


def clean(plane: NDArray[np.uint8], recipe: Recipe) -> NDArray[np.uint8]:
    """Apply the recipe from the median blur to the filled holes: a plane of 0 and 255 becomes one of 0 and 1.

    Beyond the border the median sees the border repeated, erosion sees tissue and dilation sees background, so that
    neither of them treats the edge of the image as an edge of the tissue.
    """
    smooth = _counts(plane > 0, recipe.median, None) * 2 > recipe.median**2
    eroded = _counts(smooth, recipe.erode, True) == recipe.erode**2
    dilated = _counts(eroded, recipe.dilate, False) > 0
    filled = fill_holes(ArrayImage(dilated.astype(np.uint8)))
    return np.asarray(filled.read(Box.whole(*dilated.shape))[0], np.uint8)


def _counts(inside: NDArray[np.bool_], side: int, beyond: bool | None) -> NDArray[np.uint32]:
    """Count those inside of the square around each pixel; `beyond` the border, None repeats it."""
    half = side // 2
    padded = np.pad(inside, half, "edge") if beyond is None else np.pad(inside, half, constant_values=beyond)
    height, width = inside.shape
    rows = np.zeros((height, padded.shape[1]), np.uint32)
    for k in range(side):
        rows += padded[k : k + height]
    counts = np.zeros((height, width), np.uint32)
    for k in range(side):
        counts += rows[:, k : k + width]
    return counts


def block_means(pixels_HWC: Array, step: int) -> NDArray[np.uint8]:
    """Average `step x step` blocks, rounded to uint8 `(ceil(H / step), ceil(W / step), C)`.

    Blocks that the lower or right border cuts are means of the pixels that exist.
    """
    height, width, channels = pixels_HWC.shape
    pixels_HWC = np.ascontiguousarray(pixels_HWC)
    rows = np.zeros((-(-height // step), width, channels), np.uint32)
    for k in range(min(step, height)):
        part = pixels_HWC[k::step]
        rows[: len(part)] += part
    sums = np.zeros((len(rows), -(-width // step), channels), np.uint32)
    for k in range(min(step, width)):
        part = rows[:, k::step]
        sums[:, : part.shape[1]] += part
    high, wide = (np.minimum(step, side - np.arange(0, side, step)) for side in (height, width))
    return np.rint(sums / np.outer(high, wide)[..., None]).astype(np.uint8)


class TissueLabel(Image):
    """A low-resolution mask seen at full size: `(1, H, W)` uint8 of 0 and 1, upsampled where it is read."""

    def __init__(self, mask: NDArray[np.uint8], recipe: Recipe, slide: Image) -> None:
        _, height, width = slide.shape
        super().__init__(shape=(1, height, width), dtype=np.dtype(np.uint8), name=slide.name, mpp=slide.mpp)
        step = recipe.downsample
        assert mask.shape == (-(-height // step), -(-width // step)), (mask.shape, slide.shape)
        self.mask: Final = mask
        self._step: Final = step

    def _read_inside(self, box: Box) -> Array:
        step = self._step
        y0, x0 = box.y0 // step, box.x0 // step
        low = self.mask[y0 : -(-box.y1 // step), x0 : -(-box.x1 // step)]
        full = low.repeat(step, axis=0).repeat(step, axis=1)
        inside = box.shift(-y0 * step, -x0 * step)
        return full[None, inside.y0 : inside.y1, inside.x0 : inside.x1]


def label_image(slide: Image, recipe: Recipe = PAPER_RECIPE) -> TissueLabel:
    """Return the tissue label of a slide as an image of the slide's size, without writing it anywhere."""
    return TissueLabel(tissue_mask(slide, recipe), recipe, slide)


def write_label(slide: Image, path: str | Path, recipe: Recipe = PAPER_RECIPE, *, overwrite: bool = False) -> Path:
    """Write the tissue label of a slide as a full-size pyramidal mask of 0 and 1 (uint8) and return its path.

    Raises `ImageError` for a slide that cannot be labelled and `WriteError` as `write_pyramid` does.
    """
    label = label_image(slide, recipe)
    _, height, width = label.shape
    rows = (np.asarray(label.read(strip))[0] for strip in tiles(height, width, _WRITE_HEIGHT, width))
    return write_pyramid(
        path,
        rows,
        shape=(height, width, 1),
        dtype=np.uint8,
        nearest=True,
        mpp=slide.mpp,
        overwrite=overwrite,
        description="gigagrad tissue label: 0 background, 1 tissue",
        tags=geotiff_tags(slide.georeference, None),
    )
