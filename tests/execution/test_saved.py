"""Tiles whose activations are saved from the forward to the backward pass give what those computed again do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.plans import saving


class Norms(nn.Module):
    """Batch norms behind each other, a skip, and attention over the whole field at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 5, padding=2)
        self.norm_a, self.norm_b = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.scores, self.head = nn.Conv2d(8, 1, 1), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm_a(self.a(x)).relu()
        x = x + F.dropout(self.norm_b(self.b(x)).relu(), 0.3, self.training)
        weights = self.scores(x).flatten(1).softmax(1)
        return self.head((x.flatten(2) * weights[:, None]).sum(2))


class Patches(nn.Module):
    """An encoder with attention within each patch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 8, 8)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.scores, self.head = nn.Linear(16, 1), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.layer(self.embed(x).flatten(2).transpose(1, 2)).mean(1)
        return self.head(self.scores(features).softmax(0).T @ features)


def step(
    model: nn.Module, image: torch.Tensor, tile: tuple[int, int], planned: gg.Engine | None = None, **options: Any
) -> tuple[gg.Engine, int, list[torch.Tensor]]:
    """Take a step, with the same fields kept as another engine; returns the tiles saved, the loss and the gradients."""
    model.zero_grad()
    label = torch.tensor([1])
    engine = gg.compile(model, F.cross_entropy, tile=tile, **options)
    engine.in_tiles = True
    if planned is not None:
        (choice,) = planned.state_dict()["choices"].items()
        of_each = [math.prod(one.tiles) if saving._WORTH_IT < 0 else 0 for one in planned.plan(image, label).segments]
        engine.load_state_dict({"choices": {choice[0]: choice[1] | {"saved": of_each}}})
    image = image.clone().requires_grad_()
    loss = engine.backward(image, label)
    assert image.grad is not None
    saved = sum(one.saved_tiles for one in engine.plan(image, label).segments)
    return engine, saved, [loss, image.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("memory", [None, "16 GiB"])
@pytest.mark.parametrize(
    ("model", "shape", "tile"), [(Norms, (1, 3, 40, 52), (16, 16)), (Patches, (30, 3, 16, 16), (7, 1))]
)
def test_gradients_are_those_of_tiles_computed_again(monkeypatch, model, shape, tile, memory):
    torch.manual_seed(0)
    network, image = model().double(), torch.rand(shape).double()
    state = {name: value.clone() for name, value in network.state_dict().items()}
    monkeypatch.setattr(saving, "_WORTH_IT", math.inf)
    planned, none, again = step(network, image, tile, memory=memory, seed=3)
    network.load_state_dict(state)
    monkeypatch.setattr(saving, "_WORTH_IT", -math.inf)
    _, some, saved = step(network, image, tile, planned, memory=memory, seed=3)
    assert none == 0
    assert some > 2
    for one, other in zip(again, saved, strict=True):
        assert (one - other).norm() <= 1e-14 * one.norm() + 1e-16  # one gradient is 0 but for rounding
    network.load_state_dict(state)
    _, once_more, same = step(network, image, tile, planned, memory=memory, seed=3)
    assert once_more == some
    assert all(torch.equal(one, other) for one, other in zip(saved, same, strict=True))


def test_a_tile_is_computed_once_more_where_it_is_not_saved(monkeypatch):
    """What a backward pass reads of images tells: all tiles, or those that were not saved."""
    reads = list[bool]()
    from gigagrad.execution.buffers import Buffers

    inputs = Buffers.inputs

    def counted(self, segment, tile, *, backward, cotangents_only=False):
        if backward and segment.index == 0:
            reads.append(cotangents_only)
        return inputs(self, segment, tile, backward=backward, cotangents_only=cotangents_only)

    monkeypatch.setattr(Buffers, "inputs", counted)
    monkeypatch.setattr(saving, "_WORTH_IT", -math.inf)
    torch.manual_seed(0)
    _, saved, _ = step(Norms(), torch.rand(1, 3, 40, 52), (16, 16))
    assert saved
    assert reads
    assert all(reads)


def test_an_error_leaves_nothing_saved(monkeypatch):
    monkeypatch.setattr(saving, "_WORTH_IT", -math.inf)
    from gigagrad.execution.tile_loops import TileLoops

    held = list[TileLoops]()
    gradients = TileLoops.gradients

    def failing(self, tiles, cotangents):
        held.append(self)
        assert self._saved
        raise RuntimeError("in the backward pass")
        yield from gradients(self, tiles, cotangents)

    monkeypatch.setattr(TileLoops, "gradients", failing)
    with pytest.raises(RuntimeError, match="in the backward pass"):
        step(Patches(), torch.rand(30, 3, 16, 16), (7, 1))
    assert not held[0]._saved
