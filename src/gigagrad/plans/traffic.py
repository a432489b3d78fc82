"""When the ranks that share an image meet, what they send each other there, to the byte, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import numpy as np

from gigagrad.boxes import Box
from gigagrad.plans.joins import joined
from gigagrad.plans.keeping import Lifetime, is_replicated, life_bytes, lifetimes
from gigagrad.plans.owners import Owners
from gigagrad.plans.plan import Pass, Plan, RankPlan
from gigagrad.plans.problem import Problem
from gigagrad.plans.stages import Stage, split_stages, summed_globals
from gigagrad.plans.sums import Bytes, keys_of, late_gradients, share_bytes, sum_bytes
from gigagrad.stores import Tier


@dataclass(frozen=True, eq=False)
class Meeting:
    """Everybody hears a word of everybody's, then messages travel: bytes from one rank to another, `(ranks, ranks)`."""

    fields: Bytes
    """Halos, or cotangents."""
    sums: Bytes

    @property
    def messages(self) -> Bytes:
        return self.fields + self.sums

    @property
    def sent_bytes(self) -> Bytes:
        """By rank."""
        found: Bytes = self.messages.sum(1)
        return found

    @property
    def memory_bytes(self) -> int:
        """What its messages take in the rank for which that is most: those that come, and those that go with the crops
        that they are packed from.
        """
        return int((self.messages.sum(0) + self.messages.sum(1) + self.fields.sum(1)).max())


def meetings(
    problem: Problem, stages: tuple[Stage, ...], plan: Plan, owners: Owners
) -> tuple[tuple[Meeting, ...], ...]:
    """Those that end each pass of a plan, in order."""
    found = _Meetings(problem, stages, plan, owners)
    every = [list(found.ending(step)) for step in plan.passes]
    if any(step.phase != "forward" for step in plan.passes):
        every[-1] += found.at_last()
    return tuple(map(tuple, every))


def plan_for_ranks(problem: Problem, plan: Plan) -> RankPlan:
    """What a plan comes to if so many ranks share it."""
    stages = split_stages(problem.graph, [field.node for field in plan.kept])
    owners = Owners(problem.graph, stages, plan, problem.ranks)
    every = [meeting for ending in meetings(problem, stages, plan, owners) for meeting in ending]
    sent = sum(int(meeting.messages.sum()) for meeting in every)
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
        self._count, self._ranks = owners.count, range(owners.count)

    def ending(self, step: Pass) -> Iterator[Meeting]:
        stage, graph = self._stages[step.stage], self._graph
        fields, sums = self._nothing(), self._nothing()
        if step.phase == "forward":
            fields += self._halos(stage)
        else:
            fields += self._cotangents(stage)
        cut: list[int] = []
        for nodes, summed in ((stage.reductions, "backward"), (summed_globals(graph, stage), "forward")):
            if step.phase != summed:
                keys = keys_of(self._problem, nodes)
                if keys.all:
                    sums += self._sums(stage, sum_bytes(self._problem, keys, self._count))
                cut += keys.cut
        yield Meeting(fields, sums)
        if cut:
            yield Meeting(self._nothing(), self._put_together(cut))

    def at_last(self) -> Iterator[Meeting]:
        for late in late_gradients(self._graph, self._stages):
            yield Meeting(self._nothing(), self._put_together(late, gradients=True))

    def _halos(self, stage: Stage) -> Bytes:
        owners, problem, messages = self._owners, self._problem, self._nothing()
        for i in stage.kept:
            pixel = problem.packing.bytes_per_pixel(self._graph, i, problem.tier(self._tiers[i]))
            written, held = ([boxes(i, rank) for rank in self._ranks] for boxes in (owners.written, owners.held))
            messages += _travelling(written, held, partial(owners.halo, i), pixel)
        return messages

    def _cotangents(self, stage: Stage) -> Bytes:
        """What each summed up alone, and strips."""
        owners, index, graph, messages = self._owners, stage.index, self._graph, self._nothing()
        for i in stage.reads:
            if not (index in owners.cotangents.adding(i) and graph[i].differentiable):
                continue
            held, wanted, read = (
                [boxes(rank) for rank in self._ranks]
                for boxes in (
                    partial(owners.cotangents.held, i),
                    partial(owners.cotangents.wanted_next, index, i),
                    partial(owners.read, index, i),
                )
            )
            messages += _travelling(held, wanted, partial(owners.cotangents.sums, index, i), graph[i].bytes_per_pixel)
            messages += _travelling(read, wanted, partial(self._strips, index, i), graph[i].bytes_per_pixel)
        return messages

    def _strips(self, stage: int, field: int, sender: int, receiver: int) -> Iterator[Box]:
        return (box for _, box in self._owners.cotangents.strips(stage, field, sender, receiver))

    def _sums(self, stage: Stage, nbytes: Bytes) -> Bytes:
        """Of so many bytes to each rank, as many as each rank has."""
        counts = np.array([[len(joined(self._owners, stage.index, rank))] for rank in self._ranks])
        return _to_others(counts * nbytes)

    def _put_together(self, nodes: Sequence[int], *, gradients: bool = False) -> Bytes:
        """A rank's shares, behind whether each is there, to every other one."""
        nbytes = 8 * len(nodes) + share_bytes(self._problem, nodes, self._count, gradients=gradients)
        return _to_others(np.tile(nbytes[:, None], self._count))

    def _nothing(self) -> Bytes:
        return np.zeros((self._count, self._count), np.int64)


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
) -> Bytes:
    """Bytes from each rank to each other one, given boxes of both by rank outside of which nothing travels."""
    found = np.zeros((len(some), len(some)), np.int64)
    for sender, receiver in near(some, others):
        found[sender, receiver] = pixel_bytes * sum(box.area for box in boxes(sender, receiver))
    return found


def _to_others(messages: Bytes) -> Bytes:
    np.fill_diagonal(messages, 0)
    return messages


def _hulls(boxes: Sequence[Sequence[Box]]) -> Bytes:
    """`(4, ranks)`: y0, x0, y1, x1."""
    hulls = (reduce(Box.hull, found) if found else Box(0, 0, 0, 0) for found in boxes)
    return np.array([(box.y0, box.x0, box.y1, box.x1) for box in hulls], np.int64).T
