"""A guard sees what decides about a graph beside the model itself."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import BaseTorchFunctionMode

from gigagrad.graphs import InputSpec, LossModule, trace

IMAGE = InputSpec((1, 1, 9, 8), torch.float32, field=True)


@contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def no_fast_path():
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@contextmanager
def no_onednn():
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(True)


FLAGS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another autocast": lambda: torch.autocast("cpu", torch.float16),
    "default device": lambda: torch.device("meta"),
    "default dtype": default_dtype,
    "deterministic": deterministic,
    "fast path of attention": no_fast_path,
    "kernels of attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "modes of PyTorch's functions": BaseTorchFunctionMode,
    "oneDNN": no_onednn,
}


@pytest.fixture(scope="module")
def guard():
    return trace(LossModule(nn.Conv2d(1, 1, 3), lambda output, target: output.mean()), (IMAGE,), None).guard


@pytest.mark.parametrize("name", FLAGS)
def test_a_setting_of_pytorch_counts(guard, name):
    assert guard.holds()
    with FLAGS[name]():  # type: ignore[attr-defined]
        assert not guard.holds()
    assert guard.holds()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.scale, self.shift = nn.Conv2d(1, 1, 3), 0.1, 0.2

    def forward(self, x):
        return self.conv(x) * self.scale + self.shift


def test_a_value_that_is_set_again_and_again_is_still_watched():
    model = Scaled()
    guard = trace(LossModule(model, lambda output, target: output.mean()), (IMAGE,), None).guard
    for _ in range(3):
        model.scale = float("0.1")  # another object
        assert guard.holds()
    model.scale = 0.3
    assert not guard.holds()
    model.scale = 0.1
    assert guard.holds()
    model.conv.stride = (2, 2)
    assert not guard.holds()
    model.conv.stride = (1, 1)
    assert guard.holds()
    model.conv.register_forward_hook(lambda *_: None)
    assert not guard.holds()


def test_a_guard_that_holds_calls_nothing_for_each_module():
    def calls(count):
        layers = [nn.BatchNorm2d(1, eps=0.1) for _ in range(count)]
        guard = trace(LossModule(nn.Sequential(*layers), lambda output, target: output.mean()), (IMAGE,), None).guard
        layers[0].eps = float("0.1")  # another object
        assert guard.holds()
        seen = []
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, argument: seen.append(event))
        try:
            assert guard.holds()
        finally:
            sys.setprofile(before)
        return len(seen)

    few, many = calls(2), calls(40)
    assert many <= few
