"""Random networks whose loss, or whose middle, is an operator on whole fields: made from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Field = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """Every position attends to every other one, by tokens of a coarse grid."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(channels, channels, 4, 4, 2)
        self.qkv = nn.Linear(channels, 3 * channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x)
        q, k, v = self.qkv(y.flatten(2).transpose(1, 2)).chunk(3, -1)
        z = (torch.softmax(q @ k.transpose(1, 2), -1) @ v).transpose(1, 2).reshape(y.shape)
        return x + F.interpolate(z, x.shape[-2:], mode="nearest")


class Filter(nn.Module):
    """A field in Fourier space and back, beside the field itself: two readers, one of them whole."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.fft.irfft2(torch.fft.rfft2(x) * self.gain, s=x.shape[-2:])


class Whole(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return IN_THE_MIDDLE[self.name](x)

    def extra_repr(self) -> str:
        return self.name


def _by_rank_of_value(x: Tensor) -> Tensor:
    flat = x.flatten(2)
    order = flat.argsort(-1)
    return torch.gather(flat, 2, order).cumsum(-1).div(flat.shape[-1]).gather(2, order.argsort(-1)).reshape(x.shape)


IN_THE_MIDDLE: dict[str, Field] = {
    "cumsum": lambda x: x.cumsum(-1) / x.shape[-1],
    "cumulative": lambda x: x.flatten(2).cumsum(-1).reshape(x.shape) / x[0, 0].numel(),
    "softmax": lambda x: x * torch.softmax(x.flatten(2), -1).reshape(x.shape) * x[0, 0].numel(),
    "rank of value": _by_rank_of_value,
    "turned": lambda x: x + x.roll((3, 5), (2, 3)).flatten(2).flip(-1).reshape(x.shape),
    "normed by rows": lambda x: x / (1 + x.abs().amax(-1, keepdim=True)),
}

ENDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sort": lambda o, t: (o.flatten().sort().values - t.flatten().sort().values).square().mean(),
    "sort of rows": lambda o, t: (o.sort(-1).values - t.sort(-1).values).abs().mean(),
    "topk": lambda o, t: (o - t).square().flatten(1).topk(max(1, o[0].numel() // 5)).values.mean(),
    "cumsum": lambda o, t: (o.flatten(1).cumsum(1) - t.flatten(1).cumsum(1)).square().mean() / o[0].numel(),
    "fft": lambda o, t: torch.view_as_real(torch.fft.rfft2(o - t)).square().mean(),
    "histogram": lambda o, t: (
        torch.exp(-((o.flatten()[:, None] - torch.linspace(-1, 1, 5, dtype=o.dtype)) ** 2)).mean(0).square().sum()
        + (t * o).mean()
    ),
    "median": lambda o, t: (o - t).flatten(2).median(-1).values.square().sum(),
    "kthvalue": lambda o, t: (o - t).flatten(2).kthvalue(3, -1).values.square().sum() + o.square().mean(),
    "quantile": lambda o, t: torch.quantile((o - t).abs().flatten(), 0.9) + o.square().mean(),
    "gathered": lambda o, t: (o.flatten().gather(0, t.flatten().argsort()) * t.flatten()).mean(),
    "logsumexp": lambda o, t: torch.logsumexp((o - t).flatten(), 0),
    "gram": lambda o, t: (
        (o.flatten(2) @ o.flatten(2).transpose(1, 2) / t[0, 0].numel()).square().mean() + (o * t).mean()
    ),
    "products of rows": lambda o, t: (o @ o.transpose(2, 3)).square().mean() + (o - t).square().mean(),
    "hinge": lambda o, t: F.hinge_embedding_loss(o, t.sign()),
    "lovasz": lambda o, t: ((o * t).flatten().sort(descending=True).values * t.flatten().cumsum(0)).mean(),
    "norm": lambda o, t: torch.linalg.matrix_norm(o - t).sum(),
    "scores": lambda o, t: F.cross_entropy(o.flatten(2).mean(1), t.flatten(2).mean(1).softmax(-1)),
}


@dataclass(frozen=True)
class WholeCase:
    """`options` of `compile`."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    image: Tensor
    target: Tensor
    options: dict[str, Any]
    description: str


def make_whole_case(seed: int) -> WholeCase:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    height, width = rng.randint(3, 90), rng.randint(3, 90)
    channels, layers = rng.randint(1, 3), list[nn.Module]()
    given = channels
    for _ in range(rng.randint(1, 3)):
        made = rng.randint(1, 4)
        kernel = rng.choice([1, 3, 3, 5])
        layers.append(nn.Conv2d(channels, made, kernel, padding=kernel // 2, bias=rng.random() < 0.7))
        channels = made
        kind = rng.random()
        if kind < 0.25:
            layers.append(rng.choice([nn.BatchNorm2d(channels), nn.InstanceNorm2d(channels, affine=True)]))
        elif kind < 0.4:
            layers.append(Attention(channels))
        elif kind < 0.5:
            layers.append(Filter(channels))
        elif kind < 0.7:
            layers.append(Whole(rng.choice([*IN_THE_MIDDLE])))
        layers.append(rng.choice([nn.Tanh(), nn.GELU(), nn.Softplus(), nn.Identity()]))
    # One channel lies without gaps wherever rows are whole: nothing copies it on its way to a kernel.
    outputs = rng.choice([1, 1, 1, 2])
    layers.append(nn.Conv2d(channels, outputs, rng.choice([1, 3, 3, 3]), padding="same"))
    dtype = rng.choice([torch.float64, torch.float64, torch.float32])
    model = nn.Sequential(*layers).to(dtype)
    image = torch.randn(given, height, width, dtype=dtype, requires_grad=rng.random() < 0.3)
    target = torch.randn(outputs, height, width, dtype=dtype)
    end = rng.choice([*ENDS])
    rows, columns = rng.randint(-(-height // 9), height), rng.randint(-(-width // 9), width)
    tile = rng.choice(
        [(rows, columns), (-(-height // rng.randint(3, 9)), width), (rows, width), (height, columns), None]
    )
    options: dict[str, Any] = {"tile": tile}
    return WholeCase(model, ENDS[end], image, target, options, f"{end} {options} {height}x{width} {dtype} {model}")
