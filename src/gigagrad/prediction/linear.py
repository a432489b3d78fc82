"""Compute linear layers by oneDNN where MKL, to which PyTorch gives them, leaves half of the processor idle.

MKL takes vectors of 32 bytes on AMD's processors, whose AVX-512 has 64: a linear layer in float32 reaches 108 GFLOP/s
of a core of an EPYC (Zen 5), by oneDNN, which computes PyTorch's convolutions and half precision, 240.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_CPUINFO: Final = Path("/proc/cpuinfo")


@cache
def onednn_is_faster() -> bool:
    """Say whether this is a processor of AMD with AVX-512, and PyTorch has oneDNN."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    capable = has_onednn and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return capable and hasattr(torch.ops.mkldnn, "_linear_pointwise") and "AuthenticAMD" in _cpuinfo()


def _cpuinfo() -> str:
    try:
        return _CPUINFO.read_text()
    except OSError:
        return ""


class LinearByOneDnn(TorchFunctionMode):
    """A context in which this thread's `F.linear` of float32 tensors on the CPU is oneDNN's, without gradients.

    Sums are rounded in another order than MKL's.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not kwargs:
            x, weight, bias = (*args, None)[:3]
            alike = all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in (x, weight))
            if alike and weight.ndim == 2:
                return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return func(*args, **(kwargs or {}))
