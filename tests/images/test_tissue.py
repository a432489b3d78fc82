"""The tissue recipe against a scipy oracle, step by step and whole, and against labels of real slides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from gigagrad.boxes import Box
from gigagrad.errors import ConfigError, ImageError, WriteError
from gigagrad.images import open_image
from gigagrad.images.tissue import Recipe, block_means, clean, label_image, tissue_mask, write_label


def oracle_clean(plane: np.ndarray, recipe: Recipe) -> np.ndarray:
    def square(side: int) -> np.ndarray:
        return np.ones((side, side), bool)

    smooth = ndimage.median_filter(plane, recipe.median, mode="nearest") > 0
    eroded = ndimage.binary_erosion(smooth, square(recipe.erode), border_value=1)
    dilated = ndimage.binary_dilation(eroded, square(recipe.dilate), border_value=0)
    return ndimage.binary_fill_holes(dilated).astype(np.uint8)


def block_sums(pixels_HWC: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The sum of every block, per channel, and its number of pixels."""
    rows, columns = np.arange(0, pixels_HWC.shape[0], step), np.arange(0, pixels_HWC.shape[1], step)

    def add(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(np.add.reduceat(values.astype(np.int64), rows, axis=0), columns, axis=1)

    return add(pixels_HWC), add(np.ones_like(pixels_HWC))


def blobs(seed: int, height: int, width: int, coverage: float) -> np.ndarray:
    """A plane of 0 and 255 with round shapes, holes, specks and contact with the border."""
    rng = np.random.default_rng(seed)
    noise = ndimage.gaussian_filter(rng.standard_normal((height, width)), rng.uniform(0.5, 4), mode="nearest")
    return np.where(noise > np.quantile(noise, 1 - coverage), 255, 0).astype(np.uint8)


def dice(first: np.ndarray, second: np.ndarray) -> float:
    return 2 * np.count_nonzero((first > 0) & (second > 0)) / (np.count_nonzero(first) + np.count_nonzero(second))


@given(
    seed=st.integers(0, 10**6),
    height=st.integers(1, 70),
    width=st.integers(1, 70),
    coverage=st.floats(0, 1),
    median=st.sampled_from([1, 3, 5, 7, 9]),
    erode=st.sampled_from([1, 3, 5]),
    dilate=st.sampled_from([1, 3, 5]),
)
def test_cleaning_equals_scipy(
    seed: int, height: int, width: int, coverage: float, median: int, erode: int, dilate: int
) -> None:
    recipe = Recipe(median=median, erode=erode, dilate=dilate)
    plane = blobs(seed, height, width, coverage)
    np.testing.assert_array_equal(clean(plane, recipe), oracle_clean(plane, recipe))


@given(
    seed=st.integers(0, 10**6),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    step=st.integers(1, 9),
    channels=st.sampled_from([1, 3]),
)
def test_block_means_equal_the_definition_at_any_border(
    seed: int, height: int, width: int, step: int, channels: int
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    sums, counts = block_sums(pixels, step)
    # Rounded to the nearest; a mean that ends in .5 may go either way.
    assert (2 * np.abs(block_means(pixels, step) * counts - sums) <= counts).all()


@pytest.mark.parametrize(("height", "width"), [(96, 128), (801, 3851), (1, 1), (9, 7), (775, 60)])
def test_reading_in_pieces_changes_nothing(height: int, width: int) -> None:
    """Sizes beyond one read in each direction, and no multiples of 8."""
    rng = np.random.default_rng(1)
    coarse = rng.integers(0, 256, (3, height // 24 + 1, width // 24 + 1), dtype=np.uint8)
    pixels = coarse.repeat(24, axis=1).repeat(24, axis=2)[:, :height, :width]
    sums, counts = block_sums(pixels.transpose(1, 2, 0), 8)  # blocks of one colour, so the division leaves nothing
    small = sums // counts
    foreground = np.where((small.sum(axis=2) <= 3 * 230) & (small.max(axis=2) > 1), 255, 0).astype(np.uint8)
    np.testing.assert_array_equal(tissue_mask(open_image(pixels)), oracle_clean(foreground, Recipe()))


def test_stitched_grey_and_white_are_background_and_the_rule_is_strict() -> None:
    pixels = np.full((3, 480, 640), 255, np.uint8)
    pixels[:, :, 160:] = 237  # a scanner's field beside the white it was stitched into
    pixels[:, :, 320:] = 231
    pixels[:, :, 480:] = 230
    mask = tissue_mask(open_image(pixels))
    np.testing.assert_array_equal(mask, np.repeat(np.arange(80) >= 60, 60).reshape(80, 60).T)


def test_the_mean_is_over_channels_and_black_is_nothing() -> None:
    pixels = np.zeros((3, 64, 256), np.uint8)
    pixels[:, :, 64:128] = np.array([255, 200, 234], np.uint8)[:, None, None]  # mean 229.7: tissue, though grey 222
    pixels[:, :, 128:192] = np.array([255, 202, 236], np.uint8)[:, None, None]  # mean 231: background, though grey 223
    mask = tissue_mask(open_image(pixels))
    np.testing.assert_array_equal(mask[4], np.repeat([0, 1, 0, 0], 8))


def test_holes_are_filled_and_bays_are_not() -> None:
    pixels = np.full((3, 800, 800), 255, np.uint8)
    pixels[:, 160:640, 160:640] = 150
    pixels[:, 280:360, 280:360] = 255  # a hole
    pixels[:, 480:560, 480:640] = 255  # a bay, open to the right
    mask = tissue_mask(open_image(pixels))
    assert mask[40, 40] == 1
    assert mask[65, 65] == 0


@given(data=st.data(), height=st.integers(1, 60), width=st.integers(1, 60), step=st.sampled_from([1, 3, 8]))
def test_label_reads_as_nearest_upsampling_of_the_mask(data: st.DataObject, height: int, width: int, step: int) -> None:
    pixels = np.random.default_rng(height * 61 + width).choice([90, 255], (3, height, width)).astype(np.uint8)
    label = label_image(open_image(pixels, mpp=0.5), Recipe(downsample=step, median=1, erode=1, dilate=1))
    assert (label.shape, label.dtype, label.fill, label.mpp) == ((1, height, width), np.dtype(np.uint8), 0, 0.5)
    y0, x0 = data.draw(st.integers(-5, height)), data.draw(st.integers(-5, width))
    box = Box(y0, x0, data.draw(st.integers(y0, height + 5)), data.draw(st.integers(x0, width + 5)))
    y, x = np.mgrid[box.y0 : box.y1, box.x0 : box.x1]
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    rows, columns = np.clip(y, 0, height - 1) // step, np.clip(x, 0, width - 1) // step
    np.testing.assert_array_equal(label.read(box)[0], np.where(inside, label.mask[rows, columns], 0))


def test_written_label_equals_the_one_read_on_the_fly(tmp_path: Path) -> None:
    plane = blobs(3, 75, 60, 0.5).repeat(10, axis=0).repeat(10, axis=1)
    slide = open_image(np.stack([255 - plane // 2] * 3), mpp=0.25)
    path = write_label(slide, tmp_path / "label.tif")
    with tifffile.TiffFile(path) as tiff:
        np.testing.assert_array_equal(tiff.pages[0].asarray(), label_image(slide).read(Box.whole(750, 600))[0])
        assert set(np.unique(tiff.pages[1].asarray())) == {0, 1}
    with openslide.OpenSlide(path) as seen:
        assert float(seen.properties["openslide.mpp-x"]) == pytest.approx(0.25)
    with pytest.raises(WriteError, match="exists already"):
        write_label(slide, path)


def test_unusable_images_and_recipes_are_named() -> None:
    with pytest.raises(ImageError, match=r"got 3 channels of float32, expected 1 or 3 of uint8"):
        tissue_mask(open_image(np.zeros((3, 8, 8), np.float32)))
    with pytest.raises(ConfigError, match="odd"):
        Recipe(median=4)
    with pytest.raises(ConfigError, match="threshold"):
        Recipe(threshold=256)
    with pytest.raises(ConfigError, match="downsample"):
        Recipe(downsample=0)


@pytest.mark.slides
@pytest.mark.parametrize("stem", ["CMU-1-Small-Region", "TCGA-CR-7395-01A-01-TS1"])
def test_real_slides_agree_with_scipy_and_with_their_labels(real_slides: Path, stem: str) -> None:
    """The TCGA slide has grey (237) stitched beside pure white: both must be background."""
    with open_image(real_slides / "slides" / f"{stem}.svs") as slide:
        label = label_image(slide)
        _, height, width = slide.shape
        small = block_means(np.asarray(slide.read(Box.whole(height, width))).transpose(1, 2, 0), 8)
        full = np.asarray(label.read(Box.whole(height, width)))[0]
    foreground = np.where((small.sum(axis=2, dtype=int) <= 690) & (small.max(axis=2) > 1), 255, 0).astype(np.uint8)
    np.testing.assert_array_equal(label.mask, oracle_clean(foreground, Recipe()))
    reference = tifffile.imread(real_slides / "masks" / f"{stem}.tissue01.tif", key=0)
    assert dice(full, reference) >= 0.99
