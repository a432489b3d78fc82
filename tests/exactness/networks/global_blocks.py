"""Blocks in which every position depends on the whole field: pooled, scanned, warped, normalised."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .functions import as_tokens, resized
from .recipe import Shapes


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
        return torch.cat([x, resized(y, x.shape[-2:], self.mode)], 1)


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


class Mixer(nn.Module):
    """The positions of a small grid mixed by a matrix, added back to the field."""

    def __init__(self, shapes: Shapes, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid
        self.mix = nn.Linear(grid[0] * grid[1], grid[0] * grid[1])

    def forward(self, x: Tensor) -> Tensor:
        y = F.adaptive_avg_pool2d(x, self.grid)
        return x + resized(self.mix(y.flatten(2)).reshape(y.shape), x.shape[-2:], "bilinear", False)


class Scan(nn.Module):
    """A one-dimensional convolution along the flattened positions."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.conv = nn.Conv1d(shapes[0][0], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.flatten(2)).reshape(1, 3, *x.shape[-2:])


class Position(nn.Module):
    """A learned map, kept on a small grid and interpolated to the field, is added."""

    def __init__(self, shapes: Shapes, grid: tuple[int, int], mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.map = nn.Parameter(torch.empty(1, shapes[0][0], *grid))

    def forward(self, x: Tensor) -> Tensor:
        return x + resized(self.map, x.shape[-2:], self.mode)


class RunningScale(nn.Module):
    """The field over its own running mean square, a buffer that follows it in training."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.register_buffer("square", torch.ones(shapes[0][0]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.square.mul_(0.9).add_(0.1 * x.square().mean((0, 2, 3)))  # type: ignore[operator]
        return x * torch.rsqrt(self.square + 0.1)[:, None, None]  # type: ignore[arg-type, operator]


class Warp(nn.Module):
    """The field sampled on a learned affine grid."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.empty(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        theta = 0.1 * self.theta.tanh() + torch.eye(2, 3, dtype=x.dtype, device=x.device)
        grid = F.affine_grid(theta[None], list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


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
        tokens = self.inside(as_tokens(x))[0]
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
