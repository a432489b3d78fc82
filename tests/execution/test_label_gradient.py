"""A label tensor that requires a gradient gets the one that PyTorch gives it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.ranks import run_threaded

LOSSES = {
    "difference of numbers": lambda o, t: (o.mean() - t.sum()).square(),
    "soft labels of the slide": lambda o, t: F.cross_entropy(o.mean((2, 3)), t.softmax(0)[None]),
    "beside every pixel": lambda o, t: (o - t.view(1, -1, 1, 1)).square().mean(),
    "weights of classes": lambda o, t: (
        F.cross_entropy(o, o.argmax(1), reduction="none") * t.exp()[o.argmax(1)]
    ).mean(),
    "scale of a gate": lambda o, t: (o * torch.sigmoid(t).view(1, -1, 1, 1)).std(),
    "beside a whole field": lambda o, t: (o.flatten(2).sort(-1).values * t.view(1, -1, 1)).square().mean(),
    "a threshold": lambda o, t: torch.relu(o - t.max()).mean() + F.l1_loss(o.amax((2, 3))[0], t),
    "read twice": lambda o, t: (o * t[0]).square().mean() * t.square().sum() + t[2],
    "read without a gradient": lambda o, t: (o.mean() - t.detach().sum()).square() + 0 * t[1],
}


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1)
    return nn.Sequential(*layers).double()


def given() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(2, 37, 41, generator=generator, dtype=torch.float64)
    return image, torch.rand(3, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("name", LOSSES)
def test_it_is_that_of_plain_autograd(name):
    loss, model, (image, label), (_, plain) = LOSSES[name], net(), given(), given()
    reference = copy.deepcopy(model)
    for _ in range(2):  # gradients add up
        loss(reference(image[None]), plain).backward()
    engine = gg.compile(model, loss, tile=(16, 15))
    for _ in range(2):
        engine.backward(image, label)
    torch.testing.assert_close(label.grad, plain.grad, rtol=1e-9, atol=1e-12)
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_it_flows_on_to_what_the_label_was_made_of():
    image, scores = given()
    engine = gg.compile(net(), lambda o, t: F.cross_entropy(o.mean((2, 3)), t[None]), tile=(16, 15))
    engine.backward(image, scores.softmax(0))
    plain = scores.detach().clone().requires_grad_()
    F.cross_entropy(net()(image[None]).mean((2, 3)), plain.softmax(0)[None]).backward()
    torch.testing.assert_close(scores.grad, plain.grad, rtol=1e-9, atol=1e-12)


def test_one_of_several_targets_and_one_that_nothing_reads():
    image, label = given()
    dense, unread = image[:1].clone(), torch.rand(3, dtype=torch.float64, requires_grad=True)

    def loss(output, targets):
        mask, weights, _ = targets
        return ((output.mean(1, keepdim=True) - mask) ** 2).mean() * weights.sum()

    gg.compile(net(), loss, tile=(16, 15)).backward(image, (dense, label, unread))
    (expected,) = torch.autograd.grad(loss(net()(image[None]), (dense[None], label, None)), label)
    torch.testing.assert_close(label.grad, expected, rtol=1e-9, atol=1e-12)
    assert unread.grad is None


def test_ranks_find_the_bits_of_one_process():
    loss, model = LOSSES["beside every pixel"], net()

    def found(ranks=None):
        image, label = given()
        gg.compile(copy.deepcopy(model), loss, tile=(7, 9), mesh=ranks).backward(image, label)
        return label.grad

    one = found()
    assert all(torch.equal(other, one) for other in run_threaded(3, found))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_in_half_precision_it_is_in_the_labels_own_dtype(precision):
    image, label = given()
    label = label.detach().float().requires_grad_()
    loss = LOSSES["beside every pixel"]
    gg.compile(net().float(), loss, tile=(16, 15), precision=precision).backward(image.float(), label)
    (expected,) = torch.autograd.grad(loss(net()(image[None]), label.double()), label)
    assert label.grad is not None
    assert label.grad.dtype == torch.float32
    torch.testing.assert_close(label.grad, expected, rtol=0.05, atol=0.01)
