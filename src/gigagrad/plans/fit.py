"""Fit tiles: for fields kept in given tiers, the fastest tile of every segment that fits beside all else."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush
from math import inf

from gigagrad.allowances import ROOM_BYTES
from gigagrad.errors import BudgetError
from gigagrad.graphs import GATHER, Node
from gigagrad.plans import estimate
from gigagrad.plans.cost import Costs, TileCost, segment_key
from gigagrad.plans.estimate import SegmentTiles, TileChoice
from gigagrad.plans.geometry import reference
from gigagrad.plans.liveness import held_by_pass, kept_bytes
from gigagrad.plans.memory import whole_compiled_convolutions
from gigagrad.plans.plan import EXACT, Amount, KeptField, Plan, RankPlan, SegmentPlan, WholeField, amount_of, total
from gigagrad.plans.problem import Problem
from gigagrad.plans.program import Tiles
from gigagrad.plans.saving import Savable, with_saved, worth_saving
from gigagrad.plans.segments import Segment, make_passes, split_segments
from gigagrad.stores import Tier

_TOO_LARGE_IN_A_ROW = 3
"""Tile shapes in a row that do not fit, after smaller ones that do, until no larger one is looked at."""
_FIRST_LOOK = 2
"""Every such tile shape is looked at first; its neighbours are where it would be taken."""

_ROUNDS = 12
"""So often shapes that were chosen by a tile in the middle are costed exactly; then one of those that were must do."""
_CAPS = 8
"""Steps from the most that may be compiled to the least; refining near the best gains nothing in 52 of 54 budgets."""

Kept = Mapping[int, str]
"""The fields kept, and the tier of each by name."""


class Fitter:
    """Fits tiles for one problem. `tiles` forces their shapes: one for each segment, the last serves the rest; `saved`
    how many of each segment are saved. `ranks`: what one of several ranks holds and sends at most. Plans have no
    buffers among their steps yet, so that their segments count what is kept.
    """

    def __init__(
        self,
        problem: Problem,
        costs: Costs,
        tiles: tuple[tuple[int, int], ...] | None,
        ranks: RankPlan | None = None,
        saved: tuple[int, ...] | None = None,
    ) -> None:
        self._problem, self._costs, self._tiles, self._ranks = problem, costs, tiles, ranks
        self._saved = saved
        self._held_share = 1.0 if ranks is None else ranks.held_share
        self._fixed = estimate.fixed_amounts(problem, 0 if ranks is None else ranks.message_bytes)
        budget = problem.budget_bytes
        self._compiled_on_whole = whole_compiled_convolutions(problem.graph, backward=problem.backward)
        self._room_of_tiles = None if budget is None else budget - total(self._fixed)
        self._orders: dict[frozenset[int], tuple[tuple[Segment, ...], tuple[Tiles, ...]]] = {}
        self._held_in: dict[tuple[frozenset[tuple[int, str]], str], list[tuple[int, int]]] = {}
        self._known: dict[tuple[object, ...], SegmentTiles] = {}

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
        return max(map(sum, self._held(kept, tier)), default=0)

    def _held(self, kept: Kept, tier: Tier) -> list[tuple[int, int]]:
        """Return the bytes of fields and of cotangents in a tier during every pass."""
        key = frozenset(kept.items()), tier.name
        if key not in self._held_in:
            order = self._order(frozenset(kept))
            self._held_in[key] = held_by_pass(self._problem, *order, kept, tier, self._held_share)
        return self._held_in[key]

    def _order(self, kept: frozenset[int]) -> tuple[tuple[Segment, ...], tuple[Tiles, ...]]:
        """Return the segments that fields split a graph into, wherever they are kept, and their passes."""
        if kept not in self._orders:
            segments = split_segments(self._problem.graph, kept)
            passes = make_passes(self._problem.graph, segments, backward=self._problem.backward)
            self._orders[kept] = segments, passes
        return self._orders[kept]

    def fit(self, kept: Kept, *, closely: bool = False, below: float = inf) -> Plan:
        """Return the fastest plan that keeps these fields in these tiers, of promising tiles; `closely`: of all, and
        refused as soon as one segment needs no less than `below` bytes.

        Raises `BudgetError` if there is none; only a close look finds the least budget that works. Where another tier
        has too little room, it names the memory that would do instead.
        """
        plan = self._fastest(kept, closely=closely, below=below)
        assert plan is not None
        return plan

    def rough_seconds(self, kept: Kept, *, workers: int | None = None, at_most: float = inf) -> float:
        """Return the seconds of such a plan as far as tiles in the middle tell, so that it may not fit after all, so
        many side by side where `workers` says; infinitely many, and soon, where it takes more than `at_most`.

        Raises `BudgetError` as `fit` does.
        """
        plan = self._fastest(kept, workers, roughly=True, at_most=at_most)
        return inf if plan is None else plan.modelled_seconds

    def _fastest(
        self,
        kept: Kept,
        workers: int | None = None,
        *,
        closely: bool = False,
        roughly: bool = False,
        below: float = inf,
        at_most: float = inf,
    ) -> Plan | None:
        """Return the fastest plan; None where all that fit are slower than `at_most` seconds."""
        problem = self._problem
        for tier in problem.tiers[1:]:
            if (tier_bytes := self._most_held(kept, tier)) > self._room(tier):
                needed_bytes = self.unbounded().fit(self.in_memory(kept)).predicted_peak_bytes
                raise problem.tier_refusal(tier, tier_bytes, needed_bytes)
        plans: list[Plan] = []
        asked, refused = workers or problem.workers, 0
        ways = dict.fromkeys((problem.machine.threads, 1) if asked is None else (asked,))
        for workers in ways:
            fastest = min((plan.modelled_seconds for plan in plans), default=at_most)
            is_last = refused == len(ways) - 1  # the leanest, whose refusal is the one that counts
            most = below if is_last or problem.budget_bytes is None else min(below, problem.budget_bytes + 1)
            try:
                plan = self._fit(kept, workers, closely=closely, roughly=roughly, fastest=fastest, below=most)
            except BudgetError:
                if is_last:
                    raise
                refused += 1
            else:
                plans += [plan] if plan is not None else []
        return min(plans, key=lambda plan: plan.modelled_seconds, default=None)

    def _fit(
        self, kept: Kept, workers: int, *, closely: bool, roughly: bool, fastest: float, below: float
    ) -> Plan | None:
        """Find for each segment the fastest tile that fits beside the others' needs. Raises `BudgetError` if one has
        none. None where a rough look tells that it takes more than the seconds of the `fastest` that is known.
        """
        problem, (segments, passes) = self._problem, self._order(frozenset(kept))
        held = self._held(kept, problem.memory)
        own = defaultdict[int, list[tuple[str, tuple[int, int]]]](list)
        for one, taken in zip(passes, held, strict=True):
            own[one.segment].append((one.phase, taken))
        found, least = dict[int, SegmentTiles](), 0.0  # those that take longest first
        for each in sorted(segments, key=lambda s: -len(s.fields)):
            found[each.index] = self._shapes_of(each, workers, kept, own[each.index], closely=False)
            least += found[each.index].least_seconds if fastest < inf else 0.0
            if least > fastest:
                return None
        all_shapes = [found[each.index] for each in segments]
        if closely:
            self._see_that_leanest_fit(all_shapes, below)
            all_shapes = [self._shapes_of(each, workers, kept, own[each.index], closely=True) for each in segments]
        chosen, compiled = self._choose(all_shapes)
        if sum(shapes.seconds(cost) for shapes, cost in zip(all_shapes, chosen, strict=True)) > fastest:
            return None
        if not roughly:
            chosen, compiled = self._settle(all_shapes, chosen, compiled)
        fixed = (*self._fixed, Amount(estimate.COMPILED, compiled))
        readers = self._set_readers(all_shapes, chosen, total(fixed))
        described = tuple(shapes.describe(cost) for shapes, cost in zip(all_shapes, chosen, strict=True))
        if chosen:
            peak = total(fixed) + max(total(segment.memory) for segment in described)
            tiles = max(amount_of(segment.memory, estimate.TILES) for segment in described)
            copies = estimate.weights(problem, segments, peak + estimate.useful_allocator_cache_bytes(tiles))
            fixed, peak = (*fixed, copies), peak + copies.size_bytes
            fixed = (*fixed, estimate.allocator_cache(problem, peak, tiles))
            described = self._saving(described, [s.savable(c) for s, c in zip(all_shapes, chosen, strict=True)], fixed)
        whole = [node for node in problem.graph.nodes if node.whole and node.op not in (GATHER, "gigagrad.item")]
        return Plan(
            image_shape=problem.image_shape,
            device=problem.device,
            memory_format="contiguous",
            workers=workers,
            threads=1 if workers > 1 else problem.machine.threads,
            segments=described,
            steps=passes,
            kept=tuple(_kept_field(problem, i, problem.tier(kept[i])) for i in sorted(kept)),
            whole_field=tuple(WholeField(node.operator, node.origin.module_path, node.nbytes) for node in whole),
            budget_bytes=problem.budget_bytes,
            fixed=fixed,
            whole_seconds=self._costs.whole_seconds(backward=problem.backward, on_host=problem.device == "cpu")
            + problem.image_bytes / problem.machine.copy_bytes_per_second,
            readers=readers,
        )

    def _saving(
        self, segments: tuple[SegmentPlan, ...], savable: list[Savable | None], fixed: tuple[Amount, ...]
    ) -> tuple[SegmentPlan, ...]:
        """Have segments save the tiles that there is room for, of those that were named or are worth it. The latter
        leave some, as a process grows from step to step; without a budget, half of what is free.
        """
        problem = self._problem
        room = problem.room_bytes
        if room is None:
            return segments
        room -= total(fixed) + (0 if problem.budget_bytes is not None else (problem.free_bytes or 0) // 2)
        if self._saved is not None and len(self._saved) == len(segments):
            return with_saved(segments, savable, self._saved, room)
        return with_saved(segments, savable, worth_saving(segments, savable), room - ROOM_BYTES)

    def _set_readers(self, all_shapes: list[SegmentTiles], chosen: list[TileCost], fixed_bytes: int) -> int:
        """Have the tiles that were chosen read by as many threads as they can feed and the budget has room for."""
        budget_bytes = self._problem.budget_bytes
        pairs = list(zip(all_shapes, chosen, strict=True))
        for readers in range(max((shapes.useful_readers(cost) for shapes, cost in pairs), default=1), 0, -1):
            for shapes in all_shapes:
                shapes.read_by(readers)
            peak = fixed_bytes + max((shapes.total(cost) for shapes, cost in pairs), default=0)
            if budget_bytes is None or peak <= budget_bytes:
                break
        return readers

    def _settle(
        self, all_shapes: list[SegmentTiles], chosen: list[TileCost], compiled: int
    ) -> tuple[list[TileCost], int]:
        """Choose tiles until all that are chosen have been costed exactly, from these on: no more are than look worth
        it.

        Raises `BudgetError` if there is none.
        """
        problem = self._problem
        for _ in range(_ROUNDS):
            rough = [(t, cost) for t, cost in zip(all_shapes, chosen, strict=True) if cost.tile not in t.exact]
            if not rough:
                return chosen, compiled
            for shapes, cost in rough:
                shapes.learn(self._costs.of(shapes.segment, cost.tile, backward=shapes.backward))
                for shape in shapes.neighbours(cost.tile):
                    near = self._costs.of(shapes.segment, shape, backward=shapes.backward, roughly=True)
                    if near.largest_crop_numel <= problem.most_numel:
                        shapes.costs.append(near)
            chosen, compiled = self._choose(all_shapes)
        for shapes in all_shapes:
            shapes.forget_rough()
        return self._choose(all_shapes)

    def _shapes_of(
        self, segment: Segment, workers: int, kept: Kept, passes: list[tuple[str, tuple[int, int]]], closely: bool
    ) -> SegmentTiles:
        """Return the tile shapes that may serve a segment in its passes, of which each has a phase and what is held
        during it. Other choices of fields have most segments in common: what was found for these is found once.
        """
        problem, phases = self._problem, tuple(phase for phase, _ in passes)
        most = max((taken for _, taken in passes), key=sum, default=(0, 0))
        closely = closely or self._tiles is not None
        alike = segment_key(segment), phases, workers, tuple(kept.get(i) for i in (*segment.reads, *segment.kept))
        key = alike, most, closely
        if self._tiles is not None or key not in self._known:
            if alike not in self._known:
                self._known[alike] = SegmentTiles(
                    problem, segment, workers, kept, most, phases, self._room_of_tiles, problem.reading.threads
                )
            found = self._known[key] = self._known[alike].beside(segment, most)
            self._look_through(found, closely=closely)
        return self._known[key].beside(segment, most)

    def _look_through(self, tiles: SegmentTiles, *, closely: bool) -> None:
        """Cost tile shapes that may serve a segment, some as far as one in the middle tells, or all exactly: from the
        smallest on, as far as a few behind those that fit.
        """
        forced, segment = self._tiles, tiles.segment
        shapes = (
            [forced[min(segment.index, len(forced) - 1)]]
            if forced
            else self._costs.shapes(segment, self._problem.ranks)
        )
        tiles.shapes = shapes
        fit: list[bool] = []
        step = 1 if closely else _FIRST_LOOK
        most_in_a_row = -(-_TOO_LARGE_IN_A_ROW // step)
        for shape in shapes[::step]:
            cost = self._costs.of(segment, shape, backward=tiles.backward, roughly=not closely)
            if tiles.costs and cost.largest_crop_numel > self._problem.most_numel:
                break
            tiles.costs.append(cost)
            if closely:
                tiles.exact.add(shape)
            fit.append(tiles.room is None or tiles.total(cost) <= tiles.room)
            if any(fit) and not any(fit[-most_in_a_row:]):
                break

    def _see_that_leanest_fit(self, all_shapes: list[SegmentTiles], below: float) -> None:
        """Raise `BudgetError` where the leanest tiles of a segment, all shapes considered, do not fit, or need no less
        than `below` bytes. Of the segments that need less than others one shape is costed exactly, and hardly more of
        the hungriest.
        """
        problem, fixed = self._problem, total(self._fixed)
        if problem.budget_bytes is None or self._tiles is not None:
            return
        leanest, most = dict[SegmentTiles, TileCost](), 0
        for shapes in sorted(all_shapes, key=lambda shapes: -shapes.least_bytes):
            leanest[shapes] = self._leanest_of(shapes, most)
            most = max(most, shapes.total(leanest[shapes]))
            if fixed + most >= below:
                raise problem.refusal(f"segment {shapes.segment.index} does not fit", fixed + most)
        kernels = sum(cost.compiled for cost in leanest.values())
        compiled = self._compiled_bytes([kernels])
        # Where they are not as many as are ever held, another choice may be compiled to fewer.
        if fixed + most > problem.budget_bytes and compiled == self._compiled_bytes([2 * kernels]):
            told = self._what_does_not_fit({shapes: leanest[shapes] for shapes in all_shapes})
            raise problem.refusal(told, fixed + most + compiled)

    def _leanest_of(self, shapes: SegmentTiles, enough: int) -> TileCost:
        """Return the exact cost of a segment's leanest tiles, or of large ones, which are compiled to few kernels, that
        take no more than is `enough`. Tiles in the middle tell what a shape takes at least.
        """
        problem = self._problem

        def exactly(rough: TileCost) -> TileCost:
            return self._costs.of(shapes.segment, rough.tile, backward=shapes.backward)

        for rough in reversed(shapes.costs):
            if shapes.total(rough) <= enough and shapes.total(cost := exactly(rough)) <= enough:
                return cost
        every = [self._costs.of(shapes.segment, s, backward=shapes.backward, roughly=True) for s in shapes.shapes]
        first, *others = sorted(
            (cost for cost in every if cost is every[0] or cost.largest_crop_numel <= problem.most_numel),
            key=shapes.total,
        )
        found = exactly(first)
        for rough in others:
            if shapes.total(rough) >= shapes.total(found):
                break
            found = min(found, exactly(rough), key=shapes.total)
        return found

    def _compiled_bytes(self, by_segment: Iterable[int]) -> int:
        """Count what the convolutions of all segments are compiled to, beside those on whole fields."""
        return self._problem.compiled_bytes(self._compiled_on_whole + sum(by_segment))

    def _choose(self, all_shapes: list[SegmentTiles]) -> tuple[list[TileCost], int]:
        """Return tiles for every segment, and the bytes that all their convolutions are compiled to, beside every
        segment.

        What is compiled leaves less room for the tiles of every segment, so several caps of it are tried, from the most
        that any choice compiles to down to what the leanest do. Raises `BudgetError` if the leanest do not fit.
        """
        problem, fixed, compiled_bytes = self._problem, total(self._fixed), self._compiled_bytes
        most = sum(max(cost.compiled for cost in shapes.costs) for shapes in all_shapes)
        if problem.budget_bytes is None:
            chosen = [shapes.leanest_of_the_fast() for shapes in all_shapes]
            return chosen, compiled_bytes(cost.compiled for cost in chosen)
        room = problem.budget_bytes - fixed
        needed, least = _leanest(all_shapes, compiled_bytes)
        if needed > room:
            told = self._what_does_not_fit({shapes: min(shapes.costs, key=shapes.total) for shapes in all_shapes})
            raise problem.refusal(told, fixed + needed)
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

    def _what_does_not_fit(self, leanest_of: Mapping[SegmentTiles, TileCost]) -> str:
        if not leanest_of:
            whole = amount_of(self._fixed, estimate.WHOLE)
            return (
                f"operators that run on whole fields do not fit: they make {whole:,} bytes beside "
                f"{total(self._fixed) - whole:,} bytes for the process, the parameters and the readers"
            )
        # What does for it does for all.
        hungriest = max(leanest_of, key=lambda shapes: shapes.total(leanest_of[shapes]))
        leanest = leanest_of[hungriest]
        tiles = leanest.tile_peak_bytes
        beside = total(self._fixed) + hungriest.total(leanest) - tiles
        graph, image = self._problem.graph, self._problem.graph.source("image")
        of_tile = _unit(graph[reference(graph, hungriest.segment)])
        of_crop = "px" if image is None else _unit(image)
        return (
            f"segment {hungriest.segment.index} does not fit: its leanest tile, {leanest.tile[0]} x "
            f"{leanest.tile[1]} {of_tile} with a crop of {leanest.crop[0]} x {leanest.crop[1]} {of_crop}, works on "
            f"{tiles:,} bytes beside {beside:,} bytes for the process, the parameters, the readers and the fields that "
            "are kept"
        )


def _unit(node: Node) -> str:
    """Return what the positions of a field are."""
    return "px" if node.patches is None else "patches"


def _kept_field(problem: Problem, node_id: int, tier: Tier) -> KeptField:
    node = problem.graph[node_id]
    storage = str(problem.rounding) if problem.rounds(node_id, tier) else EXACT
    nbytes = kept_bytes(problem, node_id, tier)
    return KeptField(node_id, tier.name, node.operator, node.origin.module_path, node.shape, nbytes, storage)


def _leanest(all_shapes: list[SegmentTiles], compiled_bytes: Callable[[Iterable[int]], int]) -> tuple[int, int]:
    """Return the least memory that will do, and how many kernels convolutions may then be compiled to in all.

    All segments share what is compiled, so with smaller tiles for one of them, in more shapes, all of them need more.
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


def _fastest_within(choices: list[list[TileChoice]], room: int, most_compiled: int) -> list[TileChoice] | None:
    """Return one choice for each segment that fits in `room` bytes, with no more compiled kernels in all; None if there
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


def _frontier(choices: list[TileChoice], room: int) -> list[TileChoice]:
    """Return those that fit, from the fewest kernels to the most, each faster than those before: on the convex hull."""
    hull: list[TileChoice] = []
    for choice in sorted(
        (each for each in choices if each.size_bytes <= room), key=lambda each: (each.compiled, each.seconds)
    ):
        if hull and choice.seconds >= hull[-1].seconds:
            continue
        while len(hull) > 1 and _worth([hull[-2], choice], 0) <= _worth(hull, len(hull) - 2):
            hull.pop()
        hull.append(choice)
    return hull


def _worth(frontier: list[TileChoice], index: int) -> float:
    """Return the seconds that a step along a frontier adds for a kernel: below 0."""
    now, further = frontier[index : index + 2]
    return (further.seconds - now.seconds) / (further.compiled - now.compiled)
