"""Emits the steps of a plan: when buffers are taken and released, which rank computes what, and what travels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce

import numpy as np

from gigagrad.boxes import Box
from gigagrad.plans.chunks import joined
from gigagrad.plans.liveness import buffer_bytes, holds_whole, is_replicated, lifetimes
from gigagrad.plans.partition import Partition, how_summed, late_gradients, share_bytes, sum_bytes
from gigagrad.plans.plan import Plan, RankPlan
from gigagrad.plans.problem import Problem
from gigagrad.plans.program import (
    Allocate,
    Buffer,
    Bytes,
    Exchange,
    Gather,
    Key,
    Release,
    Scalars,
    Step,
    Tiles,
    Transfer,
    live,
    message_memory,
    messages,
)
from gigagrad.plans.segments import summed_globals


def shared_by(problem: Problem, plan: Plan, ranks: int) -> Plan:
    """Return the plan for so many ranks, with what they hold and send: known of a plan only."""
    steps = tuple(_Emitter(problem.of(plan.whole_pixels), plan, ranks).steps())
    sent = sum(int(sum(chunk.sum() for chunk in messages(step, ranks))) for step in steps)
    most = max((message_memory(step, ranks) for step in steps), default=0)
    return replace(plan, steps=steps, ranks=RankPlan(ranks, held_share(steps), most, sent))


def held_share(steps: Iterable[Step]) -> float:
    """Return the largest part that a rank holds, during any pass and in any tier, of what is not replicated."""
    largest = 0.0
    for _, buffers in live(steps):
        shared = [buffer for buffer in buffers if not buffer.replicated]
        for tier in {buffer.tier for buffer in shared}:
            here = [buffer for buffer in shared if buffer.tier == tier]
            whole = sum(buffer.size_bytes for buffer in here)
            held = max(map(sum, zip(*(buffer.held_bytes for buffer in here), strict=True)))
            largest = max(largest, held / whole if whole else 0.0)
    return largest


def near(some: Sequence[Sequence[Box]], others: Sequence[Sequence[Box]]) -> list[tuple[int, int]]:
    """Return the pairs of two different ranks where the hull of some boxes of the first meets that of others of the
    second.
    """
    (y0, x0, y1, x1), (top, left, bottom, right) = _hulls(some)[:, :, None], _hulls(others)[:, None, :]
    down_to, up_to = np.minimum(y1, bottom), np.minimum(x1, right)
    meet = (np.maximum(y0, top) < down_to) & (np.maximum(x0, left) < up_to)
    return [(int(a), int(b)) for a, b in np.argwhere(meet) if a != b]


def _hulls(boxes: Sequence[Sequence[Box]]) -> Bytes:
    """Return `(4, ranks)`: y0, x0, y1, x1."""
    hulls = (reduce(Box.hull, found) if found else Box(0, 0, 0, 0) for found in boxes)
    return np.array([(box.y0, box.x0, box.y1, box.x1) for box in hulls], np.int64).T


class _Emitter:
    def __init__(self, problem: Problem, plan: Plan, ranks: int) -> None:
        self._problem, self._graph = problem, problem.graph
        self._kept = {field.node: field.tier for field in plan.kept}
        self._segments, self._passes = plan.computed, plan.passes
        self._partition, self._ranks = Partition(problem.graph, plan, ranks), range(ranks)

    def steps(self) -> Iterator[Step]:
        lives = lifetimes(self._graph, self._segments, self._passes)
        for index, step in enumerate(self._passes):
            if taken := tuple(self._buffer(key) for key, when in lives.items() if when[0] == index):
                yield Allocate(taken)
            first = tuple(self._partition.own(step.segment, rank).start for rank in self._ranks)
            yield replace(step, first_chunks=(*first, len(self._partition.chunks(step.segment))))
            exchange = self._exchange(step)
            yield exchange
            if cut := exchange.gradients.cut + exchange.reductions.cut:
                yield from self._gather([cut], gradients=False)
            yield Scalars(step.segment)
            if gone := tuple(key for key, when in lives.items() if when[-1] == index and not self._stays(key)):
                yield Release(gone)
        if self._problem.backward:
            yield Scalars(None)
            yield from self._gather(late_gradients(self._graph, self._segments), gradients=True)

    def _stays(self, key: Key) -> bool:
        """Say whether it is a result: an image's own gradient, unless that leaves in strips."""
        return self._graph[key[0]].is_source and key[0] != self._problem.handed

    def _buffer(self, key: Key) -> Buffer:
        problem, (field, cotangent) = self._problem, key
        name = self._kept.get(field, problem.memory.name)
        tier, whole = problem.tier(name), self._partition.whole(field)
        boxes = self._partition.held_cotangents if cotangent else self._partition.held
        alone = len(self._ranks) == 1  # holds all of everything
        held = ((whole,),) if alone else tuple(tuple(boxes(field, rank)) for rank in self._ranks)
        size = buffer_bytes(problem, key, tier, whole.shape)
        return Buffer(
            field,
            cotangent,
            name,
            size if holds_whole(key, self._segments, self._passes, problem.handed) else 0,
            held,
            tuple(sum(buffer_bytes(problem, key, tier, box.shape) for box in own) for own in held),
            is_replicated(self._graph, key),
        )

    def _exchange(self, step: Tiles) -> Exchange:
        segment, ranks = self._segments[step.segment], len(self._ranks)
        moved = self._halos if step.phase == "forward" else self._cotangents
        transfers = moved(step.segment) if ranks > 1 else ()
        gradients = how_summed(self._problem, summed_globals(self._graph, segment) if step.phase != "forward" else ())
        reductions = how_summed(self._problem, segment.reductions if step.phase != "backward" else ())
        sums = [one for one in (gradients, reductions) if one.all]
        partition, found = self._partition, self._partition.chunks(step.segment)
        chunks = tuple(tuple(joined(found, partition.own(step.segment, rank))) if sums else () for rank in self._ranks)
        nbytes = sum((sum_bytes(self._problem, one, ranks) for one in sums), np.zeros(ranks, np.int64))
        return Exchange(tuple(transfers), gradients, reductions, chunks, tuple(nbytes.tolist()))

    def _gather(self, groups: Iterable[Sequence[int]], *, gradients: bool) -> Iterator[Gather]:
        """Put the shares of ranks together."""
        ranks = len(self._ranks)
        for nodes in groups if ranks > 1 else ():
            nbytes = share_bytes(self._problem, nodes, ranks, gradients=gradients)
            yield Gather(tuple(nodes), gradients, tuple(nbytes.tolist()))

    def _halos(self, segment: int) -> Iterator[Transfer]:
        """Yield what ranks have written of kept fields and others will read."""
        partition, problem = self._partition, self._problem
        for i in self._segments[segment].kept:
            pixel = problem.stored_bytes_per_pixel(i, problem.tier(self._kept[i]))
            written, held = (self._by_rank(boxes, i) for boxes in (partition.written, partition.held))
            for sender, receiver in near(written, held):
                for box in partition.halo(i, sender, receiver):
                    yield Transfer(i, box, sender, receiver, pixel * box.area)

    def _cotangents(self, segment: int) -> Iterator[Transfer]:
        """Yield what each rank has summed up alone, and what its chunks add to pixels that others reach first."""
        found = self._partition
        for i in self._segments[segment].reads:
            if not (segment in found.adding(i) and self._graph[i].differentiable):
                continue
            pixel = self._graph[i].bytes_per_pixel
            held = self._by_rank(found.held_cotangents, i)
            wanted = self._by_rank(partial(found.wanted_next, segment), i)
            read = self._by_rank(partial(found.read, segment), i)
            for sender, receiver in near(held, wanted):
                for box in found.sums(segment, i, sender, receiver):
                    yield Transfer(i, box, sender, receiver, pixel * box.area)
            pairs = sorted([*near(read, wanted), *((rank, rank) for rank in self._ranks)])
            for sender, receiver in pairs:
                for chunk, box in found.overlaps(segment, i, sender, receiver):
                    yield Transfer(i, box, sender, receiver, pixel * box.area, chunk)

    def _by_rank(self, boxes: Callable[[int, int], list[Box]], field: int) -> list[list[Box]]:
        return [boxes(field, rank) for rank in self._ranks]
