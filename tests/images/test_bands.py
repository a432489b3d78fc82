"""Some of an image's channels, in an order of one's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from hypothesis import given

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images import Look, open_image
from tests.images.conformance import HEIGHT, WIDTH, boxes

PIXELS = np.random.default_rng(5).integers(0, 2000, (5, HEIGHT, WIDTH), np.uint16)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: torch.from_numpy(x.astype(np.float32))])
@given(boxes())
def test_bands_are_those_channels(make: Any, box: Box) -> None:
    image = open_image(make(PIXELS))
    seen = image.bands((5, 1, 5))
    assert seen.shape == (3, HEIGHT, WIDTH)
    np.testing.assert_array_equal(np.asarray(seen.read(box)), np.asarray(image.read(box))[[4, 0, 4]])


def test_all_of_them_in_order_are_the_image_itself() -> None:
    image = open_image(PIXELS)
    assert image.bands(range(1, 6)) is image
    with pytest.raises(ImageError, match="array has no band 6; choose from 1 to 5"):
        image.bands((1, 6))
    with pytest.raises(ImageError, match="has no band 0"):
        image.bands((0,))


def test_a_look_is_of_bands_then_of_grey() -> None:
    image = open_image(PIXELS.astype(np.uint8))
    assert Look().of(image) is image
    rgb = Look(grey=True, bands=(3, 2, 1)).of(image)
    np.testing.assert_array_equal(rgb.read(Box.whole(9, 9)), image.bands((3, 2, 1)).grey().read(Box.whole(9, 9)))
    assert str(Look(True, (3, 2, 1))) == "bands 3, 2, 1, grey, one channel"
    assert str(Look()) == "as stored"


@pytest.mark.parametrize(("extra", "channels"), [("unspecified", 4), ("unassalpha", 3)])
def test_a_fourth_band_is_left_out_only_where_it_is_alpha(tmp_path, extra, channels) -> None:
    pixels = np.random.default_rng(6).integers(0, 256, (64, 80, 4), np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="rgb", extrasamples=[extra], tile=(32, 32))
    with open_image(tmp_path / "a.tif") as image:
        assert image.channels == channels
        np.testing.assert_array_equal(image.read(Box.whole(64, 80)), pixels.transpose(2, 0, 1)[:channels])
