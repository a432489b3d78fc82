"""Losses, and targets they cannot take."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gigagrad as gg
from gigagrad import losses
from gigagrad.boxes import Box
from gigagrad.errors import ConfigError, ModelError, TargetError
from gigagrad.images import open_image
from gigagrad.losses import ce, named_loss
from gigagrad.models import resolve
from gigagrad.training.targets import CheckedMask, TargetRule, output_channels, sample_mask


def mask_of(values, shape=(40, 50), dtype=np.uint8):
    array = np.zeros((1, *shape), dtype)
    array[0].flat[: len(values)] = values
    return open_image(array)


def read_all(rule, mask):
    return CheckedMask(mask, rule).read(Box.whole(mask.height, mask.width))


def test_bce_counts_every_value_above_zero_as_one():
    output, target = torch.randn(1, 1, 5, 6), torch.randint(0, 2, (1, 1, 5, 6), dtype=torch.uint8)
    expected = F.binary_cross_entropy_with_logits(output, target.float())
    for scale in (1, 255):
        torch.testing.assert_close(named_loss("bce").function(output, target * scale), expected)


def test_ce_takes_masks_with_ignored_pixels_and_labels():
    output = torch.randn(1, 3, 4, 4)
    target = torch.randint(0, 3, (1, 1, 4, 4), dtype=torch.uint8)
    target[0, 0, 0, 0] = 255
    expected = F.cross_entropy(output, target[:, 0].long(), ignore_index=255)
    torch.testing.assert_close(named_loss("ce").function(output, target), expected)
    logits = output[:, :, 0, 0]
    torch.testing.assert_close(named_loss("ce").function(logits, torch.tensor([2])), -logits.log_softmax(1)[0, 2])


def test_mse_takes_numbers():
    assert named_loss("mse").function(torch.tensor([[3.0]]), torch.tensor([[1.0]])).item() == 4


def test_dice_is_one_minus_the_coefficient():
    target = torch.tensor([[[[0, 255], [255, 0]]]], dtype=torch.uint8)
    sure = torch.where(target > 0, 50.0, -50.0)
    assert named_loss("dice").function(sure, target).item() == pytest.approx(0)
    assert named_loss("dice").function(-sure, target).item() == pytest.approx(1 - 1 / 3)  # 0 + 1 over 0 + 4 / 2 + 1
    assert named_loss("tversky").function(-sure, target).item() == pytest.approx(1 - 1 / 3)
    both = named_loss("bce").function(sure, target) + named_loss("dice").function(sure, target)
    torch.testing.assert_close(named_loss("bce_dice").function(sure, target), both)


def test_focal_is_bce_where_the_exponent_is_zero():
    output, target = torch.randn(1, 1, 5, 6), torch.randint(0, 2, (1, 1, 5, 6), dtype=torch.uint8)
    torch.testing.assert_close(losses.focal(output, target, gamma=0), losses.bce(output, target))
    assert losses.focal(output, target) < losses.bce(output, target)


@pytest.mark.parametrize(("name", "channels"), [("bce", 1), ("bce_dice", 1), ("focal", 1), ("mse", 1), ("ce", 3)])
def test_losses_can_be_captured_without_values(name, channels):
    class Whole(torch.nn.Module):
        def forward(self, output, target):
            return named_loss(name).function(output, target)

    output = torch.empty(1, channels, 64, 48, device="meta")
    target = torch.empty(1, 1, 64, 48, dtype=torch.uint8, device="meta")
    assert torch.export.export(Whole(), (output, target)).module() is not None


def test_a_loss_of_the_users_own_is_found_and_an_unknown_one_refused():
    assert named_loss("torch.nn.functional:l1_loss").function is F.l1_loss
    with pytest.raises(ConfigError, match="use bce, bce_dice, ce, clam, cox, dice, focal, mse, tversky or package"):
        named_loss("dice2")
    with pytest.raises(ModelError, match="has no 'l3_loss'"):
        named_loss("torch.nn.functional:l3_loss")


@pytest.mark.parametrize("values", [[], [1, 1], [255] * 7])
def test_bce_takes_zero_and_one_other_value(values):
    read_all(TargetRule(named_loss("bce"), 1), mask_of(values))


@pytest.mark.parametrize(
    ("loss", "channels", "mask", "words"),
    [
        ("bce", 1, mask_of([1, 2]), "the values 1 and 2; a binary loss takes 0 and one other value"),
        ("bce", 1, mask_of([0.5, np.nan], dtype=np.float32), "NaN or infinite"),
        ("bce", 1, mask_of([-1], dtype=np.int16), "the values"),
        ("ce", 3, mask_of([2, 3]), "class 3; ce takes 0 to 2"),
        ("ce", 3, mask_of([1.0], dtype=np.float32), "float32 values; ce takes whole numbers"),
        ("ce", 3, mask_of([1, -1], dtype=np.int32), "class -1; ce takes 0 to 2"),
        ("mse", 1, mask_of([np.inf], dtype=np.float32), "NaN or infinite"),
    ],
)
def test_values_the_loss_cannot_take_are_named(loss, channels, mask, words):
    with pytest.raises(TargetError, match="renumber it or choose another --loss") as caught:
        read_all(TargetRule(named_loss(loss), channels), mask)
    assert words in str(caught.value)


def test_ce_takes_its_classes_and_the_ignored_one():
    read_all(TargetRule(named_loss("ce"), 3), mask_of([0, 1, 2, 255]))


def test_a_second_foreground_value_is_found_in_another_tile():
    checked = CheckedMask(mask_of([1, 0, 0, 2], shape=(2, 2)), TargetRule(named_loss("bce"), 1))
    checked.read(Box(0, 0, 1, 2))
    with pytest.raises(TargetError, match="the values 2 and 1"):
        checked.read(Box(1, 0, 2, 2))


@pytest.mark.parametrize("shape", [(3, 5), (1000, 2000), (5000, 300)])
def test_samples_find_a_mask_of_the_wrong_kind(shape):
    array = np.full((1, *shape), 7, np.uint8)
    with pytest.raises(TargetError, match="class 7"):
        sample_mask(open_image(array), TargetRule(named_loss("ce"), 2))
    sample_mask(open_image(array), TargetRule(named_loss("bce"), 1))


@pytest.mark.parametrize(("loss", "value"), [("ce", 3), ("ce", 0.5), ("ce", -1), ("bce", 2)])
def test_labels_the_loss_cannot_take_are_named(loss, value):
    with pytest.raises(TargetError, match="the label of s is"):
        TargetRule(named_loss(loss), 3).label(value, "s")


def test_labels_become_what_the_loss_wants():
    assert TargetRule(named_loss("ce"), 3).label(2, "s").tolist() == [2]
    assert TargetRule(named_loss("ce"), 3).label(2, "s").dtype == torch.int64
    assert TargetRule(named_loss("bce"), 1).label(1, "s").tolist() == [[1.0]]
    assert TargetRule(named_loss("mse"), 1).label(0.25, "s").tolist() == [[0.25]]


def test_output_channels_are_found_without_computing():
    assert output_channels(resolve("paper-unet"), (3, 16000, 64000)) == 1


BINARY = ("bce", "bce_dice", "dice", "focal", "tversky")


@pytest.mark.parametrize("name", BINARY)
def test_ignored_pixels_are_as_if_they_were_not_there(name):
    output = torch.randn(1, 1, 6, 8, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 2, (1, 1, 6, 8), dtype=torch.uint8)
    target[..., 5:] = 255
    loss = named_loss(name).ignoring()
    value = loss.function(output, target)
    torch.testing.assert_close(value, named_loss(name).function(output[..., :5], target[..., :5]))
    (gradient,) = torch.autograd.grad(value, output)
    assert gradient[..., :5].abs().min() > 0
    assert not gradient[..., 5:].any()
    assert float(loss.function(output.detach(), torch.full_like(target, 255))) == 0
    torch.testing.assert_close(loss.function(output[..., :5], target[..., :5]), value)


@pytest.mark.parametrize("name", BINARY)
def test_ignored_pixels_on_tiles(name):
    """What the engine makes of it, against plain PyTorch."""
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 1, 5, stride=1, padding=2).double()
    image = torch.randn(3, 37, 41, dtype=torch.float64)
    target = torch.randint(0, 2, (1, 37, 41), dtype=torch.uint8)
    target[:, 10:30, 5:20] = 255
    loss = named_loss(name).ignoring().function
    expected = loss(model(image[None]), target[None])
    gradients = torch.autograd.grad(expected, tuple(model.parameters()))
    value = gg.compile(model, loss, tile=(16, 16)).backward(image, target)
    torch.testing.assert_close(value, expected.detach())
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_loss_of_numbers_ignores_nothing():
    with pytest.raises(ConfigError, match="the loss takes every pixel; use bce, bce_dice, ce, dice"):
        named_loss("mse").ignoring()
    assert named_loss("ce").ignoring() == named_loss("ce")


def test_a_binary_mask_with_ignored_pixels():
    rule = TargetRule(named_loss("bce").ignoring(), 1, ignores=True)
    read_all(rule, mask_of([0, 1, 255, 255]))
    read_all(rule, mask_of([255] * 2000))
    with pytest.raises(TargetError, match="the values 1 and 2"):
        read_all(rule, mask_of([1, 255, 2]))
    assert sample_mask(mask_of([0, 1, 255]), rule) == {0, 1, 255}


@pytest.mark.parametrize("times", [[3, 5, 4, 9, 6], [3, 5, 5, 5, 2], [1, 1, 1, 1, 1]])
def test_cox_is_the_partial_likelihood_with_efron_s_ties(times) -> None:
    """Written out as Efron (1977) has it: of d deaths at one time, the l-th sees l / d of them gone."""
    torch.manual_seed(0)
    risk = (3 * torch.randn(5, 1, dtype=torch.float64) + 700).requires_grad_()
    events = [1, 1, 0, 1, 1]
    found = losses.cox(risk, torch.tensor(list(zip(times, events, strict=True)), dtype=torch.float64))
    by_hand = torch.zeros((), dtype=torch.float64)
    for time in sorted({t for t, e in zip(times, events, strict=True) if e}):
        dead = [i for i in range(5) if times[i] == time and events[i]]
        at_risk = [i for i in range(5) if times[i] >= time]
        for gone, i in enumerate(dead):
            weights = [1 - (gone / len(dead) if j in dead else 0) for j in at_risk]
            terms = torch.stack([risk[j, 0] + math.log(w) for j, w in zip(at_risk, weights, strict=True)])
            by_hand = by_hand + torch.logsumexp(terms, 0) - risk[i, 0]
    by_hand = by_hand / sum(events)
    torch.testing.assert_close(found, by_hand, rtol=1e-12, atol=0)
    ours, theirs = torch.autograd.grad(found, risk)[0], torch.autograd.grad(by_hand, risk)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def test_cox_without_an_event_is_nothing() -> None:
    risk = torch.randn(3, 1, requires_grad=True)
    value = losses.cox(risk, torch.tensor([[1.0, 0], [2, 0], [3, 0]]))
    value.backward()
    assert float(value.detach()) == 0
    assert risk.grad is not None
    assert torch.equal(risk.grad, torch.zeros(3, 1))


def test_cox_is_added_to_no_loss_of_single_slides() -> None:
    with pytest.raises(ConfigError, match="cox and one of single slides"):
        losses.named_loss("cox + 0.5*mse")


def test_weights_of_classes_count_for_a_single_slide_too():
    logits, weight = torch.tensor([[0.3, -1.2], [0.1, 0.4]]), torch.tensor([1.0, 4.0])
    for label in (0, 1):
        target = torch.tensor([label])
        plain = torch.nn.functional.cross_entropy(logits[:1], target)
        torch.testing.assert_close(ce(logits[:1], target, weight=weight), weight[label] * plain)
    both = torch.tensor([0, 1])
    expected = torch.nn.functional.cross_entropy(logits, both, weight)
    torch.testing.assert_close(ce(logits, both, weight=weight), expected)
