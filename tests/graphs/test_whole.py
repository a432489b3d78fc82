"""What plain autograd does on the whole image: each kernel's products, its kind of work, and where it writes."""

import pytest
import torch
from torch import nn

import gigagrad as gg
from gigagrad.graphs.whole import Effort
from gigagrad.work import Work


def efforts(network: nn.Module) -> tuple[Effort, ...]:
    """Kernels of a step on an image of 8 x 32 x 32."""
    image, target = torch.rand(1, 8, 32, 32), torch.zeros(1, 1, 32, 32)
    engine = gg.compile(network, lambda output, target: output.mean())
    whole = engine.problem(image, target).whole
    assert whole is not None
    return whole.operators


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_gradient_has_the_products_of_its_groups(groups):
    """A forward, and the same again for the gradient of the weight: the image wants none."""
    products = 2 * 9 * 16 * (8 // groups) * 32 * 32
    found = [one for one in efforts(nn.Conv2d(8, 16, 3, padding=1, groups=groups)) if one.flops]
    assert [one.flops for one in found] == [products, products]
    assert {one.work for one in found} == {Work.CHANNELWISE if groups > 2 else Work.REORDERED}


def test_a_gradient_of_a_transposed_convolution_has_the_products_of_its_input():
    products = 2 * 4 * 8 * 16 * 32 * 32
    assert [one.flops for one in efforts(nn.ConvTranspose2d(8, 16, 2, 2)) if one.flops] == [products, products]


def test_kernels_have_the_work_that_they_do():
    found = {one.work for one in efforts(nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.MaxPool2d(2)))}
    assert found == {Work.REORDERED, Work.STATISTICS, Work.WINDOWS, Work.VALUES}


@pytest.mark.parametrize("inplace", [False, True])
def test_what_writes_over_its_input_is_in_place(inplace):
    nbytes = 4 * 16 * 32 * 32
    found = efforts(nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU(inplace=inplace)))
    assert any(one.in_place and one.moved_bytes >= nbytes for one in found) == inplace
