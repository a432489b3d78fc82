"""Fitting tiles: for fields kept in given tiers, the fastest tile of every stage that fits beside all else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from gigagrad.errors import BudgetError
from gigagrad.graphs import Graph
from gigagrad.plans.cost import Costs, TileCost, candidates
from gigagrad.plans.keeping import bytes_by_pass
from gigagrad.plans.limits import Limits
from gigagrad.plans.machine import Machine
from gigagrad.plans.memory import MAPPED_BYTES, gradient_sum_bytes, whole_compiled_convolutions, whole_field_bytes
from gigagrad.plans.packing import Packing
from gigagrad.plans.plan import DISK, HOST, MEMORY, Pass, StagePlan
from gigagrad.plans.schedule import make_passes
from gigagrad.plans.stages import Stage, split_stages
from gigagrad.plans.traffic import traffic_bytes, waiting_bytes

_ALLOCATOR_SLACK = 1.5
"""Resident bytes per byte that tiles allocate: freed blocks that the allocator has not given back."""

_FEW_TILES = 100
_SLACK_OF_DOUBLING = 0.05
_MOST_FURTHER_SLACK = 0.25
"""Tiles side by side take and free blocks in ever another order, and the worst of many orders is worse: beyond a few
tiles each doubling adds some slack, up to five doublings (docs/decisions/0013-whole-process-accounting.md)."""

_TAPE_SLACK = 1.25
"""The same for whole fields and the parameters' gradients, beside which nothing is given back while they are made."""

_HOARD_BYTES = 16 * 2**20
"""What the allocator may keep between tiles beside that, where the budget has room for it: giving it back and faulting
it in again takes time (docs/decisions/0013-whole-process-accounting.md)."""

Kept = Mapping[int, str]
"""The fields kept, and the tier of each."""


@dataclass(frozen=True, slots=True)
class Option:
    """A way to run all stages, and the seconds that a step takes by the cost model."""

    workers: int
    kept: Kept
    stages: tuple[StagePlan, ...]
    passes: tuple[Pass, ...]
    seconds: float
    parameter_bytes: int
    kept_bytes: int
    ahead_bytes: int
    peak_bytes: int
    runtime_bytes: int
    """What kernels, threads and readers add, and the allocator may keep between tiles; part of the peak."""
    tier_bytes: Mapping[str, int]
    """Peak bytes of the fields in each of the other tiers."""


class Fitter:
    """Fits tiles for one graph. `tiles` forces their shapes: one for each stage, the last serves the rest."""

    def __init__(
        self,
        graph: Graph,
        limits: Limits,
        machine: Machine,
        costs: Costs,
        tiles: tuple[tuple[int, int], ...] | None,
        packing: Packing,
        *,
        backward: bool,
    ) -> None:
        self._graph, self._limits, self._machine, self._costs = graph, limits, machine, costs
        self._tiles, self._packing, self._backward = tiles, packing, backward

    def unbounded(self) -> Fitter:
        """The same for a machine with all the memory it needs."""
        limits = dataclasses.replace(self._limits, budget_bytes=None)
        return Fitter(
            self._graph, limits, self._machine, self._costs, self._tiles, self._packing, backward=self._backward
        )

    def fit(self, kept: Kept) -> Option:
        """The fastest option that keeps these fields in these tiers. Raises `BudgetError` if there is none."""
        stages = split_stages(self._graph, kept)
        passes = make_passes(self._graph, stages, backward=self._backward)
        tier_bytes = {
            tier: max(bytes_by_pass(self._graph, stages, passes, kept, tier, self._packing), default=0)
            for tier in (HOST, DISK)
        }
        self._check_tiers(kept, tier_bytes)
        options = []
        refusal: BudgetError | None = None
        for workers in dict.fromkeys((self._machine.threads, 1)):
            try:
                options.append(self._fit(kept, stages, passes, workers, tier_bytes))
            except BudgetError as error:
                refusal = error  # of the last, which is the leanest
        if not options:
            assert refusal is not None
            raise refusal
        return min(options, key=lambda option: option.seconds)

    def _check_tiers(self, kept: Kept, tier_bytes: Mapping[str, int]) -> None:
        """Raises BudgetError, with the memory that would do instead, if a tier has too little room."""
        for tier, room in ((HOST, self._limits.host_bytes), (DISK, self._limits.scratch_bytes)):
            if tier_bytes[tier] > room:
                enough = self.unbounded().fit(dict.fromkeys(kept, MEMORY)).peak_bytes
                raise self._limits.tier_refusal(tier, tier_bytes[tier], room, enough)

    def _fit(
        self,
        kept: Kept,
        stages: tuple[Stage, ...],
        passes: tuple[Pass, ...],
        workers: int,
        tier_bytes: Mapping[str, int],
    ) -> Option:
        """For each stage the fastest tile that fits beside the others' needs. Raises `BudgetError` if one has none."""
        graph, limits = self._graph, self._limits
        gradient_bytes = _gradient_bytes(graph, backward=self._backward)
        whole_bytes = whole_field_bytes(graph, backward=self._backward)
        on_tape = int(_TAPE_SLACK * (gradient_bytes + whole_bytes)) if whole_bytes else gradient_bytes
        fixed = limits.fixed_bytes + limits.runtime_bytes + on_tape
        held = bytes_by_pass(graph, stages, passes, kept, MEMORY, self._packing)
        tilings = []
        for stage in stages:
            indices = [index for index, p in enumerate(passes) if p.stage == stage.index]
            standing = fixed + max((held[index] for index in indices), default=0)
            tilings.append(self._tilings(stage, [passes[index].phase for index in indices], workers, kept, standing))
        chosen, compiled = self._choose(tilings, fixed, whole_bytes)
        seconds = self._costs.whole_seconds(backward=self._backward) + sum(sweeps.seconds for sweeps in chosen)
        peak = max((sweeps.total_bytes for sweeps in chosen), default=fixed) + compiled
        most_working = max((sweeps.working_bytes for sweeps in chosen), default=0)
        hoard = _HOARD_BYTES if chosen else 0
        if limits.budget_bytes is not None:
            hoard = max(0, min(hoard, limits.budget_bytes - peak))
        return Option(
            workers,
            kept,
            tuple(sweeps.plan for sweeps in chosen),
            passes,
            seconds,
            gradient_bytes + most_working,
            max(held, default=0),
            max((sweeps.waiting_bytes for sweeps in chosen), default=0),
            peak + hoard,
            limits.runtime_bytes + compiled + hoard,
            tier_bytes,
        )

    def _tilings(self, stage: Stage, phases: list[str], workers: int, kept: Kept, standing: int) -> _Tilings:
        """The tile shapes that may serve one stage, whose sweeps have `standing` bytes beside them."""
        graph, forced = self._graph, self._tiles
        backward = any(phase != "forward" for phase in phases)
        shapes = [forced[min(stage.index, len(forced) - 1)]] if forced else candidates(graph, stage)
        costs = tuple(self._costs.of(stage, shape, backward=backward) for shape in shapes)
        return _Tilings(graph, self._machine, self._packing, stage, phases, workers, kept, standing, costs)

    def _choose(self, tilings: list[_Tilings], fixed: int, whole_bytes: int) -> tuple[list[_Sweeps], int]:
        """Tiles for every stage, and the bytes that all their convolutions are compiled to, beside every stage.

        Either the fastest tiles beside the most that any choice compiles to, or the fastest of those that compile to no
        more than the leanest ones. Raises `BudgetError` if the leanest do not fit.
        """
        limits = self._limits
        on_whole_fields = whole_compiled_convolutions(self._graph, backward=self._backward)

        def compiled_bytes(by_stage: Iterable[int]) -> int:
            return limits.compiled_bytes(on_whole_fields + sum(by_stage))

        most = [max(cost.compiled for cost in tiling.costs) for tiling in tilings]
        budget = limits.budget_bytes
        if budget is None:
            choices = [[tiling.fastest(None, cap) for tiling, cap in zip(tilings, most, strict=True)]]
        else:
            needed, least = _leanest(tilings, compiled_bytes) if tilings else (fixed + compiled_bytes(()), [])
            if needed > budget:
                raise limits.refusal(_what_does_not_fit(tilings, fixed, whole_bytes), needed)
            choices = [
                [tiling.fastest(budget - compiled_bytes(caps), cap) for tiling, cap in zip(tilings, caps, strict=True)]
                for caps in (most, least)
            ]
        options = [[sweeps for sweeps in choice if sweeps is not None] for choice in choices]
        whole = [option for option in options if len(option) == len(tilings)]
        best = min(whole, key=lambda option: sum(sweeps.seconds for sweeps in option))
        return best, compiled_bytes(sweeps.compiled for sweeps in best)


def _leanest(tilings: list[_Tilings], compiled_bytes: Callable[[Iterable[int]], int]) -> tuple[int, list[int]]:
    """The least memory that will do, and how many kernels each stage's convolutions may then be compiled to.

    All stages share what is compiled, so with smaller tiles for one of them, in more shapes, all of them need more.
    """
    smallest: tuple[int, list[int]] | None = None
    caps: dict[int, int] = {}
    tiles = [(tiling.total(cost), cost.compiled, i) for i, tiling in enumerate(tilings) for cost in tiling.costs]
    for total, compiled, i in sorted(tiles):
        if compiled >= caps.get(i, compiled + 1):
            continue
        caps[i] = compiled
        if len(caps) == len(tilings):
            needed = total + compiled_bytes(caps.values())
            if smallest is None or needed < smallest[0]:
                smallest = needed, [caps[j] for j in range(len(tilings))]
    assert smallest is not None
    return smallest


@dataclass(frozen=True, slots=True)
class _Sweeps:
    """All sweeps of one stage with one tile shape."""

    plan: StagePlan
    seconds: float
    total_bytes: int
    """Of the process while they run, less what convolutions are compiled to."""
    waiting_bytes: int
    """Of crops read ahead or to be written."""
    working_bytes: int
    """Of working copies and sums of what the stage reads beside fields."""
    compiled: int
    """How many kernels convolutions are compiled to."""


@dataclass(frozen=True, eq=False)
class _Tilings:
    """The tile shapes that may serve one stage."""

    graph: Graph
    machine: Machine
    packing: Packing
    stage: Stage
    phases: list[str]
    workers: int
    kept: Kept
    standing: int
    """Bytes beside its sweeps that do not depend on its tiles."""
    costs: tuple[TileCost, ...]

    def fastest(self, room: int | None, most_compiled: int) -> _Sweeps | None:
        """With the fastest of the tiles that fit in `room` bytes and compile to at most so many kernels."""
        fitting = [cost for cost in self.costs if room is None or self.total(cost) <= room]
        rated = [(self._seconds(cost), cost) for cost in fitting if cost.compiled <= most_compiled]
        if not rated:
            return None
        seconds, best = min(rated, key=lambda pair: pair[0])
        plan = dataclasses.replace(
            best.plan,
            index=self.stage.index,
            beside_bytes=self._kept_free(best),
            forward_seconds=self._sweep_seconds(best, "forward"),
            backward_seconds=self._sweep_seconds(best, "backward") if self._backward else 0.0,
        )
        working = sum(self.working_bytes)
        return _Sweeps(plan, seconds, self.total(best), self._waiting(best), working, best.compiled)

    def total(self, cost: TileCost) -> int:
        """Bytes of the process while the stage's sweeps run, less what convolutions are compiled to."""
        shares, sums = self.working_bytes
        tiles = int(self.workers * cost.plan.tile_peak_bytes * _ALLOCATOR_SLACK) + self._further_slack(cost)
        # The only tile is gone when what it gave is added to sums that did not exist before.
        apart = min(tiles, sums) if cost.plan.tile_count == 1 else 0
        return self.standing + shares + sums + self._waiting(cost) + tiles - apart

    @cached_property
    def _backward(self) -> bool:
        return any(phase != "forward" for phase in self.phases)

    @cached_property
    def working_bytes(self) -> tuple[int, int]:
        return _working_bytes(self.graph, self.stage, self.workers, backward=self._backward)

    def _waiting(self, cost: TileCost) -> int:
        # Two being read, and with several workers one more in the queue, where there are as many.
        ahead = min(2 + (self.workers > 1), max(0, cost.plan.tile_count - self.workers))
        behind = waiting_bytes(self.graph, self.stage, cost.crops, self.kept, backward=self._backward)
        return ahead * cost.crop_bytes + self.workers * cost.own_crop_bytes + behind

    def _further_slack(self, cost: TileCost) -> int:
        """What many tiles side by side need beyond `_ALLOCATOR_SLACK`."""
        if self.workers == 1 or cost.plan.tile_count <= _FEW_TILES:
            return 0
        further = _SLACK_OF_DOUBLING * math.log2(cost.plan.tile_count / _FEW_TILES)
        return int(self.workers * cost.plan.tile_peak_bytes * min(further, _MOST_FURTHER_SLACK))

    def _kept_free(self, cost: TileCost) -> int:
        """What freed memory does not serve: of what comes and goes beside the tiles, what is taken from the system
        block by block, and what tiles need beyond any order of freed blocks.
        """
        crops = [height * width * self.graph[i].bytes_per_pixel for i, (height, width) in cost.crops.items()]
        waiting = self._waiting(cost) if max(crops, default=0) >= MAPPED_BYTES else 0
        weights = [self.graph[i].nbytes for i in self.stage.globals if self._backward and self.graph[i].differentiable]
        mapped = waiting + _contributions(self.workers) * sum(n for n in weights if n >= MAPPED_BYTES)
        return mapped + self._further_slack(cost)

    def _seconds(self, cost: TileCost) -> float:
        return sum(self._sweep_seconds(cost, phase) for phase in self.phases)

    def _sweep_seconds(self, cost: TileCost, phase: str) -> float:
        """Tiers are read ahead and written behind: the slowest link counts, or the processor, which has to copy and
        check what goes to files beside computing tiles.
        """
        machine, count = self.machine, cost.plan.tile_count
        disk, host = (
            count * traffic_bytes(self.graph, self.stage, cost.crops, self.kept, phase, tier, self.packing)
            for tier in (DISK, HOST)
        )
        computing = cost.forward_seconds if phase == "forward" else cost.backward_seconds
        processing = machine.wall_seconds(computing, self.workers, count) + machine.file_seconds(disk)
        return max(processing, disk / machine.disk_bytes_per_second, host / machine.copy_bytes_per_second)


def _what_does_not_fit(tilings: list[_Tilings], fixed: int, whole_bytes: int) -> str:
    if not tilings:
        return (
            f"operators that run on whole fields do not fit: they make {whole_bytes:,} bytes beside "
            f"{fixed - whole_bytes:,} bytes for the process, the parameters and the readers"
        )
    # What does for the hungriest stage does for all.
    needed, hungriest = max(((min(map(t.total, t.costs)), t) for t in tilings), key=lambda pair: pair[0])
    leanest = next(cost.plan for cost in hungriest.costs if hungriest.total(cost) == needed)
    return (
        f"stage {hungriest.stage.index} does not fit: its leanest tile, {leanest.tile[0]} x {leanest.tile[1]} px with "
        f"a crop of {leanest.crop[0]} x {leanest.crop[1]} px, works on {leanest.tile_peak_bytes:,} bytes beside "
        f"{hungriest.standing + sum(hungriest.working_bytes):,} bytes for the process, the parameters, the readers and "
        "the fields that are kept"
    )


def _gradient_bytes(graph: Graph, *, backward: bool) -> int:
    """The gradients of all parameters, and the global values made from parameters and sums."""
    total = 0
    for node in graph.nodes:
        if node.op == "parameter":
            total += max(node.nbytes, 4 * math.prod(node.shape)) if backward and node.differentiable else 0
        elif not (node.is_field or node.is_source or node.whole):
            total += node.nbytes
    return total


def _working_bytes(graph: Graph, stage: Stage, workers: int, *, backward: bool) -> tuple[int, int]:
    """Of every global that a stage reads, for its sweep: its copy in working layout and the contributions to its
    gradient of the tiles at work and of one that is done; and the float64 sums of its gradient.
    """
    shares = sum(graph[i].nbytes for i in stage.globals if len(graph[i].shape) == 4)
    sums = 0
    if backward:
        shares += _contributions(workers) * sum(graph[i].nbytes for i in stage.globals if graph[i].differentiable)
        sums = gradient_sum_bytes(graph, stage)
    return shares, sums


def _contributions(workers: int) -> int:
    """How many tiles' shares of a gradient there are at a time: of those at work, and of one that is being added."""
    return workers + (workers > 1)
