"""Turned slides: the same pixels that NumPy would give for the whole image, box by box."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.boxes import Box
from gigagrad.images import open_image
from gigagrad.training.dataset import D4_TRANSFORMS, D4View, order_of, transform_of


def turned_array(array, turn):
    mirrored = array[..., ::-1] if turn >= 4 else array
    return np.rot90(mirrored, turn % 4, axes=(-2, -1))


@st.composite
def reads(draw):
    height, width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    y0, x0 = draw(st.integers(-3, 9)), draw(st.integers(-3, 9))
    return height, width, Box(y0, x0, y0 + draw(st.integers(1, 8)), x0 + draw(st.integers(1, 8)))


@given(reads(), st.integers(0, D4_TRANSFORMS - 1), st.booleans())
def test_every_box_of_every_turn_is_what_numpy_gives(read, turn, as_tensor):
    height, width, box = read
    array = np.arange(3 * height * width, dtype=np.int32).reshape(3, height, width)
    image = D4View(open_image(torch.from_numpy(array) if as_tensor else array), turn)
    whole = turned_array(array, turn)
    assert image.shape == whole.shape
    margin = 32
    padded = np.pad(whole, ((0, 0), (margin, margin), (margin, margin)), constant_values=image.fill)
    expected = padded[:, box.y0 + margin : box.y1 + margin, box.x0 + margin : box.x1 + margin]
    np.testing.assert_array_equal(np.asarray(image.read(box)), expected)


@pytest.mark.parametrize("turn", range(D4_TRANSFORMS))
def test_pixels_go_to_torch_and_stay_channels_last(turn):
    rgb_HWC = np.zeros((40, 50, 3), np.uint8)
    image = D4View(open_image(rgb_HWC.transpose(2, 0, 1)), turn)
    assert torch.from_numpy(image.read(Box(3, 4, 20, 30))).shape == (3, 17, 26)


def test_the_eight_turns_are_all_different_and_keep_the_metadata():
    array = np.arange(12, dtype=np.uint8).reshape(1, 3, 4)
    image = open_image(array, mpp=0.5)
    seen = set()
    for turn in range(D4_TRANSFORMS):
        view = D4View(image, turn)
        seen.add((view.shape, np.asarray(view.read(Box.whole(*view.shape[1:]))).tobytes()))
        assert (view.mpp, view.fill, view.name, view.dtype) == (0.5, image.fill, image.name, image.dtype)
        assert view.levels[0].shape == view.shape[1:]
    assert len(seen) == D4_TRANSFORMS


def test_a_turn_outside_the_group_is_refused():
    with pytest.raises(ValueError, match="0 to 7"):
        D4View(open_image(np.zeros((1, 2, 2), np.uint8)), 8)


def test_closing_the_view_leaves_the_image_open():
    image = open_image(np.zeros((1, 2, 2), np.uint8))
    D4View(image, 1).close()
    image.read(Box(0, 0, 1, 1))


def test_order_and_turns_depend_on_nothing_but_their_numbers():
    assert order_of(3, 5, 40) == order_of(3, 5, 40)
    assert sorted(order_of(3, 5, 40)) == list(range(40))
    assert len({tuple(order_of(seed, epoch, 40)) for seed in range(4) for epoch in range(4)}) == 16
    turns = [transform_of(1, epoch, index) for epoch in range(40) for index in range(20)]
    assert turns == [transform_of(1, epoch, index) for epoch in range(40) for index in range(20)]
    counts = np.bincount(turns, minlength=D4_TRANSFORMS)
    assert counts.min() > 60  # 100 expected of each
