"""Check that ranks compute the same bits: kernels choose their instructions by the processor."""

from __future__ import annotations

import hashlib

from gigagrad.ranks.ranks import Ranks
from gigagrad.threads import operator_threads


def mismatched_numerics(ranks: Ranks) -> list[int]:
    """Return the ranks whose processors round a probe otherwise than the first one's. Raises RankError."""
    if ranks.count == 1:
        return []
    import torch

    first, *others = ranks.all_gather_object([torch.backends.cpu.get_cpu_capability(), _probe()])
    return [rank for rank, probe in enumerate(others, 1) if probe != first]


def _probe() -> str:
    """Digest a convolution, sums and an exponential, forward and backward, of numbers that are the same everywhere."""
    import torch
    import torch.nn.functional as F

    count = torch.arange(2 * 8 * 33 * 35, dtype=torch.float32)
    image = (count * 0.618034 % 1).reshape(2, 8, 33, 35).requires_grad_()
    weight = (count[: 16 * 8 * 9] * 0.414214 % 1 - 0.5).reshape(16, 8, 3, 3).requires_grad_()
    with operator_threads(1):
        torch.autograd.backward(F.conv2d(image, weight, padding=1).sigmoid().square().mean())
    assert image.grad is not None
    assert weight.grad is not None
    digest = hashlib.sha256(image.grad.numpy().tobytes())
    digest.update(weight.grad.numpy().tobytes())
    return digest.hexdigest()
