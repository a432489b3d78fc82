"""What the ranks of a run send each other, to the byte: known from the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

import torch

from gigagrad.boxes import Box
from gigagrad.graphs import FIELD_MAX
from gigagrad.plans.keeping import Lifetime, is_replicated, lifetimes
from gigagrad.plans.plan import Plan, RankPlan
from gigagrad.plans.problem import Problem
from gigagrad.plans.shares import Shares, down
from gigagrad.plans.stages import Stage, split_stages
from gigagrad.stores import Tier

_PACKING = 2
"""A message is packed from crops and cut into them again, which takes as much beside."""

Meeting = dict[tuple[int, int], int]
"""Bytes from one rank to another, by both."""


def traffic(problem: Problem, stages: tuple[Stage, ...], plan: Plan, shares: Shares) -> Iterator[tuple[int, Meeting]]:
    """Every meeting of a run in which something is sent, with the pass that it ends."""
    counter = _Traffic(problem, stages, plan, shares)
    for index, step in enumerate(plan.passes):
        stage = stages[step.stage]
        meetings = (
            counter.after_forward(stage) if step.phase == "forward" else counter.after_gradients(stage, step.phase)
        )
        yield from ((index, meeting) for meeting in meetings if any(meeting.values()))


def plan_for_ranks(problem: Problem, plan: Plan) -> RankPlan:
    """What a plan comes to if so many ranks share it."""
    stages = split_stages(problem.graph, [field.node for field in plan.kept])
    shares = Shares(problem.graph, stages, plan, problem.ranks)
    sent, most = 0, 0
    for _, meeting in traffic(problem, stages, plan, shares):
        sent += sum(meeting.values())
        for rank in range(problem.ranks):
            most = max(most, sum(nbytes for pair, nbytes in meeting.items() if rank in pair))
    return RankPlan(problem.ranks, _held_share(problem, stages, plan, shares), _PACKING * most, sent)


def _held_share(problem: Problem, stages: tuple[Stage, ...], plan: Plan, shares: Shares) -> float:
    """The largest part that a rank holds, in any pass and tier, of the fields that are not replicated."""
    graph, largest = problem.graph, 0.0
    tiers = {field.node: field.tier for field in plan.kept}
    lives = [life for life in lifetimes(graph, stages, plan.passes) if not is_replicated(graph, life)]
    for tier in problem.tiers:
        here = [life for life in lives if tiers.get(life.field, problem.memory.name) == tier.name]
        for index in range(len(plan.passes)):
            there = [life for life in here if life.first <= index <= life.last]
            whole = sum(_life_bytes(problem, tier, life, [shares.whole(life.field)]) for life in there)
            for rank in range(shares.count) if whole else ():
                held = (
                    _life_bytes(
                        problem,
                        tier,
                        life,
                        shares.held_cotangents(life.field, rank) if life.cotangent else shares.held(life.field, rank),
                    )
                    for life in there
                )
                largest = max(largest, sum(held) / whole)
    return largest


def _life_bytes(problem: Problem, tier: Tier, life: Lifetime, boxes: Iterable[Box]) -> int:
    graph = problem.graph
    pixel = graph[life.field].bytes_per_pixel
    if not life.cotangent:
        pixel = problem.packing.bytes_per_pixel(graph, life.field, tier)
    return sum(tier.field_bytes(box.shape, pixel) for box in boxes)


class _Traffic:
    def __init__(self, problem: Problem, stages: tuple[Stage, ...], plan: Plan, shares: Shares) -> None:
        self._problem, self._graph, self._stages, self._shares = problem, problem.graph, stages, shares
        self._tiers = {field.node: field.tier for field in plan.kept}

    def after_forward(self, stage: Stage) -> Iterator[Meeting]:
        shares, packing = self._shares, self._problem.packing
        pixel = {i: packing.bytes_per_pixel(self._graph, i, self._problem.tier(self._tiers[i])) for i in stage.kept}
        yield self._pairs(lambda a, b: sum(_pixels(shares.halo(i, a, b)) * pixel[i] for i in stage.kept))
        yield from self._sums(stage, stage.reductions)

    def after_gradients(self, stage: Stage, phase: str) -> Iterator[Meeting]:
        graph, shares, index = self._graph, self._shares, stage.index
        added = [i for i in stage.reads if index in shares.adding(i) and graph[i].differentiable]
        pixel = {i: graph[i].bytes_per_pixel for i in added}
        yield self._pairs(lambda a, b: sum(_pixels(shares.sums(index, i, a, b)) * pixel[i] for i in added))
        yield self._pairs(
            lambda a, b: sum(_pixels(box for _, box in shares.strips(index, i, a, b)) * pixel[i] for i in added)
        )
        if phase == "one pass":
            yield from self._sums(stage, stage.reductions)
        yield from self._sums(stage, [i for i in stage.globals if graph[i].differentiable])

    def _pairs(self, nbytes: Callable[[int, int], int]) -> Meeting:
        ranks = range(self._shares.count)
        return {(a, b): nbytes(a, b) for a in ranks for b in ranks if a != b}

    def _sums(self, stage: Stage, keys: Sequence[int]) -> Iterator[Meeting]:
        """Up to the first rank, joined as far as the tree allows, and down."""
        if keys:
            nbytes = sum_bytes(self._problem, keys)
            for step in self._shares.joins(stage.index):
                yield {pair: count * nbytes for pair, count in step.items()}
            for receivers in down(self._shares.count):
                yield dict.fromkeys(receivers.items(), nbytes)


def sum_bytes(problem: Problem, keys: Sequence[int]) -> int:
    """Of one message with sums of these nodes: a part, for each node whether there is a sum, and all of them."""
    return 8 * (1 + len(keys)) + sum(prod(problem.graph[key].shape) * sum_dtype(problem, key).itemsize for key in keys)


def sum_dtype(problem: Problem, key: int) -> torch.dtype:
    """In which sums of a node are kept."""
    node = problem.graph[key]
    return node.dtype if node.op == FIELD_MAX else problem.sum_dtype


def _pixels(boxes: Iterable[Box]) -> int:
    return sum(box.area for box in boxes)
