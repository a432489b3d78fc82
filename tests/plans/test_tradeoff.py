"""The smallest budget, the curve from there to where memory gains nothing, and the fate of each field."""

import dataclasses
from itertools import pairwise

import pytest
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gigagrad.errors import BudgetError
from gigagrad.plans import Costs, Machine, fates, pass_seconds, simulate, smallest_budget, trade_off
from gigagrad.plans.choose import roomy


class Normed(nn.Module):
    """Fields before norms are worth keeping, and can be given up."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(1 if i == 0 else 8, 8, 3, padding=1) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return self.head(x)


@pytest.fixture(scope="module")
def normed(graph_of):
    return graph_of(Normed().train(), F.mse_loss, (3000, 4000))


@pytest.fixture(scope="module")
def plan_at(normed, plan_for):
    return lambda budget: plan_for(normed, budget)


@pytest.fixture(scope="module")
def curve(normed, plan_at):
    return trade_off(normed, Machine(), plan_at)


def test_the_smallest_budget_works_and_little_less_does_not(unet, gate, normed, plan_for):
    for graph in (unet, gate, normed):
        budget, plan = smallest_budget(lambda b, graph=graph: plan_for(graph, b))
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


def test_every_point_can_be_had_and_is_sound(normed, curve, plan_at):
    for point in curve:
        plan = plan_at(point.budget_bytes)
        assert plan.predicted_peak_bytes <= point.budget_bytes
        assert simulate(normed, plan, backward=True).consistent


def test_where_memory_gains_nothing_there_is_one_point(graph_of, plan_for):
    graph = graph_of(nn.Conv2d(1, 1, 1), F.mse_loss, (8, 8))
    (point,) = trade_off(graph, Machine(), lambda budget: plan_for(graph, budget))
    assert point.kept == 0


def test_the_time_of_a_plan_is_that_of_its_passes(normed, plan_at):
    plan = plan_at(None)
    costs = Costs(normed, Machine())
    seconds = pass_seconds(normed, Machine(), plan, costs)
    assert len(seconds) == len(plan.passes)
    assert min(seconds) > 0
    assert seconds == pass_seconds(normed, Machine(), plan)
    slower = pass_seconds(normed, Machine(flops_per_second=1e9), plan)
    assert all(a < b for a, b in zip(seconds, slower, strict=True))


def test_the_fate_of_each_field(normed, plan_at):
    plan = plan_at(None)
    found = fates(normed, plan)
    sizes = [fate.size_bytes for fate in found]
    assert sizes == sorted(sizes, reverse=True)
    assert len({fate.node for fate in found}) == len(found)
    kept = [fate for fate in found if fate.kept]
    assert {fate.node for fate in kept} == {field.node for field in plan.kept}
    for fate in kept:
        assert len(fate.stages) == 1  # nobody else has to compute it
        assert min(fate.readers) > fate.stages[0]
        assert fate.sweeps == 2  # forward, and again for its gradient
    lean = {fate.node: fate for fate in fates(normed, smallest_budget(plan_at)[1])}
    assert not any(fate.kept for fate in lean.values())
    first = min(kept, key=lambda fate: fate.node)
    assert lean[first.node].sweeps > first.sweeps
    assert lean[first.node].readers == ()
