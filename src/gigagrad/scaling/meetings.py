"""When the ranks that share an image meet, and what they send each other there.

To the byte what `gigagrad.plans.traffic` counts; but that looks at all pairs of ranks, and here only at those whose
boxes meet, so that 64 ranks take a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import prod

import numpy as np

from gigagrad.boxes import Box
from gigagrad.graphs import FIELD_MAX
from gigagrad.plans import Pass, Plan, Problem, Stage
from gigagrad.plans.parts import JoinOrder
from gigagrad.plans.shares import Shares, down, up

_PACKING = 2
"""A message is packed from crops and cut into them again, which takes as much beside."""
_TREE_WORDS = 3
"""A step in a tree begins with how long messages are, a word in two rounds (its length, then it)."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Everybody hears a word of everybody's, then messages travel."""

    messages: Mapping[tuple[int, int], int]
    """Bytes from one rank to another, by both."""
    words: int = 1
    """How often everybody hears everybody."""
    sums: bool = False
    """Whether it joins sums; else it is of fields."""

    @property
    def sent_bytes(self) -> Counter[int]:
        """By rank."""
        sent = Counter[int]()
        for (sender, _), nbytes in self.messages.items():
            sent[sender] += nbytes
        return sent

    @property
    def memory_bytes(self) -> int:
        """What its messages take in the rank that sends and gets most."""
        most = Counter[int]()
        for pair, nbytes in self.messages.items():
            most.update(dict.fromkeys(pair, nbytes))
        return _PACKING * max(most.values(), default=0)


def meetings(
    problem: Problem, stages: tuple[Stage, ...], plan: Plan, shares: Shares
) -> tuple[tuple[Meeting, ...], ...]:
    """Those that end each pass of a plan, in order."""
    found = _Meetings(problem, stages, plan, shares)
    return tuple(tuple(found.ending(step)) for step in plan.passes)


class _Meetings:
    def __init__(self, problem: Problem, stages: tuple[Stage, ...], plan: Plan, shares: Shares) -> None:
        self._problem, self._graph, self._stages, self._shares = problem, problem.graph, stages, shares
        self._tiers = {field.node: field.tier for field in plan.kept}
        self._ranks = range(shares.count)

    def ending(self, step: Pass) -> Iterator[Meeting]:
        stage = self._stages[step.stage]
        if step.phase == "forward":
            yield from self._halos(stage)
        else:
            yield from self._cotangents(stage)
        if step.phase != "backward":
            yield from self._sums(stage, stage.reductions)
        if step.phase != "forward":
            yield from self._sums(stage, [i for i in stage.globals if self._graph[i].differentiable])

    def _halos(self, stage: Stage) -> Iterator[Meeting]:
        shares, problem = self._shares, self._problem
        if not stage.kept:
            return
        messages: Counter[tuple[int, int]] = Counter()
        for i in stage.kept:
            pixel = problem.packing.bytes_per_pixel(self._graph, i, problem.tier(self._tiers[i]))
            written, held = ([boxes(i, rank) for rank in self._ranks] for boxes in (shares.written, shares.held))
            messages += self._travelling(written, held, partial(shares.halo, i), pixel)
        yield Meeting(messages)

    def _cotangents(self, stage: Stage) -> Iterator[Meeting]:
        """What each summed up alone, then strips, part after part."""
        shares, index = self._shares, stage.index
        added = [i for i in stage.reads if index in shares.adding(i) and self._graph[i].differentiable]
        if not added:
            return
        sums: Counter[tuple[int, int]] = Counter()
        strips: Counter[tuple[int, int]] = Counter()
        for i in added:
            pixel = self._graph[i].bytes_per_pixel
            held, wanted, read = (
                [boxes(rank) for rank in self._ranks]
                for boxes in (
                    partial(shares.held_cotangents, i),
                    partial(shares.wanted_next, index, i),
                    partial(self._read, index, i),
                )
            )
            sums += self._travelling(held, wanted, partial(shares.sums, index, i), pixel)
            strips += self._travelling(read, wanted, partial(self._strips, index, i), pixel)
        yield Meeting(sums)
        yield Meeting(strips)

    def _strips(self, stage: int, field: int, sender: int, receiver: int) -> Iterator[Box]:
        return (box for _, box in self._shares.strips(stage, field, sender, receiver))

    def _read(self, stage: int, field: int, rank: int) -> list[Box]:
        parts, own = self._shares.parts(stage), self._shares.own(stage, rank)
        return parts.read(field, range(parts.start(own.start), parts.start(own.stop)))

    def _travelling(
        self,
        some: Sequence[Sequence[Box]],
        others: Sequence[Sequence[Box]],
        boxes: Callable[[int, int], Iterable[Box]],
        pixel_bytes: int,
    ) -> Counter[tuple[int, int]]:
        """Bytes from each rank to each other one, given boxes of both by rank outside of which nothing travels."""
        found: Counter[tuple[int, int]] = Counter()
        for sender, receiver in near(some, others):
            found[sender, receiver] = pixel_bytes * sum(box.area for box in boxes(sender, receiver))
        return found

    def _sums(self, stage: Stage, keys: Iterable[int]) -> Iterator[Meeting]:
        """Up to the first rank, joined as far as the tree of parts allows, and the total down again."""
        keys, shares, count = tuple(keys), self._shares, self._shares.count
        if not keys:
            return
        values, parts = sum(self._sum_bytes(key) for key in keys), shares.parts(stage.index)
        held = [JoinOrder(shares.before(stage.index, rank)) for rank in self._ranks]
        for rank, order in enumerate(held):
            for part in shares.own(stage.index, rank):
                if parts.tiles(part):
                    order.append(part)
        for receivers in up(count):
            messages = {}
            for sender, receiver in receivers.items():
                last = min(2 * sender - receiver, count) - 1
                held[sender].join_before(shares.following(stage.index, last))
                joined = held[sender].parts
                messages[sender, receiver] = len(joined) * (8 * (1 + len(keys)) + values)
                for part in joined:
                    held[receiver].append(part)
            yield Meeting(messages, _TREE_WORDS, sums=True)
        for receivers in down(count):
            yield Meeting(dict.fromkeys(receivers.items(), 8 * (1 + len(keys)) + values), _TREE_WORDS, sums=True)

    def _sum_bytes(self, key: int) -> int:
        node = self._graph[key]
        dtype = node.dtype if node.op == FIELD_MAX else self._problem.sum_dtype
        return prod(node.shape) * dtype.itemsize


def near(some: Sequence[Sequence[Box]], others: Sequence[Sequence[Box]]) -> list[tuple[int, int]]:
    """The pairs of two different ranks where the hull of some boxes of the first meets that of others of the second."""
    (y0, x0, y1, x1), (top, left, bottom, right) = _hulls(some)[:, :, None], _hulls(others)[:, None, :]
    down_to, up_to = np.minimum(y1, bottom), np.minimum(x1, right)
    meet = (np.maximum(y0, top) < down_to) & (np.maximum(x0, left) < up_to)
    return [(int(a), int(b)) for a, b in np.argwhere(meet) if a != b]


def _hulls(boxes: Sequence[Sequence[Box]]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """`(4, ranks)`: y0, x0, y1, x1."""
    hulls = (reduce(Box.hull, found) if found else Box(0, 0, 0, 0) for found in boxes)
    return np.array([(box.y0, box.x0, box.y1, box.x1) for box in hulls], np.int64).T
