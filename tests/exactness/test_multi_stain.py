"""Two stains through one engine, in training mode: step by step against plain autograd on the whole images."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

import gigagrad as gg
from gigagrad.models import MultiStainNet

TOLERANCE = 1e-9
STEPS = 2


def relative(got, expected, floor):
    size = max(expected.abs().max().item(), floor)
    return (got - expected).abs().max().item() / size


def test_training_two_stains_follows_plain_autograd():
    """Loss, gradients and running statistics at every step, from weights that differ only by what came before. Bytes,
    as slides deliver them, are scaled inside the network."""
    torch.manual_seed(0)
    tiled = MultiStainNet(stains=2, width=4).double().train()
    plain = copy.deepcopy(tiled)
    he, ihc = (torch.randint(0, 256, (3, 51, 67), dtype=torch.uint8) for _ in range(2))
    target = torch.rand(1, 51, 67, dtype=torch.float64).round()
    engine = gg.compile(tiled, F.binary_cross_entropy_with_logits, tile=(51, 36))
    assert engine.plan((he, ihc), target).tile == (51, 36)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (tiled, plain)]
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        value = engine.backward((he, ihc), target)
        whole = F.binary_cross_entropy_with_logits(plain(he[None], ihc[None]), target[None])
        whole.backward()
        assert abs(value.item() - whole.item()) <= TOLERANCE * abs(whole.item())
        largest = max(p.grad.abs().max().item() for p in plain.parameters())
        for (name, parameter), expected in zip(tiled.named_parameters(), plain.parameters(), strict=True):
            assert relative(parameter.grad, expected.grad, 1e-4 * largest) <= TOLERANCE, name
        for (name, buffer), expected in zip(tiled.named_buffers(), plain.buffers(), strict=True):  # type: ignore[assignment]
            assert relative(buffer, expected, 1e-4) <= TOLERANCE, name
        for optimizer in optimizers:
            optimizer.step()
