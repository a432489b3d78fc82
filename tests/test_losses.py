"""Losses by name: which numbers targets may be, and which shapes."""

from __future__ import annotations

import pytest
import torch

import gigagrad as gg
from gigagrad.errors import GigagradError, OperatorError
from gigagrad.losses import named_loss

NAMES = ("bce", "bce_dice", "dice", "focal", "tversky", "ce", "mse")
DTYPES = (torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_targets_are_numbers_of_any_kind(name, dtype):
    output = torch.randn(1, 3 if name == "ce" else 1, 9, 7, dtype=torch.float64, generator=torch.manual_seed(0))
    target = torch.randint(0, 2, (1, 1, 9, 7), dtype=torch.uint8, generator=torch.manual_seed(1))
    loss = named_loss(name)
    for each in (loss,) if name == "mse" else (loss, loss.ignoring()):
        assert each.function(output, target.to(dtype)) == each.function(output, target)


@pytest.mark.parametrize("name", ["bce", "ce", "mse"])
def test_the_engine_takes_wide_unsigned_ids(name):
    model = torch.nn.Conv2d(1, 3 if name == "ce" else 1, 3, padding=1).double()
    image = torch.rand(1, 12, 10, dtype=torch.float64)
    target = torch.randint(0, 2, (1, 12, 10), dtype=torch.uint8)
    engine = gg.compile(model, named_loss(name).function)
    assert engine.backward(image, target.to(torch.uint16)) == engine.backward(image, target)


def test_a_loss_of_one_s_own_is_told_what_pytorch_lacks():
    def loss(output, target):
        return ((output - 1) ** 2 * (target > 0)).mean()

    engine = gg.compile(torch.nn.Conv2d(1, 1, 1), loss)
    with pytest.raises(OperatorError, match=r"write \.to\(torch\.int64\) before it"):
        engine.backward(torch.rand(1, 8, 8), torch.ones(1, 8, 8, dtype=torch.uint16))


def test_mse_repeats_nothing():
    with pytest.raises(GigagradError, match=r"is \(1, 3, 4, 4\) and the target \(1, 1, 4, 4\); give the model"):
        gg.losses.mse(torch.zeros(1, 3, 4, 4), torch.zeros(1, 1, 4, 4))


def test_clam_of_logits_alone_is_ce_and_ce_takes_nothing_else():
    logits, target = torch.randn(1, 3), torch.tensor([2])
    assert gg.losses.clam(logits, target, bag_weight=0.1) == gg.losses.ce(logits, target)
    with pytest.raises(GigagradError, match="the head clam trains with the loss clam"):
        gg.losses.ce((logits, torch.randn(3, 4, 2)), target)  # type: ignore[arg-type]


def test_clam_weighs_classes_and_takes_its_settings():
    output, target = (torch.randn(1, 3), torch.randn(3, 4, 2)), torch.tensor([2])
    loss = named_loss("clam?bag_weight=1&subtyping=true")
    assert loss.class_ids
    weighted = loss.weighted((1.0, 2.0, 3.0)).function
    torch.testing.assert_close(weighted(output, target), 3 * gg.losses.ce(output[0], target))  # type: ignore[arg-type]
    assert named_loss("clam").function(output, target) != named_loss("clam?subtyping=true").function(output, target)  # type: ignore[arg-type]
