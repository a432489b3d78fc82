"""Several images a step on many ranks: groups that share images tile by tile, or a pipeline. Which is fastest?

Groups take images in turns, and a group's ranks share each of its own: with one group that is tile parallelism, with
groups of one rank data parallelism. Each group adds up its share of the gradients and gives it to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from gigagrad.errors import ConfigError
from gigagrad.plans import Plan, Problem
from gigagrad.scaling.link import Link
from gigagrad.scaling.pipeline import Layer, split
from gigagrad.scaling.tiles import PARTS, SUMS, TileStep, most_ranks, tile_step

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
        self._tile = lru_cache(maxsize=None)(self._find_tile)

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

    def _find_tile(self, ranks: int) -> TileStep:
        return tile_step(self._problem, self._plan, ranks, self.link)

    @cached_property
    def _parameters(self) -> set[int]:
        """Return the parameters that get gradients."""
        return {node.id for node in self._problem.graph.nodes if node.op == "parameter" and node.differentiable}

    @property
    def _gradient_bytes(self) -> int:
        return sum(self._problem.graph[i].nbytes for i in self._parameters)
