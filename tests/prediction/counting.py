"""An encoder that counts the patches it is given."""

from __future__ import annotations

import torch
from torch import nn


class Counting(nn.Module):
    """The mean of each channel through a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(3, 5), 1.0
        self.seen: list[int] = []

    @property
    def patches(self) -> int:
        return sum(self.seen)

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        if type(x_NCHW) is torch.Tensor and x_NCHW.device.type == "cpu":  # not while it is tried out
            self.seen.append(len(x_NCHW))
        features: torch.Tensor = self.layer(x_NCHW.float().mean((2, 3))) * self.factor
        return features


class Twice(Counting):
    """Twice as much."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0
