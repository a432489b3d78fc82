"""Compute what memory buys: the smallest budget that works, and how much faster a step becomes with more.

Works with anything that makes a plan for a budget, so that whatever else bounds the plan (threads, forced tiles, a
scratch folder) is its caller's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gigagrad.errors import BudgetError
from gigagrad.plans.plan import Plan
from gigagrad.plans.problem import roomy

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
    """Fields kept between stages."""
    kept_bytes: int


def smallest_budget(plan_at: PlanAt) -> tuple[int, Plan]:
    """Return the smallest budget that works, to a few percent and with room for what a process adds at will, and its
    plan.

    A refusal names what its leanest tile would need, but another stage may need more, so each proposal is tried.
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
