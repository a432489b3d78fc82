"""Numbers that depend on no pixel and no parameter are there while a model is traced; all others are refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.errors import CaptureError


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 1, 1)
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("chosen", torch.tensor([True, False, True]))
        self.register_buffer("steps", torch.tensor(2))
        self.middle = middle

    def forward(self, x):
        return self.last(self.middle(self, self.first(x)))


OUTSIDE = torch.tensor([1.5, 2.5])


def in_place(net, y):
    numbers = torch.arange(3)
    numbers += 1
    numbers[0] = 5
    return y * sum(numbers.tolist())


def through_a_view(net, y):
    numbers = torch.arange(4)
    numbers[1:].mul_(2)
    return y * numbers.sum().item()


def branch_on_a_buffer(net, y):
    return y * int(net.weights.sum()) if net.weights.min() >= 0 else y


def counted(net, y):
    net.steps += 1
    return y * int(net.steps)


def chosen_channels(net, y):
    return y[:, net.chosen].sum(1, keepdim=True) + y.index_select(1, torch.nonzero(net.chosen).flatten()[:1]) * y


def classes(net, y):
    return y * F.one_hot(torch.tensor([0, 2])).to(y).sum(0).reshape(1, 3, 1, 1)


KNOWN = {
    "list": lambda net, y: y.mean(torch.arange(2, y.ndim).tolist(), keepdim=True) + y,
    "in place": in_place,
    "through a view": through_a_view,
    "numpy": lambda net, y: y * float(torch.linspace(0, 1, 5).numpy()[2]),
    "distinct": lambda net, y: y * len(torch.unique(torch.tensor([1, 1, 4]))),
    "classes": classes,
    "branch on a buffer": branch_on_a_buffer,
    "counted": counted,
    "chosen channels": chosen_channels,
    "from outside": lambda net, y: y * OUTSIDE.sum().item(),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_numbers(name):
    """Also once buffers hold other values."""
    torch.manual_seed(0)
    net = Net(KNOWN[name]).double()
    reference = copy.deepcopy(net)
    engine = gg.compile(net, F.mse_loss, tile=(10, 11))
    image, target = torch.randn(2, 24, 30).double(), torch.rand(1, 24, 30).double()
    for weights in ((1.0, 2.0, 3.0), (7.0, 1.0, 0.5), (7.0, -1.0, 0.5)):
        for model in (net, reference):
            model.zero_grad()
            model.get_buffer("weights").copy_(torch.tensor(weights))
        expected = F.mse_loss(reference(image[None]), target[None])
        expected.backward()
        torch.testing.assert_close(engine.backward(image, target), expected.detach())
        for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


def filled_by_pixels(net, y):
    numbers = torch.zeros(3, dtype=y.dtype)
    numbers[0] = y.sum()
    return y * (2 if numbers.max().item() > 0 else 3)


def written_through_a_view(net, y):
    numbers = torch.zeros(3, dtype=y.dtype)
    numbers[1:] = y.mean()
    return y * numbers.sum().item()


UNKNOWN = {
    "pixels": lambda net, y: y * (2 if y.mean() > 0 else 1),
    "parameters": lambda net, y: y * (2 if net.last.weight.mean() > 0 else 1),
    "drawn": lambda net, y: y * torch.rand(1).item(),
    "filled by pixels": filled_by_pixels,
    "written through a view": written_through_a_view,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_refused(name):
    engine = gg.compile(Net(UNKNOWN[name]), F.mse_loss, tile=(10, 11))
    with pytest.raises(CaptureError, match=r"test_constants\.py:\d+"):
        engine.backward(torch.rand(2, 24, 30), torch.rand(1, 24, 30))


def test_a_large_constant_is_not_computed():
    """It is as large as the image."""
    net = nn.Sequential(nn.Conv2d(1, 1, 1), Plus())
    plan = gg.compile(net, F.mse_loss).plan(torch.rand(1, 64, 64), torch.rand(1, 64, 64))
    assert plan.tile_count >= 1


class Plus(nn.Module):
    def forward(self, x):
        return x + torch.zeros(1).expand(1 << 40).mean()
