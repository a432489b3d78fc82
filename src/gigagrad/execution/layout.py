"""Lay tensors out in memory as kernels read them.

Kernels choose by strides, those of axes of length 1 too, and by addresses how they add up, and so the last bits. Where
a crop comes from, a whole field, a window of it or a file, must not show in them.
"""

from __future__ import annotations

import torch

from gigagrad.graphs.crops import strides

_ALIGNED_BYTES = 64
"""PyTorch's own allocations begin at multiples of this."""


def laid_out(value: torch.Tensor, layout: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    """Return a value as a new tensor of its shape would lie, in this layout where it has four axes; itself where it
    does.
    """
    if value.ndim != 4 or (value.shape[1] == 1 and value.stride(1) != 1):  # one channel lies in either layout
        layout = torch.contiguous_format
    value = aligned(value.contiguous(memory_format=layout))
    usual = strides(value.shape, layout)
    return value if value.stride() == usual else value.as_strided(value.shape, usual)


def aligned(value: torch.Tensor) -> torch.Tensor:
    """Return a value without gaps at an address such as new tensors have. Of integers every sum is exact."""
    return value.clone() if value.is_floating_point() and value.data_ptr() % _ALIGNED_BYTES else value
