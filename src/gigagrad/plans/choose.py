"""Choosing which fields to keep and where: the fastest plan that fits in the budget of every tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heappop, heappush

from gigagrad.errors import BudgetError
from gigagrad.graphs import GATHER, Graph
from gigagrad.plans.cost import Costs, Machine
from gigagrad.plans.fit import Fitter, Kept, Option, TierError
from gigagrad.plans.keeping import fields_to_keep, whole_field_bytes
from gigagrad.plans.limits import Limits
from gigagrad.plans.plan import DISK, HOST, MEMORY, KeptField, Plan, WholeField
from gigagrad.plans.schedule import make_passes
from gigagrad.plans.stages import gathered, split_stages

_USUAL_SIDE_PX = 128
"""Tile side at which plans that keep different fields are compared."""


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
    kept: Mapping[int, str] | None = None,
) -> Plan:
    """The fastest plan that fits, or the one with these `tiles` (one shape for each stage; the last serves the rest)
    that keeps these fields in these tiers.

    Raises:
        BudgetError: even the smallest tile does not fit; names the stage, the tile and every number.
    """
    chooser = _Chooser(graph, limits, machine, tiles, backward=backward)
    best = chooser.best() if kept is None else chooser.again(kept)
    whole = [node for node in graph.nodes if node.whole and node.op not in (GATHER, "gigagrad.item")]
    return Plan(
        image_shape=image_shape,
        device=device,
        memory_format=memory_format,
        workers=best.workers,
        stages=best.stages,
        passes=best.passes,
        kept=tuple(
            KeptField(i, best.kept[i], graph[i].op, graph[i].origin.module_path, graph[i].shape, graph[i].nbytes)
            for i in sorted(best.kept)
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
        host_bytes=best.tier_bytes[HOST],
        scratch_bytes=best.tier_bytes[DISK],
        predicted_seconds=None,
    )


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
        self._graph, self._limits, self._backward = graph, limits, backward
        self._costs = Costs(graph, machine)
        self._fitter = Fitter(graph, limits, machine, self._costs, tiles, backward=backward)
        self._refusals: list[BudgetError] = []

    def best(self) -> Option:
        """Keep everything worth keeping in memory; where that does not fit, the faster of moving fields to other tiers
        and of computing them again. The refusal names the leanest of all options tried.
        """
        wanted = fields_to_keep(self._graph)
        found = self._attempt(dict.fromkeys(wanted, MEMORY))
        if found is not None:
            return found
        order = self._order_of_dropping(wanted)
        options = [
            option
            for option in (
                self._fastest(len(order), lambda count: dict.fromkeys(wanted.difference(order[:count]), MEMORY)),
                self._moved(wanted, order) if self._other_tiers else None,
            )
            if option is not None
        ]
        if not options:
            raise min(self._refusals, key=lambda error: error.needed_bytes)
        return min(options, key=lambda option: option.seconds)

    def again(self, kept: Kept) -> Option:
        """An earlier choice. Raises `BudgetError` if it does not fit, also where a tier has less room than before."""
        found = self._attempt(kept)
        if found is None:
            raise self._refusals[-1]
        return found

    @property
    def _other_tiers(self) -> bool:
        return self._limits.host_bytes > 0 or self._limits.scratch_bytes > 0

    def _attempt(self, kept: Kept) -> Option | None:
        try:
            return self._fitter.fit(kept)
        except BudgetError as error:
            self._refusals.append(error)
        except TierError as error:
            if self._limits.budget_bytes is not None:
                self._refusals.append(self._limits.refusal(str(error), 2**62))
        return None

    def _fastest(self, most: int, keeping: Callable[[int], Kept]) -> Option | None:
        """The fastest option that gives up some of at most `most` fields, in a given order.

        Giving up more leaves room for larger tiles, and does not always need less memory (halos grow): how many is
        tried in growing steps, and by bisection where the first option that fits lies between two of them.
        """
        found, low, high = list[Option](), 0, most
        for count in dict.fromkeys(-(-most * eighths // 8) for eighths in (1, 2, 3, 4, 6, 8) if most):
            option = self._attempt(keeping(count))
            if option is not None:
                found.append(option)
                high = min(high, count)
            elif not found:
                low = count
        while found and high - low > max(1, most // 16):
            middle = (low + high) // 2
            option = self._attempt(keeping(middle))
            if option is None:
                low = middle
            else:
                found.append(option)
                high = middle
        return min(found, key=lambda option: option.seconds, default=None)

    def _moved(self, wanted: frozenset[int], order: list[int]) -> Option | None:
        """Fields in other tiers, as few as the memory asks for; where those have too little room, the ones that cost
        least to compute again are not kept at all.
        """
        for eighths in range(9):
            remaining = wanted.difference(order[: -(-len(order) * eighths // 8)])
            movable = self._order_of_moving(remaining)
            found = self._fastest(len(movable), lambda count, r=remaining, m=movable: self._placed(r, m[:count]))  # type: ignore[misc]
            if found is not None:
                return found
        return None

    def _order_of_moving(self, kept: frozenset[int]) -> list[int]:
        """Kept fields, the ones with the fewest readers first, of those the largest; whole-field operators need theirs
        in memory.
        """
        stages = split_stages(self._graph, kept)
        readers = {i: sum(i in stage.reads for stage in stages) for i in kept}
        return sorted(kept - gathered(self._graph), key=lambda i: (readers[i], -self._graph[i].nbytes))

    def _placed(self, kept: frozenset[int], moved: list[int]) -> Kept:
        """The moved fields in host memory beside a GPU while it has room, with their cotangents, and then in files."""
        placed, room = dict.fromkeys(kept, MEMORY), self._limits.host_bytes
        for i in moved:
            needed = 2 * self._graph[i].nbytes
            placed[i] = HOST if needed <= room else DISK
            room -= needed if needed <= room else 0
        return placed

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
            sweeps = sum(p.stage == stage.index for p in passes)
            total += sweeps * self._costs.of(stage, shape, backward=stage.index in differentiated).seconds
        return total
