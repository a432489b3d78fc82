"""Augmented bags: each patch turned by itself, as a slide would be, in whatever chunks; colours are the slide's."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from gigagrad.boxes import Box
from gigagrad.errors import ConfigError
from gigagrad.images import Image, open_image
from gigagrad.images.bag import ArrayBag, Bag
from gigagrad.masks import open_bag
from gigagrad.training.dataset import D4View, Jitter, VariedBag, transforms_of, varied

PATCHES = np.random.default_rng(0).integers(0, 256, (11, 3, 16, 16), np.uint8)


def all_of(bag: Image | Bag) -> NDArray[np.uint8]:
    assert isinstance(bag, Bag)
    return np.asarray(bag.read(0, len(bag)))


def test_each_patch_is_turned_as_an_image_is() -> None:
    transforms = transforms_of(1, 2, 3, 11)
    seen = VariedBag(ArrayBag(PATCHES), transforms).read(0, 11)
    assert len(set(transforms.tolist())) > 3
    for patch, turned, transform in zip(PATCHES, np.asarray(seen), transforms.tolist(), strict=True):
        np.testing.assert_array_equal(turned, D4View(open_image(patch), transform).read(Box.whole(16, 16)))
    np.testing.assert_array_equal(ArrayBag(PATCHES).read(0, 11), PATCHES)


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_patches_are_the_same_in_whatever_chunks(chunk) -> None:
    def bag():
        return varied(ArrayBag(PATCHES), Jitter(0.1, 0.2), 1, 2, 3, augment=True)

    chunks = [bag().read(start, min(start + chunk, 11)) for start in range(0, 11, chunk)]
    np.testing.assert_array_equal(np.concatenate(chunks), bag().read(0, 11))


def test_transforms_are_the_slides_own_in_each_epoch() -> None:
    same = transforms_of(0, 0, 0, 64)
    assert (same == transforms_of(0, 0, 0, 64)).all()
    assert not any((same == transforms_of(*other, 64)).all() for other in ((1, 0, 0), (0, 1, 0), (0, 0, 1)))
    assert set(transforms_of(0, 0, 0, 1000).tolist()) == set(range(8))


def test_colours_are_those_of_the_slides() -> None:
    """The patches of a slide in other colours are those of the slide, and of a case each slide has its own."""
    pixels = np.random.default_rng(1).integers(0, 256, (3, 64, 48), np.uint8)
    jitter = Jitter(0.1, 0.2)
    slide = open_image(pixels)
    with open_bag(slide, 16, None, tissue=None) as plain, open_bag([slide, slide], 16, None, tissue=[None] * 2) as case:
        expected = jitter.of(slide, 1, 2, 3).read(Box.whole(64, 48))
        seen = all_of(varied(plain, jitter, 1, 2, 3, augment=False))
        for patch, (x, y) in zip(seen, plain.coords.tolist(), strict=True):
            np.testing.assert_array_equal(patch, expected[:, y : y + 16, x : x + 16])
        of_case = all_of(varied(case, jitter, 1, 2, 3, augment=False))
        np.testing.assert_array_equal(of_case[:12], seen)
        assert (of_case[12:] != seen).mean() > 0.5
        chunk = varied(case, jitter, 1, 2, 3, augment=False)
        assert isinstance(chunk, Bag)
        np.testing.assert_array_equal(chunk.read(10, 15), of_case[10:15])


def test_nothing_is_asked_and_what_cannot_be_done() -> None:
    np.testing.assert_array_equal(all_of(varied(ArrayBag(PATCHES), Jitter(), 0, 0, 0, augment=False)), PATCHES)
    with pytest.raises(ConfigError, match="of uint8, and bag has float32"):
        varied(ArrayBag(PATCHES.astype(np.float32)), Jitter(0.1), 0, 0, 0, augment=False)
    with pytest.raises(ConfigError, match="red, green and blue, and bag has 1 channels"):
        varied(ArrayBag(PATCHES[:, :1]), Jitter(0.1), 0, 0, 0, augment=False)
