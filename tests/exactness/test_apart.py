"""Exactness on a device whose memory is its own (tests/devices/apart.py): what is not brought there fails here."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gigagrad as gg
from tests.devices.apart import NAME, ApartTensor
from tests.exactness.networks import Recipe, compare_forward, compare_step, draw_recipe, ill_conditioned
from tests.exactness.normed import Net, dice
from tests.exactness.steering import with_fields_in

TOLERANCE = 1e-9


def needs_fused_cells(recipe: Recipe) -> bool:
    """Recurrent layers are computed by kernels of a device's own, where it is not the host."""
    return any(node.op == "recurrent" for node in recipe.nodes)


def drawn(seed: int) -> Recipe:
    """Draws a network that the simulated device has kernels for."""
    draw, recipe = random.Random(seed).randint, None
    while recipe is None or needs_fused_cells(recipe):
        recipe = draw_recipe(draw)
    return recipe


@pytest.mark.parametrize("seed", range(6))
def test_a_step_and_a_prediction_are_exact(seed: int) -> None:
    recipe = drawn(seed)
    outcome = compare_step(recipe, NAME)
    assert outcome.worst <= TOLERANCE or ill_conditioned(recipe, outcome.worst), (outcome, recipe)
    assert compare_forward(recipe, NAME) <= TOLERANCE, recipe


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = [torch.rand(channels, 64, 96, generator=generator, dtype=torch.float64) for channels in (3, 1)]
    return draw[0], draw[1]


@pytest.mark.parametrize(("kept", "home"), [("device", "cpu"), ("device", NAME), ("host", NAME), ("scratch", "cpu")])
def test_steps_are_exact_wherever_the_model_and_its_fields_are(kept: str, home: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, tiled = Net().double(), Net().double()
    tiled.load_state_dict(plain.state_dict())
    tiled.to(home)
    image, target = pair()
    places: dict[str, dict[str, Any]]
    places = {"device": {}, "host": {"memory": "2800 KiB"}, "scratch": {"scratch": tmp_path}}
    engine = gg.compile(tiled, dice, device=NAME, tile=(16, 24), **places[kept])
    if kept == "scratch":
        with_fields_in(engine, image, target, "disk")
    optimizers = [torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9) for model in (plain, tiled)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = dice(plain(image[None]), target[None])
        expected.backward()
        loss = engine.backward(image, target)
        assert isinstance(loss, ApartTensor)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-11)
        for optimizer in optimizers:
            optimizer.step()
    plan = engine.plan(image, target)
    if kept == "device":
        assert any("kept" in part for part, _ in plan.memory_parts())
    else:
        assert plan.bytes_in({"host": "host", "scratch": "disk"}[kept]) > 0
    for (name, found), wanted in zip(tiled.state_dict().items(), plain.state_dict().values(), strict=True):
        assert found.device.type == home
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-8, atol=1e-10, msg=name)


def test_the_images_own_gradient_comes_back() -> None:
    torch.manual_seed(0)
    net = Net().double()
    image, target = pair()
    whole = image.clone().requires_grad_()
    F.mse_loss(net(whole[None]), target[None]).backward()
    net.zero_grad()
    image.requires_grad_()
    gg.compile(net, F.mse_loss, device=NAME, tile=(16, 24)).backward(image, target)
    assert image.grad is not None
    assert whole.grad is not None
    torch.testing.assert_close(image.grad.cpu(), whole.grad, rtol=1e-9, atol=1e-12)


def test_what_is_not_brought_to_the_device_is_refused() -> None:
    there = torch.ones(3).to(NAME)
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(3)
    assert (there + torch.tensor(1.0)).cpu().tolist() == [2, 2, 2]
