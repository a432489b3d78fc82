"""Bags in memory: what `Bag` promises of every bag."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gigagrad.errors import ImageError
from gigagrad.images.bag import ArrayBag


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_patches_are_read_in_their_order(kind):
    patches = np.random.default_rng(0).integers(0, 255, (5, 3, 4, 6), np.uint8)
    bag = ArrayBag(kind(patches))
    assert (len(bag), bag.shape) == (5, (5, 3, 4, 6))
    assert np.array_equal(np.asarray(bag.read(1, 4)), patches[1:4])


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 2), (3, 2), (4, 6)])
def test_patches_that_are_not_there_are_refused(start, stop):
    with pytest.raises(ImageError, match=r"has the patches 0 to 4; asked for"):
        ArrayBag(np.zeros((5, 1, 2, 2))).read(start, stop)


def test_a_closed_bag_is_not_read():
    with ArrayBag(np.zeros((5, 1, 2, 2))) as bag:
        bag.read(0, 1)
    bag.close()
    with pytest.raises(ImageError, match="is closed"):
        bag.read(0, 1)


@pytest.mark.parametrize(("shape", "told"), [((0, 3, 4, 4), "without patches"), ((2, 3, 0, 4), "no pixels")])
def test_empty_bags_are_refused(shape, told):
    with pytest.raises(ImageError, match=told):
        ArrayBag(np.zeros(shape))


def test_other_axes_are_refused():
    with pytest.raises(ImageError, match=r"\(N, C, h, w\), got \(3, 4, 4\)"):
        ArrayBag(np.zeros((3, 4, 4)))
