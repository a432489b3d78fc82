"""What would make a plan faster: named only where it does, and where it is worth it."""

import dataclasses
from itertools import pairwise

import pytest
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gigagrad.devices import Machine
from gigagrad.errors import BudgetError
from gigagrad.plans import Costs, Point, Tiles, advise, check, make_plan, smallest_budget, trade_off
from gigagrad.plans.problem import roomy
from gigagrad.plans.program import Allocate, Buffer
from gigagrad.stores import PlannedDiskTier
from gigagrad.units import format_bytes, parse_bytes
from tests.plans.networks import MIB, plan_of, problem_of

GIB = 2**30


class Curve:
    """A planner for which a step takes what the test says, by the budget and the room in scratch in GiB; of that it
    uses at most 8 GiB.
    """

    def __init__(self, problem, plan, seconds):
        self.problem, self.plan, self.seconds = problem, plan, seconds
        self.segment = dataclasses.replace(plan.segments[0], forward_seconds=0.0, backward_seconds=0.0)

    def __call__(self, problem):
        budget, room = problem.budget_bytes / GIB, problem.rooms.get("disk", 0) / GIB
        if room and not any(isinstance(tier, PlannedDiskTier) for tier in problem.tiers):
            raise AssertionError("room in a tier that is not there")
        return dataclasses.replace(
            self.plan,
            segments=(self.segment,),
            steps=(Allocate((Buffer(0, False, "disk", int(GIB * min(room, 8)), (), (), False),)), Tiles(0, "forward")),
            whole_seconds=self.seconds(budget, room),
        )

    def advice(self, budget=4.0, points=(), rooms=None, peak=0.95):
        tiers = (*self.problem.tiers, PlannedDiskTier(1)) if rooms else self.problem.tiers
        problem = dataclasses.replace(self.problem, budget_bytes=int(budget * GIB), rooms=rooms or {}, tiers=tiers)
        room = (rooms or {}).get("disk", 0) / GIB
        now = dataclasses.replace(self.plan, segments=(), steps=(), whole_seconds=self.seconds(budget, room))
        curve = [Point(int(at * GIB), int(peak * at * GIB), self.seconds(at, 0), 0, 0) for at in points]
        found = advise(problem, now, curve, self)
        return [(each.tier, each.size_bytes / GIB, each.seconds) for each in found]


@pytest.fixture
def planner(unet):
    return lambda seconds: Curve(problem_of(unet), plan_of(unet, tiles=((64, 64),)), seconds)


def test_the_budget_that_saves_most_is_named_and_one_that_saves_much_more(planner):
    points = (2, 4, 6, 8, 16, 32)
    times = {2: 500, 4: 100, 6: 40, 8: 22, 16: 20, 32: 19}
    curve = planner(lambda budget, room: next(times[at] for at in reversed(points) if budget >= at * 0.95))
    assert curve.advice(points=points) == [("memory", pytest.approx(7.75, abs=0.2), 22)]
    times[32] = 10
    assert [seconds for _, _, seconds in curve.advice(points=points)] == [22, 10]


def test_more_memory_that_turns_out_no_faster_is_not_named(planner):
    promised = iter([100, 22, 10])  # the plan, and the curve's points, the last of which nobody can repeat
    curve = planner(lambda budget, room: 100 if room else next(promised, 22))
    assert [seconds for _, _, seconds in curve.advice(points=(8, 16))] == [22]


def test_nothing_is_named_that_saves_less_than_a_twentieth(planner):
    curve = planner(lambda budget, room: 96 if budget > 5 or room > 5 else 100)
    assert curve.advice(points=(2, 4, 8)) == []


def test_a_doubling_of_memory_has_to_save_a_twentieth(planner):
    """From 4 GiB on, 32 GiB are three doublings."""
    little = planner(lambda budget, room: 90 if budget > 24 else 100)
    assert little.advice(points=(4, 32)) == []
    enough = planner(lambda budget, room: 84 if budget > 24 else 100)
    assert [seconds for _, _, seconds in enough.advice(points=(4, 32))] == [84]


def test_less_memory_is_never_named_though_a_plan_for_it_is_faster(planner):
    curve = planner(lambda budget, room: 10 if budget < 3 else 100)
    assert curve.advice(points=(2, 4)) == []


def test_a_budget_that_does_not_keep_its_promise_is_not_named(planner):
    """What a plan for 16 GiB takes is less than that, and a greedy planner may need all of it."""
    curve = planner(lambda budget, room: 10 if budget >= 12 else 100)
    assert curve.advice(points=(4, 16), peak=0.75) == [("memory", pytest.approx(12.2, abs=0.2), 10)]
    curve = planner(lambda budget, room: 10 if budget >= 16 else 100)
    assert curve.advice(points=(4, 16), peak=0.75) == [("memory", 16, 10)]
    hopes = iter([100, 10])  # of the plan, and of the curve's point, which nobody can repeat
    curve = planner(lambda budget, room: next(hopes, 100))
    assert curve.advice(points=(16,)) == []


def test_scratch_is_named_with_what_is_kept_there(planner):
    curve = planner(lambda budget, room: 100 - 10 * min(room, 8))
    assert curve.advice() == [("disk", 8, 20)]
    enough = planner(lambda budget, room: 20 if room >= 4 else 100)
    assert enough.advice() == [("disk", 4, 20)]
    assert enough.advice(rooms={"disk": 2 * GIB}) == [("disk", 4, 20)]
    assert enough.advice(rooms={"disk": 5 * GIB}) == []
    greedy = planner(lambda budget, room: 100 if 4.5 < room < 6 else 20)  # less room than there is helps nobody
    assert greedy.advice(rooms={"disk": 5 * GIB}) == [("disk", 8, 20)]


def test_what_does_not_fit_is_no_advice_and_no_fault(planner):
    curve = planner(lambda budget, room: 20 if room >= 8 else 100)

    def refusing(problem):
        if 0 < problem.rooms.get("disk", 0) < 7 * GIB:
            raise BudgetError("room", budget_bytes=0, needed_bytes=1, smallest_bytes=1)
        return curve(problem)

    problem = dataclasses.replace(curve.problem, budget_bytes=4 * GIB)
    now = dataclasses.replace(curve.plan, segments=(), steps=(), whole_seconds=100)
    (found,) = advise(problem, now, (), refusing)
    assert (found.tier, found.size_bytes) == ("disk", 8 * GIB)


def test_without_a_budget_nothing_is_tried(unet):
    problem = problem_of(unet)
    assert advise(problem, make_plan(problem), (), lambda problem: pytest.fail("planned")) == ()


@pytest.mark.slow
def test_whoever_types_what_is_printed_gets_it(norms):
    """Memory and scratch both help three norms over 12 Mpx, on a slow processor."""
    machine = Machine(flops_per_second=2e9)
    problem = problem_of(norms, 300 * MIB, machine=machine)
    costs = Costs(norms, machine)

    def make(changed):
        return make_plan(changed, costs=costs)

    plan = make(problem)
    points = trade_off(lambda budget: make(dataclasses.replace(problem, budget_bytes=budget)))
    found = advise(problem, plan, points, make)
    assert {each.tier for each in found} == {"memory", "disk"}
    for each in found:
        assert each.seconds <= 0.95 * plan.modelled_seconds
        size = parse_bytes(format_bytes(each.size_bytes))
        if each.tier == "memory":
            again = plan_of(norms, size, machine=machine)
        else:
            tiers = (*problem.tiers, PlannedDiskTier(size))
            again = plan_of(norms, 300 * MIB, machine=machine, tiers=tiers, rooms={"disk": size})
            assert again.bytes_in("disk") <= size
        assert again.modelled_seconds == pytest.approx(each.seconds)


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
    """A planner whose refusals name too little, as those of a plan with many segments do."""

    def __init__(self, plan, steps):
        self.plan, self.steps, self.calls = plan, steps, 0

    def __call__(self, budget):
        self.calls += 1
        refusing = [step for step in self.steps if budget is not None and step > budget]
        if refusing:
            needed = min(refusing)
            raise BudgetError("segment", budget_bytes=budget, needed_bytes=needed, smallest_bytes=roomy(needed))
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
