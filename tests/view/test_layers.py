"""Tiles of layers hold class ids, and probabilities in 256 levels."""

import numpy as np
import pytest

from gigagrad.images import MaskClass
from gigagrad.images.views import ArrayImage
from gigagrad.view.layers import Layer, Shades, as_levels, classes_in, jpeg
from gigagrad.view.pyramids import ImagePyramid
from tests.view.conftest import levels_of

CLASSES = (MaskClass(1, "tumour", (10, 20, 30)), MaskClass(2, "stroma", (40, 50, 60)))


def layer(ids, kind="classes", classes=CLASSES):
    return Layer("mask", kind, ImagePyramid(ArrayImage(ids), ids=kind == "classes"), classes)


@pytest.fixture
def ids():
    found = np.zeros((1, 40, 60), np.uint8)
    found[:, 10:30, 10:30] = 1
    found[:, 10:30, 30:50] = 2
    found[:, 0, 0] = 255
    return found


def test_a_tile_holds_class_ids_and_what_is_around_it(ids):
    np.testing.assert_array_equal(levels_of(layer(ids).tile(0, 0, 0), 40, 60), ids[0])
    np.testing.assert_array_equal(levels_of(layer(ids).tile(0, 0, 0, margin=4), 48, 68), np.pad(ids[0], 4))
    large = np.arange(600 * 700, dtype=np.uint32).astype(np.uint8).reshape(1, 600, 700)
    found = levels_of(layer(large).tile(0, 1, 0, margin=4), 520, 196)
    np.testing.assert_array_equal(found, np.pad(large[0, :516, 508:], [(4, 0), (0, 4)]))
    assert layer(ids).tile(0, 1, 0) is None


def test_a_tile_holds_the_probabilities_of_a_channel():
    shares = np.linspace(0, 1, 256, dtype=np.float32).reshape(1, 1, 256)
    both = layer(np.concatenate([shares, 1 - shares]), "probabilities")
    assert levels_of(both.tile(0, 0, 0), 256).tolist() == [*range(256)]
    assert levels_of(both.tile(0, 0, 0, channel=1), 256).tolist() == [*range(255, -1, -1)]
    assert both.tile(0, 0, 0, channel=9) == both.tile(0, 0, 0, channel=1)


def test_probabilities_are_read_as_bytes_and_as_floats():
    assert as_levels(np.array([0.0, 0.5, 1.0, np.nan])).tolist() == [0, 128, 255, 0]
    assert as_levels(np.array([0, 128, 255], np.uint8)).tolist() == [0, 128, 255]


def test_values_are_told_in_words(ids):
    shown = layer(ids)
    assert shown.value(0.4, 0.4) == "tumour"
    assert shown.value(0.2, 0.1) == "background"
    assert shown.value(0, 0) == "ignored"
    assert layer(ids, "errors").value(0.2, 0.1) == "none"
    shares = layer(np.full((2, 4, 4), 51, np.uint8), "probabilities")
    assert shares.value(0.5, 0.5) == "tumour 0.200, stroma 0.200"


def test_classes_that_nobody_named_are_found_in_the_pixels(ids):
    found = classes_in(ids, CLASSES[:1])
    assert [(kind.id, kind.name) for kind in found] == [(1, "tumour"), (2, "Class 2")]


def test_a_slide_of_sixteen_bits_is_drawn_in_its_range():
    pixels = np.array([[[1000, 1500, 2000]]], np.uint16)
    assert Shades(((1000, 2000),)).of(pixels)[0].tolist() == [0, 128, 255]
    assert Shades(((0, 255),)).of(np.full((3, 2, 2), 7, np.uint8)).shape == (2, 2, 3)
    assert jpeg(np.zeros((4, 5), np.uint8)).startswith(b"\xff\xd8")
