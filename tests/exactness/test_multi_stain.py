"""Two stains through one engine, in training mode: step by step against plain autograd on the whole images."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.models import MultiStainNet, Normalise

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


def test_a_stain_of_another_resolution_follows_plain_autograd():
    """Both as one image, as a cohort's row opens them; the coarse one counts by its nearest pixels."""
    torch.manual_seed(1)
    layers = nn.Conv2d(6, 4, 5, padding=2), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 1, 3, padding=1)
    tiled = nn.Sequential(Normalise(mean=(0.5,) * 6, std=(0.2,) * 6), *layers).double().train()
    plain = copy.deepcopy(tiled)
    he, coarse = (np.random.default_rng(k).integers(0, 256, (3, 52 - 26 * k, 68 - 34 * k), np.uint8) for k in (0, 1))
    target = torch.rand(1, 52, 68, dtype=torch.float64).round()
    image = gg.open_image([he, coarse])
    engine = gg.compile(tiled, F.binary_cross_entropy_with_logits, tile=(52, 36))
    value = engine.backward(image, target)
    ihc = coarse.repeat(2, axis=1).repeat(2, axis=2)
    both = torch.from_numpy(np.concatenate([he, ihc]))[None]
    whole = F.binary_cross_entropy_with_logits(plain(both), target[None])
    whole.backward()
    assert abs(value.item() - whole.item()) <= TOLERANCE * abs(whole.item())
    largest = max(p.grad.abs().max().item() for p in plain.parameters())
    for (name, parameter), expected in zip(tiled.named_parameters(), plain.parameters(), strict=True):
        assert relative(parameter.grad, expected.grad, 1e-4 * largest) <= TOLERANCE, name


class TwoSizes(nn.Module):
    """A network that takes the second stain at half the size, and enlarges what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.he, self.ihc, self.head = (nn.Conv2d(c, k, 3, padding=1) for c, k in ((3, 2), (3, 2), (4, 1)))

    def forward(self, he, ihc):
        return self.head(torch.cat([self.he(he), F.interpolate(self.ihc(ihc), scale_factor=2.0)], dim=1))


def test_arguments_of_two_sizes_follow_plain_autograd():
    torch.manual_seed(2)
    model = TwoSizes().double()
    he, ihc, target = (torch.rand(*shape).double() for shape in ((3, 40, 60), (3, 20, 30), (1, 40, 60)))
    engine = gg.compile(model, F.binary_cross_entropy_with_logits, tile=(16, 20))
    value = engine.backward((he, ihc), target)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    whole = F.binary_cross_entropy_with_logits(model(he[None], ihc[None]), target[None])
    whole.backward()
    assert abs(value.item() - whole.item()) <= TOLERANCE * abs(whole.item())
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        assert relative(gradient, parameter.grad, 1e-6) <= TOLERANCE
