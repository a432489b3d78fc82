"""Cross entropy where pixels are ignored: as PyTorch has it, also where that is all of them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg

WEIGHTS = {"no weights": None, "weights": [0.2, 1.5, 0.7], "weights of zero": [0.0, 0.0, 0.0]}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("labelled", [0, 6], ids=["all ignored", "some ignored"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_loss_and_gradients(weights, labelled, smoothing):
    torch.manual_seed(0)
    model, given = nn.Conv2d(2, 3, 3, padding=1).double(), WEIGHTS[weights]
    weight = None if given is None else torch.tensor(given, dtype=torch.float64)
    image, mask = torch.randn(2, 20, 24).double(), torch.full((1, 20, 24), 255, dtype=torch.uint8)
    mask[0, 3 : 3 + labelled] = 1

    def loss(output, target):
        return F.cross_entropy(output, target[:, 0].long(), weight, ignore_index=255, label_smoothing=smoothing)

    plain = copy.deepcopy(model)
    expected = loss(plain(image[None]), mask[None])
    expected.backward()
    found = gg.compile(model, loss, tile=(7, 9)).backward(image, mask)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0, equal_nan=True)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-11, atol=1e-14, equal_nan=True)
