"""Thumbnails: area means, whatever the blocks and levels they are read through."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.errors import ImageError
from gigagrad.images import open_image, thumbnail
from gigagrad.images.thumbnails import names_shown


@given(height=st.integers(1, 90), width=st.integers(1, 90), side=st.integers(1, 100), block=st.integers(1, 40))
def test_every_pixel_is_the_mean_of_its_area(height: int, width: int, side: int, block: int) -> None:
    array = np.random.default_rng(height * 100 + width).integers(0, 256, (3, height, width), np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gigagrad.images.thumbnails._BLOCK", block)
        small = thumbnail(open_image(array), side)
    assert max(small.shape[:2]) == min(side, max(height, width))
    rows, columns = small.shape[:2]
    for i in range(rows):
        for j in range(columns):
            y = slice(i * height // rows, (i + 1) * height // rows)
            x = slice(j * width // columns, (j + 1) * width // columns)
            np.testing.assert_allclose(small[i, j], array[:, y, x].mean(axis=(1, 2)), atol=0.5 + 1e-9)


def test_takes_a_smaller_level_where_there_is_one(jpeg_slide: Path) -> None:
    with open_image(jpeg_slide) as full, open_image(jpeg_slide, level=2) as quarter:
        assert max(quarter.shape) == 225
        np.testing.assert_array_equal(thumbnail(full, 200), thumbnail(quarter, 200))
        assert thumbnail(full, 400).shape == (311, 400, 3)
        assert thumbnail(quarter, 400).shape == (175, 225, 3)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.full((4, 4), 65535, np.uint16), 255),
        (np.full((4, 4), 0.5, np.float32), 128),
        (np.full((4, 4), 7.0), 255),
        (np.full((4, 4), -1.0), 0),
        (np.ones((4, 4), bool), 255),
        (np.full((4, 4), 1, np.uint8), 1),
    ],
)
def test_other_dtypes_become_bytes(array: np.ndarray, expected: int) -> None:
    small = thumbnail(open_image(array), 2)
    assert small.dtype == np.uint8
    np.testing.assert_array_equal(small, expected)


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ImageError, match="at least 1 px"):
        thumbnail(open_image(np.zeros((4, 4))), 0)


@pytest.mark.parametrize(
    ("channels", "names"), [(1, ["value"]), (2, ["channel 1", "channel 2"]), (3, ["red", "green", "blue"])]
)
def test_channels_without_names_have_one_to_show(channels, names):
    assert names_shown(open_image(np.zeros((channels, 4, 4), np.uint8))) == names


def test_each_stain_is_shown_in_its_own_range():
    pixels = np.zeros((4, 64, 64), np.uint16)
    pixels[0, :, :32], pixels[1, :, 32:], pixels[2] = 10000, 100, 7
    assert thumbnail(open_image(pixels), 64)[0, [0, 63], :2].tolist() == [[255, 0], [0, 255]]
