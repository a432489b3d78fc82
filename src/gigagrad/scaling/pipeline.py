"""A chain of layers as a pipeline: which layers make a stage, and how many ranks run copies of it.

PipeDream's dynamic program (Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP
2019, section 3.1), of one level: with A(j, m) the seconds that a micro-batch costs the first j layers on m ranks,

    A(j, m) = min over i < j, k <= m of max(A(i, m - k), 2 cut_i / bandwidth, T(i..j, k)).

Activations cross a cut forward and their gradients back, hence the 2. The program balances a pipeline that stays full;
what filling and emptying it costs is the schedules' business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from gigagrad.errors import ConfigError
from gigagrad.scaling.link import Link


@dataclass(frozen=True, slots=True)
class Layer:
    """What one micro-batch costs in a layer of the chain."""

    seconds: float
    """Forward and backward."""
    cut_bytes: int
    """Everything that later layers read of it and of those before it: what would cross a cut behind it."""
    parameter_bytes: int


Replicated = Callable[[Sequence[Layer], int, Link], float]
"""Seconds that a micro-batch costs a stage of these layers, of which so many ranks run copies: PipeDream's T."""


def replicated(layers: Sequence[Layer], ranks: int, link: Link) -> float:
    """Copies take turns, and after a micro-batch each sum their gradients around a ring while they go on computing.

    Of all layers this is data parallelism. A step that sums its gradients once only, at its end, sends less.
    """
    compute = sum(layer.seconds for layer in layers)
    return max(compute, link.ring_seconds(sum(layer.parameter_bytes for layer in layers), ranks)) / ranks


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Layers `first` to `stop` (without it), of which `ranks` ranks run a copy each."""

    first: int
    stop: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Split:
    """A chain as a pipeline. Printed as PipeDream writes it: `15-1` is a stage on 15 ranks and one on a single one."""

    stages: tuple[PipelineStage, ...]
    seconds: float
    """Of a micro-batch: the slowest stage's or cut's."""

    def __str__(self) -> str:
        return "-".join(str(stage.ranks) for stage in self.stages)


def split(layers: Sequence[Layer], ranks: int, link: Link, stage_seconds: Replicated = replicated) -> Split:
    """The pipeline whose slowest stage is fastest, on at most so many ranks; of equals the smallest.

    The smallest has fewest stages, then fewest ranks: what is idle is left out. Takes time in layers^2 x ranks^2.
    Raises `ConfigError` where there is no layer or no rank.
    """
    if not layers or ranks < 1:
        raise ConfigError(f"a pipeline needs a layer and a rank at least, got {len(layers)} and {ranks}")
    cut = [0.0, *(2 * link.seconds(layer.cut_bytes) for layer in layers)]
    cost = {
        PipelineStage(first, stop, count): max(cut[first], stage_seconds(layers[first:stop], count, link))
        for stop in range(1, len(layers) + 1)
        for first in range(stop)
        for count in range(1, ranks + 1)
    }

    def slower(before: _Value, stage: PipelineStage) -> _Value:
        return max(before[0], cost[stage]), 0

    def larger(before: _Value, stage: PipelineStage) -> _Value:
        return before[0] + 1 if cost[stage] <= slowest else inf, before[1] + stage.ranks

    (slowest, _), _ = _least(len(layers), ranks, slower)
    return Split(_least(len(layers), ranks, larger)[1], slowest)


_Value = tuple[float, int]


def _least(
    layers: int, ranks: int, join: Callable[[_Value, PipelineStage], _Value]
) -> tuple[_Value, tuple[PipelineStage, ...]]:
    """The least value of any split, which `join` makes stage by stage from (0, 0) on, and its stages."""
    best: dict[tuple[int, int], tuple[_Value, tuple[PipelineStage, ...]]]
    best = {(0, free): ((0.0, 0), ()) for free in range(ranks + 1)}
    for stop in range(1, layers + 1):
        for free in range(1, ranks + 1):
            found = [
                (join(best[first, free - count][0], stage), (*best[first, free - count][1], stage))
                for first in range(stop)
                for count in range(1, free + 1)
                if (first, free - count) in best
                for stage in [PipelineStage(first, stop, count)]
            ]
            best[stop, free] = min(found, key=lambda option: option[0])
    return best[layers, ranks]
