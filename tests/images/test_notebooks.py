"""What a notebook shows of an image."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image as Pillow

from gigagrad.images import open_image


def picture_in(shown: str) -> np.ndarray:
    (data,) = re.findall(r'src="data:image/png;base64,([^"]+)"', shown)
    return np.asarray(Pillow.open(io.BytesIO(base64.b64decode(data))))


def test_an_image_shows_itself() -> None:
    colours = np.random.default_rng(0).integers(0, 256, (3, 640, 320), np.uint8)
    shown = open_image(colours)._repr_html_()
    assert "array: 3 x 640 x 320 uint8, mpp unknown" in shown
    assert picture_in(shown).shape == (320, 160, 3)


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_other_channels_show_as_grey_or_their_first_three(channels) -> None:
    shown = picture_in(open_image(np.full((channels, 40, 50), 200, np.uint8))._repr_html_())
    assert shown.shape == ((40, 50, 3) if channels >= 3 else (40, 50))


def test_a_mask_of_small_numbers_can_be_seen() -> None:
    mask = np.zeros((1, 40, 50), np.uint8)
    mask[0, :20] = 2
    assert set(np.unique(picture_in(open_image(mask)._repr_html_()))) == {0, 255}


def test_no_picture_where_that_would_take_long_or_cannot_be() -> None:
    assert "<img" not in open_image(np.broadcast_to(np.uint8(0), (3, 10_000, 10_000)))._repr_html_()
    closed = open_image(np.zeros((3, 8, 8), np.uint8))
    closed.close()
    assert "<img" not in closed._repr_html_()
    assert "&lt;" in closed._repr_html_()
