"""A small network with a norm, three images with masks as files, and what plain PyTorch makes of them."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import tifffile
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gigagrad.models import Normalise

with warnings.catch_warnings():  # what these use themselves is not for us to mend
    warnings.simplefilter("ignore")
    for library in ("ignite", "monai.engines", "lightning"):
        importlib.import_module(library)

Pairs = list[tuple[Tensor, Tensor]]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Normalise(), nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1))


@pytest.fixture
def pairs() -> Pairs:
    """Images `(3, 24, 32)` of bytes and masks `(1, 24, 32)` of 0 and 1."""
    random = partial(torch.randint, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return [(random(256, (3, 24, 32)), random(2, (1, 24, 32))) for _ in range(3)]


@pytest.fixture
def paths(pairs: Pairs, tmp_path: Path) -> list[tuple[str, str]]:
    """The same as files."""
    found = []
    for index, pair in enumerate(pairs):
        names = [str(tmp_path / f"{kind} {index}.tif") for kind in ("image", "mask")]
        tifffile.imwrite(names[0], pair[0].permute(1, 2, 0).numpy(), photometric="rgb")
        tifffile.imwrite(names[1], pair[1][0].numpy(), photometric="minisblack")
        found.append((names[0], names[1]))
    return found


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))


@pytest.fixture
def trained() -> Callable[..., nn.Module]:
    """A copy of a model after a step of SGD on each batch of pairs, by plain PyTorch."""

    def train(model: nn.Module, batches: list[Pairs], lr: Callable[[int], float] = lambda step: 0.5) -> nn.Module:
        model = deepcopy(model).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step, batch in enumerate(batches):
            optimizer.param_groups[0]["lr"] = lr(step)
            optimizer.zero_grad()
            for image, mask in batch:
                (loss(model(image[None]), mask[None]) / len(batch)).backward()
            optimizer.step()
        return model

    return train


@pytest.fixture
def bce() -> Callable[[Tensor, Tensor], Tensor]:
    return loss


@pytest.fixture
def assert_same() -> Callable[[nn.Module, nn.Module], None]:
    """Asserts that two models hold the same numbers to float32's rounding, running statistics included."""

    def check(one: nn.Module, other: nn.Module) -> None:
        for name, value in other.state_dict().items():
            torch.testing.assert_close(one.state_dict()[name], value, rtol=1e-4, atol=1e-5)

    return check
