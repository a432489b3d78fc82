"""Fitting tiles: for fields kept in given tiers, the fastest tile of every stage that fits beside all else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from gigagrad.errors import BudgetError
from gigagrad.graphs import Graph
from gigagrad.plans.cost import Costs, TileCost, candidates
from gigagrad.plans.keeping import bytes_by_pass
from gigagrad.plans.limits import Limits
from gigagrad.plans.machine import Machine
from gigagrad.plans.memory import compiled_bytes, whole_field_bytes
from gigagrad.plans.packing import Packing
from gigagrad.plans.plan import DISK, HOST, MEMORY, Pass, StagePlan
from gigagrad.plans.schedule import make_passes
from gigagrad.plans.stages import Stage, split_stages
from gigagrad.plans.traffic import traffic_bytes, waiting_bytes

_ALLOCATOR_SLACK = 1.5
"""Resident bytes per byte that tiles allocate: freed blocks that the allocator has not given back."""

_TAPE_SLACK = 1.25
"""The same for whole fields and the parameters' gradients, beside which nothing is given back while they are made."""

_HOARD_BYTES = 16 * 2**20
"""What the allocator may keep between tiles beside that, where the budget has room for it: giving it back and faulting
it in again takes time (docs/decisions/0013-whole-process-accounting.md)."""

Kept = Mapping[int, str]
"""The fields kept, and the tier of each."""


@dataclass(frozen=True, slots=True)
class Option:
    """A way to run all stages; `seconds`: a forecast on a calibrated machine, else for comparing options only."""

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
                what = f"the fields kept on '{tier}' take {tier_bytes[tier]:,} bytes, there is room for {room:,}"
                raise self._limits.refusal(what, enough)

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
        most_added = limits.added_bytes(compiled_bytes(graph, stages, backward=self._backward))
        fixed = limits.fixed_bytes + most_added + on_tape
        if not stages and limits.budget_bytes is not None and fixed > limits.budget_bytes:
            what = (
                f"operators that run on whole fields do not fit: they make {whole_bytes:,} bytes beside "
                f"{fixed - whole_bytes:,} bytes for the process, the parameters and the readers"
            )
            raise limits.refusal(what, fixed)
        held = bytes_by_pass(graph, stages, passes, kept, MEMORY, self._packing)
        chosen = list[_Sweeps]()
        refusals = list[BudgetError]()
        for stage in stages:
            indices = [index for index, p in enumerate(passes) if p.stage == stage.index]
            standing = fixed + max((held[index] for index in indices), default=0)
            phases = [passes[index].phase for index in indices]
            try:
                chosen.append(self._sweeps(stage, phases, workers, kept, standing))
            except BudgetError as error:
                refusals.append(error)
        if refusals:  # what does for the hungriest stage does for all
            raise max(refusals, key=lambda error: error.needed_bytes)
        seconds = self._costs.whole_seconds(backward=self._backward) + sum(sweeps.seconds for sweeps in chosen)
        tiles = [sweeps.plan.tiles for sweeps in chosen]
        added = limits.added_bytes(compiled_bytes(graph, stages, tiles, backward=self._backward))
        peak = max((sweeps.total_bytes for sweeps in chosen), default=fixed) - (most_added - added)
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
            added + hoard,
            tier_bytes,
        )

    def _sweeps(self, stage: Stage, phases: list[str], workers: int, kept: Kept, standing: int) -> _Sweeps:
        """The fastest tile of one stage that fits beside `standing` bytes. Raises `BudgetError` if none does."""
        graph, budget = self._graph, self._limits.budget_bytes
        backward = any(phase != "forward" for phase in phases)
        shares, sums = _working_bytes(graph, stage, workers, backward=backward)

        def waiting(cost: TileCost) -> int:
            # Two being read, and with several workers one more in the queue, where there are as many.
            ahead = min(2 + (workers > 1), max(0, cost.plan.tile_count - workers))
            behind = waiting_bytes(graph, stage, cost.crops, kept, backward=backward)
            return ahead * cost.crop_bytes + workers * cost.own_crop_bytes + behind

        def total(cost: TileCost) -> int:
            tiles = int(workers * cost.plan.tile_peak_bytes * _ALLOCATOR_SLACK)
            # The only tile is gone when what it gave is added to sums that did not exist before.
            apart = min(tiles, sums) if cost.plan.tile_count == 1 else 0
            return standing + shares + sums + waiting(cost) + tiles - apart

        forced = self._tiles
        shapes = [forced[min(stage.index, len(forced) - 1)]] if forced else candidates(graph, stage)
        costed = [self._costs.of(stage, shape, backward=backward) for shape in shapes]
        fitting = [cost for cost in costed if budget is None or total(cost) <= budget]
        if not fitting:
            leanest = min(costed, key=total)
            what = _what_does_not_fit(stage, leanest, standing + shares + sums)
            raise self._limits.refusal(what, total(leanest))

        def seconds_of(cost: TileCost) -> float:
            each = (graph, self._machine, stage, cost, kept)
            return sum(sweep_seconds(*each, phase, workers, self._packing) for phase in phases)

        rated = [(seconds_of(cost), cost) for cost in fitting]
        seconds, best = min(rated, key=lambda pair: pair[0])
        known = seconds if self._machine.model is not None else None
        plan = dataclasses.replace(best.plan, index=stage.index, seconds=known)
        return _Sweeps(plan, seconds, total(best), waiting(best), shares + sums)


def sweep_seconds(
    graph: Graph,
    machine: Machine,
    stage: Stage,
    cost: TileCost,
    kept: Kept,
    phase: str,
    workers: int,
    packing: Packing,
) -> float:
    """One sweep of a stage. Tiers are read ahead and written behind: the slowest link counts, or the tiles."""
    count = cost.plan.tile_count
    computing = cost.forward_seconds if phase == "forward" else cost.seconds
    seconds = [machine.wall_seconds(computing, workers, count)]
    for tier, rate in ((DISK, machine.disk_bytes_per_second), (HOST, machine.copy_bytes_per_second)):
        seconds.append(count * traffic_bytes(graph, stage, cost.crops, kept, phase, tier, packing) / rate)
    return max(seconds)


@dataclass(frozen=True, slots=True)
class _Sweeps:
    """All sweeps of one stage with one tile shape."""

    plan: StagePlan
    seconds: float
    total_bytes: int
    """Of the process while they run."""
    waiting_bytes: int
    """Of crops read ahead or to be written."""
    working_bytes: int
    """Of working copies and sums of what the stage reads beside fields."""


def _what_does_not_fit(stage: Stage, leanest: TileCost, standing: int) -> str:
    plan = leanest.plan
    return (
        f"stage {stage.index} does not fit: its leanest tile, {plan.tile[0]} x {plan.tile[1]} px with a "
        f"crop of {plan.crop[0]} x {plan.crop[1]} px, works on {plan.tile_peak_bytes:,} bytes beside "
        f"{standing:,} bytes for the process, the parameters, the readers and the fields that are kept"
    )


def _gradient_bytes(graph: Graph, *, backward: bool) -> int:
    """The gradients of all parameters, and the global values made from parameters and sums."""
    total = 0
    for node in graph.nodes:
        if node.op == "parameter":
            total += max(node.nbytes, 4 * prod(node.shape)) if backward and node.differentiable else 0
        elif not (node.is_field or node.is_source or node.whole):
            total += node.nbytes
    return total


def _working_bytes(graph: Graph, stage: Stage, workers: int, *, backward: bool) -> tuple[int, int]:
    """Of every global that a stage reads, for its sweep: its copy in working layout and the contributions to its
    gradient of the tiles at work and of one that is done; and the float64 sums of its gradient.
    """
    contributions = workers + (workers > 1)
    shares = sums = 0
    for i in stage.globals:
        node = graph[i]
        shares += node.nbytes if len(node.shape) == 4 else 0
        if backward and node.differentiable:
            shares += contributions * node.nbytes
            sums += 8 * prod(node.shape)
    return shares, sums
