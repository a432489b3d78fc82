"""Functions of one field, without parameters: position by position, among neighbours, over the whole field."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .recipe import Shapes


def resized(x: Tensor, size: Sequence[int], mode: str, align: bool | None = None) -> Tensor:
    if tuple(x.shape[-2:]) == tuple(size):
        return x
    return F.interpolate(x, size=tuple(size), mode=mode, align_corners=align)


def as_tokens(x: Tensor) -> Tensor:
    """`(1, C, H, W)` as `(1, H W, C)`."""
    return x.flatten(2).transpose(1, 2)


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
    "mosaic": lambda x: resized(F.avg_pool2d(x, 3, ceil_mode=True), x.shape[-2:], "nearest"),
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
