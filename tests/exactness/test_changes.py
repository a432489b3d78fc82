"""What Python would see, gigagrad sees: whatever changes between two calls counts in the next one."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch

import gigagrad as gg
from gigagrad.errors import CaptureError
from tests.exactness.changes import WAYS, Way

REFUSED = {"an_iterator_of_weights": "moves on"}
STEPS = 3


@pytest.fixture(autouse=True)
def torch_as_before():
    yield
    torch.set_default_dtype(torch.float32)


def gradients(way: Way) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in way.model.named_parameters() if p.grad is not None}


def told(make, call) -> list[tuple]:
    """Loss, gradients and Python state after each of some calls."""
    random.seed(11), np.random.seed(12)
    torch.set_default_dtype(torch.float32)
    way = make()
    step = call(way)
    found = []
    for index in range(STEPS):
        way.model.zero_grad()
        value = step()
        found.append((value.detach().clone(), gradients(way), copy.deepcopy(way.state()), random.random()))
        way.change(index)
    return found


@pytest.mark.parametrize("name", WAYS)
def test_a_change_counts(name):
    torch.manual_seed(2)
    image, target = torch.rand(1, 11, 13).double(), torch.rand(1, 11, 13).double()

    def ours(way):
        engine = gg.compile(way.model, way.loss, tile=(6, 7))
        return lambda: engine.backward(image, target)

    def pytorch(way):
        def step():
            value = way.loss(way.model(image[None]), target[None])
            value.backward()
            return value

        return step

    if name in REFUSED:
        with pytest.raises(CaptureError, match=REFUSED[name]):
            told(WAYS[name], ours)
        return
    for mine, theirs in zip(told(WAYS[name], ours), told(WAYS[name], pytorch), strict=True):
        torch.testing.assert_close(mine[0], theirs[0].to(mine[0].dtype), rtol=1e-12, atol=0)
        assert mine[1].keys() == theirs[1].keys()
        for parameter, gradient in mine[1].items():
            torch.testing.assert_close(gradient, theirs[1][parameter], rtol=1e-10, atol=1e-13, msg=parameter)
        assert mine[2:] == theirs[2:]
