"""Choose the fields to keep: where to cut the graph so that computing the others again costs least, for any memory.

Candidates lie on a chain: the fields that are worth keeping, in the order in which they are computed. A *cut* behind
one of them keeps every candidate computed so far that is still needed, skips included; whatever lies between two cuts
is computed again from the earlier one, in each of its passes. Then the time of a piece depends on its two cuts alone,
and dynamic programming over (cut, memory used) finds the fastest choice of cuts for every amount of memory at once, as
checkpointing of chains does (Chen et al., 2016; Gruslys et al., 2016; Beaumont et al., 2019), here with halos and skips
in the costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gigagrad.graphs import GATHER, Graph, lookup
from gigagrad.plans.segments import (
    Cotangents,
    Segment,
    gathered,
    is_differentiated,
    is_read,
    last_cotangents,
    levels,
    segment_for,
)

_LONGEST_PIECE = 16
"""Candidates between two cuts, at most; beside that only the whole graph in one piece is considered."""
_STEPS = 256
"""Steps in which memory is counted: bytes are rounded to this share of all candidates' bytes."""
_LONGEST_CHAIN = 4
"""Candidates that a field may be computed from pixelwise before it is a candidate itself."""

_Steps = np.ndarray[tuple[int, int, int], np.dtype[np.int_]]
Seconds = Callable[[Segment], tuple[float, float]]
"""Times of a segment's forward and of its backward pass."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Fields to keep, what they take, and the time of all passes as the chain model has it."""

    kept: frozenset[int]
    nbytes: int
    seconds: float


class Cuts:
    """The chain of one graph. `seconds` rates a segment; `backward` says whether every segment is also
    differentiated.
    """

    def __init__(self, graph: Graph, seconds: Seconds, *, backward: bool) -> None:
        self._graph, self._seconds, self._backward = graph, seconds, backward
        self._required = gathered(graph)
        self._level = levels(graph, self._required)
        self.candidates = _candidates(graph, self._required)
        last_use = _last_uses(graph, self.candidates)
        self._crossing = [
            frozenset(f for f in self.candidates if f <= position < last_use[f]) for position in self.candidates
        ]
        self._reduced = {node.operands[0] for node in graph.nodes if node.is_reduction}
        self._ends = frozenset(
            {i for i in self._reduced if not is_read(graph, i)}
            | ({graph.output} if graph[graph.output].is_field and not is_read(graph, graph.output) else set())
        )

    def selections(self) -> list[Selection]:
        """Return the fastest selection for every amount of memory, from the most memory that is of any use down to
        none.
        """
        count = len(self.candidates)
        unit = max(1.0, sum(self._graph[i].nbytes for i in self.candidates) / _STEPS)
        used = np.arange(2 * _STEPS)  # with room for what rounding adds
        best = np.full((count + 2, len(used)), np.inf)  # row 0: before everything; the last row: the end
        came = np.zeros((count + 2, len(used), 2), int)
        best[0, 0] = 0.0
        for start in range(count + 1):
            before = self._crossing[start - 1] if start else frozenset[int]()
            for stop, seconds in self._pieces(start):
                after = self._crossing[stop - 1] if stop <= count else frozenset[int]()
                added = round(sum(self._graph[i].nbytes for i in after - before) / unit)
                values = best[start, : len(used) - added] + seconds
                better = np.flatnonzero(values < best[stop, added:])
                best[stop, added + better] = values[better]
                came[stop, added + better, 0] = start
                came[stop, added + better, 1] = better
        reached = np.flatnonzero(np.isfinite(best[-1]))
        found = sorted(
            (self._selection(came, int(i), float(best[-1, i])) for i in reached), key=lambda s: (s.nbytes, s.seconds)
        )
        fastest = np.minimum.accumulate([np.inf, *(s.seconds for s in found)])
        return [s for s, leaner in zip(found, fastest, strict=False) if s.seconds < leaner][::-1]

    def _selection(self, came: _Steps, used: int, seconds: float) -> Selection:
        kept, position = set(self._required), len(self.candidates) + 1
        while position:
            position, used = (int(value) for value in came[position, used])
            if position:
                kept |= self._crossing[position - 1]
        return Selection(frozenset(kept), sum(self._graph[i].nbytes for i in kept), seconds)

    def _pieces(self, start: int) -> list[tuple[int, float]]:
        """Return for each cut (or the end) that a piece may reach from cut number `start` its number and the piece's
        time.
        """
        count = len(self.candidates)
        end = count + 1
        reach = min(start + _LONGEST_PIECE, count)
        stored = self._required | (self._crossing[start - 1] if start else frozenset[int]())
        known: dict[int, tuple[frozenset[int], float]] = {}
        stops = [*range(start + 1, reach + 1), *([end] if reach == count or not start else [])]
        return [(stop, self._piece_seconds(start, stop, stored, known)) for stop in stops]

    def _piece_seconds(
        self, start: int, stop: int, stored: frozenset[int], known: dict[int, tuple[frozenset[int], float]]
    ) -> float:
        """Predict all passes of the segments between two cuts; `known` holds each level's targets and time for the last
        stop.
        """
        first = self.candidates[start - 1] if start else -1
        final = stop > len(self.candidates)
        last = len(self._graph.nodes) if final else self.candidates[stop - 1]
        kept = (frozenset[int]() if final else self._crossing[stop - 1]) - stored
        kept |= {i for i in self._required if first < i <= last}  # whatever is cut
        targets: dict[int, set[int]] = {}
        for i in kept | {i for i in self._ends if first < i <= last}:
            targets.setdefault(self._level[i], set()).add(i)
        total = 0.0
        for level, roots in targets.items():
            frozen = frozenset(roots)
            if level not in known or known[level][0] != frozen:
                known[level] = frozen, self._segment_seconds(frozen, stored, kept & frozen)
            total += known[level][1]
        return total

    def _segment_seconds(self, roots: frozenset[int], stored: frozenset[int], kept: frozenset[int]) -> float:
        segment = segment_for(self._graph, roots, stored, kept)
        forward, backward = self._seconds(segment)
        if not self._backward or not is_differentiated(self._graph, segment):
            return forward
        one_pass = self._is_last(segment) and last_cotangents(self._graph, segment) is not Cotangents.AFTER_FORWARD
        return backward if one_pass else forward + backward

    def _is_last(self, segment: Segment) -> bool:
        return (
            not segment.kept and max(self._level[i] for i in self._ends) == self._level[segment.targets(self._graph)[0]]
        )


def _candidates(graph: Graph, required: frozenset[int]) -> list[int]:
    """Return fields that cost more than their pixels to compute again, and of long chains of sums every few links."""
    found: list[int] = []
    behind: dict[int, frozenset[int]] = {}
    for node in graph.nodes:
        if not node.is_field:
            continue
        if is_read(graph, node.id) or node.id in required:
            behind[node.id] = frozenset({node.id})
            continue
        sources = frozenset[int]().union(*(behind[i] for i in node.operands if graph[i].is_field))
        if _is_pixelwise(graph, node.id) and len(sources) <= _LONGEST_CHAIN:
            behind[node.id] = sources
        else:
            found.append(node.id)
            behind[node.id] = frozenset({node.id})
    return found


def _last_uses(graph: Graph, candidates: list[int]) -> dict[int, int]:
    """Return for each candidate the last field that is computed from it without another candidate in between."""
    chosen = set(candidates)
    seen: dict[int, set[int]] = {}
    last = dict.fromkeys(candidates, -1)
    for node in graph.nodes:
        if not node.is_field and node.op != GATHER:
            continue
        reaches: set[int] = set()
        for i in node.operands:
            if graph[i].is_field:
                reaches |= {i} if i in chosen else seen.get(i, set())
        seen[node.id] = reaches
        for i in reaches:
            last[i] = node.id
    return last


def _is_pixelwise(graph: Graph, node_id: int) -> bool:
    return lookup(graph[node_id].op).pixelwise
