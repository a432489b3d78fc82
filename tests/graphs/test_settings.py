"""A setting that changes between two calls is seen, whatever keeps it, or the model is traced in every call."""

from __future__ import annotations

import abc
import functools
import logging
import os
import re
import threading

import pytest
import torch
from torch import nn

import gigagrad as gg
from gigagrad.errors import CaptureError
from gigagrad.execution import captures
from gigagrad.graphs import InputSpec, LossModule, trace
from tests.exactness.changes import Reader, mse
from tests.exactness.settings import KINDS, PLACES, REFUSED_SETTINGS, SETTINGS, UNFOLLOWED

SPEC = InputSpec((1, 1, 11, 13), torch.float64, field=True)
ALONE = [name for name in SETTINGS if " in a" not in name and name not in REFUSED_SETTINGS]


def guard_of(model, loss=mse):
    return trace(LossModule(model, loss), SPEC, SPEC).guard


class Many(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        return x * sum(part.read(part) for part in self.parts)  # type: ignore[operator]


@pytest.mark.parametrize("place", ["a closure"])
def test_every_kind_of_setting_is_seen(place):
    kinds = {name: (kind, kind.make()) for name, kind in KINDS.items() if name not in UNFOLLOWED}
    captured = trace(
        LossModule(Many([PLACES[place](kind.read, held) for kind, held in kinds.values()]), mse), SPEC, SPEC
    )
    captured.leave_effects()
    guard = captured.guard
    unseen = []
    for name, (kind, held) in kinds.items():
        assert guard.unfollowed is None
        assert guard.holds(), name
        kind.change(held, 1.5)
        if guard.holds():
            unseen.append(name)
        guard.renew()
        guard.renew()  # what only the guard still held is gone now
    assert unseen == []


@pytest.mark.parametrize("name", [*ALONE, "array in a module imported in forward", "UserDict in a module in a closure"])
def test_a_setting_of_the_process_is_seen(name):
    way = SETTINGS[name]()
    guard = guard_of(way.model)
    assert guard.unfollowed or guard.holds()
    way.change(0)
    assert not guard.holds() or name == "the year"


@pytest.mark.parametrize("name", [n for n in REFUSED_SETTINGS if n.endswith(("attribute", "closure", "outside"))])
def test_what_cannot_be_repeated_is_refused(name):
    with pytest.raises(CaptureError, match=REFUSED_SETTINGS[name]):
        guard_of(SETTINGS[name]().model)


@pytest.fixture
def traced(monkeypatch):
    """How often the model was traced."""
    calls = []
    monkeypatch.setattr(captures, "trace", lambda *given: (calls.append(1), trace(*given))[1])  # type: ignore[func-returns-value]
    return calls


@functools.lru_cache
def ramp(length):
    return torch.linspace(0, 1, length).double()


class Busy(Reader):
    """What forwards do beside computing, and nothing that changes."""

    lock = threading.RLock()
    pattern = re.compile("a(b)")
    logger = logging.getLogger("gigagrad.tests")

    def __init__(self):
        super().__init__()
        self.sizes = {}

    def forward(self, x):
        with self.lock:
            self.logger.debug("looking at %s", tuple(x.shape))
        if self.pattern.match(os.path.join("ab", "c")):
            self.sizes.setdefault(tuple(x.shape), len(self.sizes))
        return super().forward(x) * ramp(x.shape[-1]) * getattr(self, "scale", 1.0)


class Abstract(Reader, abc.ABC):
    """As models of segmentation-models-pytorch are, whose classes know what Hugging Face's protocols met."""

    def forward(self, x):
        return super().forward(x) * getattr(self, "factor", 1.0)


def test_a_model_of_an_abstract_class_is_followed():
    assert guard_of(Abstract()).unfollowed is None


def test_an_unchanged_model_is_not_traced_again(traced):
    model = Busy()
    engine = gg.compile(model, mse, tile=(6, 7))
    image, target = torch.rand(1, 11, 13).double(), torch.rand(1, 11, 13).double()
    for _ in range(4):
        engine.backward(image, target)
        for parameter in model.parameters():
            parameter.data.mul_(0.9)
    assert len(traced) == 2  # the first forward fills its caches
    assert type(ramp(13)) is torch.Tensor


def test_looking_runs_no_code_of_the_users():
    class Loud(dict):
        def _cry(self, *_):
            raise AssertionError("user code ran")

        __iter__ = keys = values = items = __len__ = __eq__ = __getattribute__ = __repr__ = _cry
        __hash__ = None

    held = Loud(v=[0.5])
    model = Reader(lambda self: dict.__getitem__(held, "v")[0])
    guard = guard_of(model)
    assert guard.holds()
    dict.__getitem__(held, "v")[0] = 1.5
    assert not guard.holds()
