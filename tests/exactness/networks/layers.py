"""Layers as PyTorch has them, each made from the shapes of its inputs and the options of its node."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from .recipe import Shapes


class StandardisedConv(nn.Conv2d):
    """A convolution whose weights are standardised at every call."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), correction=0, keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / (variance + 1e-2).sqrt(), self.bias)


def make_convolution(
    shapes: Shapes, out: int, weights: str = "plain", depthwise: bool = False, **options: Any
) -> nn.Module:
    c = shapes[0][0]
    groups = c if depthwise else 1
    kind = StandardisedConv if weights == "standardised" else nn.Conv2d
    return _reparametrised(kind(c, groups * out, groups=groups, **options), weights)


def make_transposed(
    shapes: Shapes, out: int, weights: str = "plain", depthwise: bool = False, **options: Any
) -> nn.Module:
    c = shapes[0][0]
    groups = c if depthwise else 1
    return _reparametrised(nn.ConvTranspose2d(c, groups * out, groups=groups, **options), weights)


def _reparametrised(layer: nn.Module, weights: str) -> nn.Module:
    if weights == "weight norm":
        return parametrizations.weight_norm(layer)
    if weights == "spectral norm":
        return parametrizations.spectral_norm(layer)
    return layer


class OverChannels(nn.Module):
    """Layer normalisation of the channels at each position, by a permutation and back."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def make_norm(shapes: Shapes, kind: str, training: bool = True, **options: Any) -> nn.Module:
    c = shapes[0][0]
    layer: nn.Module
    if kind == "batch":
        layer = nn.BatchNorm2d(c, **options)
    elif kind == "instance":
        layer = nn.InstanceNorm2d(c, **options)
    elif kind == "group":
        layer = nn.GroupNorm(math.gcd(c, options["groups"]), c, affine=options["affine"])
    elif kind == "channels":
        layer = OverChannels(c)
    else:
        layer = nn.LayerNorm(shapes[0])
    layer.stays_in_evaluation = not training  # type: ignore[assignment]
    return layer


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky relu": lambda: nn.LeakyReLU(0.1),
    "gelu": nn.GELU,
    "gelu by tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "elu": nn.ELU,
    "celu": lambda: nn.CELU(0.7),
    "selu": nn.SELU,
    "softplus": nn.Softplus,
    "mish": nn.Mish,
    "relu6": nn.ReLU6,
    "hardswish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid,
    "hardtanh": nn.Hardtanh,
    "softsign": nn.Softsign,
    "logsigmoid": nn.LogSigmoid,
    "tanhshrink": nn.Tanhshrink,
    "softshrink": lambda: nn.Softshrink(0.2),
    "no dropout": lambda: nn.Dropout(0.0),
}


def make_activation(shapes: Shapes, name: str) -> nn.Module:
    c = shapes[0][0]
    if name == "prelu":
        return nn.PReLU(c)
    if name == "glu":
        return nn.Sequential(nn.Conv2d(c, 2 * c, 1), nn.GLU(1))
    return ACTIVATIONS[name]()


class Slice(nn.Module):
    def __init__(self, shapes: Shapes, start: tuple[int, int], cut: tuple[int, int], step: tuple[int, int]) -> None:
        super().__init__()
        self.start, self.cut, self.step = start, cut, step

    def forward(self, x: Tensor) -> Tensor:
        y, xs = (slice(a, n - b, s) for a, b, s, n in zip(self.start, self.cut, self.step, x.shape[2:], strict=True))
        return x[:, :, y, xs]


class Pad(nn.Module):
    def __init__(self, shapes: Shapes, amounts: tuple[int, int, int, int], mode: str) -> None:
        super().__init__()
        self.amounts, self.mode = amounts, mode

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, self.amounts, mode=self.mode)


class Join(nn.Module):
    """Two crops of one field side by side along an axis of the image."""

    def __init__(self, shapes: Shapes, axis: int, cut: int) -> None:
        super().__init__()
        self.axis, self.cut = axis, cut

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.narrow(self.axis, 0, self.cut), x * 0.5], self.axis)


class Resize(nn.Module):
    def __init__(self, shapes: Shapes, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, **self.options)


class Shuffle(nn.Module):
    """Pixels into channels, or channels into pixels or groups."""

    def __init__(self, shapes: Shapes, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv2d(shapes[0][0], 4 if kind == "apart" else 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "apart":
            return F.pixel_shuffle(self.conv(x), 2)
        if self.kind == "together":
            return F.pixel_unshuffle(self.conv(x[:, :, : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2]), 2)
        return F.channel_shuffle(torch.cat([self.conv(x), self.conv(x).sin()], 1), 2)
