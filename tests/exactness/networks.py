"""Random networks as random graphs, and one training step of each against plain autograd.

A network is a `Recipe`: plain data, whose `repr` is Python and can be pasted into a test. `draw_recipe` draws one from
anything that yields integers, so that Hypothesis and `random.Random` feed the same generator. Nodes are tried on the
image while they are drawn; what PyTorch itself cannot run, or what would vanish or explode, never enters a recipe.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import gigagrad as gg

T = TypeVar("T")
Draw = Callable[[int, int], int]
"""`draw(low, high)` is an integer, both ends included: `random.Random(0).randint`, or Hypothesis behind a lambda."""

Options = dict[str, Any]
Shapes = list[tuple[int, int, int]]
"""`(C, H, W)` of each input of a node."""

MODES = ("nearest", "bilinear", "bicubic", "nearest-exact", "area")
MOST_PIXELS, MOST_CHANNELS, MOST_TILES = 4000, 16, 60


class Node(NamedTuple):
    """One step of a network. Value 0 is the image, value i the output of the i-th node."""

    op: str
    inputs: tuple[int, ...]
    options: Options


@dataclass(frozen=True)
class Recipe:
    """Everything a case is made of.

    `frozen` numbers the nodes (from 1) whose parameters ask for no gradient. `layout` is the memory layout of tiles,
    `""` the engine's own choice: double precision would never see the one that single precision mostly runs in.
    """

    image: tuple[int, int, int]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    loss: str
    loss_options: Options
    tile: tuple[int, int]
    seed: int = 0
    training: bool = True
    frozen: tuple[int, ...] = ()
    steps: int = 1
    layout: str = ""

    def covered(self) -> set[str]:
        """The names of all that this recipe uses."""
        names = {f"loss: {self.loss}", f"layout: {self.layout or 'usual'}"}
        for node in self.nodes:
            detail = next((node.options[key] for key in ("name", "kind", "how") if key in node.options), None)
            names.add(f"{node.op}: {detail}" if detail else node.op)
        return names


@dataclass(frozen=True)
class Case:
    """A recipe made: float64, `image` is `(C, H, W)`."""

    model: nn.Module
    loss: Callable[[Any, Tensor], Tensor]
    image: Tensor
    target: Tensor
    tile: tuple[int, int]


def _pick(draw: Draw, options: Sequence[T]) -> T:
    return options[draw(0, len(options) - 1)]


def _chance(draw: Draw, percent: int) -> bool:
    return draw(1, 100) > 100 - percent


def _pair(draw: Draw, low: int, high: int) -> tuple[int, int]:
    return draw(low, high), draw(low, high)


def _resized(x: Tensor, size: Sequence[int], mode: str, align: bool | None = None) -> Tensor:
    if tuple(x.shape[-2:]) == tuple(size):
        return x
    return F.interpolate(x, size=tuple(size), mode=mode, align_corners=align)


def _tokens(x: Tensor) -> Tensor:
    """`(1, C, H, W)` as `(1, H W, C)`."""
    return x.flatten(2).transpose(1, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Functions of one field, without parameters.


def _overlapping(x: Tensor) -> Tensor:
    patches = F.unfold(x, 3, padding=1)
    return F.fold(patches * patches.sigmoid(), x.shape[-2:], 3, padding=1)


def _rotated(x: Tensor) -> Tensor:
    matrix = torch.tensor([[[0.9, -0.3, 0.05], [0.3, 0.9, -0.1]]], dtype=x.dtype, device=x.device)
    grid = F.affine_grid(matrix, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def _low_pass(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft2(x)
    keep = torch.arange(spectrum.shape[-1], device=x.device) < 5
    return torch.fft.irfft2(spectrum * keep, s=x.shape[-2:])


def _stretched(x: Tensor) -> Tensor:
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return (x - low) / (high - low + 0.1)


def _whitened(x: Tensor) -> Tensor:
    """Every channel less its mean, times the covariance of the channels."""
    flat = x.flatten(2) - x.flatten(2).mean(2, keepdim=True)
    covariance = flat @ flat.transpose(1, 2) / flat.shape[2]
    return (covariance @ flat).reshape(x.shape)


def _standardised(x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, (2, 3), keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-2)


def _best(x: Tensor) -> Tensor:
    """x plus the mean of its four largest values per channel."""
    return x + x.flatten(2).topk(4, dim=2).values.mean(2)[:, :, None, None]


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    # Position by position.
    "softmax of channels": lambda x: x.softmax(1),
    "log-softmax of channels": lambda x: x.log_softmax(1),
    "less channel mean": lambda x: x - x.mean(1, keepdim=True),
    "unit channels": lambda x: F.normalize(x, dim=1, eps=0.1),
    "root mean square of channels": lambda x: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 0.1),
    "std of channels": lambda x: torch.cat([x, (x.var(1, keepdim=True, unbiased=False) + 0.1).sqrt()], 1),
    "max of channels": lambda x: x + x.max(1, keepdim=True).values,
    "sorted channels": lambda x: x.sort(1).values,
    "channels summed up": lambda x: x.cumsum(1).tanh(),
    "channels in reverse": lambda x: x.flip(1),
    "local response": lambda x: F.local_response_norm(x, 3),
    "clamped square": lambda x: x.square().clamp(max=3.0),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x * x),
    "mask": lambda x: x * (x > -0.5),
    "detached half": lambda x: x + 0.5 * x.detach().tanh(),
    "channels last": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2]).permute(0, 3, 1, 2),
    "chunks": lambda x: torch.cat([part * (i + 1) for i, part in enumerate(x.unbind(1))], 0)[None],
    "stack": lambda x: torch.stack([x, x.sin()], 2).flatten(1, 2),
    # Neighbours.
    "differences": lambda x: torch.cat([x[:, :, 1:, 1:] - x[:, :, :-1, 1:], x[:, :, 1:, 1:] - x[:, :, 1:, :-1]], 1),
    "mosaic": lambda x: _resized(F.avg_pool2d(x, 3, ceil_mode=True), x.shape[-2:], "nearest"),
    "grown": lambda x: F.max_pool2d(x, 3, 1, 1) - F.max_pool2d(-x, 3, 1, 1),
    # The whole field, or a whole row or column of it.
    "less mean": lambda x: x - x.mean((2, 3), keepdim=True),
    "standardised": _standardised,
    "stretched": _stretched,
    "std": lambda x: x * x.std((2, 3), keepdim=True),
    "var of all": lambda x: x / (x.var((1, 2, 3), keepdim=True) + 0.5).sqrt(),
    "norm": lambda x: x / (x.norm(dim=(2, 3), keepdim=True) + 1.0) * 5,
    "logsumexp": lambda x: x - x.logsumexp((2, 3), keepdim=True) + math.log(x.shape[2] * x.shape[3]),
    "softmax of positions": lambda x: (x.flatten(2).softmax(2) * x.shape[2] * x.shape[3]).reshape(x.shape),
    "softmax of columns": lambda x: x.softmax(2) * x.shape[2],
    "strips": lambda x: x + x.mean(2, keepdim=True) * x.mean(3, keepdim=True),
    "largest of rows": lambda x: x - x.amax(3, keepdim=True),
    "whitened": _whitened,
    "scan": lambda x: x.cumsum(3) / (x.shape[3] ** 0.5),
    "flip": lambda x: x + x.flip(2),
    "roll": lambda x: x - x.roll((2, -3), (2, 3)),
    "roll of tokens": lambda x: x.flatten(2).roll(5, 2).reshape(x.shape),
    "transpose": lambda x: x.transpose(2, 3),
    "quarter turn": lambda x: torch.rot90(x, 1, (2, 3)),
    "sorted rows": lambda x: x.sort(3).values,
    "median": lambda x: x - x.flatten(2).median(2).values[:, :, None, None],
    "best four": _best,
    "low pass": _low_pass,
    "rotated": _rotated,
    "overlapping patches": _overlapping,
    "mirrored": lambda x: torch.cat([x, x.flip(3)], 3),
    "repeated": lambda x: x[:, :, ::2].repeat(1, 1, 2, 1),
}


class Function(nn.Module):
    def __init__(self, shapes: Shapes, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return FUNCTIONS[self.name](x)


# ---------------------------------------------------------------------------------------------------------------------
# Modules. Each is made from the shapes of its inputs and the options of its node.


class StandardisedConv(nn.Conv2d):
    """A convolution whose weights are standardised at every call."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), correction=0, keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / (variance + 1e-2).sqrt(), self.bias)


def _convolution(
    shapes: Shapes, out: int, weights: str = "plain", depthwise: bool = False, **options: Any
) -> nn.Module:
    c = shapes[0][0]
    groups = c if depthwise else 1
    kind = StandardisedConv if weights == "standardised" else nn.Conv2d
    return _reparametrised(kind(c, groups * out, groups=groups, **options), weights)


def _transposed(shapes: Shapes, out: int, weights: str = "plain", depthwise: bool = False, **options: Any) -> nn.Module:
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


def _norm(shapes: Shapes, kind: str, training: bool = True, **options: Any) -> nn.Module:
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
    layer.stays_in_evaluation = not training
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


def _activation(shapes: Shapes, name: str) -> nn.Module:
    c = shapes[0][0]
    if name == "prelu":
        return nn.PReLU(c)
    if name == "glu":
        return nn.Sequential(nn.Conv2d(c, 2 * c, 1), nn.GLU(1))
    return ACTIVATIONS[name]()


class Residual(nn.Module):
    """x + conv(relu(norm(conv(x)))), the activation in place."""

    def __init__(self, shapes: Shapes, kernel: int, norm: str, scale: bool) -> None:
        super().__init__()
        c = shapes[0][0]
        self.body = nn.Sequential(
            nn.Conv2d(c, 2 * c, 1, bias=False),
            nn.BatchNorm2d(2 * c) if norm == "batch" else nn.GroupNorm(2, 2 * c),
            nn.ReLU(inplace=True),
            nn.Conv2d(2 * c, 2 * c, kernel, padding=kernel // 2, groups=2 * c),
            nn.SiLU(inplace=True),
            nn.Conv2d(2 * c, c, 1),
        )
        self.scale = nn.Parameter(torch.ones(c, 1, 1)) if scale else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return x + (y if self.scale is None else y * self.scale)


class Merge(nn.Module):
    """Two fields made one: the second is projected to the channels of the first if need be, and fitted to its size."""

    def __init__(self, shapes: Shapes, how: str, fit: str, mode: str = "nearest") -> None:
        super().__init__()
        (ca, *_), (cb, *_) = shapes
        self.how, self.fit, self.mode = how, fit, mode
        self.project = nn.Conv2d(cb, ca, 1) if ca != cb and how != "concatenate" else None

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        if self.project is not None:
            b = self.project(b)
        a, b = self._fitted(a, b)
        if self.how == "concatenate":
            return torch.cat([a, b], 1)
        if self.how == "add":
            return a + b
        if self.how == "subtract":
            return a - b
        if self.how == "multiply":
            return a * b
        if self.how == "gate":
            return a * b.sigmoid()
        if self.how == "maximum":
            return torch.maximum(a, b)
        if self.how == "lerp":
            return torch.lerp(a, b, 0.3)
        if self.how == "where":
            return torch.where(b > 0, a, b)
        assert self.how == "divide", self.how
        return a / (1 + b.exp())

    def _fitted(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        size = a.shape[-2:]
        if b.shape[-2:] == (1, 1):
            return a, b.expand(-1, -1, *size) if self.how == "concatenate" else b
        if self.fit == "resize":
            return a, _resized(b, size, self.mode)
        if self.fit == "crop":
            h, w = min(a.shape[2], b.shape[2]), min(a.shape[3], b.shape[3])
            (ay, ax), (by, bx) = (((v.shape[2] - h) // 2, (v.shape[3] - w) // 2) for v in (a, b))
            return a[:, :, ay : ay + h, ax : ax + w], b[:, :, by : by + h, bx : bx + w]
        dy, dx = a.shape[2] - b.shape[2], a.shape[3] - b.shape[3]
        return a, F.pad(b, (dx // 2, dx - dx // 2, dy // 2, dy - dy // 2))


class Squeeze(nn.Module):
    """Squeeze and excitation: each channel is scaled by a function of the whole field."""

    def __init__(self, shapes: Shapes, pool: str, linear: bool, gate: str) -> None:
        super().__init__()
        c = shapes[0][0]
        self.pool, self.linear, self.gate = pool, linear, gate
        self.squeeze = nn.Linear(c, 3) if linear else nn.Conv2d(c, 3, 1)
        self.excite = nn.Linear(3, c) if linear else nn.Conv2d(3, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.pool == "mean":
            s = x.mean((2, 3), keepdim=True)
        elif self.pool == "max":
            s = F.adaptive_max_pool2d(x, 1)
        elif self.pool == "std":
            s = (x.var((2, 3), keepdim=True) + 0.01).sqrt()
        else:
            s = F.adaptive_avg_pool2d(x, 1)
        s = self.excite(F.silu(self.squeeze(s.flatten(1) if self.linear else s)))
        s = torch.sigmoid(s) if self.gate == "sigmoid" else F.hardsigmoid(s)
        return x * s.reshape(1, -1, 1, 1)


class SpatialGate(nn.Module):
    """The field is scaled by a convolution of its channels' mean and maximum."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        return x * self.conv(both).sigmoid()


class GlobalPool(nn.Module):
    """One number per channel, as a field of one position or repeated over the field it came from."""

    def __init__(self, shapes: Shapes, pool: str, broadcast: bool) -> None:
        super().__init__()
        self.pool, self.broadcast = pool, broadcast
        self.conv = nn.Conv2d(shapes[0][0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.amax((2, 3), keepdim=True) if self.pool == "max" else x.mean((2, 3), keepdim=True)
        y = self.conv(pooled)
        return torch.cat([x, F.interpolate(y, x.shape[-2:], mode="bilinear")], 1) if self.broadcast else y


class Pyramid(nn.Module):
    """Pooled to a small grid, convolved, interpolated back and put beside the field."""

    def __init__(self, shapes: Shapes, grid: tuple[int, int], pool: str, mode: str) -> None:
        super().__init__()
        self.grid, self.mode = grid, mode
        self.pool = F.adaptive_max_pool2d if pool == "max" else F.adaptive_avg_pool2d
        self.conv = nn.Conv2d(shapes[0][0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.pool(x, self.grid)).tanh()
        return torch.cat([x, _resized(y, x.shape[-2:], self.mode)], 1)


class AttentionPool(nn.Module):
    """Gated attention over all positions (multiple-instance learning), back as a gate for each channel."""

    def __init__(self, shapes: Shapes, heads: int, gated: bool) -> None:
        super().__init__()
        c = shapes[0][0]
        self.value, self.gate = nn.Linear(c, 4), nn.Linear(c, 4) if gated else None
        self.score = nn.Linear(4, heads)
        self.back = nn.Linear(heads * c, c)

    def forward(self, x: Tensor) -> Tensor:
        tokens = _tokens(x)
        hidden = self.value(tokens).tanh()
        if self.gate is not None:
            hidden = hidden * self.gate(tokens).sigmoid()
        attention = self.score(hidden).transpose(1, 2).softmax(-1)
        pooled = torch.bmm(attention, tokens).flatten(1)
        return x * (1 + self.back(pooled).tanh())[:, :, None, None]


class SelfAttention(nn.Module):
    """Multi-head attention among the tokens of a coarse copy of the field, added to it."""

    def __init__(self, shapes: Shapes, kind: str, factor: int, heads: int, mode: str) -> None:
        super().__init__()
        c, d = shapes[0][0], 2 * heads
        self.kind, self.factor, self.heads, self.mode = kind, factor, heads, mode
        self.norm, self.inside, self.outside = nn.LayerNorm(d), nn.Conv2d(c, d, 1), nn.Conv2d(d, c, 1)
        if kind == "module":
            self.attention = nn.MultiheadAttention(d, heads, batch_first=True)
        else:
            self.qkv = nn.Linear(d, 3 * d)

    def forward(self, x: Tensor) -> Tensor:
        coarse = self.inside(F.avg_pool2d(x, self.factor, ceil_mode=True))
        tokens = self.norm(_tokens(coarse))
        if self.kind == "module":
            mixed = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        else:
            n = tokens.shape[1]
            q, k, v = self.qkv(tokens).reshape(1, n, 3, self.heads, 2).permute(2, 0, 3, 1, 4)
            if self.kind == "fused":
                mixed = F.scaled_dot_product_attention(q, k, v)
            else:
                mixed = (q @ k.transpose(-2, -1) * 0.7).softmax(-1) @ v
            mixed = mixed.transpose(1, 2).reshape(1, n, -1)
        y = (tokens + mixed).transpose(1, 2).reshape(coarse.shape)
        return x + _resized(self.outside(y), x.shape[-2:], self.mode)


class LinearAttention(nn.Module):
    """Keys are normalised over positions, queries over channels; no table of all pairs."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        c = shapes[0][0]
        self.qkv, self.back = nn.Conv2d(c, 9, 1), nn.Conv2d(3, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).flatten(2).chunk(3, 1)
        context = torch.einsum("bdn,ben->bde", k.softmax(-1), v)
        y = torch.einsum("bde,bdn->ben", context, q.softmax(1))
        return x + self.back(y.reshape(1, 3, *x.shape[-2:]))


class Regions(nn.Module):
    """Soft regions: their mean features by attention over positions, handed back to every position."""

    def __init__(self, shapes: Shapes, count: int) -> None:
        super().__init__()
        c = shapes[0][0]
        self.assign, self.mix = nn.Conv2d(c, count, 1), nn.Conv2d(2 * c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.assign(x).flatten(2)
        centres = logits.softmax(2) @ x.flatten(2).transpose(1, 2)
        back = (logits.softmax(1).transpose(1, 2) @ centres).transpose(1, 2).reshape(x.shape)
        return self.mix(torch.cat([x, back], 1))


class CrossAttention(nn.Module):
    """Every position of the first field asks a small grid of the second."""

    def __init__(self, shapes: Shapes, grid: tuple[int, int]) -> None:
        super().__init__()
        (ca, *_), (cb, *_) = shapes
        self.grid = grid
        self.q, self.k, self.v = nn.Linear(ca, 3), nn.Linear(cb, 3), nn.Linear(cb, ca)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        memory = _tokens(F.adaptive_avg_pool2d(b, self.grid))
        weights = (self.q(_tokens(a)) @ self.k(memory).transpose(1, 2)).softmax(-1)
        return a + (weights @ self.v(memory)).transpose(1, 2).reshape(a.shape)


class Modulate(nn.Module):
    """The first field is scaled and shifted by what the second is on average."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        (ca, *_), (cb, *_) = shapes
        self.linear = nn.Linear(cb, 2 * ca)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        scale, shift = self.linear(b.mean((2, 3))).chunk(2, 1)
        return a * (1 + scale.tanh())[:, :, None, None] + shift[..., None, None]


class Dynamic(nn.Module):
    """The first field is convolved with kernels made from the second."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        (self.channels, *_), (cb, *_) = shapes
        self.linear = nn.Linear(cb, 9 * self.channels)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        kernel = self.linear(b.mean((2, 3))).tanh().reshape(self.channels, 1, 3, 3)
        return F.conv2d(a, kernel, padding=1, groups=self.channels)


class Product(nn.Module):
    """Channels mixed by a matrix, written in one of several ways."""

    def __init__(self, shapes: Shapes, kind: str, out: int) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.empty(out, shapes[0][0]))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "einsum":
            return torch.einsum("nchw,kc->nkhw", x, self.weight)
        if self.kind == "matmul":
            return (x.permute(0, 2, 3, 1) @ self.weight.t()).permute(0, 3, 1, 2)
        if self.kind == "tokens":
            return (self.weight @ x.flatten(2)).reshape(1, -1, *x.shape[-2:])
        return F.linear(x.movedim(1, -1), self.weight).movedim(-1, 1)


class Windows(nn.Module):
    """Windows that partition the field (padded until they do): attention inside each, or a mix of its positions."""

    def __init__(self, shapes: Shapes, kind: str, window: tuple[int, int], shift: bool) -> None:
        super().__init__()
        c = shapes[0][0]
        self.kind, self.window, self.shift = kind, window, shift
        n = window[0] * window[1]
        self.mix = nn.Linear(n, n) if kind == "mix" else nn.Linear(c, 3 * c)

    def forward(self, x: Tensor) -> Tensor:
        (h, w), (wh, ww), c = x.shape[-2:], self.window, x.shape[1]
        y = F.pad(x, (0, -w % ww, 0, -h % wh))
        if self.shift:
            y = torch.roll(y, (-(wh // 2), -(ww // 2)), (2, 3))
        rows, columns = y.shape[2] // wh, y.shape[3] // ww
        y = y.permute(0, 2, 3, 1).reshape(1, rows, wh, columns, ww, c)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(rows * columns, wh * ww, c)
        if self.kind == "mix":
            y = self.mix(y.transpose(1, 2)).transpose(1, 2)
        else:
            q, k, v = self.mix(y).chunk(3, -1)
            y = (q @ k.transpose(1, 2)).softmax(-1) @ v
        y = y.reshape(1, rows, columns, wh, ww, c).permute(0, 1, 3, 2, 4, 5)
        y = y.reshape(1, rows * wh, columns * ww, c).permute(0, 3, 1, 2)
        if self.shift:
            y = torch.roll(y, (wh // 2, ww // 2), (2, 3))
        return x + y[:, :, :h, :w]


class Mixer(nn.Module):
    """The positions of a small grid mixed by a matrix, added back to the field."""

    def __init__(self, shapes: Shapes, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid
        self.mix = nn.Linear(grid[0] * grid[1], grid[0] * grid[1])

    def forward(self, x: Tensor) -> Tensor:
        y = F.adaptive_avg_pool2d(x, self.grid)
        return x + _resized(self.mix(y.flatten(2)).reshape(y.shape), x.shape[-2:], "bilinear", False)


class Scan(nn.Module):
    """A one-dimensional convolution along the flattened positions."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.conv = nn.Conv1d(shapes[0][0], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.flatten(2)).reshape(1, 3, *x.shape[-2:])


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


class Position(nn.Module):
    """A learned map, kept on a small grid and interpolated to the field, is added."""

    def __init__(self, shapes: Shapes, grid: tuple[int, int], mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.map = nn.Parameter(torch.empty(1, shapes[0][0], *grid))

    def forward(self, x: Tensor) -> Tensor:
        return x + _resized(self.map, x.shape[-2:], self.mode)


class Coordinates(nn.Module):
    """Two channels more: where each position lies, between -1 and 1."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        y, xs = (torch.linspace(-1, 1, n, dtype=x.dtype, device=x.device) for n in x.shape[-2:])
        grid = torch.stack(torch.meshgrid(y, xs, indexing="ij"))
        return torch.cat([x, grid[None]], 1)


class RunningScale(nn.Module):
    """The field over its own running mean square, a buffer that follows it in training."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.register_buffer("square", torch.ones(shapes[0][0]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.square.mul_(0.9).add_(0.1 * x.square().mean((0, 2, 3)))
        return x * torch.rsqrt(self.square + 0.1)[:, None, None]


class Warp(nn.Module):
    """The field sampled on a learned affine grid."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.empty(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        theta = 0.1 * self.theta.tanh() + torch.eye(2, 3, dtype=x.dtype, device=x.device)
        grid = F.affine_grid(theta[None], list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


class Transformer(nn.Module):
    """Patches as tokens behind a class token, two transformer layers, and back; the class token gates the field."""

    def __init__(self, shapes: Shapes, patch: int, first: bool, activation: str) -> None:
        super().__init__()
        c, h, w = shapes[0]
        self.embed = nn.Conv2d(c, 4, patch, patch)
        self.token = nn.Parameter(torch.empty(1, 1, 4))
        self.position = nn.Parameter(torch.empty(1, 1 + (h // patch) * (w // patch), 4))
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, activation=activation, batch_first=True)
        layer.norm_first = first
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.back, self.gate = nn.Conv2d(4, c, 1), nn.Linear(4, c)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.embed(x)
        tokens = self.layers(torch.cat([self.token, _tokens(patches)], 1) + self.position)
        y = tokens[:, 1:].transpose(1, 2).reshape(patches.shape)
        gate = self.gate(tokens[:, 0]).sigmoid()[:, :, None, None]
        return x * gate + _resized(self.back(y), x.shape[-2:], "bilinear", False)


class Views(nn.Module):
    """The field and its mirror image as a batch of two through shared layers, and their mean."""

    def __init__(self, shapes: Shapes, norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shapes[0][0], 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norm(self.conv(torch.cat([x, x.flip(3)], 0))).relu().chunk(2, 0)
        return (first + second.flip(3)) / 2


class Volume(nn.Module):
    """The channels as the depth of a volume, convolved in three dimensions."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x[:, None]).amax(1)


class ChannelsAsBatch(nn.Module):
    """Every channel on its own through the same layers."""

    def __init__(self, shapes: Shapes, norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2) if norm else nn.GroupNorm(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x.transpose(0, 1)))
        return y.sum(1, keepdim=True).transpose(0, 1)


class Quantise(nn.Module):
    """Every position moves to the nearest vector of a code book; gradients pass straight through, and by the vectors.

    Half the way only: equal positions would be ties for a maximum behind it.
    """

    def __init__(self, shapes: Shapes, count: int) -> None:
        super().__init__()
        self.book = nn.Embedding(count, shapes[0][0])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.permute(0, 2, 3, 1)
        nearest = (tokens[..., None, :] - self.book.weight).square().sum(-1).argmin(-1)
        chosen = self.book(nearest).permute(0, 3, 1, 2)
        return x + 0.5 * (chosen - x).detach() + 0.1 * chosen


class Recurrent(nn.Module):
    """A recurrent layer along the rows' means, added back to every row."""

    def __init__(self, shapes: Shapes, kind: str) -> None:
        super().__init__()
        c = shapes[0][0]
        self.layer = nn.GRU(c, 2, batch_first=True) if kind == "gru" else nn.LSTM(c, 2, batch_first=True)
        self.back = nn.Linear(2, c)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x.mean(3).transpose(1, 2))[0]
        return x + self.back(hidden).transpose(1, 2)[..., None]


class TokenNorm(nn.Module):
    """Batch normalisation of the flattened positions, between two linear layers."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        c = shapes[0][0]
        self.inside, self.norm, self.outside = nn.Linear(c, 3), nn.BatchNorm1d(3), nn.Linear(3, c)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.inside(_tokens(x))[0]
        return x + self.outside(F.gelu(self.norm(tokens))).t().reshape(x.shape)


class Classifier(nn.Module):
    """One vector of logits for the image."""

    def __init__(self, shapes: Shapes, kind: str, out: int) -> None:
        super().__init__()
        c, h, w = shapes[0]
        self.kind = kind
        self.linear = nn.Linear(c * h * w if kind == "flat" else c * 4 if kind == "grid" else c, out)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "flat":
            return self.linear(x.flatten(1))
        if self.kind == "grid":
            return self.linear(F.adaptive_avg_pool2d(x, 2).flatten(1))
        return self.linear(x.mean((2, 3)))


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


# ---------------------------------------------------------------------------------------------------------------------
# The options of each operator, as drawn. Sizes are those of the first input.


def _draw_weights(draw: Draw) -> str:
    return _pick(draw, ["plain"] * 6 + ["weight norm", "spectral norm"])


def _draw_convolution(draw: Draw) -> Options:
    depthwise = _chance(draw, 20)
    weights = "standardised" if _chance(draw, 8) else _draw_weights(draw)
    options: Options = {"out": draw(1, 2) if depthwise else draw(1, 6), "depthwise": depthwise, "weights": weights}
    kind = draw(0, 9)
    if kind == 9:
        size = draw(2, 4)
        return options | {"kernel_size": size, "stride": size}
    if kind == 8:
        return options | {"kernel_size": _pair(draw, 1, 4), "padding": "same", "dilation": _pair(draw, 1, 3)}
    if kind < 4:
        size = _pick(draw, [3, 1, 5])
        return options | {"kernel_size": size, "padding": size // 2, "stride": draw(1, 2), "bias": _chance(draw, 60)}
    return options | {
        "kernel_size": _pair(draw, 1, 5),
        "stride": _pair(draw, 1, 3),
        "padding": _pair(draw, 0, 3),
        "dilation": _pair(draw, 1, 3),
        "bias": _chance(draw, 60),
        "padding_mode": _pick(draw, ["zeros", "zeros", "reflect", "replicate", "circular"]),
    }


def _draw_transposed(draw: Draw) -> Options:
    stride, dilation = _pair(draw, 1, 3), _pair(draw, 1, 2)
    depthwise = _chance(draw, 20)
    return {
        "out": draw(1, 2) if depthwise else draw(1, 5),
        "depthwise": depthwise,
        "weights": _draw_weights(draw),
        "kernel_size": _pair(draw, 1, 5),
        "stride": stride,
        "padding": _pair(draw, 0, 2),
        "output_padding": tuple(draw(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)),
        "dilation": dilation,
        "bias": _chance(draw, 60),
    }


def _draw_pool(draw: Draw) -> Options:
    kernel = _pair(draw, 2, 4)
    return {
        "kernel_size": kernel,
        "stride": _pair(draw, 1, 3),
        "padding": tuple(draw(0, k // 2) for k in kernel),
        "ceil_mode": _chance(draw, 50),
    }


def _draw_average(draw: Draw) -> Options:
    return _draw_pool(draw) | {
        "count_include_pad": _chance(draw, 50),
        "divisor_override": _pick(draw, [None, None, None, 3]),
    }


def _draw_resize(draw: Draw) -> Options:
    mode = _pick(draw, [*MODES, "bilinear"])
    options: Options = {"mode": mode}
    if mode in ("bilinear", "bicubic"):
        options["align_corners"] = _chance(draw, 40)
        if not options["align_corners"] and _chance(draw, 15):
            options["antialias"] = True
    if _chance(draw, 40):
        return options | {"size": _pair(draw, 3, 50)}
    factor = _pick(draw, [2, 0.5, 3, 1.7, 0.6, (2.0, 1.3)])
    if isinstance(factor, float) and _chance(draw, 30):
        options["recompute_scale_factor"] = True
    return options | {"scale_factor": factor}


def _draw_norm(draw: Draw) -> Options:
    kind = _pick(draw, ["batch", "batch", "batch", "group", "instance", "channels", "whole"])
    options: Options = {"kind": kind}
    if kind in ("batch", "instance"):
        options |= {
            "training": _chance(draw, 75),
            "affine": _chance(draw, 75),
            "track_running_stats": _chance(draw, 75 if kind == "batch" else 50),
            "momentum": _pick(draw, [0.1, 0.1, 0.5, 1.0, 0.0, 0.01] + [None] * (kind == "batch")),
            "eps": _pick(draw, [1e-5, 1e-3]),
        }
    elif kind == "group":
        options |= {"groups": draw(1, 4), "affine": _chance(draw, 75)}
    return options


def _draw_merge(draw: Draw) -> Options:
    how = ["add", "concatenate", "multiply", "gate", "subtract", "maximum", "lerp", "where", "divide"]
    return {
        "how": _pick(draw, ["add", "concatenate", *how]),
        "fit": _pick(draw, ["resize", "crop", "pad"]),
        "mode": _pick(draw, MODES),
    }


def _draw_attention(draw: Draw) -> Options:
    kind = _pick(draw, ["explicit", "fused", "module"])
    return {"kind": kind, "factor": draw(2, 6), "heads": draw(1, 2), "mode": _pick(draw, MODES)}


def _draw_slice(draw: Draw) -> Options:
    return {"start": _pair(draw, 0, 3), "cut": _pair(draw, 0, 3), "step": _pair(draw, 1, 2)}


def _draw_pad(draw: Draw) -> Options:
    mode = _pick(draw, ["constant", "reflect", "replicate", "circular"])
    return {"amounts": tuple(draw(-1 if mode == "constant" else 0, 3) for _ in range(4)), "mode": mode}


def _draw_squeeze(draw: Draw) -> Options:
    pool = _pick(draw, ["mean", "adaptive", "max", "std"])
    return {"pool": pool, "linear": _chance(draw, 50), "gate": _pick(draw, ["sigmoid", "hardsigmoid"])}


def _draw_pyramid(draw: Draw) -> Options:
    return {"grid": _pair(draw, 1, 7), "pool": _pick(draw, ["mean", "max"]), "mode": _pick(draw, MODES)}


@dataclass(frozen=True)
class Operator:
    """How a node's options are drawn, how its module is made, and how often it is asked for."""

    draw: Callable[[Draw], Options]
    make: Callable[..., nn.Module]
    weight: int = 1
    arity: int = 1


def _nothing(draw: Draw) -> Options:
    return {}


def _windows(draw: Draw) -> Options:
    return {"kind": _pick(draw, ["attention", "mix"]), "window": _pair(draw, 2, 7), "shift": _chance(draw, 40)}


OPERATORS: dict[str, Operator] = {
    "conv": Operator(_draw_convolution, _convolution, weight=14),
    "norm": Operator(_draw_norm, _norm, weight=12),
    "activation": Operator(lambda draw: {"name": _pick(draw, [*ACTIVATIONS, "prelu", "glu"])}, _activation, weight=5),
    "merge": Operator(_draw_merge, Merge, weight=8, arity=2),
    "max pool": Operator(
        lambda draw: _draw_pool(draw) | {"dilation": draw(1, 2)}, lambda shapes, **o: nn.MaxPool2d(**o), weight=2
    ),
    "average pool": Operator(_draw_average, lambda shapes, **o: nn.AvgPool2d(**o), weight=2),
    "resize": Operator(_draw_resize, Resize, weight=4),
    "transposed": Operator(_draw_transposed, _transposed, weight=3),
    "function": Operator(lambda draw: {"name": _pick(draw, list(FUNCTIONS))}, Function, weight=9),
    "residual": Operator(
        lambda draw: {
            "kernel": _pick(draw, [1, 3, 5]),
            "norm": _pick(draw, ["batch", "group"]),
            "scale": _chance(draw, 50),
        },
        Residual,
        weight=2,
    ),
    "squeeze": Operator(_draw_squeeze, Squeeze, weight=3),
    "spatial gate": Operator(_nothing, SpatialGate),
    "global pool": Operator(
        lambda draw: {"pool": _pick(draw, ["mean", "max"]), "broadcast": _chance(draw, 70)}, GlobalPool, weight=2
    ),
    "pyramid": Operator(_draw_pyramid, Pyramid, weight=3),
    "attention pool": Operator(lambda draw: {"heads": draw(1, 2), "gated": _chance(draw, 60)}, AttentionPool, weight=2),
    "self-attention": Operator(_draw_attention, SelfAttention, weight=2),
    "linear attention": Operator(_nothing, LinearAttention),
    "regions": Operator(lambda draw: {"count": draw(1, 4)}, Regions),
    "cross-attention": Operator(lambda draw: {"grid": _pair(draw, 1, 4)}, CrossAttention, arity=2),
    "modulate": Operator(_nothing, Modulate, arity=2),
    "dynamic": Operator(_nothing, Dynamic, arity=2),
    "product": Operator(
        lambda draw: {"kind": _pick(draw, ["einsum", "matmul", "tokens", "linear"]), "out": draw(1, 5)},
        Product,
        weight=2,
    ),
    "windows": Operator(_windows, Windows, weight=2),
    "mixer": Operator(lambda draw: {"grid": _pair(draw, 1, 5)}, Mixer),
    "scan": Operator(_nothing, Scan),
    "shuffle": Operator(lambda draw: {"kind": _pick(draw, ["apart", "together", "groups"])}, Shuffle, weight=2),
    "position": Operator(lambda draw: {"grid": _pair(draw, 1, 6), "mode": _pick(draw, MODES)}, Position, weight=2),
    "coordinates": Operator(_nothing, Coordinates),
    "running scale": Operator(_nothing, RunningScale),
    "warp": Operator(_nothing, Warp),
    "transformer": Operator(
        lambda draw: {
            "patch": draw(3, 8),
            "first": _chance(draw, 50),
            "activation": _pick(draw, ["relu", "gelu"]),
        },
        Transformer,
        weight=2,
    ),
    "views": Operator(lambda draw: {"norm": _chance(draw, 50)}, Views),
    "volume": Operator(_nothing, Volume),
    "channels as batch": Operator(lambda draw: {"norm": _chance(draw, 50)}, ChannelsAsBatch),
    "quantise": Operator(lambda draw: {"count": draw(2, 5)}, Quantise),
    "recurrent": Operator(lambda draw: {"kind": _pick(draw, ["gru", "lstm"])}, Recurrent),
    "token norm": Operator(_nothing, TokenNorm),
    "classifier": Operator(
        lambda draw: {"kind": _pick(draw, ["mean", "grid", "flat"]), "out": draw(2, 4)}, Classifier, weight=0
    ),
    "slice": Operator(_draw_slice, Slice),
    "pad": Operator(_draw_pad, Pad),
    "join": Operator(lambda draw: {"axis": draw(2, 3), "cut": draw(1, 4)}, Join),
}

_ASKED_FOR = [name for name, operator in OPERATORS.items() for _ in range(operator.weight)]


# ---------------------------------------------------------------------------------------------------------------------
# The network.


class Network(nn.Module):
    """The graph of a recipe, grown node by node on one image so that every module knows its channels."""

    def __init__(self, image: Tensor, seed: int) -> None:
        super().__init__()
        self.values = [image[None]]
        self.seed = seed
        self.nodes: list[Node] = []
        self.outputs: tuple[int, ...] = ()
        self.named = False
        self.parts = nn.ModuleList()

    def grow(self, node: Node) -> Tensor:
        """Add a node and return what it gives for the image. Raises whatever PyTorch does if it cannot run."""
        operands = [self.values[i] for i in node.inputs]
        if node.op == "again":
            part = self.parts[node.options["node"] - 1]
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1000 * self.seed + len(self.nodes))
                part = self._made(node, [tuple(v.shape[1:]) for v in operands])
        with torch.no_grad():
            value = copy.deepcopy(part)(*operands)
        self.parts.append(part)
        self.nodes.append(node)
        self.values.append(value)
        return value

    def shrink(self) -> None:
        """Undo the last `grow`."""
        self.values.pop()
        self.nodes.pop()
        del self.parts[-1]

    def finish(self, outputs: tuple[int, ...], *, named: bool) -> None:
        self.outputs, self.named = outputs, named
        self.values = self.values[:1]

    def forward(self, image: Tensor) -> Any:
        values = [image]
        for node, part in zip(self.nodes, self.parts, strict=True):
            values.append(part(*(values[i] for i in node.inputs)))
        outputs = [values[i] for i in self.outputs]
        if self.named:
            return {"out": outputs[0], "aux": outputs[-1]}
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _made(self, node: Node, shapes: Shapes) -> nn.Module:
        part = OPERATORS[node.op].make(shapes, **node.options).double()
        for name, parameter in part.named_parameters():
            _stir(name, parameter.data)
        for module in part.modules():
            if isinstance(module, nn.BatchNorm2d | nn.InstanceNorm2d) and module.running_mean is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                module.num_batches_tracked.fill_(3)
        return part.train()


def _stir(name: str, parameter: Tensor) -> None:
    """Values of a useful size, away from the 0 and 1 of a fresh network, where mistakes would hide."""
    if parameter.ndim < 2:
        parameter.uniform_(0.5, 1.5) if name.endswith("weight") else parameter.normal_(0, 0.3)
    elif "original0" in name:
        parameter.uniform_(0.5, 1.5)
    else:
        parameter.normal_(0, 1.2 / (parameter.numel() / parameter.shape[0]) ** 0.5)


def make_case(recipe: Recipe) -> Case:
    """The model, loss, image and target of a recipe. Raises whatever PyTorch does if a node cannot run."""
    generator = torch.Generator().manual_seed(recipe.seed)
    image = torch.randn(recipe.image, dtype=torch.float64, generator=generator)
    network = Network(image, recipe.seed)
    for node in recipe.nodes:
        network.grow(node)
    output = network.values[recipe.outputs[0]].shape
    network.finish(recipe.outputs, named=recipe.loss_options.get("named", False))
    network.values = []
    network.train(recipe.training)
    for module in network.modules():
        if getattr(module, "stays_in_evaluation", False):
            module.eval()
    for i in recipe.frozen:
        network.parts[i - 1].requires_grad_(False)
    size = image.shape[-2:] if recipe.loss_options.get("target") == "image" else output[-2:]
    target = LOSSES[recipe.loss].target(generator, output[1], size)
    return Case(network, Loss(recipe.loss, recipe.loss_options, output[1]).double(), image, target, recipe.tile)


# ---------------------------------------------------------------------------------------------------------------------
# Losses: functions of one output and the target; `Loss` adds up the heads.


def _dice(p: Tensor, t: Tensor, axes: tuple[int, ...]) -> Tensor:
    return (1 - (2 * (p * t).sum(axes) + 1) / (p.sum(axes) + t.sum(axes) + 1)).mean()


def _tversky(o: Tensor, t: Tensor) -> Tensor:
    p = o.sigmoid()
    hit, false, missed = (p * t).sum(), (p * (1 - t)).sum(), ((1 - p) * t).sum()
    return (1 - (hit + 1) / (hit + 0.3 * false + 0.7 * missed + 1)) ** 0.75


def _focal(o: Tensor, t: Tensor) -> Tensor:
    bce = F.binary_cross_entropy_with_logits(o, t, reduction="none")
    p = torch.exp(-bce)
    return ((0.25 * t + 0.75 * (1 - t)) * (1 - p) ** 2 * bce).mean()


def _balanced(o: Tensor, t: Tensor) -> Tensor:
    share = t.mean((0, 2, 3), keepdim=True)
    return F.binary_cross_entropy_with_logits(o, t, pos_weight=(1 - share) / (share + 0.01))


def _correlation(o: Tensor, t: Tensor) -> Tensor:
    a, b = o - o.mean(), t - t.mean()
    return 1 - (a * b).sum() / ((a.square().sum() + 0.1).sqrt() * (b.square().sum() + 0.1).sqrt())


def _hardest(o: Tensor, t: Tensor) -> Tensor:
    losses = F.binary_cross_entropy_with_logits(o, t, reduction="none").flatten()
    return losses.topk(max(1, losses.numel() // 4)).values.mean()


def _lovasz(o: Tensor, t: Tensor) -> Tensor:
    """The Lovasz extension of the Jaccard index: the errors are sorted over all positions."""
    errors, order = (1 - o * (2 * t - 1)).flatten().sort(descending=True)
    truth = t.flatten()[order]
    meeting, union = truth.sum() - truth.cumsum(0), truth.sum() + (1 - truth).cumsum(0)
    steps = torch.cat([torch.zeros(1, dtype=o.dtype, device=o.device), 1 - meeting / union]).diff()
    return F.elu(errors).dot(steps)


def _smooth(o: Tensor, t: Tensor) -> Tensor:
    rough = (o[:, :, 1:] - o[:, :, :-1]).square().mean() + (o[:, :, :, 1:] - o[:, :, :, :-1]).square().sum() / 100
    return F.mse_loss(o, t) + 0.1 * rough


def _masked(o: Tensor, t: Tensor) -> Tensor:
    inside = (t > 0.3).to(o.dtype)
    return (F.smooth_l1_loss(o, t, reduction="none") * inside).sum() / (inside.sum() + 1)


def _frequencies(o: Tensor, t: Tensor) -> Tensor:
    """Class weights from how often each class occurs in this target."""
    counts = F.one_hot(t[:, 0].long(), o.shape[1]).sum((0, 1, 2)).to(o.dtype)
    return F.cross_entropy(o, t[:, 0].long(), weight=counts.sum() / (counts + 1))


def _dice_of_classes(o: Tensor, t: Tensor) -> Tensor:
    truth = F.one_hot(t[:, 0].long(), o.shape[1]).permute(0, 3, 1, 2).to(o.dtype)
    return _dice(o.softmax(1), truth, (0, 2, 3)) + F.nll_loss(o.log_softmax(1), t[:, 0].long())


def _dense(generator: torch.Generator, channels: int, size: Sequence[int]) -> Tensor:
    return torch.rand(channels, *size, dtype=torch.float64, generator=generator)


def _binary(generator: torch.Generator, channels: int, size: Sequence[int]) -> Tensor:
    return (_dense(generator, channels, size) < 0.3).double()


def _classes(generator: torch.Generator, channels: int, size: Sequence[int]) -> Tensor:
    return torch.randint(0, channels, (1, *size), generator=generator)


def _ignored(generator: torch.Generator, channels: int, size: Sequence[int]) -> Tensor:
    some = torch.rand(1, *size, generator=generator) < 0.2
    return _classes(generator, channels, size).masked_fill(some, 255).to(torch.uint8)


def _label(generator: torch.Generator, channels: int, size: Sequence[int]) -> Tensor:
    return torch.randint(0, channels, (1,), generator=generator)


class Criterion(NamedTuple):
    """A loss of one output: `None` where `Loss` itself holds what it needs."""

    function: Callable[[Tensor, Tensor], Tensor] | None
    target: Callable[[torch.Generator, int, Sequence[int]], Tensor]


LOSSES: dict[str, Criterion] = {
    "mse": Criterion(F.mse_loss, _dense),
    "bce": Criterion(F.binary_cross_entropy_with_logits, _dense),
    "mse sum": Criterion(lambda o, t: F.mse_loss(o, t, reduction="sum"), _dense),
    "cross entropy": Criterion(None, _ignored),
    "dice": Criterion(lambda o, t: _dice(o.sigmoid(), t, (0, 1, 2, 3)), _binary),
    "dice of classes": Criterion(_dice_of_classes, _classes),
    "bce + dice": Criterion(
        lambda o, t: F.binary_cross_entropy_with_logits(o, t) + _dice(o.sigmoid(), t, (2, 3)), _binary
    ),
    "tversky": Criterion(_tversky, _binary),
    "focal": Criterion(_focal, _binary),
    "balanced": Criterion(_balanced, _binary),
    "frequencies": Criterion(_frequencies, _classes),
    "label": Criterion(lambda o, t: F.cross_entropy(o.mean((2, 3)) if o.ndim == 4 else o, t), _label),
    "label of largest": Criterion(lambda o, t: F.cross_entropy(o.amax((2, 3)) + o.logsumexp((2, 3)), t), _label),
    "correlation": Criterion(_correlation, _dense),
    "log of mean": Criterion(lambda o, t: torch.log(1 + (o * t).square().mean()), _dense),
    "smooth": Criterion(_smooth, _dense),
    "masked": Criterion(_masked, _dense),
    "learned": Criterion(None, _dense),
    "hardest": Criterion(_hardest, _dense),
    "lovasz": Criterion(_lovasz, _binary),
}

_CLASS_LOSSES = ("cross entropy", "dice of classes", "frequencies", "label", "label of largest")


class Loss(nn.Module):
    """The named loss of each output, resized to the target, weighted and added up."""

    def __init__(self, name: str, options: Options, classes: int) -> None:
        super().__init__()
        self.name, self.options = name, options
        if name == "cross entropy":
            weight = torch.linspace(0.5, 1.5, classes) if options["weighted"] else None
            self.entropy = nn.CrossEntropyLoss(
                weight, ignore_index=255, label_smoothing=options["smoothing"], reduction=options["reduction"]
            )
        elif name == "learned":
            self.variance = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, outputs: Any, target: Tensor) -> Tensor:
        if isinstance(outputs, Tensor):
            return self._one(outputs, target)
        first, second = (outputs["out"], outputs["aux"]) if isinstance(outputs, dict) else outputs
        return self._one(first, target) + 0.4 * self._one(second, target)

    def _one(self, output: Tensor, target: Tensor) -> Tensor:
        if target.ndim == 4 and output.ndim == 4:
            output = _resized(output, target.shape[-2:], "bilinear", False)
        function = LOSSES[self.name].function
        if function is not None:
            return function(output, target)
        if self.name == "cross entropy":
            return self.entropy(output, target[:, 0].long())
        near, far = F.mse_loss(output, target), F.huber_loss(output, target, delta=0.5)
        return torch.exp(-self.variance[0]) * near + torch.exp(-self.variance[1]) * far + self.variance.sum()


# ---------------------------------------------------------------------------------------------------------------------
# Drawing.


def draw_recipe(draw: Draw) -> Recipe | None:
    """A network of one to twelve nodes and its loss; None (rarely) where its loss or a gradient is not finite."""
    seed = draw(0, 999)
    shape = (draw(1, 3), draw(20, 60), draw(20, 60))
    image = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    network = Network(image, seed)
    for _ in range(draw(1, 9)):
        _extend(draw, network)
    loose = set(range(1, len(network.values) - 1)) - {i for node in network.nodes for i in node.inputs}
    for i in sorted(loose)[-3:]:
        if _chance(draw, 60):
            _try(network, Node("merge", (len(network.nodes), i), _draw_merge(draw)))
    loss, options, channels = _draw_loss(draw)
    last = len(network.nodes)
    heads = [last]
    if _chance(draw, 20) and last > 1:
        heads.append(draw(1, last - 1))
        options["named"] = _chance(draw, 50)
    outputs = []
    for i in heads:
        head = Node("conv", (i,), {"out": channels, "kernel_size": 1})
        if loss == "label" and _chance(draw, 60):
            head = Node("classifier", (i,), OPERATORS["classifier"].draw(draw) | {"out": channels})
        if not _try(network, head, area=1 if "label" in loss else 4):
            return None
        outputs.append(len(network.nodes))
    recipe = Recipe(
        image=shape,
        nodes=tuple(network.nodes),
        outputs=tuple(outputs),
        loss=loss,
        loss_options=options,
        tile=_draw_tile(draw, shape, tuple(network.values[outputs[0]].shape[2:]) or (1, 1)),
        seed=seed,
        training=_chance(draw, 85),
        frozen=tuple(i for i in range(1, last + 1) if _chance(draw, 6)),
        steps=_pick(draw, [1, 1, 2]),
        layout="channels_last" if _chance(draw, 25) else "",
    )
    return recipe if _is_sound(recipe) else None


def _extend(draw: Draw, network: Network) -> None:
    op = _pick(draw, _ASKED_FOR)
    inputs = tuple(_draw_input(draw, len(network.values)) for _ in range(OPERATORS[op].arity))
    node = Node(op, inputs, OPERATORS[op].draw(draw))
    tied = [i for i, earlier in enumerate(network.nodes, 1) if earlier.op == op and len(earlier.inputs) == len(inputs)]
    if tied and _chance(draw, 30):
        earlier = network.nodes[tied[-1] - 1]
        _try(network, Node("again", inputs, {"node": tied[-1]})) or _try(network, Node(op, inputs, earlier.options))
    else:
        _try(network, node)


def _draw_input(draw: Draw, count: int) -> int:
    """The newest value more often than not, any other otherwise."""
    return count - 1 if _chance(draw, 65) else draw(0, count - 1)


def _try(network: Network, node: Node, area: int = 1) -> bool:
    """Grow the node if PyTorch runs it and its value is of a useful size and spread."""
    try:
        with warnings.catch_warnings():
            # The variance of a single position is not a number, and not kept.
            warnings.simplefilter("ignore")
            value = network.grow(node)
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return False
    n, c, h, w = value.shape if value.ndim == 4 else (*value.shape, 1, 1)
    useful = n == 1 and c <= MOST_CHANNELS and area <= h * w <= MOST_PIXELS and (h * w == 1 or min(h, w) > 1)
    spread = value.std(correction=0) if useful and value.numel() > 1 else torch.tensor(1.0)
    if not useful or not torch.isfinite(value).all() or value.abs().max() > 300 or spread < 1e-3:
        network.shrink()
        return False
    return True


def _draw_loss(draw: Draw) -> tuple[str, Options, int]:
    loss = _pick(draw, list(LOSSES))
    options: Options = {"target": _pick(draw, ["output", "output", "image"])}
    if loss == "cross entropy":
        options |= {
            "weighted": _chance(draw, 60),
            "smoothing": _pick(draw, [0.0, 0.0, 0.1]),
            "reduction": _pick(draw, ["mean", "mean", "sum"]),
        }
    return loss, options, draw(2, 4) if loss in _CLASS_LOSSES else draw(1, 3)


def _draw_tile(draw: Draw, image: tuple[int, int, int], output: tuple[int, int]) -> tuple[int, int]:
    tile = draw(5, 30), draw(5, 30)
    if _chance(draw, 15):
        tile = tile[0], 70
    largest = max(image[1], output[0]), max(image[2], output[1])
    while math.prod(-(-n // t) for n, t in zip(largest, tile, strict=True)) > MOST_TILES:
        tile = 2 * tile[0], 2 * tile[1]
    return tile


def _is_sound(recipe: Recipe) -> bool:
    """Whether plain PyTorch runs the step, and everything it gives is finite."""
    case = make_case(recipe)
    try:
        loss = step(case, recipe.steps)[-1]
    except (RuntimeError, ValueError):
        return False
    numbers = [loss, *_gradients(case).values(), *_buffers(case).values()]
    return len(numbers) > 1 and all(torch.isfinite(n).all() for n in numbers) and loss.abs() < 1e8


# ---------------------------------------------------------------------------------------------------------------------
# The comparison.


@dataclass(frozen=True)
class Outcome:
    """Relative errors of the loss, of the worst gradient and of the worst buffer (2-norms), and the tiles run."""

    loss_error: float
    gradient_error: float
    buffer_error: float
    worst_parameter: str
    worst_buffer: str
    tile_count: int

    @property
    def worst(self) -> float:
        return max(self.loss_error, self.gradient_error, self.buffer_error)


def step(case: Case, steps: int, backward: Callable[[], Tensor] | None = None) -> list[Tensor]:
    """The losses of the steps, by `backward` or by plain autograd.

    Gradients of all steps add up; between two steps every parameter moves by one hundredth, so that whatever was kept
    from the step before is out of date.
    """
    losses = []
    for i in range(steps):
        if i:
            with torch.no_grad():
                for parameter in [*case.model.parameters(), *case.loss.parameters()]:
                    parameter.mul_(1.01)
        if backward is not None:
            losses.append(backward())
            continue
        target = case.target[None] if case.target.ndim == 3 else case.target
        value = case.loss(case.model(case.image[None]), target)
        value.backward()
        losses.append(value.detach())
    return losses


def compare_step(recipe: Recipe, device: str = "cpu") -> Outcome:
    """The steps of a recipe by gigagrad and by plain autograd on the whole image."""
    plain, tiled = make_case(recipe), make_case(recipe)
    expected = step(plain, recipe.steps)
    engine = _engine(tiled, recipe.layout, device)
    losses = step(tiled, recipe.steps, lambda: engine.backward(tiled.image, tiled.target))
    wanted, got = _gradients(plain), _gradients(tiled)
    loss_error = max(_relative(b, a) for a, b in zip(expected, losses, strict=True))
    scale = torch.stack([g.norm() for g in wanted.values()]).norm().item()
    # A gradient that is zero but for rounding (a bias before a batch norm) has no relative error: the rounding of the
    # whole gradient and of the loss is then its scale.
    floor = max(1e-4 * scale, 1e-5 * abs(expected[-1].item()))
    gradient_error, parameter = _worst(got, wanted, floor)
    buffer_error, buffer = _worst(_buffers(tiled), _buffers(plain), 1e-4)
    tiles = engine.plan(tiled.image, tiled.target).tile_count
    return Outcome(loss_error, gradient_error, buffer_error, parameter, buffer, tiles)


def _engine(case: Case, layout: str, device: str) -> gg.Engine:
    engine = gg.compile(case.model, case.loss, tile=case.tile, device=device)
    if not layout:
        return engine
    engine.plan(case.image, case.target)
    state = engine.state_dict()
    for choice in state["choices"].values():
        choice["memory_format"] = layout
    engine = gg.compile(case.model, case.loss, tile=case.tile, device=device)
    engine.load_state_dict(state)
    assert engine.plan(case.image, case.target).memory_format == layout
    return engine


def ill_conditioned(recipe: Recipe, error: float) -> bool:
    """Whether an error may be rounding: plain autograd's own answers move as far when the image hardly does.

    A channel that is the same everywhere and then normalised does this, and so does a tie for a maximum.
    """
    return error <= 100 * conditioning(recipe)


def conditioning(recipe: Recipe) -> float:
    """How far plain autograd's own loss, gradients and buffers move when the image moves by one part in 10^14."""
    case, moved = make_case(recipe), make_case(recipe)
    noise = torch.randn(case.image.shape, dtype=case.image.dtype, generator=torch.Generator().manual_seed(1))
    moved.image.mul_(1 + 1e-14 * noise)
    losses, others = step(case, recipe.steps), step(moved, recipe.steps)
    wanted = _gradients(case)
    scale = torch.stack([g.norm() for g in wanted.values()]).norm().item()
    floor = max(1e-4 * scale, 1e-5 * abs(losses[-1].item()))
    return max(
        _relative(others[-1], losses[-1]),
        _worst(_gradients(moved), wanted, floor)[0],
        _worst(_buffers(moved), _buffers(case), 1e-4)[0],
    )


def compare_forward(recipe: Recipe, device: str = "cpu") -> float:
    """The relative error of the first output, predicted tile by tile in evaluation mode."""
    case = make_case(recipe)
    first = First(case.model).eval()
    with torch.no_grad():
        expected = first(case.image[None])
    got = gg.compile(first, tile=case.tile, device=device).forward(case.image)
    assert isinstance(got, Tensor)
    return _relative(got, expected)


class First(nn.Module):
    """The first output of a model alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        output = self.model(image)
        if isinstance(output, Tensor):
            return output
        return output["out"] if isinstance(output, dict) else output[0]


def _gradients(case: Case) -> dict[str, Tensor]:
    named = [*_named("model", case.model.named_parameters()), *_named("loss", case.loss.named_parameters())]
    return {name: p.grad for name, p in named if p.grad is not None}


def _buffers(case: Case) -> dict[str, Tensor]:
    return dict([*_named("model", case.model.named_buffers()), *_named("loss", case.loss.named_buffers())])


def _named(prefix: str, items: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    return [(f"{prefix}.{name}", item) for name, item in items]


def _relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|; infinite where it is not a number or the shapes differ."""
    if a.shape != b.shape:
        return math.inf
    error = (a - b).double().norm().item() / max(b.double().norm().item(), 1e-300)
    return error if math.isfinite(error) else math.inf


def _worst(got: dict[str, Tensor], wanted: dict[str, Tensor], floor: float) -> tuple[float, str]:
    """The largest relative error and its name. What only one side has must be zero."""
    worst, name_of_worst = 0.0, ""
    for name in sorted(got.keys() | wanted.keys()):
        reference = wanted.get(name, torch.zeros(()))
        value = got.get(name, torch.zeros(()))
        if name in got and name in wanted and value.shape != reference.shape:
            return math.inf, name
        size = max(reference.double().norm().item(), floor, 1e-300)
        error = (value - reference).double().norm().item() / size
        if not error < worst and error:
            worst, name_of_worst = (error if math.isfinite(error) else math.inf), name
    return worst, name_of_worst
