"""Gains of several ranks, by arithmetic alone: links, one image by tiles, several by groups or in a pipeline. Nothing
here runs anything.

Each rank computes its share of every pass over an image, and all of what whole-field operators do. After a pass ranks
meet: everybody hears a word of everybody's, around a ring as gloo gathers (n - 1 messages of nothing); then messages
travel, those of a rank one after the other, and a rank goes on when those for it have come and its own are there. What
it sends it has packed before, and what it gets it opens.

Groups take several images in turns, and a group's ranks share each of its own: with one group that is tile parallelism,
with groups of one rank data parallelism. Each group adds up its share of the gradients and gives it to the others.

A chain of layers is split into a pipeline by PipeDream's dynamic program (Narayanan et al., "PipeDream: Generalized
Pipeline Parallelism for DNN Training", SOSP 2019, section 3.1), of one level: with A(j, m) the seconds that a
micro-batch costs the first j layers on m ranks,

    A(j, m) = min over i < j, k <= m of max(A(i, m - k), 2 cut_i / bandwidth, T(i..j, k)).

Activations cross a cut forward and their gradients back, hence the 2. The program balances a pipeline that stays full.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from gigagrad.errors import ConfigError
from gigagrad.plans import MEMORY, Chunks, Plan, Problem, Tiles
from gigagrad.plans.emit import shared_by
from gigagrad.plans.geometry import Grid
from gigagrad.plans.plan import total
from gigagrad.plans.program import Bytes, Exchange, Gather, live, message_memory, messages
from gigagrad.units import parse_bytes, parse_seconds


@dataclass(frozen=True, slots=True)
class Link:
    """A rank's connection to the others: a message of n bytes takes latency + n / bandwidth, and every rank sends and
    receives at once (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
    2005, section 3). Additions cost nothing.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0

    def __str__(self) -> str:
        return f"{8e-9 * self.bytes_per_second:.3g} Gbit/s, {1e6 * self.latency_seconds:.3g} us"

    def shared(self, ranks: int) -> Link:
        """Divide the link among so many ranks that send at once, as the GPUs of a machine do."""
        return Link(self.bytes_per_second / ranks, self.latency_seconds)

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of a message."""
        return self.latency_seconds + nbytes / self.bytes_per_second

    def sum_seconds(self, nbytes: float, ranks: int) -> float:
        """Return the seconds of an all-reduce of `nbytes` in which each of n ranks adds up a share: 2 (n - 1) messages
        of 1/n of them (same paper, section 4.5, around a ring; in the same time each may give every other one its
        share).
        """
        return 2 * (ranks - 1) * self.seconds(nbytes / ranks)


def parse_link(text: str) -> Link:
    """Read `"10Gbit/s"` or `"25GB/s"`, and behind a comma the latency if there is one: `"10Gbit/s,50us"`.

    Raises `ConfigError` for anything else. `Gb/s` is refused: half of its readers take it for bytes.
    """
    match = re.fullmatch(r"([^,]+?)(bit|B)/s(?:\s*,(.+))?", text.strip())
    if match:
        amount, unit, latency = match.groups()
        with suppress(ValueError):
            rate = parse_bytes(f"{amount}B") / (8 if unit == "bit" else 1)
            return Link(rate, parse_seconds(latency) if latency else 0.0)
    raise ConfigError(f"cannot read {text!r} as a link; write it like '10Gbit/s', '25GB/s' or '10Gbit/s,50us'")


CHUNKS, BALANCE, HALOS, SUMS, COPIES = "fewer chunks than ranks", "uneven chunks", "halos", "sums", "packing"
LATENCY, REPLICATED = "latency", "whole fields on every rank"
"""Causes that keep a step from being as many times faster as there are ranks."""
_MOVED = 2
"""Bytes that packing or opening a message moves, for each of its own: read and written."""


class PassTimes(NamedTuple):
    """A pass by several ranks."""

    seconds: Sequence[float]
    """That each computes."""
    exchanges: Sequence[tuple[Bytes, Bytes]]
    """That end it: bytes of fields, and of sums, from each rank to each other one."""


@dataclass(frozen=True, slots=True)
class TileStep:
    """A step on one image, shared by several ranks."""

    ranks: int
    """That have something to do: no more than any segment has chunks."""
    seconds: float
    alone_seconds: float
    """Seconds that one rank takes."""
    memory_bytes: int
    """The predicted peak of the rank that holds most."""
    sent_bytes: int
    """Bytes of the rank that sends most."""
    lost: Mapping[str, float]
    """Seconds beyond an equal share of what one rank takes, by cause."""


def most_ranks(plan: Plan) -> int:
    """Return how many ranks have something to do: the chunks of a segment that are not empty."""
    return max((min(segment.chunks, segment.tile_count) for segment in plan.segments), default=1)


def tile_step(
    problem: Problem, plan: Plan, ranks: int, link: Link, pass_seconds: Sequence[float] | None = None
) -> TileStep:
    """Estimate a step by so many ranks, as far as they have something to do, of a plan that was made for one.

    `pass_seconds`: what each pass takes one rank, where that was measured; by default what the plan predicts.
    """
    ranks = min(ranks, most_ranks(plan))
    problem, plan = problem.of(plan.whole_pixels), shared_by(problem, plan, ranks)
    replicated = plan.whole_seconds if pass_seconds is None and plan.timed_seconds is None else 0.0
    if pass_seconds is None:
        pass_seconds = [share * (plan.predicted_seconds - replicated) for share in plan.pass_shares]
    passes = list[PassTimes]()
    for step in plan.steps:
        if isinstance(step, Tiles):
            shares = _rank_shares(problem, plan, step)
            passes.append(PassTimes([pass_seconds[len(passes)] * share for share in shares], []))
        elif isinstance(step, Exchange | Gather):
            passes[-1] = passes[-1]._replace(exchanges=[*passes[-1].exchanges, messages(step, ranks)])
    copying = problem.machine.memory_bytes_per_second / _MOVED
    message_bytes = max((message_memory(step, ranks) for step in plan.steps), default=0)
    every = [fields + sums for one in passes for fields, sums in one.exchanges]
    sent = sum((matrix.sum(1) for matrix in every), np.zeros(ranks, np.int64))
    return TileStep(
        ranks,
        clock(passes, link, copying) + replicated,
        sum(pass_seconds) + replicated,
        _memory_bytes(plan) + message_bytes,
        int(sent.max()),
        {**_lost(passes, link, copying), REPLICATED: replicated * (1 - 1 / ranks)},
    )


def clock(passes: Sequence[PassTimes], link: Link, copying: float = inf) -> float:
    """Return the seconds until the last rank is through all passes; `copying`: bytes a second packed or opened."""
    clocks = [0.0] * len(passes[0].seconds) if passes else [0.0]
    for one in passes:
        clocks = [now + seconds for now, seconds in zip(clocks, one.seconds, strict=True)]
        for fields, sums in one.exchanges:
            clocks = _exchanged(clocks, fields + sums, link, copying)
    return max(clocks)


def _exchanged(clocks: Sequence[float], messages: Bytes, link: Link, copying: float) -> list[float]:
    heard = (clocks + messages.sum(1) / copying).max() + (len(clocks) - 1) * link.seconds(0)
    # One after the other; those of nothing don't travel.
    there = np.where(messages > 0, link.latency_seconds + messages.cumsum(1) / link.bytes_per_second, 0.0)
    after: list[float] = (heard + np.maximum(there.max(1), there.max(0)) + messages.sum(0) / copying).tolist()
    return after


def _lost(passes: Sequence[PassTimes], link: Link, copying: float) -> dict[str, float]:
    """Return what would be gained without one cause after another."""

    def of(fields_too: bool, sums_too: bool) -> list[PassTimes]:
        return [PassTimes(seconds, [(fields_too * a, sums_too * b) for a, b in met]) for seconds, met in passes]

    quick = Link(link.bytes_per_second)
    sums, silent = of(False, True), of(False, False)
    times = [
        clock(passes, link, copying),
        clock(passes, link),
        *(clock(some, quick) for some in (passes, sums, silent)),
    ]
    waits = [max(one.seconds) - sum(one.seconds) / len(one.seconds) for one in passes]
    idle = sum(wait for wait, one in zip(waits, passes, strict=True) if not all(one.seconds))
    found = dict(zip((COPIES, LATENCY, HALOS, SUMS), (a - b for a, b in pairwise(times)), strict=True))
    return {CHUNKS: idle, BALANCE: sum(waits) - idle, **found}


def _rank_shares(problem: Problem, plan: Plan, step: Tiles) -> list[float]:
    """Return the share of a pass that each rank takes, of one rank's seconds: its pixels, and what its last tiles leave
    idle of the threads that compute tiles side by side.
    """
    segment = plan.segments[step.segment]
    grid = Grid(problem.graph, segment.computes, segment.tile)
    chunks = Chunks(grid, segment.chunks, by_rows=grid.by_rows)

    def taken(some: range) -> float:
        tiles = range(chunks.start(some.start), chunks.start(some.stop))
        idle = -len(tiles) % plan.workers / max(len(tiles), 1)
        return (1 + idle) * sum(box.area for box in chunks.written(grid.reference, tiles))

    return [taken(step.own(rank)) / taken(range(len(chunks))) for rank in range(len(step.first_chunks) - 1)]


def _memory_bytes(plan: Plan) -> int:
    """Return the peak, without messages, of the rank whose fields and cotangents in memory are most."""
    peaks = []
    for step, buffers in live(plan.steps):
        here = [buffer.held_bytes for buffer in buffers if buffer.tier == MEMORY]
        peaks.append(total(plan.segments[step.segment].memory) + max(map(sum, zip(*here, strict=True)), default=0))
    return total(plan.fixed) + max(peaks, default=0)


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
    """Find the stages of a split of which none takes longer: the fewest stages, then the fewest ranks."""
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
            CHUNKS: self.alone_seconds * (1 / self.busy - 1 / self.ranks),
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
        """Return the seconds of a step if all ranks share an image, each has its own, groups do, or in a pipeline."""
        busy = min(ranks, self.images)
        return {
            TILE: self.grouped(ranks, 1).seconds,
            DATA: self.grouped(busy, busy).seconds,
            GROUPS: self.shared(ranks).seconds,
            PIPELINE: self.pipeline_seconds(ranks),
        }

    def pipeline_seconds(self, ranks: int) -> float:
        """Estimate the pipeline that PipeDream's program makes of the plan's segments, emptied every step: an image
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
        """Return the segments of the plan as a chain of layers."""
        graph, plan = self._problem.graph, self._plan
        segments = [segment.computes for segment in plan.segments]
        seconds = [0.0] * len(segments)
        for step, share in zip(plan.passes, plan.pass_shares, strict=True):
            seconds[step.segment] += share * plan.predicted_seconds
        made = {field: segment.index for segment in segments for field in segment.kept}
        last = {field: segment.index for segment in segments for field in segment.reads}
        return [
            Layer(
                seconds[segment.index],
                sum(graph[i].nbytes for i, first in made.items() if first <= segment.index < last.get(i, first)),
                sum(graph[i].nbytes for i in segment.globals if i in self._parameters),
            )
            for segment in segments
        ]

    @cached_property
    def _parameters(self) -> set[int]:
        """Return the parameters that get gradients."""
        return {node.id for node in self._problem.graph.nodes if node.op == "parameter" and node.differentiable}

    @property
    def _gradient_bytes(self) -> int:
        return sum(self._problem.graph[i].nbytes for i in self._parameters)
