"""The picture shows both outlines where they are, and says which is which."""

import numpy as np
import pytest
from PIL import Image as Pillow

from gigagrad.errors import ImageError
from gigagrad.images import open_image
from gigagrad.masks.classes import mask_classes
from gigagrad.prediction.outlines import draw_overlay, layers, write_overlay


def square(height, width, y, x, side):
    plane = np.zeros((height, width), np.uint8)
    plane[y : y + side, x : x + side] = 1
    return plane


def marked(picture, color):
    return np.argwhere((picture == np.array(color)).all(axis=2))


def test_outlines_lie_on_the_borders_of_the_masks(tmp_path):
    slide = open_image(np.full((3, 400, 600), 200, np.uint8))
    predicted = open_image(square(400, 600, 100, 100, 200))
    truth = open_image(square(400, 600, 140, 300, 200))
    classes = mask_classes(1)
    drawn = layers(predicted, classes, truth)
    assert [layer.label for layer in drawn] == ["True mask", "Predicted"]
    picture = draw_overlay(slide, drawn, max_side=300)
    assert picture.shape[1] == 300
    assert picture.shape[0] > 200, "the legend is missing"
    assert (picture[100, 80] == 200).all(), "the inside must stay visible"
    for layer, (top, left) in zip(drawn, ((70, 150), (50, 50)), strict=True):
        ys, xs = marked(picture[:200], layer.color).T
        reach = 2 + layer.width_px // 2
        assert abs(ys.min() - top) <= reach
        assert abs(xs.min() - left) <= reach
        assert abs(ys.max() - (top + 100)) <= reach
        assert len(marked(picture[200:], layer.color)), "the legend lacks a swatch"

    path = tmp_path / "overlays" / "slide.png"
    write_overlay(path, picture)
    with Pillow.open(path) as read:
        assert np.array_equal(np.asarray(read), picture)
    assert [entry.name for entry in path.parent.iterdir()] == ["slide.png"]


def test_classes_have_a_colour_each_and_long_legends_break():
    plane = np.zeros((80, 120), np.uint8)
    plane[10:30, 10:30], plane[50:70, 60:90] = 1, 2
    slide = open_image(np.full((80, 120), 250, np.uint8))
    drawn = layers(open_image(plane), mask_classes(2, ["A long name for a class", "Another long name"]))
    picture = draw_overlay(slide, drawn)
    assert picture.shape[1:] == (120, 3)
    assert all(len(marked(picture[:80], layer.color)) for layer in drawn)
    one_line = draw_overlay(slide, drawn[:1])
    assert picture.shape[0] > one_line.shape[0]


@pytest.mark.parametrize(("values", "outlined"), [((1, 255), 1), ((255, 0), 1), ((7, 255), 1), ((0, 0), 0)], ids=str)
def test_what_a_true_mask_leaves_out_is_not_outlined(values, outlined):
    plane = np.zeros((80, 240), np.uint8)
    plane[20:60, 20:60], plane[20:60, 160:220] = values
    slide = open_image(np.full((80, 240), 250, np.uint8))
    nothing = open_image(np.zeros_like(plane))
    drawn = layers(nothing, mask_classes(1), open_image(plane))
    picture = draw_overlay(slide, drawn)[:80]
    ys_xs = marked(picture, drawn[0].color)
    assert bool(len(ys_xs)) == outlined
    assert (ys_xs[:, 1] < 80).all()


def test_a_mask_full_of_holes_does_not_hide_the_slide():
    plane = np.zeros((200, 300), np.uint8)
    plane[20:180, 20:280] = 1
    plane[30:170:8, 30:270:8] = 0
    slide = open_image(np.full((3, 200, 300), 200, np.uint8))
    (predicted,) = layers(open_image(plane), mask_classes(1))
    picture = draw_overlay(slide, [predicted])
    inside = picture[28:172, 28:272]
    assert (inside == 200).all(axis=2).mean() > 0.8
    assert len(marked(inside, predicted.color)) > 18 * 30, "a hole is missing"
    assert (picture[18:22, 100] == np.array(predicted.color)).all(axis=1).any(), "the outer line stays"


def test_a_slide_is_no_mask():
    slide = open_image(np.zeros((3, 20, 20), np.uint8))
    with pytest.raises(ImageError, match="no mask"):
        draw_overlay(slide, layers(slide, mask_classes(1)))
