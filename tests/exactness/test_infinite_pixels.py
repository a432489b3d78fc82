"""Pixels that are infinite or not a number: loss and gradients are PyTorch's there, too.

What selects pixels must select them; 0 times an infinite one is NaN.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg

HEIGHT, WIDTH = 13, 17
OPERATORS = {
    "amax": lambda x: x.amax((2, 3)),
    "amax, kept": lambda x: x.amax((2, 3), keepdim=True) + 0 * x.new_ones(1),
    "amin": lambda x: x.amin((2, 3)),
    "amax of everything": lambda x: x.amax(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, 1),
    "adaptive average": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive bins": lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
    "max pooling": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max pooling, ceil": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "max pooling, dilated": lambda x: F.max_pool2d(x, 2, 1, 0, dilation=2),
    "average pooling": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear, aligned": lambda x: F.interpolate(x, size=(9, 30), mode="bilinear", align_corners=True),
    "bilinear, one axis": lambda x: F.interpolate(x, size=(HEIGHT, 30), mode="bilinear"),
    "bilinear, the same size": lambda x: F.interpolate(x, size=(HEIGHT, WIDTH), mode="bilinear"),
    "deviation": lambda x: x.std((2, 3)),
    "variance": lambda x: x.var((2, 3)),
    "sum": lambda x: x.sum((2, 3)),
    "mean": lambda x: x.mean((2, 3)),
    "padding": lambda x: F.pad(x, (1, 2, 3, 0)),
    "reflection": lambda x: F.pad(x, (1, 2, 3, 0), mode="reflect"),
    "relu": lambda x: x.relu(),
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "gelu": lambda x: F.gelu(x),
    "sigmoid": lambda x: x.sigmoid(),
    "softmax": lambda x: x.softmax(1),
    "clamp": lambda x: x.clamp(-1, 1),
    "where": lambda x: torch.where(x.isfinite(), x, x.new_zeros(())),
    "nan to num": lambda x: x.nan_to_num(0, 2, -2),
}  # fmt: skip


class Net(nn.Module):
    """Three channels of multiples of the pixels: no sum of several pixels comes before the operator."""

    def __init__(self, operator):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64).reshape(1, 3, 1, 1))
        self.operator = operator

    def forward(self, x):
        return self.operator(self.weight * x)


def loss(output, target):
    """Finite whatever the output."""
    return torch.where(output.isfinite(), output, output.sign()).sum() + 0 * target.sum()


def with_some(generator):
    """An image with one to four such pixels, anywhere."""
    image = torch.randn(1, HEIGHT, WIDTH, dtype=torch.float64, generator=generator)
    for _ in range(int(torch.randint(1, 5, (), generator=generator))):
        y, x, which = (int(torch.randint(n, (), generator=generator)) for n in (HEIGHT, WIDTH, 3))
        image[0, y, x] = (torch.inf, -torch.inf, torch.nan)[which]
    return image


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("name", OPERATORS)
def test_loss_and_gradients_are_pytorchs(name):
    net = Net(OPERATORS[name])
    reference = copy.deepcopy(net)
    engine = gg.compile(net, loss, tile=(5, 7))
    generator = torch.Generator().manual_seed(len(name))
    target = torch.zeros(1, HEIGHT, WIDTH, dtype=torch.float64)
    for _ in range(16):
        image = with_some(generator)
        ours, theirs = image.clone().requires_grad_(), image.clone().requires_grad_()
        net.zero_grad()
        reference.zero_grad()
        expected = loss(reference(theirs[None]), target[None])
        expected.backward()
        same(engine.backward(ours, target), expected.detach())
        same(net.weight.grad, reference.weight.grad)
        same(ours.grad, theirs.grad)


@pytest.mark.parametrize("value", [1e200, 1e300, torch.inf, torch.nan])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(3), nn.InstanceNorm2d(3, affine=True), nn.GroupNorm(1, 3)], ids=str)
def test_a_norm_of_a_pixel_whose_square_overflows(norm, value):
    net = Net(copy.deepcopy(norm).double())
    reference = copy.deepcopy(net)
    image = torch.randn(1, HEIGHT, WIDTH, dtype=torch.float64)
    image[0, 3, 3] = value
    target = torch.zeros(1, HEIGHT, WIDTH, dtype=torch.float64)
    expected = loss(reference(image[None]), target[None])
    expected.backward()
    same(gg.compile(net, loss, tile=(5, 7)).backward(image, target), expected.detach())
    for ours, theirs in zip(
        (*net.parameters(), *net.buffers()), (*reference.parameters(), *reference.buffers()), strict=True
    ):
        same(ours.detach(), theirs.detach())
        if theirs.grad is not None:
            same(ours.grad, theirs.grad)


def test_what_nothing_reads_does_not_count():
    """The one difference: PyTorch multiplies such a pixel by its cotangent, 0, and that is NaN where it is infinite."""
    net = Net(lambda x: x[:, :, 2:9, 3:])
    image = torch.randn(1, HEIGHT, WIDTH, dtype=torch.float64)
    image[0, 0, 0] = torch.inf
    target = torch.zeros(1, HEIGHT, WIDTH, dtype=torch.float64)
    gg.compile(net, loss, tile=(4, 4)).backward(image, target)
    image[0, 0, 0] = 0
    reference = copy.deepcopy(net)
    reference.zero_grad()
    loss(reference(image[None]), target[None]).backward()
    same(net.weight.grad, reference.weight.grad)
