"""An engine without a loss: the output whole, as a stream and as a file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.errors import ConfigError, ModelError
from gigagrad.images import open_image

TILE = (5, 8)


def test_forward_without_a_loss_is_the_models_output(net, gate, pair):
    for model in (net, gate):
        with torch.no_grad():
            expected = model(pair.image[None])
        torch.testing.assert_close(gg.compile(model, tile=TILE).forward(pair.image), expected, rtol=1e-12, atol=1e-13)


def test_a_pooled_output_is_a_small_tensor(pair):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    engine = gg.compile(model, tile=(4, 4))
    torch.testing.assert_close(engine.forward(pair.image), model(pair.image[None]).detach(), rtol=1e-12, atol=1e-13)
    with pytest.raises(ConfigError, match="output is an image"):
        engine.forward(pair.image, out="never.tif")
    with pytest.raises(ConfigError, match="output is an image"):
        next(engine.stream(pair.image))


@pytest.mark.parametrize("scale", [1, 2])
def test_the_stream_covers_the_output_in_rows(net, pair, scale):
    model = nn.Sequential(net, nn.Upsample(scale_factor=scale)).double()
    with torch.no_grad():
        expected = model(pair.image[None])
    pieces = list(gg.compile(model, tile=TILE).stream(pair.image))
    boxes = [box for box, _ in pieces]
    assert boxes == sorted(boxes)
    assert len({(box.y0, box.height) for box in boxes}) == len({box.y0 for box in boxes})
    covered = torch.zeros(expected.shape[-2:])
    for box, crop in pieces:
        assert crop.shape == (1, 1, *box.shape)
        covered[box.y0 : box.y1, box.x0 : box.x1] += 1
        torch.testing.assert_close(crop, expected[..., box.y0 : box.y1, box.x0 : box.x1], rtol=1e-12, atol=1e-13)
    assert (covered == 1).all()


def test_a_stream_may_be_left_early(net, pair):
    engine = gg.compile(net, tile=TILE)
    stream = engine.stream(pair.image)
    next(stream)
    stream.close()
    assert engine.last_run is None
    engine.forward(pair.image)
    assert engine.last_run is not None


def test_a_prediction_is_written_as_a_file(net, pair, tmp_path):
    path = tmp_path / "prediction.tif"
    assert gg.compile(net, tile=TILE).forward(pair.image, out=path) == path
    with torch.no_grad():
        expected = net(pair.image[None])[0].float().numpy()
    with open_image(path) as written:
        assert written.shape == (1, 23, 31)
        assert written.dtype == np.float32
        np.testing.assert_allclose(written.read(Box.whole(23, 31)), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "move", [lambda x: x.permute(0, 2, 3, 1), lambda x: x[:, 0]], ids=["channels last", "no channels"]
)
def test_an_output_of_another_layout_is_refused(net, pair, move, tmp_path):
    class Moved(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return move(self.net(x))

    engine = gg.compile(Moved(), tile=TILE)
    for call in (
        engine.forward,
        lambda image: next(engine.stream(image)),
        lambda image: engine.forward(image, out=tmp_path / "x.tif"),
    ):
        with pytest.raises(ModelError, match=r"\(N, C, H, W\)"):
            call(pair.image)
