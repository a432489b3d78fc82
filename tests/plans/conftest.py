"""Graphs to plan for, captured once, and limits to plan within."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gigagrad.graphs import Graph, InputSpec, capture
from gigagrad.plans import Plan
from tests.plans.networks import Planned, plan_of

Loss = Callable[[Tensor, Tensor], Tensor]


class UNet(nn.Module):
    """Strides 8 and 5, additive skip, odd sizes welcome."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 15, 8, 7)
        self.down = nn.Conv2d(3, 3, 9, 5, 4)
        self.up = nn.ConvTranspose2d(3, 3, 9, 5, 4)
        self.last = nn.ConvTranspose2d(3, 1, 15, 8, 7)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.first(x))
        b = F.relu(self.up(F.relu(self.down(a)), output_size=a.shape[-2:])) + a
        return self.last(b, output_size=x.shape[-2:])


class Gate(nn.Module):
    """Two segments: a convolution scaled by its own mean."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y * y.mean((2, 3), keepdim=True)


class Norms(nn.Module):
    """Fields before norms are worth keeping, and can be given up."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(1 if i == 0 else 8, 8, 3, padding=1) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return self.head(x)


class Residual(nn.Module):
    """Reads a field with a halo by way of an operator that works position by position, and without."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return (self.inside(x.relu()) + x).mean(1, keepdim=True)


@pytest.fixture(scope="session")
def models() -> SimpleNamespace:
    return SimpleNamespace(UNet=UNet, Gate=Gate)


@pytest.fixture(scope="session")
def graph_of() -> Callable[..., Graph]:
    """Captures a model and a loss for an image `(1, 1, H, W)`; the target has the output's size."""

    def make(
        model: nn.Module, loss: Loss | None, size: tuple[int, int], target: tuple[int, int] | None = None
    ) -> Graph:
        image = InputSpec((1, 1, *size), torch.float32, field=True)
        dense = InputSpec((1, 1, *(target or size)), torch.float32, field=True)
        return capture(model, loss, image, dense if loss else None)

    return make


@pytest.fixture(scope="session")
def unet(graph_of: Any) -> Graph:
    return graph_of(UNet(), F.binary_cross_entropy_with_logits, (331, 517))


@pytest.fixture(scope="session")
def gate(graph_of: Any) -> Graph:
    return graph_of(Gate(), F.mse_loss, (61, 47), (31, 24))


@pytest.fixture(scope="session")
def residual(graph_of: Any) -> Graph:
    return graph_of(Residual(), F.mse_loss, (97, 61))


@pytest.fixture(scope="session")
def plan_for() -> Callable[..., Plan]:
    """Plans a graph with a budget (above an idle process of 1 MiB) and optional tiles."""
    return plan_of


@pytest.fixture(scope="session")
def norms(graph_of: Any) -> Graph:
    return graph_of(Norms().train(), F.mse_loss, (3000, 4000))


@pytest.fixture(scope="session")
def plan_at(norms: Graph, plan_for: Any) -> Callable[[int | None], Plan]:
    return lambda budget: plan_for(norms, budget)


@pytest.fixture(scope="session")
def ladder() -> Planned:
    return Planned()
