"""What `compile` promises: plans, budgets and state, and what is refused."""

from __future__ import annotations

import pytest
import torch

import gigagrad as gg
from gigagrad.errors import BudgetError, CaptureError, ConfigError, ImageError, TargetError
from gigagrad.events import StepMeasured
from gigagrad.execution import engine as engines
from tests.devices.fake import FakeCpu

TILE = (5, 8)


def test_a_plan_is_of_this_size_and_runs_nothing(engine, net, pair):
    plan = engine.plan(pair.image, pair.target)
    assert plan.image_shape == (1, 2, 23, 31)
    assert plan.tile == TILE
    assert all(p.grad is None for p in net.parameters())
    assert engine.plan(pair.image, pair.target) is plan
    assert engine.last_run is None


def test_a_budget_too_small_is_refused_before_anything_runs(net, bce):
    """The smallest budget it names works."""
    image, target = torch.rand(2, 300, 400).double(), torch.rand(1, 300, 400).double()
    with pytest.raises(BudgetError) as caught:
        gg.compile(net, bce, memory="64 MiB", device=FakeCpu()).backward(image, target)
    error = caught.value
    assert error.budget_bytes == 64 * 2**20
    assert error.budget_bytes < error.needed_bytes <= error.smallest_bytes
    assert all(p.grad is None for p in net.parameters())
    plan = gg.compile(net, bce, memory=error.smallest_bytes, device=FakeCpu()).plan(image, target)
    assert plan.predicted_peak_bytes <= error.smallest_bytes == plan.budget_bytes


def test_state_repeats_the_same_plan(net, bce, pair):
    first = gg.compile(net, bce, tile=(6, 9))
    first.backward(pair.image, pair.target)
    state = first.state_dict()
    second = gg.compile(net, bce)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert second.plan(pair.image, pair.target).tile == (6, 9)
    assert second.state_dict() == state
    (choice,) = state["choices"].values()
    choice["tiles"] = [[9, 6]] * len(choice["tiles"])
    second.load_state_dict(state)
    assert second.plan(pair.image, pair.target).tile == (9, 6)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"memory": "lots"}, "cannot read 'lots'"),
        ({"memory": 0}, "positive"),
        ({"memory": 2.5}, "whole number of bytes"),
        ({"tile": (0, 4)}, "tile must be"),
        ({"tile": (4,)}, "tile must be"),
        ({"tile": 16}, "tile must be"),
        ({"device": "tpu9000"}, "unknown device"),
        ({"device": "meta"}, "unknown device"),
        ({"loss": 3}, "loss must be a callable"),
        ({"optimizer": "adam"}, "optimizer must be a torch.optim.Optimizer"),
    ],
)
def test_arguments_that_cannot_be_used(net, arguments, text):
    with pytest.raises(ConfigError, match=text):
        gg.compile(net, **arguments)


def test_the_model_must_be_a_module():
    with pytest.raises(ConfigError, match=r"torch\.nn\.Module, got function"):
        gg.compile(lambda x: x)  # type: ignore[arg-type]


def test_calls_that_make_no_sense(engine, net, pair):
    with pytest.raises(TargetError, match="needs a target"):
        engine.backward(pair.image, None)
    with pytest.raises(ConfigError, match="no loss"):
        gg.compile(net).backward(pair.image, pair.target)
    with pytest.raises(ConfigError, match="without the target"):
        engine.forward(pair.image, pair.target, out="never.tif")
    with pytest.raises(ImageError, match="does not exist"):
        engine.backward("missing.svs", pair.target)
    with pytest.raises(TargetError, match="target of a bag is a label"):
        engine.backward(torch.rand(2, 2, 9, 9), gg.open_image(pair.target[0].numpy()))
    with pytest.raises(CaptureError):
        engine.backward(torch.rand(5, 23, 31).double(), pair.target)


def test_an_engine_with_a_loss_predicts_where_there_is_no_target(engine, net, pair, tmp_path):
    heard: list[object] = []
    engine.events.subscribe(heard.append)
    found = engine.forward(pair.image)
    torch.testing.assert_close(found, net(pair.image[None]).detach(), rtol=1e-12, atol=1e-12)
    assert engine.last_run.phase == "forward"
    assert any(isinstance(event, StepMeasured) for event in heard)
    for box, crop in engine.stream(pair.image):
        assert torch.equal(crop, found[:, :, box.y0 : box.y1, box.x0 : box.x1])
    assert engine.forward(pair.image, out=tmp_path / "p.tif").exists()
    assert engine.forward(pair.image, pair.target).ndim == 0


def test_an_engine_says_what_it_is():
    engine = gg.compile(torch.nn.Conv2d(1, 1, 1), gg.losses.bce, memory="2 GiB", device=FakeCpu())
    assert repr(engine) == "<Engine of Conv2d, bce, on cpu, 2 GiB>"
    assert repr(gg.compile(torch.nn.Conv2d(1, 1, 1))) == "<Engine of Conv2d, no loss, on cpu, no budget>"
    plan = engine.plan(torch.zeros(1, 8, 8), torch.zeros(1, 8, 8))
    assert plan._repr_html_().startswith("<pre>Training step as planned")


@pytest.mark.parametrize("in_tiles", [False, True])
def test_a_new_gradient_is_taken_over_as_it_is(net, bce, pair, monkeypatch, in_tiles):
    """A copy of every gradient would be a copy of all weights in every step."""
    given = list[int]()
    taking_over = engines._HandOver.forward

    def forward(ctx, gradients, *tensors):
        given.extend(gradient.data_ptr() for gradient in gradients)
        return taking_over(ctx, gradients, *tensors)

    monkeypatch.setattr(engines._HandOver, "forward", staticmethod(forward))
    engine = gg.compile(net, bce)
    engine.in_tiles = in_tiles
    engine.backward(pair.image, pair.target)
    # Where the whole image is computed at once, autograd has filled what was empty itself.
    assert given == ([parameter.grad.data_ptr() for parameter in net.parameters()] if in_tiles else [])
    first = [parameter.grad.clone() for parameter in net.parameters()]
    engine.backward(pair.image, pair.target)
    for one, parameter in zip(first, net.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, 2 * one)
