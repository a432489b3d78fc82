"""Several images a step on many ranks: groups that share images tile by tile, or a pipeline. Which is fastest?

Groups take images in turns, and a group's ranks share each of its own: with one group that is tile parallelism, with
groups of one rank data parallelism. Each group adds up its share of the gradients and gives it to the others.

A chain of layers is split into a pipeline by PipeDream's dynamic program (Narayanan et al., "PipeDream: Generalized
Pipeline Parallelism for DNN Training", SOSP 2019, section 3.1), of one level: with A(j, m) the seconds that a
micro-batch costs the first j layers on m ranks,

    A(j, m) = min over i < j, k <= m of max(A(i, m - k), 2 cut_i / bandwidth, T(i..j, k)).

Activations cross a cut forward and their gradients back, hence the 2. The program balances a pipeline that stays full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf

import numpy as np

from gigagrad.errors import ConfigError
from gigagrad.plans import Plan, Problem
from gigagrad.scaling.tiles import PARTS, SUMS, Link, TileStep, most_ranks, tile_step


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


TILE, DATA, GROUPS, PIPELINE = "tile", "data", "data x tile", "pipeline"
SLIDES = "slides that do not divide evenly"
_MOST_IN_A_PIPELINE = 64
"""More ranks than this would take the program minutes."""


@dataclass(frozen=True, slots=True)
class Shared:
    """A step on so many ranks, in groups each of which shares its images."""

    ranks: int
    groups: int
    tile: TileStep
    """A step of one image in one group."""
    images: int
    """Images of the group that has most."""
    alone_seconds: float
    """Seconds that one rank takes for all images."""
    sums_seconds: float
    """Seconds of summing the gradients of all groups."""
    sent_bytes: int
    """Bytes of the rank that sends most."""

    @property
    def busy(self) -> int:
        """Count the ranks that have something to do."""
        return self.groups * self.tile.ranks

    @property
    def seconds(self) -> float:
        return self.images * self.tile.seconds + self.sums_seconds

    @property
    def times_faster(self) -> float:
        """Return how many times faster this is than one rank."""
        return self.alone_seconds / self.seconds

    @property
    def efficiency(self) -> float:
        return self.times_faster / self.ranks

    @property
    def lost(self) -> dict[str, float]:
        """Return the seconds beyond an equal share of what one rank takes, by cause."""
        tile = self.tile
        more = {
            SLIDES: self.images * tile.alone_seconds / tile.ranks - self.alone_seconds / self.busy,
            PARTS: self.alone_seconds * (1 / self.busy - 1 / self.ranks),
            SUMS: self.sums_seconds,
        }
        lost = {cause: self.images * seconds for cause, seconds in tile.lost.items()}
        return {cause: lost.get(cause, 0.0) + more.get(cause, 0.0) for cause in (*lost, SLIDES)}


class Scaling:
    """Estimates of a plan's step when so many `images` a step are shared by ranks with a `link` each."""

    def __init__(self, problem: Problem, plan: Plan, link: Link, images: int = 1) -> None:
        if images < 1:
            raise ConfigError(f"a step needs an image at least, got {images}")
        self._problem, self._plan, self.link, self.images = problem, plan, link, images
        self._tile = lru_cache(maxsize=None)(lambda ranks: tile_step(problem, plan, ranks, link))

    def shared(self, ranks: int) -> Shared:
        """Find the fastest way to share them in groups; of equals with fewest groups."""
        most = min(ranks, self.images)
        counts = sorted({*(1 << power for power in range(most.bit_length())), most})
        return min((self.grouped(ranks, groups) for groups in counts), key=lambda way: way.seconds)

    def grouped(self, ranks: int, groups: int) -> Shared:
        """Share them in so many groups."""
        tile, images = self._tile(min(ranks // groups, most_ranks(self._plan))), -(-self.images // groups)
        summed = 2 * self._gradient_bytes * (groups - 1) // groups
        return Shared(
            ranks,
            groups,
            tile,
            images,
            self.images * tile.alone_seconds,
            self.link.sum_seconds(self._gradient_bytes, groups),
            images * tile.sent_bytes + summed,
        )

    def ways(self, ranks: int) -> dict[str, float]:
        """Return the seconds of a step if all ranks share every image, each has images of its own, groups do, or in
        a pipeline.
        """
        busy = min(ranks, self.images)
        return {
            TILE: self.grouped(ranks, 1).seconds,
            DATA: self.grouped(busy, busy).seconds,
            GROUPS: self.shared(ranks).seconds,
            PIPELINE: self.pipeline_seconds(ranks),
        }

    def pipeline_seconds(self, ranks: int) -> float:
        """Estimate the pipeline that PipeDream's program makes of the plan's stages, emptied every step: an image
        through all of them, and what the slowest takes for every other one. Copies of a stage sum their gradients once,
        at the end.
        """
        layers, images = self.layers, self.images

        def stage_seconds(some: Sequence[Layer], copies: int) -> float:
            return sum(layer.seconds for layer in some) / min(copies, images)

        def sums(some: Sequence[Layer], copies: int) -> float:
            return self.link.sum_seconds(sum(layer.parameter_bytes for layer in some), copies)

        if not layers:
            return self.grouped(1, 1).seconds
        most = min(ranks, _MOST_IN_A_PIPELINE)
        found = split(
            layers, most, self.link, lambda some, copies, _: stage_seconds(some, copies) + sums(some, copies) / images
        )
        stages = [(layers[stage.first : stage.stop], stage.ranks) for stage in found.stages]
        cuts = [2 * self.link.seconds(some[-1].cut_bytes) for some, _ in stages[:-1]]
        slowest = max([*cuts, *(stage_seconds(*stage) for stage in stages)])
        filled = sum(layer.seconds for layer in layers) + sum(cuts)
        return filled + (images - 1) * slowest + max(sums(*stage) for stage in stages)

    @cached_property
    def layers(self) -> list[Layer]:
        """Return the stages of the plan as a chain of layers."""
        graph, plan = self._problem.graph, self._plan
        stages = [stage.computes for stage in plan.stages]
        seconds = [0.0] * len(stages)
        for step, share in zip(plan.passes, plan.pass_shares, strict=True):
            seconds[step.stage] += share * plan.predicted_seconds
        made = {field: stage.index for stage in stages for field in stage.kept}
        last = {field: stage.index for stage in stages for field in stage.reads}
        return [
            Layer(
                seconds[stage.index],
                sum(graph[i].nbytes for i, first in made.items() if first <= stage.index < last.get(i, first)),
                sum(graph[i].nbytes for i in stage.globals if i in self._parameters),
            )
            for stage in stages
        ]

    @cached_property
    def _parameters(self) -> set[int]:
        """Return the parameters that get gradients."""
        return {node.id for node in self._problem.graph.nodes if node.op == "parameter" and node.differentiable}

    @property
    def _gradient_bytes(self) -> int:
        return sum(self._problem.graph[i].nbytes for i in self._parameters)
