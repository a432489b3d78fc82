"""What a compiled convolution is taken to add to the process depends on its precision and on the processor."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gigagrad.execution.kernels import kernel_bytes
from gigagrad.graphs import InputSpec, capture
from gigagrad.plans.limits import KERNEL_BYTES

CPU = torch.device("cpu")
FIELD = InputSpec((1, 3, 64, 64), torch.float32, field=True)
TARGET = InputSpec((1, 1, 64, 64), torch.float32, field=True)


def graph_in(precision, model=None):
    return capture(model or nn.Conv2d(3, 1, 3, padding=1), F.mse_loss, (FIELD,), TARGET, precision)


@pytest.fixture
def processor(monkeypatch):
    """Give the processor features, by name."""

    def has(*features):
        monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_f": True, **dict.fromkeys(features, True)})

    return has


def test_kernels_for_matrix_tiles_are_several_times_as_large(processor):
    half = graph_in(torch.bfloat16)
    processor()
    assert kernel_bytes(half, CPU) == KERNEL_BYTES
    processor("amx_tile", "amx_bf16")
    assert kernel_bytes(half, CPU) > 4 * KERNEL_BYTES


@pytest.mark.parametrize("precision", [None, torch.float16])
def test_tiles_that_do_not_take_these_numbers_change_nothing(processor, precision):
    processor("amx_tile", "amx_bf16")
    assert kernel_bytes(graph_in(precision), CPU) == KERNEL_BYTES
    processor("amx_tile", "amx_bf16", "amx_fp16")
    assert (kernel_bytes(graph_in(precision), CPU) > KERNEL_BYTES) == (precision is torch.float16)


def test_a_network_without_convolutions_and_a_gpu_compile_none_for_tiles(processor):
    processor("amx_tile", "amx_bf16")
    assert kernel_bytes(graph_in(torch.bfloat16, nn.Identity()), CPU) == KERNEL_BYTES
    assert kernel_bytes(graph_in(torch.bfloat16), torch.device("cuda")) == KERNEL_BYTES
