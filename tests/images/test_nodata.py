"""Pixels that hold no data, in whatever way a file is laid out."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import rasterio
from hypothesis import given, settings

from gigagrad.boxes import Box
from gigagrad.errors import ImageError, TargetError
from gigagrad.images import InputView, open_image, thumbnail, tiff, tiff_directory
from gigagrad.masks import ignoring_missing, open_mask
from tests.images.conformance import HEIGHT, WIDTH, boxes
from tests.images.test_georeference import make

ALL = Box.whole(HEIGHT, WIDTH)
RNG = np.random.default_rng(3)


def gappy(dtype: str, nodata: float, bands: int = 7) -> np.ndarray:
    pixels = RNG.integers(1, 200, (bands, HEIGHT, WIDTH)).astype(dtype)
    pixels[:, RNG.random((HEIGHT, WIDTH)) < 0.3] = nodata
    pixels[0, RNG.random((HEIGHT, WIDTH)) < 0.3] = nodata  # of this band alone
    return pixels


LAYOUTS: dict[str, dict[str, Any]] = {
    "strips": {},
    "tiles": {"tiled": True, "blockxsize": 32, "blockysize": 16, "compress": "deflate"},
    "planes": {"interleave": "band"},
    "BigTIFF": {"BIGTIFF": "YES", "tiled": True, "blockxsize": 16, "blockysize": 16},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "nodata"), [("uint16", 0), ("float32", np.nan), ("float32", -9999), ("int16", -1)])
def test_missing_are_the_pixels_that_gdal_masks(tmp_path, layout, dtype, nodata):
    pixels = gappy(dtype, nodata)
    path = make(tmp_path / "a.tif", pixels, nodata=nodata, **LAYOUTS[layout])
    with open_image(path) as image, rasterio.open(path) as theirs:
        np.testing.assert_array_equal(image.missing(ALL), theirs.dataset_mask() == 0)
        filled = image.filled().read(ALL)
        np.testing.assert_array_equal(filled, theirs.read(masked=True).filled(0))
        np.testing.assert_array_equal(image.filled().missing(ALL), image.missing(ALL))


@given(boxes())
@settings(max_examples=30)
def test_of_any_box(tmp_path_factory, box: Box):
    path = tmp_path_factory.getbasetemp() / "any.tif"
    if not path.exists():
        make(path, gappy("float32", np.nan), nodata=np.nan)
    with open_image(path) as image:
        whole = np.zeros((5 * HEIGHT, 5 * WIDTH), bool)
        whole[HEIGHT : 2 * HEIGHT, WIDTH : 2 * WIDTH] = image.missing(ALL)
        missing = image.missing(box)
        shifted = box.shift(HEIGHT, WIDTH)
        expected = whole[shifted.y0 : shifted.y1, shifted.x0 : shifted.x1]
        np.testing.assert_array_equal(np.zeros(box.shape, bool) if missing is None else missing, expected)


def test_a_look_misses_what_its_bands_miss_and_greys_what_is_there(tmp_path):
    pixels = gappy("int16", -9999)
    with open_image(make(tmp_path / "a.tif", pixels, nodata=-9999)) as image:
        seen = InputView(grey=True, bands=(1, 3, 2)).of(image)
        np.testing.assert_array_equal(seen.missing(ALL), (pixels[[0, 2, 1]] == -9999).all(axis=0))
        rgb = np.where(pixels == -9999, 0, pixels)[[0, 2, 1]]
        luma = np.tensordot((0.299, 0.587, 0.114), rgb, 1)
        np.testing.assert_allclose(seen.read(ALL)[0], luma, atol=0.5 + 1e-9)
        assert seen.nodata is None
        assert seen.missing_bytes == image.bands((1, 3, 2)).missing_bytes > 0


def test_where_nothing_is_missing_nothing_is_looked_at(tmp_path):
    with open_image(make(tmp_path / "a.tif", np.ones((2, 20, 30), np.uint8), nodata=0)) as image:
        assert image.missing(Box.whole(20, 30)) is None
    with open_image(make(tmp_path / "b.tif", nodata=None)) as image:
        assert image.filled() is image
        assert image.missing(ALL) is None
        assert image.missing_bytes == 0


JPEG = {"compress": "jpeg", "photometric": "ycbcr", "tiled": True, "blockxsize": 32, "blockysize": 32}


def masked(path, pixels, **options):
    """A file with GDAL's mask inside, and levels of both."""
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True):
        make(path, pixels, **options)
        with rasterio.open(path, "r+") as file:
            file.write_mask(np.random.default_rng(5).random(pixels.shape[1:]) > 0.4)
        with rasterio.open(path, "r+") as file:
            file.build_overviews([2])
    return path


@pytest.mark.parametrize("options", [*LAYOUTS.values(), JPEG, {"nodata": 7}], ids=[*LAYOUTS, "JPEG", "beside a value"])
def test_a_mask_inside_the_file_is_that_of_gdal(tmp_path, options):
    pixels = RNG.integers(1, 255, (3, HEIGHT, WIDTH)).astype(np.uint8)
    path = masked(tmp_path / "a.tif", pixels, **options)
    with open_image(make(tmp_path / "b.tif", pixels, **options)) as image:
        plain = np.asarray(image.read(ALL))
    with open_image(path) as image, rasterio.open(path) as theirs:
        missing = theirs.dataset_mask() == 0
        np.testing.assert_array_equal(image.missing(ALL), missing)
        np.testing.assert_array_equal(image.read(ALL), np.where(missing, 0, plain))
        part = Box(3, 70, 40, WIDTH + 2)
        np.testing.assert_array_equal(image.read(part)[:, :, :-2], image.read(ALL)[:, 3:40, 70:])
        grey = InputView(grey=True, bands=(1, 2, 3)).of(image)
        assert not grey.read(ALL)[0, missing].any()
        for seen in (grey, image.bands((2,)), pickle.loads(pickle.dumps(image))):
            np.testing.assert_array_equal(seen.missing(ALL), missing)
            assert seen.missing_bytes > 0
            assert seen.filled() is seen
        with image.at_level(1) as small, rasterio.open(path, overview_level=0) as theirs_small:
            np.testing.assert_array_equal(
                small.missing(Box.whole(small.height, small.width)), theirs_small.dataset_mask() == 0
            )
    with pytest.raises(ImageError, match="closed"):
        image.missing(ALL)


def test_a_level_without_a_mask_of_its_own_takes_the_nearest_pixels_of_the_largest(tmp_path, monkeypatch):
    path = masked(tmp_path / "a.tif", np.ones((1, HEIGHT, WIDTH), np.uint8))
    monkeypatch.setattr(tiff, "mask_levels", lambda file, name: tiff_directory.mask_levels(file, name)[:1])
    with open_image(path) as image, image.at_level(1) as small:
        found, missing = small.missing(Box.whole(small.height, small.width)), image.missing(ALL)
        assert missing is not None
        rows = ((np.arange(small.height) + 0.5) * HEIGHT / small.height).astype(int)
        columns = ((np.arange(small.width) + 0.5) * WIDTH / small.width).astype(int)
        np.testing.assert_array_equal(found, missing[np.ix_(rows, columns)])


def test_nothing_is_true_where_a_mask_inside_the_file_says_so(tmp_path):
    path = masked(tmp_path / "a.tif", np.ones((3, HEIGHT, WIDTH), np.uint8))
    with open_image(path) as slide:
        truth, missing = ignoring_missing(open_image(np.ones((HEIGHT, WIDTH), np.uint8)), slide), slide.missing(ALL)
        assert missing is not None
        np.testing.assert_array_equal(truth.read(ALL)[0], np.where(missing, 255, 1))
        ids = masked(tmp_path / "ids.tif", np.ones((1, HEIGHT, WIDTH), np.uint8))
        with pytest.raises(TargetError, match="ids says by a mask inside its file where it holds data"):
            open_mask(ids, slide)


def test_a_thumbnail_shows_reflectance_and_elevation(tmp_path):
    ramp = np.linspace(200, 3000, HEIGHT * WIDTH).reshape(1, HEIGHT, WIDTH)
    for dtype in ("uint16", "float32"):
        pixels = ramp.astype(dtype)
        pixels[:, :3] = 0
        with open_image(make(tmp_path / "a.tif", pixels, nodata=0)) as image:
            small = thumbnail(image, 50)
        assert small.min() == 0
        assert small.max() == 255
        assert 90 < np.median(small) < 150


def test_a_closed_image_has_nothing_to_say(tmp_path):
    image = open_image(make(tmp_path / "a.tif", nodata=0))
    image.close()
    with pytest.raises(ImageError, match="closed"):
        image.filled().missing(ALL)
