"""A guard sees what decides about a graph beside the model itself."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

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
