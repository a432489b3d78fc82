"""Tiles of layers are pictures with transparency, in the colours of the legend."""

import io

import numpy as np
import pytest
from PIL import Image as Pillow

from gigagrad.errors import ConfigError
from gigagrad.images import MaskClass
from gigagrad.images.views import ArrayImage
from gigagrad.view.layers import Layer, Shades, Style, as_levels, classes_in, jpeg
from gigagrad.view.pyramids import ImagePyramid

CLASSES = (MaskClass(1, "tumour", (10, 20, 30)), MaskClass(2, "stroma", (40, 50, 60)))


def rgba(picture):
    return np.asarray(Pillow.open(io.BytesIO(picture)).convert("RGBA"))


def layer(ids, kind="classes", classes=CLASSES):
    return Layer("mask", kind, ImagePyramid(ArrayImage(ids), ids=kind == "classes"), classes)


@pytest.fixture
def ids():
    found = np.zeros((1, 40, 60), np.uint8)
    found[:, 10:30, 10:30] = 1
    found[:, 10:30, 30:50] = 2
    found[:, 0, 0] = 255
    return found


def test_classes_are_filled_in_their_colours(ids):
    got = rgba(layer(ids).picture(0, 0, 0, Style()))
    assert got[15, 15].tolist() == [10, 20, 30, 255]
    assert got[15, 45].tolist() == [40, 50, 60, 255]
    assert got[5, 5, 3] == got[0, 0, 3] == 0


def test_outlines_are_where_a_region_meets_another(ids):
    got = rgba(layer(ids).picture(0, 0, 0, Style("outline")))
    assert got[10, 20].tolist() == [10, 20, 30, 255]
    assert got[20, 29].tolist() == [10, 20, 30, 255]
    assert got[20, 30].tolist() == [40, 50, 60, 255]
    assert got[20, 20, 3] == got[20, 40, 3] == 0


def test_a_line_has_a_dark_edge_and_no_edge_where_its_class_is_hidden(ids):
    got = rgba(layer(ids).picture(0, 0, 0, Style("outline", frozenset([2]))))
    assert got[20, 27].tolist() == [10, 20, 30, 255]
    assert got[20, 26].tolist() == [20, 20, 24, 255]
    assert got[20, 25, 3] == 0
    assert not got[10:30, 30:34, 3].any()
    assert got[0, 0, 3] == 0, "ignored"


def test_a_region_that_fills_a_tile_has_no_outline_inside_of_the_slide():
    ids = np.ones((1, 600, 1100), np.uint8)
    got = rgba(layer(ids).picture(0, 1, 0, Style("outline")))
    assert not got[5:, :, 3].any()


def test_a_hidden_class_is_not_drawn(ids):
    got = rgba(layer(ids).picture(0, 0, 0, Style(hidden=frozenset([2]))))
    assert got[15, 15, 3] == 255
    assert got[15, 45, 3] == 0


def test_small_probabilities_are_faint_and_large_ones_yellow():
    shares = np.linspace(0, 1, 256, dtype=np.float32).reshape(1, 1, 256)
    got = rgba(layer(shares, "probabilities", ()).picture(0, 0, 0, Style()))[0]
    assert got[0, 3] == 0
    assert np.all(np.diff(got[:, 3].astype(int)) >= 0)
    assert got[70, 3] == 255
    assert got[255].tolist() == [253, 231, 37, 255]


def test_probabilities_are_read_as_bytes_and_as_floats():
    assert as_levels(np.array([0.0, 0.5, 1.0, np.nan])).tolist() == [0, 128, 255, 0]
    assert as_levels(np.array([0, 128, 255], np.uint8)).tolist() == [0, 128, 255]


def test_values_are_told_in_words(ids):
    shown = layer(ids)
    assert shown.value(0.4, 0.4) == "tumour"
    assert shown.value(0.2, 0.1) == "background"
    assert shown.value(0, 0) == "ignored"
    shares = layer(np.full((2, 4, 4), 51, np.uint8), "probabilities")
    assert shares.value(0.5, 0.5) == "tumour 0.200, stroma 0.200"


def test_styles_are_read_from_an_address():
    assert Style.parse({"form": "outline", "hide": "1,20"}) == Style("outline", frozenset([1, 20]))
    assert Style.parse({}) == Style()
    with pytest.raises(ConfigError, match="expected form=fill"):
        Style.parse({"hide": "1;2"})


def test_classes_that_nobody_named_are_found_in_the_pixels(ids):
    found = classes_in(ids, CLASSES[:1])
    assert [(kind.id, kind.name) for kind in found] == [(1, "tumour"), (2, "Class 2")]


def test_a_slide_of_sixteen_bits_is_drawn_in_its_range():
    pixels = np.array([[[1000, 1500, 2000]]], np.uint16)
    assert Shades(1000, 2000).of(pixels)[0].tolist() == [0, 128, 255]
    assert Shades(0, 255).of(np.full((3, 2, 2), 7, np.uint8)).shape == (2, 2, 3)
    assert jpeg(np.zeros((4, 5), np.uint8)).startswith(b"\xff\xd8")
