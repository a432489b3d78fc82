"""Choosing what to keep, how many tiles to run at a time and their shapes: the fastest plan that fits in the budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import prod

from gigagrad.errors import BudgetError
from gigagrad.graphs import GATHER, Graph
from gigagrad.plans.cost import Costs, TileCost, candidates
from gigagrad.plans.keeping import (
    bytes_by_pass,
    fields_to_keep,
    whole_field_bytes,
)
from gigagrad.plans.machine import Machine
from gigagrad.plans.plan import KeptField, Pass, Plan, StagePlan, WholeField
from gigagrad.plans.schedule import make_passes
from gigagrad.plans.stages import Stage, gathered, split_stages

_ALLOCATOR_SLACK = 1.5
"""Resident bytes per byte allocated: freed blocks that the allocator has not given back (bench/tile_memory.py)."""

_USUAL_SIDE_PX = 128
"""Tile side at which plans that keep different fields are compared."""

_ROOM_BYTES = 24 * 2**20
"""By how much a process differs from the one that was refused: its first allocations, its garbage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The memory a plan may count on, in bytes. `budget_bytes=None` means that only speed decides."""

    budget_bytes: int | None
    base_bytes: int
    peak_bytes: int
    """The highest the process has been before the run; the peak of the whole process cannot be below it."""
    reader_cache_bytes: int
    runtime_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """What the process holds whatever the tiles: itself, the readers' caches and what kernels still add."""
        return self.base_bytes + self.runtime_bytes + self.reader_cache_bytes


def make_plan(
    graph: Graph,
    limits: Limits,
    machine: Machine,
    *,
    image_shape: tuple[int, ...],
    backward: bool,
    device: str,
    memory_format: str,
    tiles: tuple[tuple[int, int], ...] | None,
    kept: Iterable[int] | None = None,
) -> Plan:
    """The fastest plan that fits, or the one with these `tiles` (one shape for each stage; the last serves the rest)
    that keeps these fields.

    Raises:
        BudgetError: even the smallest tile does not fit; names the stage, the tile and every number.
    """
    chooser = _Chooser(graph, limits, machine, tiles, backward=backward)
    best = chooser.best() if kept is None else chooser.keeping(frozenset(kept))
    whole = [node for node in graph.nodes if node.whole and node.op not in (GATHER, "gigagrad.item")]
    return Plan(
        image_shape=image_shape,
        device=device,
        memory_format=memory_format,
        workers=best.workers,
        stages=best.stages,
        passes=best.passes,
        kept=tuple(
            KeptField(field, graph[field].op, graph[field].origin.module_path, graph[field].shape, graph[field].nbytes)
            for field in sorted(best.kept)
        ),
        whole_field=tuple(WholeField(node.op, node.origin.module_path, node.nbytes) for node in whole),
        budget_bytes=limits.budget_bytes,
        base_bytes=limits.base_bytes,
        parameter_bytes=best.parameter_bytes,
        kept_bytes=best.kept_bytes,
        whole_field_bytes=whole_field_bytes(graph, backward=backward),
        reader_bytes=limits.reader_cache_bytes + best.ahead_bytes,
        runtime_bytes=limits.runtime_bytes,
        predicted_peak_bytes=max(best.peak_bytes, limits.peak_bytes),
        predicted_seconds=best.seconds if machine.model is not None else None,
    )


@dataclass(frozen=True, slots=True)
class _Option:
    """A way to run all stages; `seconds`: a forecast on a calibrated machine, else for comparing options only."""

    workers: int
    kept: frozenset[int]
    stages: tuple[StagePlan, ...]
    passes: tuple[Pass, ...]
    seconds: float
    parameter_bytes: int
    kept_bytes: int
    ahead_bytes: int
    peak_bytes: int


class _Chooser:
    """Looks for the fastest option that fits."""

    def __init__(
        self,
        graph: Graph,
        limits: Limits,
        machine: Machine,
        tiles: tuple[tuple[int, int], ...] | None,
        *,
        backward: bool,
    ) -> None:
        self._graph, self._limits, self._machine = graph, limits, machine
        self._tiles, self._backward = tiles, backward
        self._costs = Costs(graph, machine)

    def best(self) -> _Option:
        """Keep everything worth keeping, or as much of it as the budget allows.

        How much of what could be given up is tried in growing steps, then by bisection between the last two. Giving up
        more does not always need less memory (halos grow), so the refusal names the leanest of all options tried.
        """
        kept = fields_to_keep(self._graph)
        refusals: list[BudgetError] = []

        def attempt(dropped: list[int]) -> _Option | None:
            try:
                return self.keeping(kept - set(dropped))
            except BudgetError as error:
                refusals.append(error)
                return None

        found = attempt([])
        if found is not None:
            return found
        order = self._order_of_dropping(kept)
        low = 0
        for high in dict.fromkeys(-(-len(order) * eighths // 8) for eighths in (1, 2, 3, 4, 6, 8) if order):
            found = attempt(order[:high])
            if found is not None:
                break
            low = high
        if found is None:
            raise min(refusals, key=lambda error: error.needed_bytes)
        while high - low > max(1, len(order) // 16):
            middle = (low + high) // 2
            leaner = attempt(order[:middle])
            if leaner is None:
                low = middle
            else:
                found, high = leaner, middle
        return found

    def _order_of_dropping(self, kept: frozenset[int]) -> list[int]:
        """Kept fields, the one that costs the least time per byte first, given that those before it are gone.

        Greedy, and lazy about it (Minoux, 1978): giving up a field becomes dearer as its neighbours go, so a cost that
        was computed earlier is a lower bound, and only the best candidate's is brought up to date.
        """
        graph, remaining, order = self._graph, kept, list[int]()
        seconds = self._rough_seconds(remaining)
        heap = [(0.0, i) for i in kept - gathered(graph)]
        fresh: dict[int, int] = {}
        while heap:
            _, field = heappop(heap)
            without = self._rough_seconds(remaining - {field})
            rate = (without - seconds) / graph[field].nbytes
            if fresh.get(field) != len(order) and heap and rate > heap[0][0]:
                fresh[field] = len(order)
                heappush(heap, (rate, field))
                continue
            order.append(field)
            remaining, seconds = remaining - {field}, without
        return order

    def _rough_seconds(self, kept: frozenset[int]) -> float:
        """Time of all sweeps with tiles of a usual size."""
        stages = split_stages(self._graph, kept)
        passes = make_passes(self._graph, stages, backward=self._backward)
        differentiated = {p.stage for p in passes if p.phase != "forward"}
        total = 0.0
        for stage in stages:
            sizes = [max(self._graph[i].size(axis) for i in stage.targets(self._graph)) for axis in (0, 1)]
            shape = (min(sizes[0], _USUAL_SIDE_PX), min(sizes[1], _USUAL_SIDE_PX))
            cost = self._costs.of(stage, shape, backward=stage.index in differentiated)
            total += sum(_sweep_seconds(cost, p) for p in passes if p.stage == stage.index)
        return total

    def keeping(self, kept: frozenset[int]) -> _Option:
        """The fastest option that keeps these fields. Raises `BudgetError` if there is none."""
        stages = split_stages(self._graph, kept)
        passes = make_passes(self._graph, stages, backward=self._backward)
        options = []
        refusal: BudgetError | None = None
        for workers in dict.fromkeys((self._machine.threads, 1)):
            try:
                options.append(self._fit(kept, stages, passes, workers))
            except BudgetError as error:
                refusal = error  # of the last, which is the leanest
        if not options:
            assert refusal is not None
            raise refusal
        return min(options, key=lambda option: option.seconds)

    def _fit(self, kept: frozenset[int], stages: tuple[Stage, ...], passes: tuple[Pass, ...], workers: int) -> _Option:
        """For each stage the fastest tile that fits beside the others' needs. Raises `BudgetError` if one has none."""
        graph, limits = self._graph, self._limits
        # Each worker's crop, two being read, and with several workers one more in the queue.
        crops_ahead = workers + 2 + (workers > 1)
        gradient_bytes = _gradient_bytes(graph, backward=self._backward)
        fixed = limits.fixed_bytes + gradient_bytes + whole_field_bytes(graph, backward=self._backward)
        held = bytes_by_pass(graph, stages, passes)
        seconds = self._costs.whole_seconds(backward=self._backward)
        peak, most_ahead, most_working, chosen = fixed, 0, 0, list[StagePlan]()
        for stage in stages:
            sweeps = [index for index, p in enumerate(passes) if p.stage == stage.index]
            differentiates = any(passes[index].phase != "forward" for index in sweeps)
            working = _working_bytes(graph, stage, workers, backward=differentiates)
            standing = fixed + working + max((held[index] for index in sweeps), default=0)

            def total(cost: TileCost, standing: int = standing) -> int:
                tiles = int(workers * cost.plan.tile_peak_bytes * _ALLOCATOR_SLACK)
                return standing + crops_ahead * cost.crop_bytes + tiles

            forced = self._tiles
            shapes = [forced[min(stage.index, len(forced) - 1)]] if forced else candidates(graph, stage)
            costed = [self._costs.of(stage, shape, backward=differentiates) for shape in shapes]
            budget = limits.budget_bytes
            fitting = [cost for cost in costed if budget is None or total(cost) <= budget]
            if not fitting:
                assert budget is not None
                raise _refusal(stage, min(costed, key=total), standing, total(min(costed, key=total)), budget)
            rated = [
                (
                    sum(_sweep_seconds(cost, passes[index]) for index in sweeps)
                    / self._machine.speedup(workers, cost.plan.tile_count),
                    cost,
                )
                for cost in fitting
            ]
            stage_seconds, best = min(rated, key=lambda pair: pair[0])
            seconds += stage_seconds
            peak, most_ahead = max(peak, total(best)), max(most_ahead, crops_ahead * best.crop_bytes)
            most_working = max(most_working, working)
            known = stage_seconds if self._machine.model is not None else None
            chosen.append(dataclasses.replace(best.plan, index=stage.index, seconds=known))
        return _Option(
            workers,
            kept,
            tuple(chosen),
            passes,
            seconds,
            gradient_bytes + most_working,
            max(held, default=0),
            most_ahead,
            peak,
        )


def _sweep_seconds(cost: TileCost, step: Pass) -> float:
    return cost.forward_seconds if step.phase == "forward" else cost.seconds


def _refusal(stage: Stage, leanest: TileCost, standing: int, needed: int, budget: int) -> BudgetError:
    plan = leanest.plan
    return BudgetError(
        f"stage {stage.index} does not fit: its leanest tile, {plan.tile[0]} x {plan.tile[1]} px with a "
        f"crop of {plan.crop[0]} x {plan.crop[1]} px, works on {plan.tile_peak_bytes:,} bytes beside "
        f"{standing:,} bytes for the process, the parameters, the readers and the fields that are kept",
        budget_bytes=budget,
        needed_bytes=needed,
        smallest_bytes=_roomy(needed),
    )


def _roomy(needed_bytes: int) -> int:
    """A budget to recommend: with room to spare, because a process never has the same size twice, and rounded up to a
    number that survives being printed with three digits and typed in again.
    """
    step = max(16 * 2**20, 1 << (needed_bytes.bit_length() - 6))
    return -(-(needed_bytes + _ROOM_BYTES) // step) * step


def _gradient_bytes(graph: Graph, *, backward: bool) -> int:
    """The gradients of all parameters, and the global values made from parameters and sums."""
    total = 0
    for node in graph.nodes:
        if node.op == "parameter":
            total += max(node.nbytes, 4 * prod(node.shape)) if backward and node.differentiable else 0
        elif not (node.is_field or node.is_source or node.whole):
            total += node.nbytes
    return total


def _working_bytes(graph: Graph, stage: Stage, workers: int, *, backward: bool) -> int:
    """Of every global that a stage reads: its copy in working layout and, where it has one, the float64 sum of its
    gradient and the contributions of the tiles at work and of one that is done.
    """
    contributions = workers + (workers > 1)
    total = 0
    for i in stage.globals:
        node = graph[i]
        total += node.nbytes if len(node.shape) == 4 else 0
        if backward and node.differentiable:
            total += contributions * node.nbytes + 8 * prod(node.shape)
    return total
