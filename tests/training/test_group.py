"""A loss over several slides, one in memory at a time, is that of all of them at once."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gigagrad import losses
from gigagrad.images import open_image
from gigagrad.training.learner import Group


class Scorer(nn.Module):
    def __init__(self, outputs: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout2d(dropout), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.norm(self.conv(x)))).mean((2, 3)))


CASES = (1, 2, 1, 3)


@pytest.fixture
def slides() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.rand(2, 9, 11, dtype=torch.float64, generator=generator) for _ in range(count)] for count in CASES]


def opened(slides: list[list[Tensor]]) -> list[list[partial[nullcontext]]]:
    return [[partial(nullcontext, (open_image(slide), torch.empty(0))) for slide in case] for case in slides]


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (losses.cox, 1, [[3.0, 1.0], [5.0, 1.0], [4.0, 0.0], [5.0, 1.0]]),
        (F.cross_entropy, 3, [0, 2, 1, 1]),
    ],
)
def test_the_gradient_is_that_of_all_slides_at_once(slides, loss, outputs, targets) -> None:
    torch.manual_seed(0)
    model = Scorer(outputs).double().train()
    whole = copy.deepcopy(model)
    pooled = torch.cat([torch.cat([whole(slide[None]) for slide in case]).mean(0, keepdim=True) for case in slides])
    value = loss(pooled, torch.tensor(targets))
    value.backward()
    group = Group(model, loss, tile=(4, 5))
    found = group.backward(opened(slides), [torch.tensor([target]) for target in targets])
    assert found == pytest.approx(float(value.detach()), rel=1e-12)
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=name)
    statistics = zip(model.buffers(), whole.buffers(), strict=True)
    assert all(torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12) for ours, theirs in statistics)
    assert group.loss(opened(slides), [torch.tensor([target]) for target in targets]) == pytest.approx(found)


def test_both_passes_draw_the_same_random_numbers(slides, monkeypatch) -> None:
    torch.manual_seed(0)
    group = Group(Scorer(1, dropout=0.5).double().train(), losses.mse, tile=(4, 5))
    outputs: list[Tensor] = []
    again: list[tuple[Tensor, float]] = []
    seen, pull = group._seen, group.engine.backward

    def seen_and_noted(*given: Any) -> list[Tensor]:
        outputs.extend(seen(*given))
        return list(outputs)

    monkeypatch.setattr(group, "_seen", seen_and_noted)
    monkeypatch.setattr(
        group.engine, "backward", lambda slide, weight: again.append((weight, float(pull(slide, weight))))
    )
    group.backward(opened(slides), [torch.ones(1, 1, dtype=torch.float64)] * len(CASES))
    values = [float(output.detach()) for output in outputs]
    assert len(set(values)) > 3
    assert [float(w) * value for (w, _), value in zip(again, values, strict=True)] == pytest.approx(
        [value for _, value in again], rel=1e-12
    )


def test_a_model_that_counts_and_draws_is_seen_twice_as_it_was(slides) -> None:
    class Counting(Scorer):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * (self.calls + random.random())

    torch.manual_seed(0)
    model = Counting(1).double().train()
    whole = copy.deepcopy(model)
    targets = torch.tensor([[3.0, 1.0], [5.0, 1.0]])
    random.seed(5)
    slides = slides[:2]
    pooled = torch.cat([torch.cat([whole(slide[None]) for slide in case]).mean(0, keepdim=True) for case in slides])
    losses.cox(pooled, targets).backward()
    random.seed(5)
    Group(model, losses.cox, tile=(4, 5)).backward(opened(slides), [*targets[:, None]])
    assert model.calls == whole.calls == 3
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
