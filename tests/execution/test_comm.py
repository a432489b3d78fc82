"""Any number of ranks gives the bits of one, and sends what the plan says."""

from __future__ import annotations

import dataclasses
from functools import partial
from math import prod

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import gigagrad as gg
from gigagrad.errors import RankError
from gigagrad.execution.comm import Comm, PassResult
from gigagrad.execution.ordered_sum import OrderedSum
from gigagrad.graphs import MOMENTS
from gigagrad.plans import Tiles
from gigagrad.plans import check as faults_of
from gigagrad.plans.emit import shared_by
from gigagrad.plans.partition import how_summed
from gigagrad.plans.plan import RankPlan
from gigagrad.plans.program import Exchange, Gather, Sum
from gigagrad.plans.segments import summed_globals
from gigagrad.ranks import SingleRank, run_threaded
from tests.exactness.generated import make_case
from tests.exactness.normed import Net, dice
from tests.execution.by_ranks import RankRun, outcome, prepared_by, prepared_for


def check(run: RankRun, count: int) -> None:
    alone, _ = outcome(run, SingleRank())
    found = run_threaded(count, partial(outcome, run), timeout=60)
    assert [bits for bits, _ in found] == [alone] * count
    assert sum(nbytes for _, nbytes in found) == by(run, count).sent_bytes


def by(run: RankRun, count: int) -> RankPlan:
    """What the plan comes to if so many ranks share it."""
    found = shared_by(run.prepared.problem, run.prepared.plan, count).ranks
    assert found is not None
    return found


@settings(max_examples=12, derandomize=True, phases=[Phase.generate])
@given(st.integers(0, 10_000), st.integers(2, 12))
def test_random_networks_by_random_numbers_of_ranks(seed, count):
    case = make_case(seed)
    check(prepared_for(case.model, case.loss, case.image, case.target, tile=case.tile), count)


class Looks(nn.Module):
    """A field read whole, and a map as large as the image that leads back to fields."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x):
        y = self.conv(x)
        return self.last(y + y.flip(-1).cumsum(-2) / 9)


@pytest.mark.parametrize("where", ["memory", "scratch", "bfloat16"])
@pytest.mark.parametrize("net", [Net, Looks])
def test_wherever_fields_are_kept(net, where, tmp_path):
    torch.manual_seed(0)
    storage = where if where == "bfloat16" else "exact"
    image, target = torch.rand(3, 64, 96, requires_grad=True), (torch.rand(1, 64, 96) > 0.5).float()
    run = prepared_for(net(), dice, image, target, tile=(13, 24), scratch=tmp_path, storage=storage)
    if where != "memory":
        state = run.engine.state_dict()
        for choice in state["choices"].values():
            choice["kept"] = [[node, "disk"] for node, _ in choice["kept"]]
        run.engine.load_state_dict(state)
        run = prepared_by(run.engine, image, target)
    assert run.prepared.plan.kept
    check(run, 3)


class Standardised(nn.Module):
    """Weights made of parameters, which are used, too; so large that ranks share their sums."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv = nn.Conv2d(3, 40, 1), nn.Conv2d(40, 40, 3, padding=1)
        self.head = nn.Conv2d(40, 1, 1)

    def forward(self, x):
        y, weight = self.first(x).relu(), self.conv.weight
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / weight.std((1, 2, 3), keepdim=True)
        return self.head((nn.functional.conv2d(y, weight, padding=1) + self.conv(y)).relu())


@pytest.mark.parametrize("count", [2, 5])
def test_large_sums_that_are_needed_at_once_are_put_together(count):
    torch.manual_seed(0)
    net = Standardised().double()
    image, target = torch.rand(3, 48, 40).double(), (torch.rand(1, 48, 40) > 0.5).double()
    run = prepared_for(net, dice, image, target, tile=(8, 40))
    problem, segments = run.prepared.problem, run.prepared.segments
    assert any(how_summed(problem, summed_globals(run.prepared.graph, segment)).cut for segment in segments)
    check(run, count)
    expected = torch.autograd.grad(dice(net(image[None]), target[None]), [*net.parameters()])
    run.engine.backward(image, target)
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert (parameter.grad - gradient).abs().max() <= 1e-11 * gradient.abs().max()


def test_moments_are_never_cut():
    """However many there are: none of their numbers can be merged without the others."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 2100, 1), nn.BatchNorm2d(2100), nn.Conv2d(2100, 1, 1))
    image, target = torch.rand(3, 16, 8), (torch.rand(1, 16, 8) > 0.5).float()
    run = prepared_for(net, dice, image, target, tile=(4, 8))
    graph = run.prepared.graph
    moments = tuple(node.id for node in graph.nodes if node.op == MOMENTS)
    assert sum(8 * prod(graph[i].shape) for i in moments) > 2**16
    assert how_summed(run.prepared.problem, moments).whole == moments
    check(run, 3)


def test_plans_for_ranks_say_what_each_holds_and_are_walked():
    image, target = torch.rand(3, 256, 96), torch.rand(1, 256, 96)
    run = prepared_for(Net(), dice, image, target, tile=(16, 96))
    for count in (2, 4):
        problem = dataclasses.replace(run.prepared.problem, ranks=count)
        plan = gg.plans.make_plan(problem, tiles=((16, 96),))
        assert plan.ranks is not None
        assert 1 / count < plan.ranks.held_share < 1 / count + 0.2
        assert not faults_of(problem, plan)
        less = dataclasses.replace(plan.ranks, held_share=0.9 / count)
        assert {fault.rule for fault in faults_of(problem, dataclasses.replace(plan, ranks=less))} == {"ranks"}
        assert gg.plans.Plan.from_dict(plan.to_dict()) == plan
        assert f"{count}; each holds at most" in str(plan)


def test_what_whole_field_operators_read_is_replicated_and_the_rest_is_shared():
    image, target = torch.rand(3, 256, 96), torch.rand(1, 256, 96)
    run = prepared_for(Looks(), dice, image, target, tile=(16, 96))
    assert any(run.prepared.graph.gathers(field.node) for field in run.prepared.plan.kept)
    assert by(run, 4).held_share < 0.4


def test_a_rank_without_a_sum_adds_nothing_not_zero():
    run = prepared_for(Net(), dice, torch.rand(3, 64, 96), torch.rand(1, 64, 96), tile=(16, 24))
    plan = shared_by(run.prepared.problem, run.prepared.plan, 2)
    prepared = dataclasses.replace(run.prepared, plan=plan)
    segment = next(one for one in prepared.segments if one.globals)
    graph = prepared.graph
    index, step = next(
        (i, step)
        for i, step in enumerate(plan.steps)
        if isinstance(step, Tiles) and step.segment == segment.index
        if step.phase != "forward"
    )
    end = plan.steps[index + 1]
    assert isinstance(end, Exchange)
    end = dataclasses.replace(end, transfers=(), reductions=Sum((), (), ()))
    first, second = [i for i in segment.globals if graph[i].differentiable][:2]

    def work(ranks):
        comm = Comm(prepared, ranks)
        _, own = comm.own(step)
        sums, key = comm.new_sums(step), (first, second)[ranks.index]
        sums.add(own.start, {key: torch.full(graph[key].shape, -0.0)})
        total, _ = comm.exchange(end, PassResult(step, {}, sums, comm.new_sums(step)))
        shares = {i: value for i, value in total.items() if not comm.is_whole(i)}
        assert all(len(value) == prod(graph[i].shape) / 2 for i, value in shares.items())
        gradients = {i: value.float() for i, value in shares.items()}
        for gather in (one for one in plan.steps if isinstance(one, Gather) and one.gradients):
            comm.gather(gather, [gradients])
        return {**total, **gradients}

    for total in run_threaded(2, work, timeout=120):
        assert {first, second} <= set(total)
        assert all(total[key].signbit().all() and total[key].shape == graph[key].shape for key in (first, second))


def test_an_error_of_one_rank_ends_all_and_is_told_as_it_was():
    image, target = torch.rand(3, 64, 96), torch.rand(1, 64, 96)
    run = prepared_for(Net(), dice, image, target, tile=(16, 24))
    told = []

    def work(ranks):
        with ranks.error_scope():
            if ranks.index == 1:
                raise OSError("no such slide")
            try:
                outcome(run, ranks)
            except RankError as error:
                told.append(str(error))
                raise

    with pytest.raises(OSError, match="no such slide"):
        run_threaded(3, work)
    assert told == ["rank 1 failed: no such slide"] * 2


def test_maxima_and_missing_values_are_joined_as_they_should():
    sums = OrderedSum(torch.float64, {7: torch.maximum})
    sums.add(0, {1: torch.tensor(1.0), 7: torch.tensor(3.0)})
    sums.add(0, {1: torch.tensor(2.0), 7: torch.tensor(1.0)})
    sums.add(5, {2: torch.tensor(-0.0)})
    sums.add(9, {1: torch.tensor(4.0), 7: torch.tensor(9.0)})
    total = sums.total()
    assert {key: value.item() for key, value in total.items()} == {1: 7.0, 2: 0.0, 7: 9.0}
    assert str(total[2].item()) == "-0.0", "what is missing is not added as zero"
