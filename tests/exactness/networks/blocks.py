"""Blocks in which a position reads no further than its neighbours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .functions import resized
from .recipe import Shapes


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
            return a, resized(b, size, self.mode)
        if self.fit == "crop":
            h, w = min(a.shape[2], b.shape[2]), min(a.shape[3], b.shape[3])
            (ay, ax), (by, bx) = (((v.shape[2] - h) // 2, (v.shape[3] - w) // 2) for v in (a, b))
            return a[:, :, ay : ay + h, ax : ax + w], b[:, :, by : by + h, bx : bx + w]
        dy, dx = a.shape[2] - b.shape[2], a.shape[3] - b.shape[3]
        return a, F.pad(b, (dx // 2, dx - dx // 2, dy // 2, dy - dy // 2))


class SpatialGate(nn.Module):
    """The field is scaled by a convolution of its channels' mean and maximum."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        return x * self.conv(both).sigmoid()


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


class Coordinates(nn.Module):
    """Two channels more: where each position lies, between -1 and 1."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        y, xs = (torch.linspace(-1, 1, n, dtype=x.dtype, device=x.device) for n in x.shape[-2:])
        grid = torch.stack(torch.meshgrid(y, xs, indexing="ij"))
        return torch.cat([x, grid[None]], 1)


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
