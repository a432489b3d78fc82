"""Partition a plan over ranks: who computes which chunks of every segment, which pixels of every field it holds for
that, and what travels.

A rank holds what its tiles write of a kept field, and what they read of it in any later pass. Of a field's cotangents,
during a pass that reads it, it holds what its tiles are the first to reach; what they add to pixels that other
ranks reach first travels when the pass is over, to whoever needs it next.

Small sums come to all ranks whole, from each to each; of large ones each rank has a share. It joins that, in the order
of chunks, and gives it to the others: what the next pass needs at once, gradients of parameters when the step is over.
So a rank sends as much as it would around a ring (Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005, section 4.4), and adds as little.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from math import prod

import numpy as np
import torch

from gigagrad.boxes import Box, apart, shared, without
from gigagrad.graphs import MOMENTS, Graph, merge_of
from gigagrad.plans.chunks import Chunks, chunks_of
from gigagrad.plans.plan import Plan
from gigagrad.plans.problem import Problem
from gigagrad.plans.program import Bytes, Sum
from gigagrad.plans.segments import Segment, adding, is_read, summed_globals

_TOLD_BYTES = 2**16
"""Sums of a pass that are no more travel whole: on a fast link that takes less than a further meeting."""

_AT_ONCE_BYTES = 2**24

PartBox = tuple[int, Box]
"""The share of a chunk that goes to pixels which another rank reaches first: the chunk, and the box."""


class Partition:
    """The chunks of a plan, its kept fields and the cotangents of what its segments read, divided among so many
    ranks.
    """

    def __init__(self, graph: Graph, plan: Plan, count: int) -> None:
        self.count = count
        self._graph, self._described, self._segments = graph, plan.segments, plan.computed
        self._producers = {field: segment.index for segment in self._segments for field in segment.kept}
        self.chunks, self._first_chunk = cache(self._find_chunks), cache(self._find_first_chunk)
        self.held, self.written, self.read = cache(self._find_held), cache(self._find_written), cache(self._find_read)
        self.halo = cache(self._find_halo)
        """Boxes that a rank sends another one of a kept field, once it is written: by field, sender and receiver."""
        self.adding, self._first = cache(partial(adding, self._segments, plan.passes)), cache(self._find_first)
        self.held_cotangents = cache(self._find_held_cotangents)
        self.sums, self.overlaps = cache(self._find_sums), cache(self._find_overlaps)
        """Boxes that a rank sends another one after a pass over a segment, by segment, field, sender and receiver: of
        what it has summed up alone, and what its chunks add to pixels that others reach first, in the order of
        chunks."""

    def own(self, segment: int, rank: int) -> range:
        """Return the chunks of a segment that a rank computes."""
        return range(self._first_chunk(segment, rank), self._first_chunk(segment, rank + 1))

    def whole(self, field: int) -> Box:
        """Return the box of all of a field."""
        return self._graph[field].box

    def _find_halo(self, field: int, sender: int, receiver: int) -> list[Box]:
        missing = without(self.held(field, receiver), self.written(field, receiver))
        return shared(missing, self.written(field, sender))

    def _find_chunks(self, segment: int) -> Chunks:
        return chunks_of(self._graph, self._described[segment])

    def _find_first_chunk(self, segment: int, rank: int) -> int:
        chunks = self.chunks(segment)
        return len(chunks) if rank == self.count else chunks.nearest(len(chunks.grid) * rank // self.count)

    def _find_written(self, field: int, rank: int) -> list[Box]:
        """Return what a rank's tiles write of a kept field: of all ranks together the whole field, once."""
        segment = self._producers[field]
        return self.chunks(segment).written(field, self._tiles(segment, rank))

    def _find_read(self, segment: int, field: int, rank: int) -> list[Box]:
        """Return what a rank's tiles read of a field in a pass of a segment; boxes may overlap."""
        return self.chunks(segment).read(field, self._tiles(segment, rank))

    def _find_held(self, field: int, rank: int) -> list[Box]:
        """Return what a rank holds of a kept field."""
        if self._graph.gathers(field):
            return [self.whole(field)]
        reading = [segment.index for segment in self._segments if field in segment.reads]
        read = [box for segment in reading for box in self.read(segment, field, rank)]
        return apart([*self.written(field, rank), *read])

    def _tiles(self, segment: int, rank: int) -> range:
        own, chunks = self.own(segment, rank), self.chunks(segment)
        return range(chunks.start(own.start), chunks.start(own.stop))

    def wanted_next(self, segment: int, field: int, rank: int) -> list[Box]:
        """Return what a rank needs of a field's cotangents after a pass over a segment: what it is the first to reach
        in the next pass that adds to them; after the last one what it wrote, or all of it where no segment wrote it.
        """
        adding = self.adding(field)
        following = adding.index(segment) + 1
        return self._first(adding[following], field, rank) if following < len(adding) else self._at_last(field, rank)

    def elsewhere(self, segment: int, field: int, rank: int) -> list[Box]:
        """Return the pixels of a field that ranks before this one reach first in a pass over a segment."""
        return self.chunks(segment).reached_before(field, self.own(segment, rank).start)

    def _find_sums(self, segment: int, field: int, sender: int, receiver: int) -> list[Box]:
        return shared(self._first(segment, field, sender), self.wanted_next(segment, field, receiver))

    def _find_overlaps(self, segment: int, field: int, sender: int, receiver: int) -> list[PartBox]:
        before = self.elsewhere(segment, field, sender)
        found = []
        for chunk in self.own(segment, sender) if before else ():
            boxes = [box for box in self.chunks(segment).overlaps(field, chunk) if box is not None]
            for box in shared(shared(boxes, before), self.wanted_next(segment, field, receiver)):
                found.append((chunk, box))
        return found

    def _find_first(self, segment: int, field: int, rank: int) -> list[Box]:
        """Return the pixels that a rank's tiles reach before those of all others: of all ranks together the whole
        field.
        """
        last = rank == self.count - 1
        until = [self.whole(field)] if last else self.elsewhere(segment, field, rank + 1)
        return without(until, self.elsewhere(segment, field, rank))

    def _find_held_cotangents(self, field: int, rank: int) -> list[Box]:
        """Return what a rank holds of a field's cotangents, in any pass."""
        first = [box for segment in self.adding(field) for box in self._first(segment, field, rank)]
        return apart([*first, *self._at_last(field, rank)])

    def _at_last(self, field: int, rank: int) -> list[Box]:
        whole = is_read(self._graph, field)
        return [self.whole(field)] if whole else self.written(field, rank)


def how_summed(problem: Problem, nodes: Sequence[int]) -> Sum:
    """Sort these nodes by how their sums travel. Moments go whole: they are merged, and each of their numbers needs the
    others.
    """
    late = tuple(i for i in nodes if problem.graph[i].op == "parameter")
    now = tuple(i for i in nodes if i not in late)
    small = sum(prod(problem.graph[i].shape) * sum_dtype(problem, i).itemsize for i in now) <= _TOLD_BYTES
    whole = tuple(i for i in now if small or problem.graph[i].op == MOMENTS)
    return Sum(whole, tuple(i for i in now if i not in whole), late)


def late_gradients(graph: Graph, segments: Sequence[Segment]) -> list[list[int]]:
    """Return the parameters whose gradients ranks have shares of until the step is over, as they are put together then:
    a few at a time, so that their messages do not take much memory.
    """
    found, nbytes = list[list[int]](), 0
    for i in sorted({i for segment in segments for i in summed_globals(graph, segment) if graph[i].op == "parameter"}):
        own = prod(graph[i].shape) * gradient_dtype(graph, i).itemsize
        if not found or nbytes + own > _AT_ONCE_BYTES:
            found.append([])
            nbytes = 0
        found[-1].append(i)
        nbytes += own
    return found


def share_of(size: int, rank: int, ranks: int) -> slice:
    """Return which of so many numbers are a rank's."""
    return slice(size * rank // ranks, size * (rank + 1) // ranks)


def sum_dtype(problem: Problem, node: int) -> torch.dtype:
    """Return the type in which a node is summed."""
    return problem.sum_dtype if merge_of(problem.graph[node]) is None else problem.graph[node].dtype


def gradient_dtype(graph: Graph, parameter: int) -> torch.dtype:
    """Return the type of a parameter's gradient, once it is summed: sums over segments are added up in no less than
    float32.
    """
    dtype = graph[parameter].dtype
    return dtype if dtype.itemsize >= 4 else torch.float32


def sum_bytes(problem: Problem, summed: Sum, ranks: int) -> Bytes:
    """Return, as `(ranks,)`, the bytes of one sum in a message to each of them, behind a chunk and whether each node
    has a sum.
    """
    head = 8 * (1 + len(summed.all))
    whole = sum(prod(problem.graph[i].shape) * sum_dtype(problem, i).itemsize for i in summed.whole)
    return head + whole + share_bytes(problem, summed.shared, ranks)


def share_bytes(problem: Problem, nodes: Sequence[int], ranks: int, *, gradients: bool = False) -> Bytes:
    """Return, as `(ranks,)`, the bytes of the shares that each has of the sums of some nodes, or of gradients."""
    edges, found = np.arange(ranks + 1, dtype=np.int64), np.zeros(ranks, np.int64)
    for i in nodes:
        dtype = gradient_dtype(problem.graph, i) if gradients else sum_dtype(problem, i)
        found += np.diff(prod(problem.graph[i].shape) * edges // ranks) * dtype.itemsize
    return found
