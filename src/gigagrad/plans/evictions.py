"""Order in which kept fields leave the memory: to another tier, or to be computed again, whichever takes less time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import Any, NamedTuple

from gigagrad.plans.cost import Costs
from gigagrad.plans.problem import Problem
from gigagrad.plans.segments import Segment, gathered, moved_fields, segment_for, split_segments


class Eviction(NamedTuple):
    """One field that leaves the memory."""

    field: int
    tier: str | None
    """The tier that it goes to; None where it is computed again."""


def evictions(
    problem: Problem, costs: Costs, kept: frozenset[int], *, dropping: bool, moving: bool
) -> Iterator[Eviction]:
    """Yield the fields in the order in which they leave the memory, the one that costs the least time per byte first,
    given that those before it are gone: cuts keep their skips as a whole, and cotangents of large fields live long, so
    that no choice of cuts may fit. With `dropping` they are computed again, with `moving` they go to the first of the
    other tiers that has room for them and their cotangents; with both, whichever takes less time.

    Greedy, and lazy about it (Minoux, 1978): giving up a field becomes dearer as its neighbours go, so a cost that was
    computed earlier is a lower bound, and only the best candidate's is brought up to date.
    """
    passes, gone = _Passes(problem, costs, kept), 0
    rooms = dict(problem.rooms) if moving else {}
    heap = [(0.0, i) for i in kept - gathered(problem.graph)]
    fresh: dict[int, int] = {}
    while heap:
        _, field = heappop(heap)
        needed = 2 * problem.graph[field].nbytes
        tier = next((tier for tier, room in rooms.items() if needed <= room), None)
        ways = [Eviction(field, way) for way in ([None] if dropping else []) + ([tier] if tier else [])]
        if not ways:
            continue
        seconds, best = min(((passes.seconds_more(way), way) for way in ways), key=lambda pair: pair[0])
        rate = seconds / problem.graph[field].nbytes
        if fresh.get(field) != gone and heap and rate > heap[0][0]:
            fresh[field] = gone
            heappush(heap, (rate, field))
            continue
        passes.apply(best)
        if best.tier is not None:
            rooms[best.tier] -= needed
        gone += 1
        yield best


def placed(kept: Mapping[int, str], gone: Iterable[Eviction]) -> Iterator[dict[int, str]]:
    """Yield the fields kept and the tier of each, after each of those gone has left the memory."""
    left = dict(kept)
    for field, tier in gone:
        left = {i: where for i, where in left.items() if i != field} | ({} if tier is None else {field: tier})
        yield left


class Asked(Sequence[dict[int, str]]):
    """So many of them, of which each is found when it is asked for: the last fields to leave take longest to find."""

    def __init__(self, found: Iterator[dict[int, str]], count: int) -> None:
        self._found, self._known, self._count = found, list[dict[int, str]](), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        self._known += islice(self._found, max(0, place + 1 - len(self._known)))
        return self._known[place]


class _Passes:
    """The passes of a plan with their usual tiles, each by itself: where a field is dropped, those that read it compute
    it again, and none become one.
    """

    def __init__(self, problem: Problem, costs: Costs, kept: frozenset[int]) -> None:
        self._problem, self._graph, self._costs = problem, problem.graph, costs
        self._segments = list(split_segments(problem.graph, kept))
        self._stored = kept | gathered(problem.graph)
        self._tiers: dict[int, str] = {}
        self._seconds = [self._seconds_of(segment, self._tiers) for segment in self._segments]

    def seconds_more(self, way: Eviction) -> float:
        """Predict by the clock how much longer the passes take, one field further gone."""
        return sum(seconds - self._seconds[place] for place, (_, seconds) in self._after(way).items())

    def apply(self, way: Eviction) -> None:
        for place, (segment, seconds) in self._after(way).items():
            self._segments[place], self._seconds[place] = segment, seconds
        if way.tier is None:
            self._stored -= {way.field}
        else:
            self._tiers[way.field] = way.tier

    def _after(self, way: Eviction) -> dict[int, tuple[Segment, float]]:
        """Return the segments that change, by their place, and the seconds of each."""
        field, tier = way
        tiers = self._tiers if tier is None else {**self._tiers, field: tier}
        changed = {}
        for place, segment in enumerate(self._segments):
            if field in segment.reads or field in segment.kept:
                after = segment if tier is not None else self._without(segment, field)
                changed[place] = after, self._seconds_of(after, tiers)
        return changed

    def _without(self, segment: Segment, field: int) -> Segment:
        kept = [i for i in segment.kept if i != field]
        roots = {*segment.targets(self._graph)}
        if field in segment.kept and field not in {self._graph[r].operands[0] for r in segment.reductions}:
            roots.discard(field)
        return segment_for(self._graph, roots, self._stored - {field}, kept)

    def _seconds_of(self, segment: Segment, tiers: Mapping[int, str]) -> float:
        if not (segment.kept or segment.reductions or segment.output is not None):
            return 0.0
        machine, graph = self._problem.machine, self._graph
        found = 0.0
        for backward in (False, True)[: 1 + self._problem.backward]:
            values, cotangents = moved_fields(graph, segment, backward=backward)
            processing, links = self._costs.usual_seconds(segment)[backward] / machine.threads, [0.0]
            for tier in self._problem.tiers[1:]:
                nbytes = sum(graph[i].nbytes for i in (*values, *cotangents) if tiers.get(i) == tier.name)
                processing += tier.processor_seconds(nbytes, machine)
                links.append(tier.link_seconds(nbytes, machine))
            found += max(processing, *links)
        return found
