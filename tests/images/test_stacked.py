"""Several images of one place as one."""

from __future__ import annotations

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image as Pillow

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images import open_image
from gigagrad.images.image import View


class _Band(View):
    def _read_inside(self, box):
        return self._image.read(box)


def plane(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def test_channels_follow_each_other(tmp_path):
    colours, band = plane(0, 3, 50, 60), plane(1, 50, 60)
    tifffile.imwrite(tmp_path / "band.tif", band, tile=(16, 16))
    with open_image([colours, tmp_path / "band.tif"]) as image:
        assert (image.shape, image.name) == ((4, 50, 60), "array")
        box = Box(10, 20, 35, 60)
        expected = np.concatenate([colours, band[None]])[:, 10:35, 20:60]
        np.testing.assert_array_equal(image.read(box), expected)


def test_outside_each_is_what_it_is_alone():
    with open_image((plane(0, 3, 9, 9), plane(1, 9, 9))) as image:
        assert image.read(Box(-2, -2, 3, 3))[:, 0, 0].tolist() == [255, 255, 255, 0]
        assert image.read(Box(20, 20, 22, 22)).tolist() == [[[255] * 2] * 2] * 3 + [[[0] * 2] * 2]


def test_tensors_stay_tensors():
    ones = torch.ones(1, 4, 5)
    read = open_image([ones, 2 * ones]).read(Box(0, 0, 5, 5))
    assert isinstance(read, torch.Tensor)
    assert read[:, :, 0].tolist() == [[1, 1, 1, 1, 0], [2, 2, 2, 2, 0]]


def test_levels_are_those_of_all(tmp_path):
    full, half = plane(0, 64, 80), plane(1, 32, 40)
    for name, levels in (("a", (full, half)), ("b", (full,)), ("c", (full, half))):
        with tifffile.TiffWriter(tmp_path / f"{name}.tif") as file:
            for index, level in enumerate(levels):
                file.write(level, tile=(16, 16), subfiletype=int(index > 0))
    a, b, c = (tmp_path / f"{name}.tif" for name in "abc")
    assert len(open_image([a, b]).levels) == 1
    with open_image([a, c], mpp=0.5) as image, image.at_level(1) as coarse:
        assert (coarse.shape, coarse.mpp) == ((2, 32, 40), 1.0)
        np.testing.assert_array_equal(coarse.read(Box.whole(32, 40)), [half, half])
    assert open_image([a, c], level=1, mpp=0.5).mpp == 1.0


def pyramid(path, *levels, mpp=None):
    resolution = {} if mpp is None else {"resolution": (1e4 / mpp, 1e4 / mpp), "resolutionunit": "CENTIMETER"}
    with tifffile.TiffWriter(path) as file:
        for index, level in enumerate(levels):
            file.write(level, tile=(16, 16), subfiletype=int(index > 0), **resolution)
    return path


@pytest.mark.parametrize("second", ["half.tif", "half.png", "finer.tif"])
def test_an_image_of_another_resolution_gets_the_pixels_of_the_first(tmp_path, second):
    full, quarter, half = plane(0, 64, 81), plane(1, 16, 20), plane(2, 32, 40)
    first = pyramid(tmp_path / "first.tif", full, quarter)
    pyramid(tmp_path / "half.tif", half)
    Pillow.fromarray(half).save(tmp_path / "half.png")
    pyramid(tmp_path / "finer.tif", plane(3, 128, 162), half)
    rows, columns = (2 * np.arange(64) + 1) * 32 // 128, (2 * np.arange(81) + 1) * 40 // 162
    shown = plane(3, 128, 162)[1::2, 1::2] if second == "finer.tif" else half[np.ix_(rows, columns)]
    with open_image([first, tmp_path / second], mpp=0.5) as image, image.at_level(1) as coarse:
        assert (image.shape, len(image.levels), image.mpp) == ((2, 64, 81), 2, 0.5)
        np.testing.assert_array_equal(image.read(Box.whole(64, 81)), [full, shown])
        np.testing.assert_array_equal(image.read(Box(9, 11, 40, 60))[1], shown[9:40, 11:60])
        rows, columns = ((2 * np.arange(count) + 1) * of // (2 * count) for count, of in ((16, 32), (20, 40)))
        np.testing.assert_array_equal(coarse.read(Box.whole(16, 20)), [quarter, half[np.ix_(rows, columns)]])
    with open_image([first, tmp_path / second], level=1) as coarse:
        assert coarse.shape == (2, 16, 20)
        np.testing.assert_array_equal(coarse.read(Box.whole(16, 20))[1], half[np.ix_(rows, columns)])


def test_closing_closes_all_levels_of_another_resolution(tmp_path):
    first = open_image(pyramid(tmp_path / "first.tif", plane(0, 32, 40)))
    finer = open_image(pyramid(tmp_path / "finer.tif", plane(1, 64, 80), plane(2, 32, 40)))
    open_image([first, finer]).close()
    for image in (first, finer):
        with pytest.raises(ImageError, match="is closed"):
            image.read(Box(0, 0, 1, 1))


def test_another_resolution_knows_where_it_has_no_data(tmp_path):
    tag = [(42113, "s", 0, "0", True)]
    fine, coarse = plane(0, 32, 32) | 1, plane(1, 16, 16) | 1
    fine[:8], coarse[:, :4], coarse[0, 0] = 0, 0, 9
    for name, pixels in (("fine", fine), ("coarse", coarse)):
        tifffile.imwrite(tmp_path / f"{name}.tif", pixels, tile=(16, 16), extratags=tag)
    with open_image([tmp_path / "fine.tif", tmp_path / "coarse.tif"]) as image:
        gaps = image.missing(Box(-1, 0, 20, 20))
    expected = np.zeros((21, 20), bool)
    expected[1:9, :8], expected[1:3, :2] = True, False
    np.testing.assert_array_equal(gaps, expected)


def test_images_that_say_they_are_of_other_places_are_refused(tmp_path):
    first = pyramid(tmp_path / "first.tif", plane(0, 64, 80), mpp=0.5)
    same = pyramid(tmp_path / "same.tif", plane(0, 32, 40), mpp=1.01)
    other = pyramid(tmp_path / "other.tif", plane(0, 32, 40), mpp=0.5)
    assert open_image([first, same]).shape == (2, 64, 80)
    with pytest.raises(
        ImageError, match=r"first is 0\.04 mm wide and other 0\.02 mm by .*; images of one place must be"
    ):
        open_image([first, other])
    assert open_image([first, other], mpp=0.5).shape == (2, 64, 80)


@pytest.mark.parametrize("other", [plane(1, 9, 10), plane(1, 9, 9).astype(np.uint16)])
def test_what_is_not_alike_is_refused(other):
    with pytest.raises(ImageError, match=r"array is 9 x 9 px of uint8 and array 9 x .*; images of one place must be"):
        open_image([plane(0, 9, 9), other])


def test_one_is_itself_and_none_is_refused(tmp_path):
    assert open_image([plane(0, 9, 9)]).shape == (1, 9, 9)
    with pytest.raises(ImageError, match="empty list"):
        open_image([])


def test_closing_closes_all(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", plane(0, 32, 32), tile=(16, 16))
    parts = [open_image(tmp_path / "a.tif"), open_image(tmp_path / "a.tif")]
    open_image(parts).close()
    for part in parts:
        with pytest.raises(ImageError, match="closed"):
            part.read(Box(0, 0, 1, 1))


def test_what_holds_no_data_is_alike():
    bands = [_Band(open_image(plane(seed, 9, 9) % 2), nodata=0) for seed in (0, 1)]
    image = open_image(bands)
    assert image.nodata == 0
    both = (np.asarray(image.read(Box.whole(9, 9))) == 0).all(0)
    assert both.any()
    np.testing.assert_array_equal(image.missing(Box.whole(9, 9)), both)
    with pytest.raises(
        ImageError, match=r"uint8, no data being 0 and array 9 x 9 px of uint8; .* alike where they hold"
    ):
        open_image([bands[0], plane(1, 9, 9)])
