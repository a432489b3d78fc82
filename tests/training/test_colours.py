"""Varied colours: the same in whatever tile, by the published formula, and nothing where nothing is asked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.boxes import Box
from gigagrad.errors import ConfigError
from gigagrad.images import open_image
from gigagrad.training.dataset import _STAINS, Jitter

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 150, 90), np.uint8)
WHOLE = Box.whole(150, 90)


@given(st.integers(-20, 150), st.integers(-20, 90), st.integers(1, 100), st.integers(1, 100))
def test_a_pixel_is_the_same_in_whatever_box(y, x, height, width) -> None:
    seen = Jitter(0.1, 0.2).of(open_image(PIXELS), seed=1, epoch=2, index=3)
    outside = np.pad(seen.read(WHOLE), ((0, 0), (120, 120), (120, 120)), constant_values=255)
    part = outside[:, y + 120 : y + 120 + height, x + 120 : x + 120 + width]
    np.testing.assert_array_equal(seen.read(Box(y, x, y + height, x + width)), part)


def test_colours_are_the_slides_own_in_each_epoch() -> None:
    def read(seed, epoch, index):
        return Jitter(0.1, 0.2).of(open_image(PIXELS), seed, epoch, index).read(WHOLE)

    np.testing.assert_array_equal(read(0, 0, 0), read(0, 0, 0))
    assert not any((read(0, 0, 0) == read(*other)).all() for other in ((1, 0, 0), (0, 1, 0), (0, 0, 1)))


def test_stains_vary_as_published() -> None:
    """Tellez et al. (2018), with the same random numbers and in double precision."""
    draw = np.random.default_rng((5, 6, 3, 7))
    factors, offsets = draw.uniform(0.9, 1.1, 3), draw.uniform(-0.1, 0.1, 3)
    density = -np.log(np.maximum(PIXELS, 1) / 255).transpose(1, 2, 0)
    stains = density @ np.linalg.inv(_STAINS) * factors + offsets
    expected = (255 * np.exp(-(stains @ _STAINS))).round().clip(0, 255).transpose(2, 0, 1)
    seen = Jitter(stain=0.1).of(open_image(PIXELS), 5, 6, 7).read(WHOLE).astype(int)
    assert np.abs(seen - expected).max() <= 1
    assert (seen == expected).mean() > 0.999


def test_brightness_and_contrast() -> None:
    seen = Jitter(colour=0.2).of(open_image(PIXELS), 0, 0, 0).read(WHOLE)
    for channel in range(3):
        values = [int(seen[channel][PIXELS[channel] == level].max()) for level in np.unique(PIXELS[channel])]
        assert values == sorted(values)
    assert np.abs(seen.astype(int) - PIXELS).max() <= 255 * 0.2 + 1
    grey = Jitter(colour=0.2).of(open_image(PIXELS[:1]), 0, 0, 0)
    assert grey.read(WHOLE).shape == (1, 150, 90)


def test_nothing_is_asked_and_what_cannot_be_done() -> None:
    slide = open_image(PIXELS)
    assert Jitter().of(slide, 0, 0, 0) is slide
    with pytest.raises(ConfigError, match="needs red, green and blue, and array has 1 channels"):
        Jitter(stain=0.1).of(open_image(PIXELS[:1]), 0, 0, 0)
    with pytest.raises(ConfigError, match="slides of uint8, and array has float32"):
        Jitter(colour=0.1).of(open_image(PIXELS.astype(np.float32)), 0, 0, 0)
