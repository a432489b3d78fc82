"""Extremes of images of integers: those that have no negative, too."""

import pytest
import torch
from torch import nn

import gigagrad as gg


class Extremes(nn.Module):
    def forward(self, x):
        return x.amin((2, 3)), x.amax((2, 3)), x.min(), x.max(), x.amin((1, 2, 3), keepdim=True)


@pytest.mark.parametrize("size", [(1, 1), (1, 17), (19, 1), (23, 31)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_extremes(dtype, size):
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    torch.manual_seed(0)
    image = torch.randint(low // 2, high // 2 + 1, (2, *size)).to(dtype)
    engine = gg.compile(Extremes(), tile=(7, 9))
    for value in (low, high):
        image[1, -1, -1] = value
        for found, expected in zip(engine.forward(image), Extremes()(image[None]), strict=True):
            assert torch.equal(found, expected)


class Sums(nn.Module):
    def forward(self, x):
        return x.sum((2, 3)), x.sum(), (x % 1000).sum((1, 2, 3), keepdim=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_sums_stay_integers(dtype):
    """A float64 has 53 bits, an int64 63."""
    torch.manual_seed(0)
    high = 2 if dtype == torch.bool else min(torch.iinfo(dtype).max, 2**52 + 12345)
    image = torch.randint(0, high, (2, 23, 31), dtype=torch.int64).to(dtype)
    found = gg.compile(Sums(), tile=(7, 9)).forward(image)
    for one, expected in zip(found, Sums()(image[None]), strict=True):
        assert one.dtype == expected.dtype
        assert torch.equal(one, expected)
