"""When the ranks that share an image meet, what they send each other there, to the byte, and what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import prod

import numpy as np
import torch

from gigagrad.boxes import Box
from gigagrad.graphs import FIELD_MAX
from gigagrad.plans.joins import down, up
from gigagrad.plans.keeping import Lifetime, is_replicated, life_bytes, lifetimes
from gigagrad.plans.owners import Owners
from gigagrad.plans.plan import Pass, Plan, RankPlan
from gigagrad.plans.problem import Problem
from gigagrad.plans.stages import Stage, split_stages
from gigagrad.stores import Tier

_PACKING = 2
"""A message is packed from crops and cut into them again, which takes as much beside."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Everybody hears a word of everybody's, then messages travel."""

    messages: Mapping[tuple[int, int], int]
    """Bytes from one rank to another, by both."""
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
    problem: Problem, stages: tuple[Stage, ...], plan: Plan, owners: Owners
) -> tuple[tuple[Meeting, ...], ...]:
    """Those that end each pass of a plan, in order."""
    found = _Meetings(problem, stages, plan, owners)
    return tuple(tuple(found.ending(step)) for step in plan.passes)


def plan_for_ranks(problem: Problem, plan: Plan) -> RankPlan:
    """What a plan comes to if so many ranks share it."""
    stages = split_stages(problem.graph, [field.node for field in plan.kept])
    owners = Owners(problem.graph, stages, plan, problem.ranks)
    every = [meeting for ending in meetings(problem, stages, plan, owners) for meeting in ending]
    sent = sum(meeting.sent_bytes.total() for meeting in every)
    most = max((meeting.memory_bytes for meeting in every), default=0)
    return RankPlan(problem.ranks, _held_share(problem, stages, plan, owners), most, sent)


def held_by_ranks(
    problem: Problem, lives: Iterable[Lifetime], plan: Plan, owners: Owners, tier: Tier
) -> list[list[int]]:
    """Bytes of fields and cotangents in one tier, by pass and rank."""
    tiers = {field.node: field.tier for field in plan.kept}
    held = [[0] * owners.count for _ in plan.passes]
    for life in lives:
        if tiers.get(life.field, problem.memory.name) == tier.name:
            boxes = owners.cotangents.held if life.cotangent else owners.held
            for rank in range(owners.count):
                own = sum(life_bytes(problem, life, tier, box.shape) for box in boxes(life.field, rank))
                for index in range(life.first, life.last + 1):
                    held[index][rank] += own
    return held


def _held_share(problem: Problem, stages: tuple[Stage, ...], plan: Plan, owners: Owners) -> float:
    """The largest part that a rank holds, in any pass and tier, of the fields that are not replicated."""
    lives = [life for life in lifetimes(problem.graph, stages, plan.passes) if not is_replicated(problem.graph, life)]
    alone, largest = Owners(problem.graph, stages, plan, 1), 0.0
    for tier in problem.tiers:
        by_pass = zip(*(held_by_ranks(problem, lives, plan, some, tier) for some in (owners, alone)), strict=True)
        largest = max(largest, *(max(held) / whole if whole else 0.0 for held, (whole,) in by_pass), 0.0)
    return largest


class _Meetings:
    def __init__(self, problem: Problem, stages: tuple[Stage, ...], plan: Plan, owners: Owners) -> None:
        self._problem, self._graph, self._stages, self._owners = problem, problem.graph, stages, owners
        self._tiers = {field.node: field.tier for field in plan.kept}
        self._ranks = range(owners.count)

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
        owners, problem = self._owners, self._problem
        messages: Counter[tuple[int, int]] = Counter()
        for i in stage.kept:
            pixel = problem.packing.bytes_per_pixel(self._graph, i, problem.tier(self._tiers[i]))
            written, held = ([boxes(i, rank) for rank in self._ranks] for boxes in (owners.written, owners.held))
            messages += _travelling(written, held, partial(owners.halo, i), pixel)
        if stage.kept:
            yield Meeting(messages)

    def _cotangents(self, stage: Stage) -> Iterator[Meeting]:
        """What each summed up alone, then strips, part after part."""
        owners, index, graph = self._owners, stage.index, self._graph
        sums: Counter[tuple[int, int]] = Counter()
        strips: Counter[tuple[int, int]] = Counter()
        added = [i for i in stage.reads if index in owners.cotangents.adding(i) and graph[i].differentiable]
        for i in added:
            held, wanted, read = (
                [boxes(rank) for rank in self._ranks]
                for boxes in (
                    partial(owners.cotangents.held, i),
                    partial(owners.cotangents.wanted_next, index, i),
                    partial(owners.read, index, i),
                )
            )
            sums += _travelling(held, wanted, partial(owners.cotangents.sums, index, i), graph[i].bytes_per_pixel)
            strips += _travelling(read, wanted, partial(self._strips, index, i), graph[i].bytes_per_pixel)
        if added:
            yield Meeting(sums)
            yield Meeting(strips)

    def _strips(self, stage: int, field: int, sender: int, receiver: int) -> Iterator[Box]:
        return (box for _, box in self._owners.cotangents.strips(stage, field, sender, receiver))

    def _sums(self, stage: Stage, keys: Sequence[int]) -> Iterator[Meeting]:
        """Up to the first rank, joined as far as the tree of parts allows, and the total down again."""
        if keys:
            nbytes = sum_bytes(self._problem, keys)
            for step in (*up(self._owners, stage.index), *down(self._owners.count)):
                yield Meeting({pair: count * nbytes for pair, count in step.items()}, sums=True)


def sum_bytes(problem: Problem, keys: Sequence[int]) -> int:
    """Of one message with sums of these nodes: a part, for each node whether there is a sum, and all of them."""
    return 8 * (1 + len(keys)) + sum(prod(problem.graph[key].shape) * sum_dtype(problem, key).itemsize for key in keys)


def sum_dtype(problem: Problem, key: int) -> torch.dtype:
    """In which sums of a node are kept."""
    node = problem.graph[key]
    return node.dtype if node.op == FIELD_MAX else problem.sum_dtype


def near(some: Sequence[Sequence[Box]], others: Sequence[Sequence[Box]]) -> list[tuple[int, int]]:
    """The pairs of two different ranks where the hull of some boxes of the first meets that of others of the second."""
    (y0, x0, y1, x1), (top, left, bottom, right) = _hulls(some)[:, :, None], _hulls(others)[:, None, :]
    down_to, up_to = np.minimum(y1, bottom), np.minimum(x1, right)
    meet = (np.maximum(y0, top) < down_to) & (np.maximum(x0, left) < up_to)
    return [(int(a), int(b)) for a, b in np.argwhere(meet) if a != b]


def _travelling(
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


def _hulls(boxes: Sequence[Sequence[Box]]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """`(4, ranks)`: y0, x0, y1, x1."""
    hulls = (reduce(Box.hull, found) if found else Box(0, 0, 0, 0) for found in boxes)
    return np.array([(box.y0, box.x0, box.y1, box.x1) for box in hulls], np.int64).T
