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


@pytest.mark.parametrize("groups", [1, 8])
def test_a_gradient_has_the_products_of_its_groups(groups):
    """A forward, and the same again for the gradient of the weight: the image wants none. Vectors of 16 channels, half
    filled, are computed whole.
    """
    products = 2 * 9 * (16 * 16 if groups == 1 else 8) * 32 * 32
    found = [one for one in efforts(nn.Conv2d(8, 8, 3, padding=1, groups=groups)) if one.flops]
    assert [one.flops for one in found] == [products, products]
    assert {one.work for one in found} == {Work.REORDERED}


@pytest.mark.parametrize(
    ("outputs", "groups", "kernel", "both"), [(16, 2, 3, True), (16, 8, 3, True), (8, 8, 5, False)]
)
def test_windows_are_unfolded_where_the_library_has_no_kernel(outputs, groups, kernel, both):
    """In products of one channel. Depthwise ones have a kernel but for gradients of large weights."""
    convolution = nn.Conv2d(8, outputs, kernel, padding=kernel // 2, groups=groups)
    forward, gradient = (one for one in efforts(convolution) if one.flops)
    assert (forward.work is Work.UNFOLDED, gradient.work) == (both, Work.UNFOLDED)
    assert gradient.flops == 2 * 8 * kernel**2 * 32 * 32


def test_both_gradients_are_kernels_that_read_and_make_two_fields_each():
    """What the first convolution makes wants a gradient, the image none."""
    first, second = nn.Conv2d(8, 20, 1, bias=False), nn.Conv2d(20, 32, 1, bias=False)
    found = [one for one in efforts(nn.Sequential(first, second)) if one.flops]
    px, of_first, of_second = 4 * 32 * 32, 4 * 8 * 20, 4 * 20 * 32
    forward, backward = [28 * px + of_first, 52 * px + of_second], [*2 * [52 * px + of_second], 28 * px + of_first]
    assert [one.moved_bytes for one in found] == [*forward, *backward]
    assert [one.ragged_bytes for one in found] == [28 * px, 20 * px, 20 * px, 20 * px, 28 * px]


def test_the_gradient_of_a_batch_norm_goes_over_its_fields_twice():
    nbytes = 4 * 8 * 32 * 32
    moved = {one.moved_bytes // nbytes for one in efforts(nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)))}
    assert 5 in moved


def test_a_gradient_of_a_transposed_convolution_has_the_products_of_its_input():
    products = 2 * 4 * 16 * 16 * 32 * 32  # 8 channels in, as vectors of 16
    assert [one.flops for one in efforts(nn.ConvTranspose2d(8, 16, 2, 2)) if one.flops] == [products, products]


def test_kernels_have_the_work_that_they_do():
    found = {one.work for one in efforts(nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.MaxPool2d(2)))}
    assert found == {Work.REORDERED, Work.STATISTICS, Work.WINDOWS, Work.VALUES}


@pytest.mark.parametrize("inplace", [False, True])
def test_what_writes_over_its_input_is_in_place(inplace):
    nbytes = 4 * 16 * 32 * 32
    found = efforts(nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU(inplace=inplace)))
    assert any(one.in_place and one.moved_bytes >= nbytes for one in found) == inplace
