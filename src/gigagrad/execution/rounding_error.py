"""Predict how much quantised storage moves the gradients of convolutions, while the gradients are computed.

A stored error reaches a convolution directly, or through operators that pass it on value by value: a norm multiplies
it, ReLU passes it or stops it. `error_gains` follows it there; a `Watch` sees the cotangents of the convolution's
output in one tile, `RoundingErrors` adds up the norms of a run, `average_in` averages over runs (docs/math.md).
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

import torch

from gigagrad.graphs import Call, Gains, Graph, Node, lookup
from gigagrad.plans import Segment
from gigagrad.stores.rounding import gradient_error, noisy_shares, noisy_squares

NEWEST = 0.1
"""The weight of the newest run in averages."""


def error_gains(
    graph: Graph, segment: Segment, quantised: Container[int], values: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return by convolution of the segment the factor `(C,)` on the stored errors in each channel that it reads.

    Errors of different fields are independent, and their squares add up. Where values of one field come together, or an
    operator repeats them, the factor is that of the worst case. Convolutions that read nothing quantised are left out,
    and those behind operators that errors pass in other ways. `values` are the global values that the segment reads.
    """
    if not any(i in quantised for i in (*segment.reads, *segment.fields)):
        return {}
    gains: dict[int, Gains | None] = {}
    for i in (*segment.reads, *segment.fields):
        node = graph[i]
        if len(node.shape) != 4 or node.axes != (-2, -1):
            gains[i] = None
        elif i in quantised:
            gains[i] = {i: torch.ones(node.shape[1], dtype=torch.float64)}
        elif i in segment.reads:
            gains[i] = {}
        else:
            gains[i] = _passed_on(graph, node, gains, values)
    found = {}
    for i in segment.fields:
        read = gains[graph[i].operands[0]] if lookup(graph[i].op).errors_reach_weight else None
        if read:
            found[i] = torch.stack(list(read.values())).square().sum(0).sqrt()
    return found


def _passed_on(
    graph: Graph, node: Node, gains: Mapping[int, Gains | None], values: Mapping[int, torch.Tensor]
) -> Gains | None:
    """Return the gain of the output, from those of the operands. None: not known."""
    call = Call(node, graph.operands(node))
    known = [gain for field in call.fields if (gain := gains[field.id]) is not None]
    if len(known) < len(call.fields):
        return None
    if not any(known):
        return {}
    return lookup(node.op).error_gains(call, known, lambda ref: values[ref.id].detach().double().cpu())


class Watch:
    """One tile's backward pass: the norms of the convolutions that read rounded fields, once cotangents have come."""

    def __init__(self, graph: Graph, gains: Mapping[int, torch.Tensor]) -> None:
        self._graph = graph
        self._gains = gains
        self.norms: dict[int, torch.Tensor] = {}
        """The `noisy_squares` by convolution."""

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._gains

    def attach(self, convolution: int, read: torch.Tensor, output: torch.Tensor) -> None:
        """Watch a convolution. `read` is the crop that it was given; it is not kept."""
        if not output.requires_grad:
            return
        shares = noisy_shares(read.detach(), self._gains[convolution])
        groups = self._graph[convolution].arguments["groups"]

        def seen(cotangent: torch.Tensor) -> None:
            self.norms[convolution] = noisy_squares(shares, cotangent, groups)

        output.register_hook(seen)  # type: ignore[no-untyped-call]


class RoundingErrors:
    """One run: the norms of its convolutions, summed over tiles."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._norms: dict[int, torch.Tensor] = {}

    def add(self, norms: Mapping[int, torch.Tensor]) -> None:
        """Add the norms of one tile, by convolution."""
        for convolution, found in norms.items():
            known = self._norms.get(convolution)
            self._norms[convolution] = found if known is None else known + found

    def scale(self, convolutions: Container[int], factor: float | torch.Tensor) -> None:
        """Correct them: the cotangents turned out to be `factor` times as large."""
        if not self._norms:  # then a device need not be waited for
            return
        factor = float(factor)
        self._norms = {i: factor * factor * each if i in convolutions else each for i, each in self._norms.items()}

    def by_weight(self, error_bound: float) -> dict[str, float]:
        """Return by the name of a weight the square of the expected 2-norm of its gradient's error.

        Left out are weights that are computed from parameters.
        """
        squares: dict[str, float] = {}
        for convolution, norms in self._norms.items():
            weight = self._graph[self._graph[convolution].operands[1]]
            while lookup(weight.op).copies:
                weight = self._graph[weight.operands[0]]
            if weight.op == "parameter":
                name = weight.arguments["name"]
                taps = math.prod(weight.shape[1:])
                errors = (gradient_error(error_bound, 1.0, norm, taps) for norm in norms.sqrt().tolist())
                squares[name] = squares.get(name, 0.0) + sum(error * error for error in errors)
        return squares


def average_in(known: dict[str, float], squares: Mapping[str, float], gradients: Mapping[str, torch.Tensor]) -> float:
    """Take one more run, `RoundingErrors.by_weight`, into averages over runs: exponential ones, as the norms drift
    slowly, and those of one image are not those of the next. Return what it is expected to have added, in all weights
    at once, relative to their gradients.
    """
    for name, square in squares.items():
        before = known.get(name, square)
        known[name] = before + NEWEST * (square - before)
    found = [name for name in squares if name in gradients]
    size = math.hypot(*(gradients[name].norm().item() for name in found))
    return math.hypot(*(math.sqrt(known[name]) for name in found)) / size if size else 0.0
