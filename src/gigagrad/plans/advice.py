"""Work out what more of a resource buys: the curve of memory against time, and how much of what a faster plan needs.

Whatever is named has been planned with: a planner that finds less in it than was promised would make bad advice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, log2

from gigagrad.errors import BudgetError
from gigagrad.plans.plan import Plan
from gigagrad.plans.problem import Problem, roomy
from gigagrad.stores import DiskTier, PlannedDiskTier
from gigagrad.units import printable_bytes

PlanAt = Callable[[int | None], Plan]
"""Makes a plan for a budget in bytes, or for none. Raises `BudgetError`."""

_BUDGETS = 9
"""Budgets tried between the smallest and the one that more memory would not help."""
_GROWTH = 1.25
"""Factor by which a refused budget grows at least before it is tried again."""
_PRECISION = 1.02
"""Factor to which the smallest budget is found."""
_GAIN = 0.99
"""A point of the curve takes at most this share of the time of the one before it."""


@dataclass(frozen=True, slots=True)
class Point:
    """A plan as a point of the trade-off curve. `seconds` are the cost model's, of one step."""

    budget_bytes: int
    """Bytes that it was planned for."""
    predicted_peak_bytes: int
    seconds: float
    kept: int
    """Fields kept between segments."""
    kept_bytes: int


def smallest_budget(plan_at: PlanAt) -> tuple[int, Plan]:
    """Return the smallest budget that works, to a few percent and with room for what a process adds at will, and its
    plan.

    A refusal names what its leanest tile would need, but another segment may need more, so each proposal is tried.
    """

    def needed(budget: int) -> int:
        """Return 0 if the budget works, else more than it: a budget that may."""
        try:
            plan_at(budget)
        except BudgetError as refusal:
            return max(refusal.needed_bytes, budget + 1)
        return 0

    low, high = 0, 1
    while hint := needed(high):
        low, high = hint - 1, max(hint, int(high * _GROWTH))
    while high > low * _PRECISION:
        middle = (low + high) // 2
        if hint := needed(middle):
            low = min(hint - 1, high)
        else:
            high = middle
    budget = roomy(high)
    while True:
        try:
            return budget, plan_at(budget)
        except BudgetError:  # a greedy planner may refuse what a smaller budget could do
            budget = roomy(budget)


def trade_off(plan_at: PlanAt) -> tuple[Point, ...]:
    """Plan memory against time: from the smallest workable budget to where more memory gains nothing.

    Every point is faster than those before it: a plan that needs more memory and is not is left out.
    """
    budget, leanest = smallest_budget(plan_at)
    roomiest = plan_at(None)
    top = max(roomiest.predicted_peak_bytes, budget)
    found = [(budget, leanest), (top, roomiest)]
    for step in range(1, _BUDGETS + 1):
        between = int(budget * (top / budget) ** (step / (_BUDGETS + 1)))
        try:
            found.append((between, plan_at(between)))
        except BudgetError:  # a greedy planner may refuse what a smaller budget could do
            continue
    points = [
        Point(
            between,
            plan.predicted_peak_bytes,
            plan.modelled_seconds,
            len(plan.kept),
            sum(field.size_bytes for field in plan.kept),
        )
        for between, plan in found
    ]
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.predicted_peak_bytes, p.seconds)):
        if not front or point.seconds < _GAIN * front[-1].seconds:
            front.append(point)
    return tuple(front)


MakePlan = Callable[[Problem], Plan]
"""Raises `BudgetError`."""

WORTH_SAYING = 0.05
"""Share of the time that has to be saved."""
_ENOUGH = 0.8
"""The least that saves so much of what can be saved is named."""
_WORTH_MORE = 0.8
"""More memory is named, too, where a step takes at most this share of that time."""
_UNLIMITED = 1 << 60
_SMALLER = (0.75, 0.5)
"""Shares of what is kept in a tier without bounds that are tried, too: what gains little is kept there as well."""


@dataclass(frozen=True, slots=True)
class Advice:
    """With so much of one resource, and all others as they are, there is a faster plan."""

    tier: str
    size_bytes: int
    """A budget of memory, or room in another tier; `format_bytes` prints it without rounding."""
    seconds: float
    """Seconds of a step, by the cost model."""


def advise(problem: Problem, plan: Plan, points: Sequence[Point], make: MakePlan) -> tuple[Advice, ...]:
    """Return what would save a twentieth of this plan's time or more: memory by its trade-off curve, a twentieth for
    each doubling of the budget, and room in each other tier.

    Scratch files count as one, also where the problem has none. Nothing where no budget holds the plan back.
    """
    if problem.budget_bytes is None:
        return ()
    adviser = _Adviser(problem, plan.modelled_seconds, make)
    others = dict.fromkeys([*(tier.name for tier in problem.tiers if not tier.in_budget), DiskTier.name])
    return (*adviser.memory(problem.budget_bytes, points), *(found for tier in others for found in adviser.room(tier)))


class _Adviser:
    """Compares plans with more of something with one that takes `seconds`."""

    def __init__(self, problem: Problem, seconds: float, make: MakePlan) -> None:
        self._problem, self._seconds, self._make = problem, seconds, make

    def memory(self, budget_bytes: int, points: Sequence[Point]) -> list[Advice]:
        """Find a budget that saves most of the time that any could save, and one that saves all where that is much
        less.
        """

        def is_worth(point: Point) -> bool:
            doublings = max(1.0, log2(point.predicted_peak_bytes / budget_bytes))
            return point.budget_bytes > budget_bytes and self._is_worth(point.seconds, doublings)

        faster = [*filter(is_worth, points)]
        if not faster:
            return []
        enough = faster[self._enough([point.seconds for point in faster])]
        fastest = min(faster, key=lambda point: point.seconds)
        named = [enough] if fastest.seconds > _WORTH_MORE * enough.seconds else [enough, fastest]
        tier, found = self._problem.memory.name, list[Advice]()
        for point in named:
            sizes = (roomy(point.predicted_peak_bytes), point.budget_bytes)
            found += self._first(tier, (size for size in map(printable_bytes, sizes) if size > budget_bytes))
        return [each for i, each in enumerate(found) if each.seconds < min((f.seconds for f in found[:i]), default=inf)]

    def room(self, tier: str) -> list[Advice]:
        """Find the least room of a few that saves most of the time that unlimited room would save."""
        most = self._plan(tier, _UNLIMITED)
        if most is None or not self._is_worth(most.modelled_seconds):
            return []
        kept_bytes = most.bytes_in(tier)
        fewer = [self._plan(tier, int(share * kept_bytes)) for share in _SMALLER]
        plans = sorted((plan for plan in (most, *fewer) if plan is not None), key=lambda plan: plan.bytes_in(tier))
        enough = plans[self._enough([plan.modelled_seconds for plan in plans])].bytes_in(tier)
        has = self._problem.rooms.get(tier, 0)
        sizes = (printable_bytes(size) for size in (enough, kept_bytes) if size)
        return self._first(tier, (size for size in sizes if size > has))

    def _first(self, tier: str, sizes: Iterable[int]) -> list[Advice]:
        """Return the first of these sizes whose plan is worth it, if there is one."""
        for size in sizes:
            plan = self._plan(tier, size)
            if plan is not None and self._is_worth(plan.modelled_seconds):
                return [Advice(tier, size, plan.modelled_seconds)]
        return []

    def _is_worth(self, seconds: float, times: float = 1.0) -> bool:
        return seconds <= (1 - times * WORTH_SAYING) * self._seconds

    def _enough(self, seconds: Sequence[float]) -> int:
        """Return the index of the first of these that saves most of what the fastest does."""
        needed = _ENOUGH * (self._seconds - min(seconds))
        return next(i for i, each in enumerate(seconds) if self._seconds - each >= needed)

    def _plan(self, tier: str, size_bytes: int) -> Plan | None:
        """Make a plan with so much of this tier; None if it does not fit."""
        problem = self._problem
        if tier == problem.memory.name:
            changed = dataclasses.replace(problem, budget_bytes=size_bytes)
        else:
            problem = problem.unplaced or problem  # what is recorded has its fields in memory
            missing = () if tier in problem.rooms else (PlannedDiskTier(size_bytes),)
            rooms = {**problem.rooms, tier: size_bytes}
            changed = dataclasses.replace(problem, tiers=(*problem.tiers, *missing), rooms=rooms)
        try:
            return self._make(changed)
        except BudgetError:
            return None
