"""Steps whose slide is read by several threads: the same bits, whatever becomes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import torch.nn.functional as F

import gigagrad as gg
from gigagrad.execution.buffers import Buffers
from gigagrad.plans.problem import Reading

SIDE = 300


@pytest.fixture
def slide(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
    path = tmp_path / "slide.tif"
    tifffile.imwrite(path, pixels, tile=(64, 64), photometric="ycbcr", compression="jpeg")
    return path


def read_by(monkeypatch: pytest.MonkeyPatch, readers: int) -> None:
    """From now on plans are made for so many."""
    monkeypatch.setattr(Reading, "readers", lambda *_: readers)


class Loss(torch.nn.Module):
    """Two segments, with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            gg.models.Normalise(), torch.nn.Conv2d(3, 4, 5), torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 1, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        return found


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output, target.float())


def step(
    model: torch.nn.Module, slide: Path, choices: dict[str, Any], **options: Any
) -> tuple[int, list[torch.Tensor]]:
    """Loss and gradients, and by how many the slide was read. `choices`: what the first step chose, the memory layout
    by a trial.
    """
    engine = gg.compile(model, loss, tile=(40, 40), **options)
    if choices:
        engine.load_state_dict(choices)
    target = (torch.arange((SIDE - 6) ** 2) % 3 == 0).reshape(1, SIDE - 6, SIDE - 6)
    model.zero_grad()
    value = engine.backward(slide, target)
    choices |= engine.state_dict()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return engine.plan(slide, target).readers, [value, *gradients]


def test_bits_do_not_depend_on_how_many_read(slide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, choices = Loss().train(), dict[str, Any]()
    found = []
    for readers in (1, 2, 5):
        read_by(monkeypatch, readers)
        planned, values = step(model, slide, choices)
        assert planned == readers
        found.append(values)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_a_journal_holds_what_several_readers_read_in_the_order_of_tiles(
    slide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off, a step goes on by another number of readers, and reads its images as before."""
    torch.manual_seed(0)
    model, folder, choices = Loss().train(), tmp_path / "journal", dict[str, Any]()
    read_by(monkeypatch, 1)
    _, expected = step(model, slide, choices)
    read, left = Buffers.inputs, iter(range(120))

    def cut_off(*given: Any, **options: Any) -> Any:
        if next(left, None) is None:
            raise RuntimeError("killed")
        return read(*given, **options)

    read_by(monkeypatch, 4)
    monkeypatch.setattr(Buffers, "inputs", cut_off)
    with pytest.raises(RuntimeError, match="killed"):
        step(model, slide, choices, journal=folder)
    assert [*folder.rglob("*-*")], "chunks were written down"
    computed = []
    monkeypatch.setattr(Buffers, "inputs", lambda *given, **options: computed.append(1) or read(*given, **options))  # type: ignore[func-returns-value]
    read_by(monkeypatch, 2)
    _, found = step(model, slide, choices, journal=folder)
    assert 0 < len(computed) < 150
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
