"""A chain of layers as a pipeline: which layers make a stage, and how many ranks run copies of it.

PipeDream's dynamic program (Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP
2019, section 3.1), of one level: with A(j, m) the seconds that a micro-batch costs the first j layers on m ranks,

    A(j, m) = min over i < j, k <= m of max(A(i, m - k), 2 cut_i / bandwidth, T(i..j, k)).

Activations cross a cut forward and their gradients back, hence the 2. The program balances a pipeline that stays full;
what filling and emptying it costs is the business of schedules (`bench/schedules.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from gigagrad.errors import ConfigError
from gigagrad.scaling.link import Link


@dataclass(frozen=True, slots=True)
class Layer:
    """The cost of one micro-batch in a layer of the chain."""

    seconds: float
    """Forward and backward."""
    cut_bytes: int
    """Everything that later layers read of it and of those before it: what would cross a cut behind it."""
    parameter_bytes: int


Replicated = Callable[[Sequence[Layer], int, Link], float]
"""Seconds that a micro-batch costs a stage of these layers, of which so many ranks run copies: PipeDream's T."""


def replicated(layers: Sequence[Layer], ranks: int, link: Link) -> float:
    """Return the seconds of a stage whose copies take turns, and after a micro-batch each sum their gradients around a
    ring while they go on computing.

    Of all layers this is data parallelism. A step that sums its gradients once only, at its end, sends less.
    """
    compute = sum(layer.seconds for layer in layers)
    return max(compute, link.sum_seconds(sum(layer.parameter_bytes for layer in layers), ranks)) / ranks


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
    """The slowest stage's or cut's, for a micro-batch."""

    def __str__(self) -> str:
        return "-".join(str(stage.ranks) for stage in self.stages)


def split(layers: Sequence[Layer], ranks: int, link: Link, stage_seconds: Replicated = replicated) -> Split:
    """Find the pipeline whose slowest stage is fastest, on at most so many ranks; of equals the smallest.

    The smallest has fewest stages, then fewest ranks: what is idle is left out. Raises `ConfigError` where there is no
    layer or no rank.
    """
    if not layers or ranks < 1:
        raise ConfigError(f"a pipeline needs a layer and a rank at least, got {len(layers)} and {ranks}")
    cut = [0.0, *(2 * link.seconds(layer.cut_bytes) for layer in layers)]
    cost = {
        (first, stop): np.array(
            [max(cut[first], stage_seconds(layers[first:stop], count, link)) for count in range(1, ranks + 1)]
        )
        for stop in range(1, len(layers) + 1)
        for first in range(stop)
    }
    slowest = _slowest(cost, len(layers), ranks)
    return Split(_smallest(cost, len(layers), ranks, slowest), slowest)


_Costs = dict[tuple[int, int], np.ndarray[tuple[int], np.dtype[np.float64]]]
"""Seconds of layers `first` to `stop` as a stage, and of the cut before it, on 1, 2, 3, ... ranks; sorted by `stop`."""


def _slowest(cost: _Costs, layers: int, ranks: int) -> float:
    """Compute A(layers, ranks)."""
    best = np.full((layers + 1, ranks + 1), inf)
    best[0] = 0.0
    for (first, stop), stage in cost.items():
        for free in range(1, ranks + 1):
            joined = np.maximum(best[first, :free][::-1], stage[:free])
            best[stop, free] = min(best[stop, free], joined.min())
    return float(best[layers, ranks])


def _smallest(cost: _Costs, layers: int, ranks: int, slowest: float) -> tuple[PipelineStage, ...]:
    """Find the stages of a split of which none takes longer: by the number of stages, the fewest ranks up to each
    layer.
    """
    needs = {piece: int(np.argmax(times <= slowest)) + 1 for piece, times in cost.items() if times.min() <= slowest}
    reached: dict[int, tuple[int, tuple[PipelineStage, ...]]] = {0: (0, ())}
    for _ in range(layers):
        before, reached = reached, {}
        for (first, stop), own in needs.items():
            if first in before:
                used, stages = before[first]
                if used + own < reached.get(stop, (inf,))[0]:
                    reached[stop] = used + own, (*stages, PipelineStage(first, stop, own))
        if reached.get(layers, (inf,))[0] <= ranks:
            return reached[layers][1]
    raise AssertionError("no split is as fast as the fastest")
