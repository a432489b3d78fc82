"""Scale cotangents where values are in float16, whose smallest number is 6e-8.

The cotangent of one pixel of a mean over a gigapixel is 1e-9: in float16, 0, and with it every gradient. The pullback
is linear, and floating-point numbers times a power of two keep their digits. So fields' cotangents are multiplied
with a scale of 2^k, and what a pass delivers is divided by it (docs/math.md). Micikevicius et al., Mixed precision
training, ICLR 2018, scale the loss likewise, by one number for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from gigagrad.graphs import Graph

_LARGEST = 2.0**-4
"""Size of the first cotangents that reach fields. They grow by what weights and joined paths multiply them with..."""
_LARGEST_SUM = 2.0**14
"""...and in a tile's sums, if all its pixels have the same sign, by their number. The largest float16 is 2^16."""
_SMALLER = 2.0**-10
"""Factor by which an overflow changes that."""
MOST_OVERFLOWS = 2
"""After so many, what is not finite is taken for what the network's gradient is."""


class CotangentOverflow(Exception):
    """A gradient left the range of float16 although the loss is finite. The run begins anew with another scale."""


class GradientScale:
    """The gradient scale of one run. 1, unless a value that gradients pass is in float16: elsewhere not one bit
    changes.
    """

    def __init__(self, graph: Graph, smaller: int) -> None:
        """Set a scale; `smaller`: how often an overflow has asked for a smaller one, at most `MOST_OVERFLOWS`."""
        self.is_needed = any(node.dtype == torch.float16 and node.differentiable for node in graph.nodes)
        self.times = 1.0
        """Factor of fields' cotangents: a power of two."""
        self._smaller = smaller
        self._is_settled = not self.is_needed

    def settle(self, cotangents: Iterable[torch.Tensor], times: float = 1, pixels: int = 1) -> None:
        """Choose the scale by the first cotangents that enter a field, `times` as large as the true ones, and by the
        pixels over which a tile sums them.
        """
        largest = 0.0 if self._is_settled else _largest(cotangents) / times
        if largest:
            self._is_settled = True
            self.times = _power_of_two(min(_LARGEST, _LARGEST_SUM / pixels) / largest) * _SMALLER**self._smaller

    def within(self, cotangents: Iterable[torch.Tensor]) -> float:
        """Return the factor that brings these, whatever their own scale, to a size at which float16 arithmetic loses
        least.
        """
        largest = _largest(cotangents) if self.is_needed else 0.0
        return _power_of_two(1 / largest) if largest else 1.0

    def out_of(self, cotangent: torch.Tensor) -> torch.Tensor:
        """Return a field's cotangent as a true one, in float64 unless nothing changes."""
        return cotangent if self.times == 1 else cotangent.double() / self.times

    def check(self, gradients: Iterable[torch.Tensor]) -> None:
        """Raises CotangentOverflow if one is not finite and another scale may help."""
        if (
            self.is_needed
            and self._smaller < MOST_OVERFLOWS
            and not all(gradient.isfinite().all() for gradient in gradients)
        ):
            raise CotangentOverflow


def multiplied(values: torch.Tensor, times: float) -> torch.Tensor:
    """Multiply by a power of two; by 1, return the values themselves, not a copy."""
    return values if times == 1 else values * times


def _largest(values: Iterable[torch.Tensor]) -> float:
    """Return the largest finite magnitude, 0 if there is none."""
    found = (value.detach().abs().double().nan_to_num(0.0, 0.0, 0.0).amax().item() for value in values if value.numel())
    return max(found, default=0.0)


def _power_of_two(value: float) -> float:
    """Return the next power of two at or below it."""
    return math.ldexp(0.5, math.frexp(value)[1])
