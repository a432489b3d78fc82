"""What the compiled kernel of a convolution takes in oneDNN's cache on this processor."""

from __future__ import annotations

import torch

from gigagrad.graphs import Graph, lookup
from gigagrad.plans.limits import KERNEL_BYTES

_AMX_KERNEL_BYTES = 320 * 2**10
"""With matrix tiles (bench/compiled_kernels.py, docs/decisions/0013-whole-process-accounting.md)."""
_FEATURES = {torch.bfloat16: "amx_bf16", torch.float16: "amx_fp16"}
"""What a processor must have for its matrix tiles to take numbers of a dtype."""


def kernel_bytes(graph: Graph, device: torch.device) -> int:
    """Of each of a graph's convolutions: the most that one of their dtypes asks for."""
    if device.type != "cpu":
        return KERNEL_BYTES
    processor = torch.cpu.get_capabilities()
    tiled = {dtype for dtype, feature in _FEATURES.items() if processor.get(feature, False)}
    on_tiles = any(lookup(node.op).compiled and node.dtype in tiled for node in graph.nodes)
    return _AMX_KERNEL_BYTES if on_tiles else KERNEL_BYTES
