"""What changes between two calls is noticed: values, structure, mode, the image's size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg

TILE = (5, 8)


def test_new_values_are_simply_used(engine, net, bce, pair, whole, assert_exact):
    engine.backward(pair.image, pair.target)
    planned = engine.plan(pair.image, pair.target)
    for p in net.parameters():
        p.data.mul_(0.5)
    net.zero_grad()
    _, expected = whole(net, bce, pair.image, pair.target[None])
    engine.backward(pair.image, pair.target)
    assert_exact(net, expected)
    assert engine.plan(pair.image, pair.target) is planned


def test_a_changed_requires_grad_is_noticed(engine, net, pair):
    engine.backward(pair.image, pair.target)
    net.zero_grad()
    net.down.requires_grad_(False)
    engine.backward(pair.image, pair.target)
    assert net.down.weight.grad is None
    assert net.up.weight.grad is not None


def test_a_changed_mode_is_noticed(pair, bce):
    model = nn.Sequential(nn.Conv2d(2, 1, 1), nn.BatchNorm2d(1)).double().eval()
    engine = gg.compile(model, bce, tile=TILE)
    engine.backward(pair.image, pair.target)
    assert model[1].num_batches_tracked == 0
    model.train()
    engine.backward(pair.image, pair.target)
    assert model[1].num_batches_tracked == 1
    model.eval()
    engine.backward(pair.image, pair.target)
    assert model[1].num_batches_tracked == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net.inner, "padding", (0, 0)) or setattr(net, "head", nn.Conv2d(3, 1, 3, padding=1)),  # type: ignore[func-returns-value]
        lambda net: setattr(net, "head", nn.Conv2d(3, 1, 3, padding=1)),
        lambda net: setattr(net, "head", nn.Sequential(nn.Conv2d(3, 1, 1), nn.Tanh())),
        lambda net: setattr(net.down, "dilation", (2, 2)) or setattr(net.down, "padding", (4, 4)),  # type: ignore[func-returns-value]
    ],
    ids=["padding", "another layer", "one more layer", "dilation"],
)
def test_a_changed_structure_is_noticed(engine, net, pair, change, whole, assert_exact):
    def loss(o, t):
        return F.mse_loss(o, t[..., : o.shape[-2], : o.shape[-1]])

    engine = gg.compile(net, loss, tile=TILE)
    engine.forward(pair.image, pair.target)
    engine.backward(pair.image, pair.target)
    change(net)
    net.double().zero_grad()
    value, expected = whole(net, loss, pair.image, pair.target[None])
    torch.testing.assert_close(engine.backward(pair.image, pair.target), value, rtol=1e-12, atol=0)
    assert_exact(net, expected)


def test_a_plain_setting_of_a_module_is_noticed(net, pair):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net
            self.factor = 1.0

        def forward(self, x):
            return self.net(x) * self.factor

    model = Scaled()
    engine = gg.compile(model, lambda o, t: o.mean() + 0 * t.mean(), tile=TILE)
    first = engine.forward(pair.image, pair.target).item()
    model.factor = 3.0
    assert engine.forward(pair.image, pair.target).item() == pytest.approx(3 * first, rel=1e-12)


def test_untied_weights_are_noticed(bce, pair, whole, assert_exact):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 1, 1)).double()
    model[1].weight = model[0].weight
    engine = gg.compile(model, bce, tile=TILE)
    engine.backward(pair.image, pair.target)
    model.zero_grad()
    model[1].weight = nn.Parameter(model[0].weight.detach() * 2)  # type: ignore[operator]
    _, expected = whole(model, bce, pair.image, pair.target[None])
    engine.backward(pair.image, pair.target)
    assert_exact(model, expected)


def test_a_changed_model_is_planned_anew(net, bce, pair):
    """Freezing all but the head makes a backward lean; its tiles must not bind the model that is trained whole."""
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    engine = gg.compile(net, bce)
    engine.in_tiles = True
    lean = engine.plan(pair.image, pair.target)
    net.requires_grad_(True)
    full = engine.plan(pair.image, pair.target)
    assert full.segments[0].tile_peak_bytes > lean.segments[0].tile_peak_bytes
    assert engine.plan(pair.image, pair.target) is full


def test_several_sizes_live_side_by_side(engine, net, bce, whole, assert_exact):
    torch.manual_seed(3)
    pairs = [(torch.rand(2, h, w).double(), torch.rand(1, h, w).double()) for h, w in ((23, 31), (17, 12), (40, 9))]
    plans = [engine.plan(image, target) for image, target in pairs]
    for image, target in [*pairs, *pairs]:
        net.zero_grad()
        _, expected = whole(net, bce, image, target[None])
        engine.backward(image, target)
        assert_exact(net, expected)
    assert all(engine.plan(*pair) is plan for pair, plan in zip(pairs, plans, strict=True))


def test_a_batch_norm_of_plain_averages_notices_that_training_is_over() -> None:
    norm = nn.BatchNorm2d(3, momentum=None)
    engine = gg.compile(nn.Sequential(norm).train(), lambda output, target: (output - target).square().mean())
    image, target = torch.rand(3, 16, 16), torch.zeros(3, 16, 16)
    engine.backward(image, target)
    norm.eval()
    value = engine.forward(image, target)
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 1
    torch.testing.assert_close(value, norm(image[None]).square().mean())
