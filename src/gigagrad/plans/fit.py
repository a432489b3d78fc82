"""Fit tiles: for fields kept in given tiers, the fastest tile of every stage that fits beside all else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from gigagrad.allowances import HEAP_TOP_BYTES
from gigagrad.errors import BudgetError
from gigagrad.plans import estimate
from gigagrad.plans.cost import Costs, TileCost, tile_shapes
from gigagrad.plans.estimate import StageEstimate
from gigagrad.plans.liveness import held_by_pass
from gigagrad.plans.memory import whole_compiled_convolutions
from gigagrad.plans.plan import Amount, RankPlan, StagePlan, amount_of, total
from gigagrad.plans.problem import Problem
from gigagrad.plans.program import Tiles
from gigagrad.plans.schedule import make_passes
from gigagrad.plans.stages import Stage, split_stages
from gigagrad.stores import Tier

ABOUT_AS_FAST = 1.1
"""Times that differ by less are alike, as far as rates can tell."""
_GIVEN_BACK = 0.4
"""Share of what a tile takes that it touches anew where nothing may be held between tiles (by page faults of the
paper's network 0.37 and 0.39 on a Xeon with AMX)."""
_TOO_LARGE_IN_A_ROW = 3
"""Tile shapes in a row that do not fit, after smaller ones that do, until no larger one is looked at."""

_ROUNDS = 12
"""So often shapes that were chosen by a tile in the middle are costed exactly; then one of those that were must do."""
_CAPS = 8
"""Steps from the most that may be compiled to the least; refining near the best gains nothing in 52 of 54 budgets."""

Kept = Mapping[int, str]
"""The fields kept, and the tier of each by name."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to run all stages, and the seconds that a step takes by the cost model."""

    workers: int
    readers: int
    kept: Kept
    stages: tuple[StagePlan, ...]
    passes: tuple[Tiles, ...]
    seconds: float
    fixed: tuple[Amount, ...]
    elsewhere: tuple[Amount, ...]
    """Peak bytes of the fields in each of the other tiers."""


class Fitter:
    """Fits tiles for one problem. `tiles` forces their shapes: one for each stage, the last serves the rest. `ranks`:
    what one of several ranks holds and sends at most.
    """

    def __init__(
        self, problem: Problem, costs: Costs, tiles: tuple[tuple[int, int], ...] | None, ranks: RankPlan | None = None
    ) -> None:
        self._problem, self._costs, self._tiles, self._ranks = problem, costs, tiles, ranks
        self._held_share = 1.0 if ranks is None else ranks.held_share
        self._fixed = estimate.fixed_amounts(problem, 0 if ranks is None else ranks.message_bytes)
        self._orders: dict[frozenset[int], tuple[tuple[Stage, ...], tuple[Tiles, ...]]] = {}

    def unbounded(self) -> Fitter:
        """Return a fitter for a machine with all the memory it needs."""
        return Fitter(dataclasses.replace(self._problem, budget_bytes=None), self._costs, self._tiles, self._ranks)

    def least_bytes(self, kept: Kept) -> int:
        """Count what these fields take in memory with their cotangents, without any tile: found quickly."""
        return total(self._fixed) + self._most_held(kept, self._problem.memory)

    def has_room(self, kept: Kept) -> bool:
        """Say whether the fields fit in the other tiers: found quickly, too."""
        return all(self._most_held(kept, tier) <= self._room(tier) for tier in self._problem.tiers[1:])

    def in_memory(self, kept: Iterable[int]) -> Kept:
        return dict.fromkeys(kept, self._problem.memory.name)

    def _room(self, tier: Tier) -> int:
        return self._problem.rooms.get(tier.name, 0)

    def _most_held(self, kept: Kept, tier: Tier) -> int:
        order = self._order(frozenset(kept))
        return max(map(sum, held_by_pass(self._problem, *order, kept, tier, self._held_share)), default=0)

    def _order(self, kept: frozenset[int]) -> tuple[tuple[Stage, ...], tuple[Tiles, ...]]:
        """Return the stages that fields split a graph into, wherever they are kept, and their passes."""
        if kept not in self._orders:
            stages = split_stages(self._problem.graph, kept)
            passes = make_passes(self._problem.graph, stages, backward=self._problem.backward)
            self._orders[kept] = stages, passes
        return self._orders[kept]

    def fit(self, kept: Kept, *, closely: bool = False) -> Candidate:
        """Return the fastest candidate that keeps these fields in these tiers, of promising tiles; `closely`: of all.

        Raises `BudgetError` if there is none; only a close look finds the least budget that works.
        """
        problem = self._problem
        stages, passes = self._order(frozenset(kept))
        elsewhere = []
        for tier in problem.tiers[1:]:
            elsewhere.append(Amount(tier.name, self._most_held(kept, tier)))
            self._check(tier, elsewhere[-1].size_bytes, kept)
        candidates = []
        refusal: BudgetError | None = None
        for workers in dict.fromkeys((problem.machine.threads, 1)):
            try:
                candidates.append(self._fit(kept, stages, passes, workers, tuple(elsewhere), closely=closely))
            except BudgetError as error:
                refusal = error  # of the last, which is the leanest
        if not candidates:
            assert refusal is not None
            raise refusal
        return min(candidates, key=lambda candidate: candidate.seconds)

    def _check(self, tier: Tier, tier_bytes: int, kept: Kept) -> None:
        """Raises BudgetError, with the memory that would do instead, if a tier has too little room."""
        if tier_bytes > self._room(tier):
            candidate = self.unbounded().fit(self.in_memory(kept))
            raise self._problem.tier_refusal(tier, tier_bytes, peak_bytes(candidate))

    def _fit(
        self,
        kept: Kept,
        stages: tuple[Stage, ...],
        passes: tuple[Tiles, ...],
        workers: int,
        elsewhere: tuple[Amount, ...],
        *,
        closely: bool,
    ) -> Candidate:
        """Find for each stage the fastest tile that fits beside the others' needs. Raises `BudgetError` if one has
        none.
        """
        problem = self._problem
        held = held_by_pass(problem, stages, passes, kept, problem.memory, self._held_share)
        all_shapes = []
        for stage in stages:
            indices = [index for index, p in enumerate(passes) if p.stage == stage.index]
            phases = [passes[index].phase for index in indices]
            most = max((held[index] for index in indices), key=sum, default=(0, 0))
            backward = any(phase != "forward" for phase in phases)
            stage_estimate = StageEstimate(problem, stage, workers, kept, most, backward)
            all_shapes.append(self._tile_shapes(stage_estimate, phases, closely=closely))
        chosen, compiled = self._settle(all_shapes)
        fixed = (*self._fixed, Amount(estimate.COMPILED, compiled))
        all_shapes, readers = self._with_readers(all_shapes, chosen, total(fixed))
        described = tuple(shapes.describe(cost) for shapes, cost in zip(all_shapes, chosen, strict=True))
        seconds = self._costs.whole_seconds(backward=problem.backward, on_host=problem.device == "cpu")
        seconds += sum(shapes.seconds(cost) for shapes, cost in zip(all_shapes, chosen, strict=True))
        if chosen:
            peak = total(fixed) + max(total(stage.memory) for stage in described)
            tiles = max(amount_of(stage.memory, estimate.TILES) for stage in described)
            copies = estimate.weights(problem, stages, peak + estimate.useful_allocator_cache_bytes(tiles))
            fixed, peak = (*fixed, copies), peak + copies.size_bytes
            fixed = (*fixed, estimate.allocator_cache(problem, peak, tiles))
        return Candidate(workers, readers, kept, described, passes, seconds, fixed, elsewhere)

    def _with_readers(
        self, all_shapes: list[_TileShapes], chosen: list[TileCost], fixed_bytes: int
    ) -> tuple[list[_TileShapes], int]:
        """Return the tiles that were chosen, read by as many threads as they can feed and the budget has room for."""
        budget_bytes = self._problem.budget_bytes
        pairs = list(zip(all_shapes, chosen, strict=True))
        for readers in range(max((shapes.readers(cost) for shapes, cost in pairs), default=1), 0, -1):
            read = [shapes.read_by(readers) for shapes in all_shapes]
            peak = fixed_bytes + max((shapes.total(cost) for shapes, cost in zip(read, chosen, strict=True)), default=0)
            if budget_bytes is None or peak <= budget_bytes:
                break
        return read, readers

    def _tile_shapes(self, stage_estimate: StageEstimate, phases: list[str], *, closely: bool) -> _TileShapes:
        """Return the tile shapes that may serve a stage, as far as a tile in the middle tells; `closely`, or where
        shapes are forced, exactly.
        """
        budget_bytes, closely = self._problem.budget_bytes, closely or self._tiles is not None
        room = None if budget_bytes is None else budget_bytes - total(self._fixed)
        costs = self._looked_through(stage_estimate, room, roughly=not closely)
        exact = {cost.tile for cost in costs} if closely else set()
        return _TileShapes(stage_estimate, phases, costs, room, exact, self._problem.reading.threads)

    def _settle(self, all_shapes: list[_TileShapes]) -> tuple[list[TileCost], int]:
        """Choose tiles until all that are chosen have been costed exactly: no more are than look worth it.

        Raises `BudgetError` if there is none.
        """
        for _ in range(_ROUNDS):
            chosen, compiled = self._choose(all_shapes)
            rough = [(t, cost) for t, cost in zip(all_shapes, chosen, strict=True) if cost.tile not in t.exact]
            if not rough:
                return chosen, compiled
            for shapes, cost in rough:
                shapes.learn(self._costs.of(shapes.estimate.stage, cost.tile, backward=shapes.estimate.backward))
        for shapes in all_shapes:
            shapes.forget_rough()
        return self._choose(all_shapes)

    def _looked_through(self, stage_estimate: StageEstimate, room: int | None, *, roughly: bool) -> list[TileCost]:
        """Return costs of tile shapes, from the smallest on; behind those that fit only a few more."""
        forced, stage = self._tiles, stage_estimate.stage
        shapes = (
            [forced[min(stage.index, len(forced) - 1)]]
            if forced
            else tile_shapes(self._problem.graph, stage, self._problem.ranks)
        )
        found: list[TileCost] = []
        fit: list[bool] = []
        for shape in shapes:
            found.append(self._costs.of(stage, shape, backward=stage_estimate.backward, roughly=roughly))
            fit.append(room is None or total(stage_estimate.amounts(found[-1])) <= room)
            if any(fit) and not any(fit[-_TOO_LARGE_IN_A_ROW:]):
                break
        return found

    def _choose(self, all_shapes: list[_TileShapes]) -> tuple[list[TileCost], int]:
        """Return tiles for every stage, and the bytes that all their convolutions are compiled to, beside every stage.

        What is compiled leaves less room for the tiles of every stage, so several caps of it are tried, from the most
        that any choice compiles to down to what the leanest do. Raises `BudgetError` if the leanest do not fit.
        """
        problem, fixed = self._problem, total(self._fixed)
        on_whole_fields = whole_compiled_convolutions(problem.graph, backward=problem.backward)

        def compiled_bytes(by_stage: Iterable[int]) -> int:
            return problem.compiled_bytes(on_whole_fields + sum(by_stage))

        most = sum(max(cost.compiled for cost in shapes.costs) for shapes in all_shapes)
        if problem.budget_bytes is None:
            chosen = [shapes.by_speed(None)[0] for shapes in all_shapes]
            return chosen, compiled_bytes(cost.compiled for cost in chosen)
        room = problem.budget_bytes - fixed
        needed, least = _leanest(all_shapes, compiled_bytes)
        if needed > room:
            raise problem.refusal(self._what_does_not_fit(all_shapes), fixed + needed)
        choices = [shapes.choices() for shapes in all_shapes]
        fastest = sum(min(choice.seconds for choice in each) for each in choices)

        candidates = []
        step = max(1, -(-(most - least) // _CAPS))
        for cap in (*range(most, least, -step), least):
            found = _fastest_within(choices, room - compiled_bytes([cap]), cap)
            if found is not None:
                candidates.append((sum(choice.seconds for choice in found), found))
                if candidates[-1][0] <= fastest:
                    break
        _, best = min(candidates, key=lambda candidate: candidate[0])
        chosen = [choice.cost for choice in best]
        return chosen, compiled_bytes(cost.compiled for cost in chosen)

    def _what_does_not_fit(self, all_shapes: list[_TileShapes]) -> str:
        if not all_shapes:
            whole = amount_of(self._fixed, estimate.WHOLE)
            return (
                f"operators that run on whole fields do not fit: they make {whole:,} bytes beside "
                f"{total(self._fixed) - whole:,} bytes for the process, the parameters and the readers"
            )
        leanest_of = {shapes: min(shapes.costs, key=shapes.total) for shapes in all_shapes}
        # What does for it does for all.
        hungriest = max(all_shapes, key=lambda shapes: shapes.total(leanest_of[shapes]))
        leanest = leanest_of[hungriest]
        tiles = leanest.tile_peak_bytes
        beside = total(self._fixed) + hungriest.total(leanest) - tiles
        return (
            f"stage {hungriest.estimate.stage.index} does not fit: its leanest tile, {leanest.tile[0]} x "
            f"{leanest.tile[1]} px with a crop of {leanest.crop[0]} x {leanest.crop[1]} px, works on {tiles:,} bytes "
            f"beside {beside:,} bytes for the process, the parameters, the readers and the fields that are kept"
        )


def _leanest(all_shapes: list[_TileShapes], compiled_bytes: Callable[[Iterable[int]], int]) -> tuple[int, int]:
    """Return the least memory that will do, and how many kernels convolutions may then be compiled to in all.

    All stages share what is compiled, so with smaller tiles for one of them, in more shapes, all of them need more.
    """
    if not all_shapes:
        return compiled_bytes(()), 0
    found = []
    caps: dict[int, int] = {}
    tiles = [(shapes.total(cost), cost.compiled, i) for i, shapes in enumerate(all_shapes) for cost in shapes.costs]
    for size, compiled, i in sorted(tiles):
        if compiled < caps.get(i, compiled + 1):
            caps[i] = compiled
            if len(caps) == len(all_shapes):
                found.append((size + compiled_bytes(caps.values()), sum(caps.values())))
    return min(found)


class _TileChoice(NamedTuple):
    """A tile shape for a stage."""

    seconds: float
    size_bytes: int
    compiled: int
    cost: TileCost


def _fastest_within(choices: list[list[_TileChoice]], room: int, most_compiled: int) -> list[_TileChoice] | None:
    """Return one choice for each stage that fits in `room` bytes, with no more compiled kernels in all; None if there
    are none.

    Greedy: from those that compile to least on, always the step that saves the most seconds for a kernel.
    """
    frontiers = [_frontier(each, room) for each in choices]
    if not all(frontiers):
        return None
    taken = [0] * len(frontiers)
    left = most_compiled - sum(frontier[0].compiled for frontier in frontiers)
    if left < 0:
        return None
    heap = [(_worth(frontier, 0), i) for i, frontier in enumerate(frontiers) if len(frontier) > 1]
    heapify(heap)
    while heap:
        _, i = heappop(heap)
        now, further = frontiers[i][taken[i] : taken[i] + 2]
        if further.compiled - now.compiled <= left:
            left -= further.compiled - now.compiled
            taken[i] += 1
            if taken[i] + 1 < len(frontiers[i]):
                heappush(heap, (_worth(frontiers[i], taken[i]), i))
    return [frontier[index] for frontier, index in zip(frontiers, taken, strict=True)]


def _frontier(choices: list[_TileChoice], room: int) -> list[_TileChoice]:
    """Return those that fit, from the fewest kernels to the most, each faster than those before: on the convex hull."""
    hull: list[_TileChoice] = []
    for choice in sorted(
        (each for each in choices if each.size_bytes <= room), key=lambda each: (each.compiled, each.seconds)
    ):
        if hull and choice.seconds >= hull[-1].seconds:
            continue
        while len(hull) > 1 and _worth([hull[-2], choice], 0) <= _worth(hull, len(hull) - 2):
            hull.pop()
        hull.append(choice)
    return hull


def _worth(frontier: list[_TileChoice], index: int) -> float:
    """Return the seconds that a step along a frontier adds for a kernel: below 0."""
    now, further = frontier[index : index + 2]
    return (further.seconds - now.seconds) / (further.compiled - now.compiled)


def peak_bytes(candidate: Candidate) -> int:
    return total(candidate.fixed) + max((total(stage.memory) for stage in candidate.stages), default=0)


@dataclass(frozen=True, eq=False)
class _TileShapes:
    """The tile shapes that may serve one stage."""

    estimate: StageEstimate
    phases: list[str]
    costs: list[TileCost]
    room: int | None
    """Bytes beside what is fixed, but for compiled convolutions."""
    exact: set[tuple[int, int]]
    """The shapes that were costed exactly."""
    most_readers: int
    """While tiles are chosen, time is that of so many; their crops are counted once it is known how many there are."""
    known: dict[TileCost, _TileChoice] = field(default_factory=dict)

    def learn(self, exact: TileCost) -> None:
        """Replace what a tile in the middle told of a shape by its exact cost."""
        self.costs[[cost.tile for cost in self.costs].index(exact.tile)] = exact
        self.exact.add(exact.tile)

    def forget_rough(self) -> None:
        self.costs[:] = [cost for cost in self.costs if cost.tile in self.exact]

    def choices(self) -> list[_TileChoice]:
        for cost in self.costs:
            if cost not in self.known:
                self.known[cost] = _TileChoice(self.seconds(cost), self.total(cost), cost.compiled, cost)
        return [self.known[cost] for cost in self.costs]

    def by_speed(self, room: int | None) -> list[TileCost]:
        """Return the tiles that fit in so many bytes, the fastest first; where memory is no matter, first of all the
        leanest of those that are about as fast.
        """
        costs = sorted(self.costs, key=self.seconds)
        if room is not None:
            return [cost for cost in costs if self.total(cost) <= room]
        good_enough = ABOUT_AS_FAST * self.seconds(costs[0])
        return sorted(costs, key=lambda cost: self.total(cost) if self.seconds(cost) <= good_enough else math.inf)

    def total(self, cost: TileCost) -> int:
        return total(self.estimate.amounts(cost))

    def describe(self, cost: TileCost) -> StagePlan:
        stage = self.estimate.stage
        return StagePlan(
            computes=stage,
            tile=cost.tile,
            tiles=cost.tiles,
            crop=cost.crop,
            computed_ratio=cost.computed_ratio,
            tile_peak_bytes=cost.tile_peak_bytes,
            largest_block_bytes=cost.largest_block_bytes,
            parts=self.estimate.parts,
            memory=self.estimate.amounts(cost),
            beside_bytes=self.estimate.mapped_bytes(cost),
            forward_seconds=self._pass_seconds(cost, "forward"),
            backward_seconds=self._pass_seconds(cost, "backward") if self.estimate.backward else 0.0,
        )

    def read_by(self, readers: int) -> _TileShapes:
        """Return these tiles with so many readers and their crops."""
        stage_estimate = dataclasses.replace(self.estimate, readers=readers, _counted={})
        return dataclasses.replace(self, estimate=stage_estimate, most_readers=readers, known={})

    def readers(self, cost: TileCost) -> int:
        """Return the number of threads that these tiles can feed."""
        reading, seconds = self.estimate.problem.reading, self._reading_seconds(cost)
        return max(reading.readers(seconds, self._processing_and_tiers(cost, phase)[0]) for phase in self.phases)

    def seconds(self, cost: TileCost) -> float:
        return sum(self._pass_seconds(cost, phase) for phase in self.phases)

    def _pass_seconds(self, cost: TileCost, phase: str) -> float:
        """Predict one pass. Tiers and images are read ahead, and tiles written behind: the slowest link counts, or the
        processor.
        """
        processing, tiers = self._processing_and_tiers(cost, phase)
        reading = self.estimate.problem.reading
        return max(tiers, reading.pass_seconds(self._reading_seconds(cost), processing, self.most_readers))

    def _processing_and_tiers(self, cost: TileCost, phase: str) -> tuple[float, float]:
        """Predict what computing tiles takes, with what tiers ask of the same cores, and what the slowest tier takes.

        What tiles take in memory beyond what a heap holds is new to the first of them, and some of it to all others
        where too little may be held between them.
        """
        problem = self.estimate.problem
        computing = cost.forward_seconds if phase == "forward" else cost.backward_seconds
        calls = cost.forward_calls if phase == "forward" else cost.backward_calls
        count = self._tiles_of_most(cost)
        share = count / cost.tile_count
        processing = problem.machine.wall_seconds(share * computing, share * calls, self.estimate.workers, count)
        new = max(0, self.estimate.workers * cost.tile_peak_bytes - HEAP_TOP_BYTES)
        processing += problem.machine.page_seconds(new + count * self._given_back_bytes(cost))
        links = [0.0]
        for tier in problem.tiers[1:]:
            moved = count * self._moved_bytes(cost, phase, tier)
            processing += tier.processor_seconds(moved, problem.machine)
            links.append(tier.link_seconds(moved, problem.machine))
        return processing, max(links)

    def _reading_seconds(self, cost: TileCost) -> float:
        """Predict what one thread takes to read the images for the tiles of the rank that has most."""
        problem = self.estimate.problem
        seconds = problem.reading.seconds_of(problem.graph, self.estimate.stage)
        return seconds * self._tiles_of_most(cost) / cost.tile_count

    def _tiles_of_most(self, cost: TileCost) -> int:
        """Return the number of tiles of the rank that has most."""
        return -(-cost.tile_count // self.estimate.problem.ranks)

    def _given_back_bytes(self, cost: TileCost) -> float:
        """Predict the bytes of one tile whose pages are new to it."""
        if self.room is None:
            return 0.0
        useful = estimate.useful_allocator_cache_bytes(self.estimate.workers * cost.tile_peak_bytes)
        held = min(max(self.room - self.total(cost), 0), useful)
        return _GIVEN_BACK * (1 - held / useful) * cost.tile_peak_bytes

    def _moved_bytes(self, cost: TileCost, phase: str, tier: Tier) -> float:
        """Return the bytes that one tile of a pass reads from and writes to a tier."""
        stage_estimate, stage = self.estimate, self.estimate.stage
        problem, graph = stage_estimate.problem, stage_estimate.problem.graph

        def moved(fields: Iterable[int], *, cotangents: bool = False) -> float:
            found = 0.0
            for i in fields:
                if stage_estimate.kept.get(i) == tier.name:
                    pixel = graph[i].bytes_per_pixel if cotangents else problem.stored_bytes_per_pixel(i, tier)
                    size = graph[i].size(0), graph[i].size(1)
                    found += tier.crop_bytes(size, cost.crops.get(i, (0, 0)), pixel)
            return found

        values = moved(stage.reads) + moved(stage.kept)
        if phase == "forward":
            return values
        # What the reductions need of a share comes with its cotangent; a cotangent is added to what is there.
        added = [i for i in stage.reads if graph[i].differentiable]
        return values + moved(stage.kept, cotangents=True) + 2 * moved(added, cotangents=True)
