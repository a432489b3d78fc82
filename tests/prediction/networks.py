"""Networks that need no training: what they say can be seen in the pixels."""

from __future__ import annotations

import torch
from torch import nn


class Darkness(nn.Module):
    """A logit of every pixel, above 0 where it is darker than the middle."""

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        return (128 - x_NCHW.float()).mean(1, keepdim=True)


class Brightness(nn.Module):
    """One logit of the whole slide."""

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        return x_NCHW.float().mean((2, 3)).mean(1, keepdim=True) / 100 - 1
