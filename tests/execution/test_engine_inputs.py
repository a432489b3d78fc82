"""Images and targets of every kind, and images that fail in the middle."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.events import StepMeasured, TileDone
from gigagrad.images import Image, open_image

TILE = (5, 8)


def test_images_of_every_kind_give_the_same(engine, pair):
    zarr = pytest.importorskip("zarr")
    image, target = pair.image, pair.target
    expected = engine.forward(image, target)
    forms = [
        (image.numpy(), target.numpy()),
        (image[None], target[None]),
        (image, target[0]),
        (image.numpy()[:, ::-1][:, ::-1], target[0].numpy()),
        (open_image(image), open_image(target.numpy())),
        (zarr.array(image.numpy()), zarr.array(target.numpy())),
    ]
    for form in forms:
        assert torch.equal(engine.forward(*form), expected)


def test_an_open_image_is_left_open_and_a_path_is_closed(net, bce, jpeg_slide):
    class Grey(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 1, 3)

        def forward(self, x):
            return self.conv(x / 255)

    engine = gg.compile(Grey(), lambda o, t: o.mean() * t.mean(), tile=(200, 300))
    with open_image(jpeg_slide) as image:
        first = engine.backward(image, 1.0)
        image.read(Box(0, 0, 1, 1))
        assert engine.backward(str(jpeg_slide), 1.0).item() == first.item()
        image.read(Box(0, 0, 1, 1))


@pytest.mark.parametrize("target", [torch.tensor([2]), 2, np.array([2])], ids=["tensor", "number", "array"])
def test_labels(target, pair):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    expected = F.cross_entropy(model(pair.image[None]), torch.tensor([2]))
    value = gg.compile(model, F.cross_entropy, tile=(3, 4)).backward(pair.image, target)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)


def test_a_two_dimensional_target_is_a_mask_or_a_label(net, pair):
    mask = (pair.target[0] > 0.5).to(torch.uint8)
    dense = gg.compile(net, lambda o, t: F.mse_loss(o, t.to(o.dtype)), tile=TILE)
    expected = F.mse_loss(net(pair.image[None]), mask[None, None].double())
    assert dense.forward(pair.image, mask).item() == pytest.approx(expected.item(), rel=1e-12)
    soft = torch.rand(1, 1, dtype=torch.float64)
    pooled = gg.compile(net, lambda o, t: F.mse_loss(o.mean((2, 3)), t), tile=TILE)
    expected = F.mse_loss(net(pair.image[None]).mean((2, 3)), soft)
    assert pooled.forward(pair.image, soft).item() == pytest.approx(expected.item(), rel=1e-12)


def test_uint8_images_reach_the_model_as_bytes(pair):
    class Bytes(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 1, 3, padding=1).double()

        def forward(self, x):
            assert x.dtype == torch.uint8
            return self.conv(x.double() / 255)

    image = torch.randint(0, 256, (3, 20, 17), dtype=torch.uint8)
    engine = gg.compile(Bytes(), lambda o, t: F.mse_loss(o, t.double()), tile=(6, 6))
    mask = torch.randint(0, 2, (1, 20, 17), dtype=torch.uint8)
    expected = F.mse_loss(engine.model(image[None]), mask[None].double()).item()
    assert engine.backward(image, mask).item() == pytest.approx(expected, rel=1e-12)


class Faulty(Image):
    """Zeros, until a box beyond a row is asked for."""

    def __init__(self, last_row: int) -> None:
        super().__init__(shape=(2, 23, 31), dtype=np.dtype(np.float64), name="faulty")
        self._last_row = last_row

    def _read_inside(self, box):
        if box.y1 > self._last_row:
            raise ImageError("faulty: tile 7 is corrupt")
        return np.zeros((2, *box.shape))


def test_an_error_in_the_middle_leaves_gradients_alone(engine, net, pair):
    engine.backward(pair.image, pair.target)
    before = copy.deepcopy({name: p.grad for name, p in net.named_parameters()})
    seen: list[Any] = []
    engine.events.subscribe(seen.append)
    with pytest.raises(ImageError, match="tile 7 is corrupt"):
        engine.backward(Faulty(20), pair.target)
    assert any(isinstance(event, TileDone) for event in seen), "the error must come in the middle"
    assert not any(isinstance(event, StepMeasured) for event in seen)
    assert all(torch.equal(p.grad, before[name]) for name, p in net.named_parameters())
    first = {name: g.clone() for name, g in before.items()}
    engine.backward(pair.image, pair.target)
    assert all(torch.equal(p.grad, 2 * first[name]) for name, p in net.named_parameters())


def test_an_error_while_writing_leaves_no_file(net, tmp_path):
    with pytest.raises(ImageError, match="corrupt"):
        gg.compile(net, tile=TILE).forward(Faulty(10), out=tmp_path / "prediction.tif")
    assert list(tmp_path.iterdir()) == []
