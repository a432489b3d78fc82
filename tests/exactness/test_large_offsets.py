"""Statistics of pixels whose mean is large beside their deviation: as exact as PyTorch's, and the same by any ranks.

The reference is PyTorch in float64 on the image less its offset. Taking that away is exact, and no norm sees it.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from tests.ranks.bits import bits_by_ranks

HEIGHT, WIDTH = 29, 23


class By(nn.Module):
    """Standardised by the arithmetic of its own."""

    def __init__(self, standardised):
        super().__init__()
        self.standardised, self.weight = standardised, nn.Parameter(torch.empty(4, 1, 1))

    def forward(self, x):
        return self.weight * self.standardised(x)


def by_deviation(x, dims=(2, 3), **options):
    return (x - x.mean(dims, keepdim=True)) / (x.std(dims, keepdim=True, **options) + 0.1)


def by_variance(x):
    variance, mean = torch.var_mean(x, (2, 3), keepdim=True)
    return (x - mean) * (variance + 0.1).rsqrt()


NORMS = {
    "batch": lambda: nn.BatchNorm2d(4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
    "group": lambda: nn.GroupNorm(2, 4),
    "group of all": lambda: nn.GroupNorm(1, 4),
    "layer": lambda: nn.LayerNorm([4, HEIGHT, WIDTH]),
    "layer over space": lambda: nn.LayerNorm([HEIGHT, WIDTH]),
    "deviation": lambda: By(by_deviation),
    "deviation of all": lambda: By(partial(by_deviation, dims=(0, 1, 2, 3), correction=0)),
    "variance and mean": lambda: By(by_variance),
}


def made(name, dtype):
    torch.manual_seed(1)
    model = nn.Sequential(NORMS[name](), nn.Conv2d(4, 1, 3, padding=1))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    near = torch.randn(4, HEIGHT, WIDTH).double() * torch.tensor([1, 2, 0.5, 3]).reshape(4, 1, 1)
    return model.to(dtype), near, torch.rand(1, HEIGHT, WIDTH).double()


def plain(model):
    def backward(image, target):
        value = F.mse_loss(model(image[None]), target[None])
        value.backward()
        return value

    return backward


def found_by(model, backward, image, target):
    """The loss, and the gradients of the image and of all parameters."""
    model.zero_grad()
    image = image.clone().requires_grad_()
    value = backward(image, target)
    return [value.detach(), *(x.grad for x in (image, *model.parameters()))]


def errors(found, expected):
    size = max(x.norm().item() for x in expected[1:])
    return [
        ((x.double() - y).norm() / max(y.norm().item(), 1e-2 * size)).item()
        for x, y in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", NORMS)
def test_no_digits_are_lost_that_pytorch_keeps(name, dtype):
    model, near, target = made(name, dtype)
    near_model = copy.deepcopy(model).double()
    engine = gg.compile(model, F.mse_loss, tile=(11, 16))
    for offset in (0, 1e3, 1e6, 1e8):
        image = (near + offset).to(dtype)
        expected = found_by(near_model, plain(near_model), image.double() - offset, target)
        ours = errors(found_by(model, engine.backward, image, target.to(dtype)), expected)
        theirs = errors(found_by(model, plain(model), image, target.to(dtype)), expected)
        for error, other in zip(ours, theirs, strict=True):
            assert error <= 4 * max(other, *theirs[1:], torch.finfo(dtype).eps * max(offset, 10)), offset


def test_the_bits_do_not_depend_on_ranks():
    model, near, target = made("batch", torch.float32)
    alone, by_three = bits_by_ranks(model, F.mse_loss, (near + 1e5).float(), target.float(), ranks=(3,), tile=(6, 7))
    assert by_three == alone


@pytest.mark.parametrize("value", [0.1, 1e8 + 0.1, -3e-7])
def test_the_deviation_of_equal_pixels_is_zero_and_has_no_gradient(value):
    class Deviation(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x):
            return (self.weight * x).std((2, 3))

    model, image = Deviation(), torch.full((2, HEIGHT, WIDTH), value, dtype=torch.float64)
    assert gg.compile(model, lambda y, _: y.sum(), tile=(11, 16)).backward(image, image).item() == 0
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 0
