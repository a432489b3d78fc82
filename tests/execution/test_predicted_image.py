"""A prediction as an image: boxes have the bits of the whole, and cost what they need."""

import numpy as np
import pytest
import torch
from torch import nn

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.errors import ConfigError, ImageError
from gigagrad.execution import predictions
from gigagrad.images.views import ArrayImage

TILE = (5, 8)
BOXES = (Box(0, 0, 1, 1), Box(3, 2, 12, 15), Box(4, 7, 5, 9), Box(-3, -2, 6, 30))


@pytest.mark.parametrize("kept_bytes", [0, 2**20])
def test_boxes_have_the_bits_of_the_whole(net, gate, pair, kept_bytes, monkeypatch):
    """Of one segment, and of two: behind a sum over the image."""
    monkeypatch.setattr(predictions, "_KEPT_BYTES", kept_bytes)
    for model in (net, gate):
        engine = gg.compile(model, tile=TILE)
        whole = engine.forward(pair.image)[0].numpy()
        with engine.at(pair.image) as predicted:
            assert predicted.shape == whole.shape
            assert predicted.dtype == np.float64
            for box in BOXES:
                inside = box.clamp(*whole.shape[1:])
                read = predicted.read(box)[:, inside.y0 - box.y0 :, inside.x0 - box.x0 :]
                expected = whole[:, inside.y0 : inside.y1, inside.x0 : inside.x1]
                np.testing.assert_array_equal(read[:, : inside.height, : inside.width], expected)


def test_at_once_no_field_is_kept_and_sums_are_there(net, gate, pair):
    deep = nn.Sequential(net, nn.Conv2d(1, 2, 1), type(net)()).double()
    for model in (deep, gate):
        engine = gg.compile(model, tile=TILE)
        whole = engine.forward(pair.image)[0].numpy()
        with engine.at(pair.image, at_once=True) as predicted:
            assert not predicted.plan.kept
            box = Box(0, 0, *whole.shape[1:])
            np.testing.assert_allclose(predicted.read(box), whole, rtol=1e-12, atol=1e-13)
            np.testing.assert_array_equal(predicted.read(BOXES[1]), predicted.read(box)[:, 3:12, 2:15])


def test_tiles_of_boxes_are_small(net):
    image = np.zeros((2, 1500, 40), np.float64)
    with gg.compile(net).at(image, at_once=True) as predicted:
        assert max(predicted.plan.tile) <= 1024


def test_a_box_costs_the_tiles_that_it_meets_once(net, pair, monkeypatch):
    class Counting(ArrayImage):
        read_pixels = 0

        def view(self, box):
            Counting.read_pixels += box.clamp(self.height, self.width).area
            return super().view(box)

    image = Counting(pair.image.numpy())
    with gg.compile(net, tile=TILE).at(image) as predicted:
        predicted.read(Box(0, 0, 2, 2))
        once = Counting.read_pixels
        assert 0 < once < image.height * image.width
        predicted.read(Box(1, 1, 4, 7))
        assert Counting.read_pixels == once
    assert not image._closed


def test_an_engine_with_a_loss_predicts_too(net, pair):
    engine = gg.compile(net, nn.functional.mse_loss, tile=TILE)
    whole = engine.forward(pair.image)[0].numpy()
    with engine.at(pair.image) as predicted:
        np.testing.assert_array_equal(predicted.read(BOXES[1]), whole[:, 3:12, 2:15])


def test_it_is_closed_once_and_for_all(net, pair):
    predicted = gg.compile(net, tile=TILE).at(pair.image)
    predicted.read(BOXES[0])
    predicted.close()
    predicted.close()
    with pytest.raises(ImageError, match="is closed"):
        predicted.read(BOXES[0])
    gg.compile(net, tile=TILE).at(pair.image).close()


def test_an_output_that_is_no_image_is_refused(pair):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    with pytest.raises(ConfigError, match="output is no image"):
        gg.compile(model, tile=(4, 4)).at(pair.image)


def test_a_half_output_is_read_in_single_precision(pair):
    model = nn.Conv2d(2, 1, 3, padding=1)
    engine = gg.compile(model, precision="bfloat16", tile=TILE)
    image = pair.image.float()
    with engine.at(image) as predicted:
        assert predicted.dtype == np.float32
        expected = engine.forward(image)[0].float().numpy()
        np.testing.assert_array_equal(predicted.read(Box(0, 0, *expected.shape[1:])), expected)
    assert torch.is_grad_enabled()
