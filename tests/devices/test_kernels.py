"""What a compiled convolution is taken to add to the process depends on its precision and on the processor."""

import pytest
import torch

from gigagrad.allowances import KERNEL_BYTES, MOST_COMPILED
from gigagrad.devices import device_for
from tests.devices.fake import FakeCpu


@pytest.fixture
def processor(monkeypatch):
    """Give the processor features, by name."""

    def has(*features):
        monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_f": True, **dict.fromkeys(features, True)})

    return has


def kernel_bytes(*dtypes):
    return FakeCpu().compiled_bytes(1, dtypes)


def test_kernels_for_matrix_tiles_are_several_times_as_large(processor):
    processor()
    assert kernel_bytes(torch.bfloat16) == KERNEL_BYTES
    processor("amx_tile", "amx_bf16")
    assert kernel_bytes(torch.float32, torch.bfloat16) > 4 * KERNEL_BYTES


@pytest.mark.parametrize("precision", [torch.float32, torch.float16])
def test_tiles_that_do_not_take_these_numbers_change_nothing(processor, precision):
    processor("amx_tile", "amx_bf16")
    assert kernel_bytes(precision) == KERNEL_BYTES
    processor("amx_tile", "amx_bf16", "amx_fp16")
    assert (kernel_bytes(precision) > KERNEL_BYTES) == (precision is torch.float16)


def test_what_is_compiled_already_is_not_added_again():
    device = FakeCpu()
    whole = device.compiled_bytes(10**6, ())
    assert whole == MOST_COMPILED * KERNEL_BYTES
    device.note_compiled(MOST_COMPILED - 3)
    assert device.compiled_bytes(10**6, ()) == 3 * KERNEL_BYTES


@pytest.mark.cuda
def test_a_gpu_compiles_none_into_its_memory():
    assert device_for("cuda").compiled_bytes(100, (torch.bfloat16,)) == 0
