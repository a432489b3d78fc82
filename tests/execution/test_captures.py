"""Graphs are captured again when something changed, and only then; plans stay as long as the graph does."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import gigagrad as gg
from gigagrad.events import Notice
from gigagrad.execution import captures
from tests.devices.fake import FakeCpu

collections = 0
IMAGE, TARGET = torch.rand(1, 20, 20), torch.rand(1, 20, 20)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.note, self.scale = nn.Conv2d(1, 1, 3, padding=1), None, 1.0

    def forward(self, x):
        self.note = self.note  # read, and of no consequence
        return self.conv(x) * self.scale


def mse(output, target):
    return ((output - target) ** 2).mean()


@pytest.fixture
def traced(monkeypatch):
    """How often something was captured."""
    calls = []

    def counted(*given):
        calls.append(given)
        return captured(*given)

    captured = captures.trace  # type: ignore[attr-defined]
    monkeypatch.setattr(captures, "trace", counted)
    return calls


def test_nothing_is_captured_again_where_nothing_changed(traced):
    model = Model()
    engine = gg.compile(model, mse, tile=(8, 8))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        engine.backward(IMAGE, TARGET)
        optimizer.step()
        model.unread = object()  # type: ignore[assignment]
    engine.forward(IMAGE, TARGET)
    assert len(traced) == 1


def test_what_a_collection_of_garbage_runs_is_not_the_models(traced):
    """Property tests, for one, measure how long collections take."""

    def count(phase, info):
        global collections
        collections += 1

    class Littering(Model):
        def forward(self, x):
            for _ in range(99):
                cycle: list[Any] = []
                cycle.append(cycle)
            return super().forward(x)

    threshold = gc.get_threshold()
    gc.callbacks.append(count)
    gc.set_threshold(20)
    try:
        engine = gg.compile(Littering(), mse, tile=(8, 8))
        for _ in range(2):
            engine.backward(IMAGE, TARGET)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(count)
    assert gc.isenabled()
    assert len(traced) == 1


def test_what_does_not_change_the_graph_keeps_the_plan(traced):
    model = Model()
    engine = gg.compile(model, mse, tile=(8, 8))
    plan = engine.plan(IMAGE, TARGET)
    model.note = "another"
    assert engine.plan(IMAGE, TARGET) is plan
    assert len(traced) == 2


def test_going_back_and_forth_captures_each_state_once(traced):
    model = Model()
    engine = gg.compile(model, mse, tile=(8, 8))
    for scale in (1.0, 2.0, 1.0, 2.0):
        model.scale = scale
        engine.backward(IMAGE, TARGET)
    assert len(traced) == 2


def test_modes_of_one_graph_are_captured_once_each(traced):
    """Dropout of 0 reads the mode, and does nothing in either."""
    model = nn.Sequential(Model(), nn.Dropout(0.0))
    engine = gg.compile(model, mse, tile=(8, 8))
    for _ in range(3):
        engine.plan(IMAGE, TARGET)
        model.eval()
        engine.plan(IMAGE, TARGET)
        model.train()
    assert len(traced) == 2


def test_a_model_that_counts_leaves_room_for_other_graphs(traced):
    model = Model()
    engine = gg.compile(model, mse, tile=(8, 8))
    engine.plan(IMAGE, TARGET)
    model.scale = 2.0
    for number in range(6):
        model.note = number
        engine.plan(IMAGE, TARGET)
    model.scale, model.note = 1.0, None
    engine.plan(IMAGE, TARGET)
    assert len(traced) == 7


def test_an_annealed_number_keeps_the_tiles():
    model = Model()
    engine = gg.compile(model, mse, memory="2 GiB", device=FakeCpu())
    first = engine.plan(IMAGE, TARGET)
    model.scale = 0.5
    second = engine.plan(IMAGE, TARGET)
    assert second is not first
    assert second.tile == first.tile


def test_what_forward_stores_is_told_once():
    class Storing(Model):
        def forward(self, x):
            self.seen = super().forward(x)
            return self.seen

    engine = gg.compile(Storing(), mse, tile=(8, 8))
    told = []
    engine.events.subscribe(lambda event: told.append(event.text) if isinstance(event, Notice) else None)
    engine.backward(IMAGE, TARGET)
    engine.backward(IMAGE, TARGET)
    assert [text for text in told if "model.seen" in text] == [
        "forward stores model.seen for somebody to look at; it will not be found there"
    ]


def test_engines_in_two_threads_get_the_gradients_of_one():
    models = [Model() for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())

    def gradient(model):
        gg.compile(model, mse, tile=(8, 8)).backward(IMAGE, TARGET)
        return model.conv.weight.grad

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(gradient, models[1:])
    alone = gradient(models[0])
    torch.testing.assert_close(first, alone, rtol=0, atol=0)
    torch.testing.assert_close(second, alone, rtol=0, atol=0)


def test_a_tensor_from_outside_gets_its_gradient():
    weight = torch.rand(1, 1, 1, requires_grad=True)
    outer = weight * 2  # no leaf: its own history goes on
    model = Model()
    engine = gg.compile(model, lambda o, t: mse(o * weight * outer, t), tile=(8, 8))
    engine.backward(IMAGE, TARGET)
    found = weight.grad.clone()
    weight.grad = None
    mse(model(IMAGE[None]) * weight * (weight * 2), TARGET[None]).backward()
    torch.testing.assert_close(found, weight.grad, rtol=1e-4, atol=1e-6)
