"""A moving average of a model's weights, which is what is validated and kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Averaged:
    """`decay * average + (1 - decay) * weights` after every step (Polyak and Juditsky, 1992), begun at the weights.

    In the first steps the decay is `(1 + step) / (10 + step)` where that is less, so that the start is soon forgotten.
    Buffers are the model's own.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self, step: int) -> None:
        """After step `step`, counted from 1."""
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                self.weights[name].lerp_(parameter, share)

    def load(self, weights: dict[str, Tensor]) -> None:
        """Raises `KeyError` or `RuntimeError` for those of another model."""
        with torch.no_grad():
            for name, average in self.weights.items():
                average.copy_(weights[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with the averaged weights; its own come back at the end."""
        own = {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}
        self._set(self.weights)
        try:
            yield
        finally:
            self._set(own)

    def _set(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights[name])
