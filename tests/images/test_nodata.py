"""Pixels that hold no data, in whatever way a file is laid out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import rasterio
from hypothesis import given, settings

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images import Look, open_image, thumbnail
from gigagrad.images.tiff_directory import UnreadMaskWarning
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
        seen = Look(grey=True, bands=(1, 3, 2)).of(image)
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


def test_a_mask_inside_the_file_is_told_of(tmp_path):
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True):
        make(tmp_path / "a.tif")
        with rasterio.open(tmp_path / "a.tif", "r+") as file:
            file.write_mask(np.zeros((90, 130), bool))
    with pytest.warns(UnreadMaskWarning, match="a_nodata"), open_image(tmp_path / "a.tif") as image:
        assert image.shape == (1, 90, 130)


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
