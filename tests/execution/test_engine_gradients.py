"""Loss and gradients are exact, and what `.grad` means."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg

TILE = (5, 8)


def test_loss_and_gradients_are_exact(engine, net, bce, pair, whole, assert_exact):
    value, expected = whole(net, bce, pair.image, pair.target[None])
    result = engine.backward(pair.image, pair.target)
    assert result.shape == ()
    assert not result.requires_grad
    torch.testing.assert_close(result, value, rtol=1e-12, atol=0)
    assert_exact(net, expected)


def test_gradients_are_added_to_those_there(engine, net, bce, pair, whole, assert_exact):
    _, expected = whole(net, bce, pair.image, pair.target[None])
    engine.backward(pair.image, pair.target)
    kept = {name: p.grad for name, p in net.named_parameters()}
    engine.backward(pair.image, pair.target)
    assert_exact(net, {name: 2 * g for name, g in expected.items()})
    assert all(p.grad is kept[name] for name, p in net.named_parameters())


def test_the_same_plan_twice_gives_the_same_bits(engine, net, pair):
    def step():
        net.zero_grad()
        value = engine.backward(pair.image, pair.target)
        return [value, *(p.grad.clone() for p in net.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(step(), step(), strict=True))
    other = gg.compile(net, engine.loss, tile=TILE)
    first = step()
    net.zero_grad()
    assert torch.equal(other.backward(pair.image, pair.target), first[0])
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), first[1:], strict=True))


@pytest.mark.parametrize("tile", [(1, 1), (2, 31), (23, 3), (7, 7), (23, 31), (100, 100), None])
@pytest.mark.parametrize("which", ["net", "gate"])
def test_every_tile_shape_agrees(request, which, tile, bce, pair, whole, assert_exact):
    model = request.getfixturevalue(which)
    value, expected = whole(model, bce, pair.image, pair.target[None])
    result = gg.compile(model, bce, tile=tile).backward(pair.image, pair.target)
    torch.testing.assert_close(result, value, rtol=1e-12, atol=0)
    assert_exact(model, expected)


def test_frozen_parameters_get_no_gradient(net, bce, pair, whole, assert_exact):
    net.inner.requires_grad_(False)
    _, expected = whole(net, bce, pair.image, pair.target[None])
    gg.compile(net, bce, tile=TILE).backward(pair.image, pair.target)
    assert "inner.weight" not in expected
    assert_exact(net, expected)


def test_a_frozen_network_has_a_loss_and_no_gradients(net, bce, pair):
    net.requires_grad_(False)
    value = gg.compile(net, bce, tile=TILE).backward(pair.image, pair.target)
    assert value.item() == pytest.approx(bce(net(pair.image[None]), pair.target[None]).item(), rel=1e-12)
    assert all(p.grad is None for p in net.parameters())


def test_parameters_nothing_depends_on_get_no_gradient(net, bce, pair):
    net.unused = nn.Linear(3, 3)
    net.stopped = nn.Parameter(torch.ones((), dtype=torch.float64))

    class LossModule(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x) * self.net.stopped.detach()

    gg.compile(LossModule(), bce, tile=TILE).backward(pair.image, pair.target)
    assert net.unused.weight.grad is None
    assert net.stopped.grad is None
    assert net.inner.weight.grad is not None


def test_tied_weights_gather_both_gradients(bce, pair, whole, assert_exact):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 1, 1)
    ).double()
    model[2].weight = model[0].weight
    _, expected = whole(model, bce, pair.image, pair.target[None])
    gg.compile(model, bce, tile=TILE).backward(pair.image, pair.target)
    assert_exact(model, expected)


def test_modules_in_the_loss_have_buffers_and_parameters(net, pair):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.tensor([2.0], dtype=torch.float64))
            self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

        def forward(self, o, t):
            return F.binary_cross_entropy_with_logits(o / self.temperature, t, pos_weight=self.weight)  # type: ignore[arg-type]

    loss = Loss()
    expected = torch.autograd.grad(loss(net(pair.image[None]), pair.target[None]), loss.temperature)[0]
    engine = gg.compile(net, loss, tile=TILE)
    engine.backward(pair.image, pair.target)
    torch.testing.assert_close(loss.temperature.grad, expected, rtol=1e-11, atol=1e-13)
    loss.weight.fill_(5)  # type: ignore[operator]
    value = engine.forward(pair.image, pair.target)
    assert value.item() == pytest.approx(loss(net(pair.image[None]), pair.target[None]).item(), rel=1e-12)


def test_closures_over_tensors_are_read_as_they_are(net, pair):
    factor = torch.tensor(2.0, dtype=torch.float64)
    engine = gg.compile(net, lambda o, t: factor * F.mse_loss(o, t), tile=TILE)
    first = engine.forward(pair.image, pair.target).item()
    factor.fill_(6)
    assert engine.forward(pair.image, pair.target).item() == pytest.approx(3 * first, rel=1e-12)


def test_grad_modes_around_a_call_change_nothing(engine, net, bce, pair, whole, assert_exact):
    _, expected = whole(net, bce, pair.image, pair.target[None])
    with torch.no_grad():
        engine.backward(pair.image, pair.target)
    assert_exact(net, expected)
    with torch.inference_mode():
        gg.compile(net, tile=TILE).forward(pair.image)


@pytest.mark.cuda
@pytest.mark.parametrize("which", ["net", "gate"])
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_a_gpu_gives_the_same(request, which, home, bce, pair, whole):
    model = request.getfixturevalue(which)
    value, expected = whole(model, bce, pair.image, pair.target[None])
    model.to(home)
    result = gg.compile(model, bce, tile=TILE, device="cuda").backward(pair.image, pair.target)
    assert result.item() == pytest.approx(value.item(), rel=1e-12)
    for name, p in model.named_parameters():
        assert p.grad.device.type == home
        torch.testing.assert_close(p.grad.cpu(), expected[name], rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        predicted = model(pair.image[None].to(home)).cpu()
    output = gg.compile(model, tile=TILE, device="cuda").forward(pair.image)
    torch.testing.assert_close(output.cpu(), predicted, rtol=1e-11, atol=1e-12)
