"""The smallest budget, and the curve from there to where memory gains nothing."""

import dataclasses
from itertools import pairwise

import pytest
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gigagrad.errors import BudgetError
from gigagrad.plans import check, smallest_budget, trade_off
from gigagrad.plans.problem import roomy
from tests.plans.networks import problem_of


@pytest.fixture(scope="module")
def curve(plan_at):
    return trade_off(plan_at)


@pytest.mark.slow
def test_the_smallest_budget_works_and_little_less_does_not(unet, gate, norms, plan_for):
    for graph in (unet, gate, norms):
        budget, plan = smallest_budget(lambda b, graph=graph: plan_for(graph, b))  # type: ignore[misc]
        assert plan.predicted_peak_bytes <= budget == plan.budget_bytes
        with pytest.raises(BudgetError):
            plan_for(graph, plan_for(graph, budget).predicted_peak_bytes * 95 // 100 - 2**26)


class Stairs:
    """A planner whose refusals name too little, as those of a plan with many stages do."""

    def __init__(self, plan, steps):
        self.plan, self.steps, self.calls = plan, steps, 0

    def __call__(self, budget):
        self.calls += 1
        refusing = [step for step in self.steps if budget is not None and step > budget]
        if refusing:
            needed = min(refusing)
            raise BudgetError("stage", budget_bytes=budget, needed_bytes=needed, smallest_bytes=roomy(needed))
        return dataclasses.replace(self.plan, budget_bytes=budget)


@given(st.lists(st.integers(2**20, 2**40), min_size=1, max_size=40))
def test_a_refusal_that_names_too_little_is_tried_and_left_behind(plan_for, unet, steps):
    stairs = Stairs(plan_for(unet, tiles=((64, 64),)), steps)
    budget, _ = smallest_budget(stairs)
    assert max(steps) <= budget <= roomy(int(1.02 * max(steps)) + 1)
    # From a byte to a terabyte with steps of a quarter, then halves of what is left.
    assert stairs.calls < 150


@pytest.mark.slow
def test_the_curve_falls_from_the_smallest_budget_to_the_fastest_plan(curve, plan_at):
    assert len(curve) >= 4
    assert curve[0].budget_bytes == smallest_budget(plan_at)[0]
    for before, after in pairwise(curve):
        assert before.predicted_peak_bytes < after.predicted_peak_bytes
        assert before.seconds > after.seconds
    roomiest = plan_at(None)
    assert curve[-1].predicted_peak_bytes <= roomiest.predicted_peak_bytes
    assert (curve[0].kept, curve[-1].kept) == (0, len(roomiest.kept))
    assert curve[-1].kept_bytes == sum(field.size_bytes for field in roomiest.kept)


@pytest.mark.slow
def test_every_point_can_be_had_and_is_sound(norms, curve, plan_at):
    for point in curve:
        plan = plan_at(point.budget_bytes)
        assert plan.predicted_peak_bytes <= point.budget_bytes
        assert not check(problem_of(norms), plan)


def test_where_memory_gains_nothing_there_is_one_point(graph_of, plan_for):
    graph = graph_of(nn.Conv2d(1, 1, 1), F.mse_loss, (8, 8))
    (point,) = trade_off(lambda budget: plan_for(graph, budget))
    assert point.kept == 0
