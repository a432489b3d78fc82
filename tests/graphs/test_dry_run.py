"""A dry run finds out, sets back, and refuses."""

from __future__ import annotations

import builtins
import cProfile
import functools
import math
import pstats
import secrets
import sys
import textwrap
import threading

import pytest
import torch
from torch import nn

from gigagrad.errors import CaptureError
from gigagrad.graphs import InputSpec, LossModule, capture, trace

IMAGE = InputSpec((1, 1, 16, 16), torch.float32, field=True)


class Model(nn.Module):
    def __init__(self, body=lambda self, x: self.conv(x)) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def mean(output, target=None):
    return output.mean()


def clipped(self, x):
    y = self.conv(x)
    y.register_hook(lambda g: g.clamp(-1, 1))
    return y


def clipped_later(self, x):
    y = self.conv(x)
    y.grad_fn.register_hook(lambda *gradients: None)
    return y


def clipped_weight(self, x):
    self.conv.weight.register_hook(lambda g: g * 2)
    return self.conv(x)


def several(self, x):
    y = self.conv(x)
    torch.autograd.graph.register_multi_grad_hook([y], lambda gradients: None)
    return y


@pytest.mark.parametrize("body", [clipped, clipped_later, clipped_weight, several])
def test_hooks_on_gradients_inside_forward_are_refused_with_their_line(body):
    with pytest.raises(CaptureError, match=r"hook on a gradient at .*test_dry_run\.py:\d+"):
        capture(Model(body), mean, IMAGE, None)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_modules_are_refused_by_name(register):
    model = Model()
    getattr(model.conv, register)(lambda *_: None)
    with pytest.raises(CaptureError, match="'conv' has a backward hook"):
        capture(model, mean, IMAGE, None)


def test_what_cannot_be_seen_is_refused():
    with pytest.raises(CaptureError, match="for a reason that cannot be seen"):
        capture(Model(lambda self, x: self.conv(x) * secrets.randbits(60)), mean, IMAGE, None)


def running(self, x):
    y = self.conv(x)
    self.average = 0.9 * self.average + 0.1 * y.mean().detach()
    return y * self.average


def test_a_tensor_carried_from_call_to_call_is_refused_by_name():
    model = Model(running)
    model.average = torch.zeros(())
    with pytest.raises(CaptureError, match=r"keeps 'model\.average'.*register_buffer"):
        capture(model, mean, IMAGE, None)


def cached(self, x):
    if not hasattr(self, "ramp"):
        self.ramp = torch.linspace(0, 1, x.shape[-1])
    return self.conv(x) * self.ramp


def cached_pixels(self, x):
    if not hasattr(self, "first"):
        self.first = x.mean()
    return self.conv(x) * self.first


def test_a_cache_of_what_is_no_pixel_is_made_in_every_run():
    assert any(node.op.startswith("aten.linspace") for node in capture(Model(cached), None, IMAGE, None).nodes)


def test_a_cache_of_pixels_is_refused():
    with pytest.raises(CaptureError, match=r"keeps 'model\.first'"):
        capture(Model(cached_pixels), mean, IMAGE, None)


def test_what_is_stored_to_be_looked_at_is_told():
    def storing(self, x):
        self.features = self.conv(x)
        return self.features

    model = Model(storing)
    captured = trace(LossModule(model, mean), IMAGE, None)
    assert captured.left_out == ("model.features",)
    assert not hasattr(model, "features")


SEEN: dict[str, torch.Tensor] = {}


def test_no_fake_tensor_stays_in_the_users_hands():
    model = Model()
    model.conv.register_forward_hook(lambda module, inputs, output: SEEN.update(features=output))
    capture(model, mean, IMAGE, None)
    assert SEEN == {}


def test_capture_leaves_the_model_as_it_was():
    calls = []

    def counting(self, x):
        self.calls += 1
        calls.append(self.calls)
        return self.conv(x)

    model = Model(counting)
    model.calls = 0  # type: ignore[assignment]
    before = dict(vars(model))
    captured = trace(LossModule(model, mean), IMAGE, None)
    assert vars(model) == before
    assert calls == []
    captured.leave_effects()
    assert (model.calls, calls) == (1, [1])  # type: ignore[comparison-overlap]


def test_an_error_leaves_python_as_it_was():
    def failing(self, x):
        self.calls += 1
        raise RuntimeError("no")

    model = Model(failing)
    model.calls = 0  # type: ignore[assignment]
    with pytest.raises(CaptureError, match="no"):
        capture(model, mean, IMAGE, None)
    assert model.calls == 0


def test_a_profiler_goes_on_after_a_capture():
    profiler = cProfile.Profile()

    def work():
        capture(Model(), mean, IMAGE, None)
        textwrap.dedent("afterwards")

    profiler.runcall(work)
    assert "dedent" in {name for _, _, name in pstats.Stats(profiler).stats}  # type: ignore[attr-defined]


def test_a_profiler_in_python_sees_the_capture_too():
    seen = set()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: seen.add(frame.f_code.co_name))
    try:
        capture(Model(), mean, IMAGE, None)
        textwrap.dedent("afterwards")
    finally:
        sys.setprofile(before)
    assert {"run_dry", "_refuse_own_gradients", "dedent"} <= seen


def test_two_threads_capture_one_after_the_other():
    """Export replaces `max` and `min` while it traces; two of them at once would leave their own behind."""
    found, functions = [], (builtins.max, builtins.min, math.pow)

    def work():
        found.append(capture(Model(lambda self, x: self.conv(x) * max(1.0, x.shape[-1])), mean, IMAGE, None))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert (builtins.max, builtins.min, math.pow) == functions


def test_builtins_come_back_whatever_happens(monkeypatch):
    functions = builtins.max, builtins.min, math.pow

    def broken(*_, **__):
        builtins.max = functools.partial(max)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.export, "export", broken)
    with pytest.raises(KeyboardInterrupt):
        capture(Model(), mean, IMAGE, None)
    assert (builtins.max, builtins.min, math.pow) == functions
