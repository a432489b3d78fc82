"""`open_mask`: whatever resolution a mask has, whatever numbers are in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.errors import ConfigError, ImageError, TargetError
from gigagrad.images import open_image, write_pyramid
from gigagrad.masks import Outlines, open_mask


@pytest.fixture
def slide():
    return open_image(np.zeros((3, 90, 120), np.uint8))


def write(folder, plane, name="m.png"):
    Pillow.fromarray(plane).save(folder / name)
    return folder / name


def test_a_mask_of_the_slides_size_is_itself(tmp_path, slide) -> None:
    plane = np.random.default_rng(0).integers(0, 3, (90, 120), np.uint8)
    with gg.open_mask(write(tmp_path, plane), slide) as mask:
        np.testing.assert_array_equal(mask.read(Box.whole(90, 120))[0], plane)


def pyramid(path, pixels) -> None:
    write_pyramid(path, [pixels], shape=pixels.shape, dtype=np.uint8, nearest=True, tile=64, levels=3)


@pytest.mark.parametrize("factor", [2, 3, 8])
def test_a_coarse_mask_counts_by_its_nearest_pixel(tmp_path, slide, factor) -> None:
    small = np.random.default_rng(1).integers(0, 5, (-(-90 // factor), -(-120 // factor)), np.uint8)
    with open_mask(write(tmp_path, small), slide) as mask:
        assert mask.shape == (1, 90, 120)
        rows = ((np.arange(90) + 0.5) * small.shape[0] / 90).astype(int)
        columns = ((np.arange(120) + 0.5) * small.shape[1] / 120).astype(int)
        expected = small[np.ix_(rows, columns)]
        np.testing.assert_array_equal(mask.read(Box.whole(90, 120))[0], expected)
        np.testing.assert_array_equal(mask.read(Box(7, 11, 60, 70))[0], expected[7:60, 11:70])


def test_a_fine_mask_of_a_coarse_level(tmp_path) -> None:
    plane = np.kron(np.random.default_rng(2).integers(0, 3, (75, 100), np.uint8), np.ones((4, 4), np.uint8))
    pyramid(tmp_path / "s.tif", np.zeros((300, 400, 3), np.uint8))
    with open_image(tmp_path / "s.tif", level=2) as level, open_mask(write(tmp_path, plane), level) as mask:
        np.testing.assert_array_equal(mask.read(Box.whole(75, 100))[0], plane[2::4, 2::4])


def test_the_level_of_the_slides_size_is_taken(tmp_path, slide) -> None:
    plane = np.random.default_rng(3).integers(0, 2, (180, 240), np.uint8)
    pyramid(tmp_path / "m.tif", plane[..., None])
    with open_image(tmp_path / "m.tif", level=1) as level, open_mask(tmp_path / "m.tif", slide) as mask:
        np.testing.assert_array_equal(mask.read(Box.whole(90, 120)), level.read(Box.whole(90, 120)))


def test_values_are_renamed(tmp_path, slide) -> None:
    plane = np.random.default_rng(4).choice(np.array([0, 1, 128, 255], np.uint8), (90, 120))
    with open_mask(write(tmp_path, plane), slide, {"255": 1, "1": 255, "128": "ignore"}) as mask:
        expected = np.array([{0: 0, 1: 255, 128: 255, 255: 1}[value] for value in plane.ravel()]).reshape(plane.shape)
        np.testing.assert_array_equal(mask.read(Box.whole(90, 120))[0], expected)


def test_arrays_and_tensors_are_masks_too(slide) -> None:
    plane = np.random.default_rng(5).integers(0, 3, (90, 120), np.uint8)
    for source in (plane, torch.from_numpy(plane), open_image(plane), np.kron(plane, np.ones((2, 2), np.uint8))):
        with open_mask(source, slide, {"2": 1}) as mask:
            np.testing.assert_array_equal(np.asarray(mask.read(Box.whole(90, 120)))[0], plane - (plane == 2))


def test_a_mask_of_something_else_is_refused(tmp_path, slide) -> None:
    with pytest.raises(TargetError, match="100 x 120 px and its slide 90 x 120 px; both must show the same part"):
        open_mask(write(tmp_path, np.zeros((100, 120), np.uint8)), slide)
    with pytest.raises(ImageError, match="does not exist"):
        open_mask(tmp_path / "none.png", slide)
    with pytest.raises(ConfigError, match="has no class id"):
        open_mask(write(tmp_path, np.zeros((90, 120), np.uint8)), slide, {"a": "b"})


def test_outlines_of_another_slide_are_refused(slide) -> None:
    far = Outlines.pack([("a", [[(500, 0), (600, 0), (600, 50)]])], "far")
    with pytest.raises(TargetError, match=r"lie from \(500, 0\) to \(600, 50\), outside their slide array of 90 x 120"):
        open_mask(far, slide)
    with pytest.raises(TargetError, match="no outline that covers an area"):
        open_mask(Outlines.pack([("a", [])], "empty"), slide)


def test_closing_closes_the_file(tmp_path, slide) -> None:
    for classes in (None, {"1": 2}):
        mask = open_mask(write(tmp_path, np.ones((45, 60), np.uint8)), slide, classes)
        mask.close()
        with pytest.raises(ImageError, match="closed"):
            mask.read(Box.whole(1, 1))
