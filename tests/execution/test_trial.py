"""The trial of memory layouts: it decides speed, never numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.execution import trial
from tests.devices.fake import FakeCpu


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))


def bce(o, t):
    return F.binary_cross_entropy_with_logits(o, t.to(o.dtype))


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(3, 60, 60, generator=generator), torch.randint(0, 2, (1, 60, 60), generator=generator).byte()


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
def test_the_faster_layout_is_taken(monkeypatch, model, images, layout):
    seconds = {"channels_last": 1.0, "contiguous": 1.0} | {layout: 0.5}
    monkeypatch.setattr(trial, "trial_seconds", lambda prepared, memory_format, timings=1: (seconds[memory_format],))
    plan = gg.compile(model, bce, tile=(10, 10)).plan(*images)
    assert plan.memory_format == layout
    assert plan.predicted_seconds == 0.5
    assert plan.timed_seconds == (0.5,)


def test_both_layouts_give_the_same_loss(monkeypatch, model, images):
    results = []
    for layout in ("channels_last", "contiguous"):
        monkeypatch.setattr(trial, "faster_layout", lambda prepared, layout=layout: (layout, (1.0,)))
        monkeypatch.setattr("gigagrad.execution.planner.faster_layout", trial.faster_layout)
        engine = gg.compile(model, bce, tile=(10, 10))
        model.zero_grad()
        value = engine.backward(*images).item()
        assert engine.plan(*images).memory_format == layout
        results.append((value, [p.grad.clone() for p in model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    for a, b in zip(*(r[1] for r in results), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_a_trial_neither_draws_random_numbers_nor_touches_gradients(model, images):
    state = torch.get_rng_state()
    plan = gg.compile(model, bce, tile=(10, 10)).plan(*images)
    assert plan.timed_seconds is not None
    assert plan.timed_seconds[0] > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_few_tiles_and_double_precision_have_no_trial(monkeypatch, model, images):
    def refuse(prepared):
        raise AssertionError("no trial here")

    monkeypatch.setattr("gigagrad.execution.planner.faster_layout", refuse)
    assert gg.compile(model, bce, tile=(60, 60)).plan(*images).memory_format == "channels_last"
    image, target = images
    plan = gg.compile(model.double(), bce, tile=(10, 10)).plan(image.double(), target)
    assert plan.memory_format == "contiguous"
    assert plan.timed_seconds is None


@pytest.fixture
def timed_as(monkeypatch, model, images):
    """Plans a step of three passes over a hundred tiles each, of which the first segment's are saved, on a machine on
    which the runs of a tile take so many seconds, by (segment, whether backward).
    """

    def plan(seconds):
        runs = {tile: iter(each) for tile, each in seconds.items()}
        monkeypatch.setattr(
            trial, "_tile_seconds", lambda prepared, segment, backward, layout: next(runs[segment.index, backward])
        )
        image, target = images
        normed = nn.Sequential(model, nn.BatchNorm2d(1)).double()
        engine = gg.compile(normed, bce, tile=(6, 6), memory="2 GiB", device=FakeCpu())
        made = engine.plan(image.double(), target)
        assert [one.saved_tiles for one in made.segments] == [100, 0]
        return made

    return plan


def test_a_tile_of_each_pass_is_timed_where_that_is_cheap(timed_as):
    """Of two runs of a tile the faster one counts, whichever it is; no backward pass computes anew what is saved."""
    plan = timed_as({(0, False): [1.0, 6.0], (1, True): [2.0, 9.0], (0, True): [8.0, 3.0]})
    assert [(one.segment, one.phase) for one in plan.passes] == [(0, "forward"), (1, "one pass"), (0, "backward")]
    assert plan.timed_seconds == (100, 200, 300 - 100)


def test_no_pass_takes_less_than_no_time_where_a_busy_machine_delays_another(timed_as):
    plan = timed_as({(0, False): [4.0, 5.0], (1, True): [2.0, 2.0], (0, True): [3.0, 3.0]})
    assert plan.timed_seconds == (400, 200, 0)


def test_frozen_networks_and_class_targets_can_be_tried(model, images):
    def cross_entropy(o, t):
        return F.cross_entropy(torch.cat([o, -o], 1), t[:, 0].long(), torch.ones(2))

    assert gg.compile(model, cross_entropy, tile=(10, 10)).plan(*images).timed_seconds[0] > 0  # type: ignore[index]
    assert gg.compile(model.requires_grad_(False), bce, tile=(10, 10)).plan(*images).timed_seconds[0] > 0  # type: ignore[index]
