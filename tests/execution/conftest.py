"""Small networks in float64, and their plain gradients."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gigagrad as gg
from gigagrad.execution.engine import Engine, Loss


class Net(nn.Module):
    """Down, up, additive skip: a halo, two scales, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(2, 3, 3, padding=1)
        self.down = nn.Conv2d(3, 3, 5, 3, 2)
        self.up = nn.ConvTranspose2d(3, 3, 5, 3, 2)
        self.head = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.inner(x))
        return self.head(a + torch.tanh(self.up(self.down(a), output_size=a.shape[-2:])))


class Gate(nn.Module):
    """Two segments: scaled by a function of its own mean."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 3, padding=1)
        self.scale = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y * self.scale(y.mean((2, 3)))[..., None, None]


def plain(model: nn.Module, loss: Any, image: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by whole-image autograd; the model's `.grad` are as they were afterwards."""
    value = loss(model(image[None]), target)
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    return value.detach(), dict(zip(names, torch.autograd.grad(value, parameters), strict=True))


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def gate() -> nn.Module:
    torch.manual_seed(0)
    return Gate().double()


@pytest.fixture
def pair() -> SimpleNamespace:
    """An image `(2, 23, 31)` and a target `(1, 23, 31)`."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.rand(c, 23, 31, dtype=torch.float64, generator=generator) for c in (2, 1)]
    return SimpleNamespace(image=made[0], target=made[1])


@pytest.fixture
def whole() -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    return plain


@pytest.fixture
def bce() -> Callable[[Tensor, Tensor], Tensor]:
    return F.binary_cross_entropy_with_logits


@pytest.fixture
def assert_exact() -> Callable[[nn.Module, dict[str, Tensor]], None]:
    """Asserts that `.grad` is the expected gradient to 1e-11, and nothing else has one."""

    def check(model: nn.Module, expected: dict[str, Tensor]) -> None:
        for name, parameter in model.named_parameters():
            if name in expected:
                torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-11, atol=1e-13)
            else:
                assert parameter.grad is None, name

    return check


@pytest.fixture
def engine(net: nn.Module, bce: Loss) -> Engine:
    """Trains `net` in tiles of 5 x 8 px."""
    return gg.compile(net, bce, tile=(5, 8))
