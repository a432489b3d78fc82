"""The tile shape: what fits, what is refused, what is forced."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gigagrad.devices import Machine
from gigagrad.errors import BudgetError
from gigagrad.graphs import InputSpec, capture
from gigagrad.plans import Costs, Grid, choose, estimate, make_plan, split_segments
from gigagrad.plans.cuts import Cuts
from gigagrad.plans.fit import Fitter
from gigagrad.plans.geometry import lattice
from gigagrad.plans.plan import amount_of
from gigagrad.stores import DiskTier, MemoryTier
from gigagrad.stores.disk import PlannedDiskTier
from tests.plans.networks import graph_of as colour_graph_of
from tests.plans.networks import kept_at_best, plan_of, problem_of, residual


def refusal(plan_for, graph, budget):
    """The error for a budget, None if it works (and then the plan keeps to it)."""
    try:
        plan = plan_for(graph, budget)
    except BudgetError as error:
        return error
    assert plan.budget_bytes == budget
    assert plan.predicted_peak_bytes <= budget
    return None


@given(st.integers(1, 2**24))
def test_a_plan_keeps_to_its_budget_or_names_one_that_works(unet, gate, plan_for, budget):
    for graph in (unet, gate):
        error = refusal(plan_for, graph, budget)
        if error is not None:
            assert error.budget_bytes == budget
            assert budget < error.needed_bytes <= error.smallest_bytes
            assert refusal(plan_for, graph, error.smallest_bytes) is None


def test_a_refusal_is_of_the_first_segment_that_fails_and_the_next_may_need_more(unet, plan_for):
    error = refusal(plan_for, unet, 1)
    assert refusal(plan_for, unet, error.needed_bytes - 1) is not None
    assert refusal(plan_for, unet, error.needed_bytes) is None


def test_a_refusal_names_the_segment_the_tile_and_the_numbers(unet, plan_for):
    with pytest.raises(
        BudgetError, match=r"segment 0 does not fit: its leanest tile, \d+ x \d+ px.*smallest budget"
    ) as caught:
        plan_for(unet, 1000)
    assert "\n" not in str(caught.value)


def test_more_budget_never_means_smaller_tiles_than_fit(unet, plan_for):
    areas = []
    for budget in (4 * 2**20, 8 * 2**20, 16 * 2**20, 64 * 2**20):
        try:
            plan = plan_for(unet, budget)
        except BudgetError:
            continue
        areas.append(plan.tile[0] * plan.tile[1])
    assert areas == sorted(areas)
    assert len(areas) >= 2


def segments_of(graph, plan):
    return split_segments(graph, [field.node for field in plan.kept])


def test_forced_tiles_are_taken_as_they_are(unet, gate, plan_for):
    assert plan_for(unet, tiles=((7, 300),)).tile == (7, 300)
    plan = plan_for(gate, tiles=((5, 6), (3, 4)))
    assert [segment.tile for segment in plan.segments] == [(5, 6), (3, 4)]
    assert [segment.tile for segment in plan_for(gate, tiles=((5, 6),)).segments] == [(5, 6), (5, 6)]


def test_chosen_tiles_lie_on_the_lattice_or_are_the_whole_field(unet, plan_for):
    for budget in (6 * 2**20, 16 * 2**20, None):
        plan = plan_for(unet, budget)
        for planned, segment in zip(plan.segments, segments_of(unet, plan), strict=True):
            step, largest = lattice(unet, segment), max(unet[i].shape[-2:] for i in segment.targets(unet))
            for axis, whole in enumerate(largest):
                assert planned.tile[axis] % step[axis] == 0 or planned.tile[axis] == whole


def test_what_the_process_holds_counts(unet, plan_for):
    lean = plan_for(unet, tiles=((64, 64),))
    heavy = plan_for(unet, tiles=((64, 64),), base=2**30)
    assert heavy.predicted_peak_bytes - lean.predicted_peak_bytes == 2**30 - 2**20


def test_the_plan_describes_its_grid(unet, plan_for):
    plan = plan_for(unet, tiles=((50, 60),))
    planned, segment = plan.segments[0], segments_of(unet, plan)[0]
    grid = Grid(unet, segment, (50, 60))
    assert planned.tiles == grid.shape
    assert planned.computed_ratio > 1
    image = unet.source("image").id
    assert planned.crop == max(grid[i].box(image).shape for i in range(len(grid)))


def test_gradients_cost_memory(unet, plan_for):
    tiles = ((64, 64),)
    assert (
        plan_for(unet, tiles=tiles).predicted_peak_bytes
        > plan_for(unet, backward=False, tiles=tiles).predicted_peak_bytes
    )


def test_parameters_cost_their_gradients_and_sums(graph_of, plan_for):
    """1000 numbers of 4 bytes: a working copy; the gradient, one tile's contribution and the float64 sum, and of 36
    tiles up to six that wait to be joined.
    """
    graph = graph_of(nn.Conv2d(1, 40, 5, bias=False), lambda o, t: o.mean() + t.mean(), (50, 50))
    scalars = 1000  # a few global numbers of the loss

    def counted(**more):
        return amount_of(plan_for(graph, tiles=((9, 9),), **more).memory_at_peak, estimate.GRADIENTS, estimate.SUMS)

    assert 0 <= counted() - 1000 * (4 + 4 + 4 + 8 + 6 * 8) < scalars
    assert 0 <= counted(backward=False) - 1000 * 4 < scalars


def test_global_maps_as_large_as_the_image_are_counted(graph_of, plan_for):
    """A positional ramp has no field to come from: it is made whole, and the plan has to know."""
    import torch

    class Ramp(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 1)

        def forward(self, x):
            return self.conv(x) * (torch.arange(x.shape[-1])[None] + torch.arange(x.shape[-2])[:, None])

    size = (2048, 2048)
    without = plan_for(graph_of(nn.Conv2d(1, 1, 1), F.mse_loss, size), tiles=((64, 64),))
    assert plan_for(graph_of(Ramp(), F.mse_loss, size), tiles=((64, 64),)).predicted_peak_bytes > (
        without.predicted_peak_bytes + 8 * 2048**2
    )


def test_the_machine_is_known_without_asking():
    assert Machine.detect(2).cache_bytes > 0


def test_without_a_budget_tiles_are_no_larger_than_speed_asks_for():
    """A classifier of whole slides: one tile as large as the image is no faster than many small ones."""
    deep = nn.Sequential(
        *(nn.Conv2d(3 if not i else 16, 16, 3, 2, 1) for i in range(5)), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    graph = colour_graph_of(deep, lambda o, t: o.square().mean() + t.mean(), size=8192)
    chosen, largest = plan_of(graph, kept=()), plan_of(graph, kept=(), tiles=((8192, 8192),))
    assert chosen.predicted_peak_bytes < largest.predicted_peak_bytes / 3
    forced = [plan_of(graph, kept=(), tiles=((side, side),)).predicted_seconds for side in (256, 512, 1024, 2048, 8192)]
    assert chosen.predicted_seconds <= 1.2 * min(forced)


def test_no_single_field_of_a_long_step_is_better_kept_or_given_up():
    graph = colour_graph_of(residual(6, 16), size=512)
    slow = Machine(flops_per_second=1e9)
    free = plan_of(graph, machine=slow)
    plan = plan_of(graph, int(0.4 * free.predicted_peak_bytes), machine=slow)
    assert plan.modelled_seconds > 10
    kept = [field.node for field in plan.kept]
    wanted = kept_at_best(graph)
    assert 0 < len(kept) < len(wanted)
    for field in set(wanted) - {*kept}:
        try:
            other = plan_of(graph, plan.budget_bytes, machine=slow, kept=[*kept, field])
        except BudgetError:
            continue
        assert other.modelled_seconds > 0.995 * plan.modelled_seconds


def test_what_was_given_up_early_may_take_the_place_of_what_stayed(monkeypatch):
    """Where files have little room, the first fields to be given up are not the least worth keeping together."""
    graph = colour_graph_of(residual(6, 16), size=512)
    slow, room = Machine(flops_per_second=1e9), 64 * 2**20
    budget = int(0.4 * plan_of(graph, machine=slow).predicted_peak_bytes)
    problem = problem_of(graph, budget, machine=slow, rooms={"disk": room})
    problem = replace(problem, tiers=(MemoryTier(), PlannedDiskTier(room)))
    found = make_plan(problem)
    assert make_plan(problem) == found  # the draws are the same ones
    assert found.predicted_peak_bytes <= budget
    assert found.bytes_in("disk") <= room
    monkeypatch.setattr(choose, "_MOST_DRAWN", 0)
    assert make_plan(problem).modelled_seconds > 1.3 * found.modelled_seconds


@pytest.mark.parametrize("is_bag", [False, True])
def test_of_bags_the_leanest_of_what_is_about_as_fast_is_taken(is_bag):
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1)
    image = InputSpec((9, 1, 8, 8) if is_bag else (1, 1, 8, 8), torch.float32, field=True, bag=is_bag)
    target = InputSpec((1,), torch.float32, field=False)
    graph = capture(nn.Sequential(*layers), lambda output, target: output.square().mean() * target.sum(), image, target)
    problem = problem_of(graph)
    chooser = choose._Chooser(problem, Costs(graph, problem.machine), None, None, lambda _: None, None)
    wide, narrow = (node.id for node in graph.nodes if "conv" in node.op)
    rated: list[choose.Rated] = [(1.0, {wide: "memory"}), (1.04, {narrow: "memory"}), (1.06, {})]
    plan = chooser._first_that_fits(rated, math.inf)
    assert plan is not None
    assert [field.node for field in plan.kept] == [narrow if is_bag else wide]


def test_whoever_asks_is_told_of_every_way_that_was_tried(norms):
    told: list[float | None] = []
    problem = problem_of(norms, 900 * 2**20)
    plan = make_plan(problem, tried=told.append)
    fitting = [seconds for seconds in told if seconds is not None]
    assert None in told
    assert min(fitting) == pytest.approx(plan.modelled_seconds)


@pytest.mark.parametrize("ranks", [3, 5])
def test_the_smallest_budget_of_several_ranks_counts_their_messages(ranks):
    layers = nn.Conv2d(3, 3000, 1), nn.Conv2d(3000, 3000, 1), nn.BatchNorm2d(3000), nn.Conv2d(3000, 1, 1)
    graph = colour_graph_of(nn.Sequential(*layers), size=8)
    problem = replace(problem_of(graph), ranks=ranks, budget_bytes=1)
    with pytest.raises(BudgetError) as caught:
        make_plan(problem)
    smallest = caught.value.smallest_bytes
    assert "the budget is 1 B" in str(caught.value)
    plan = make_plan(replace(problem, budget_bytes=smallest))
    assert plan.ranks is not None
    assert plan.ranks.message_bytes > 2**25
    assert plan.predicted_peak_bytes <= smallest


def test_of_all_ways_to_evict_the_best_alone_is_settled_exactly(monkeypatch):
    graph = colour_graph_of(residual(6, 16), size=512)
    free = plan_of(graph)
    rough: list[bool] = []
    settled: list[object] = []
    fit, settle = Fitter._fit, Fitter._settle

    def fitted(*given, roughly, **how):
        rough.append(roughly)
        return fit(*given, roughly=roughly, **how)

    def settling(*given):
        settled.append(given)
        return settle(*given)

    monkeypatch.setattr(Fitter, "_fit", fitted)
    monkeypatch.setattr(Fitter, "_settle", settling)
    problem = problem_of(graph, int(0.4 * free.predicted_peak_bytes), rooms={"disk": 2**40})
    plan = make_plan(replace(problem, tiers=(MemoryTier(), DiskTier(Path(), 2**40))))
    assert {field.tier for field in plan.kept} == {"memory", "disk"}
    assert sum(rough) > 12
    assert len(settled) <= 4


def test_where_nothing_fits_at_first_every_choice_of_fields_is_tried(monkeypatch):
    """A rough look passes over choices behind some that are slower; one of them may be all that fits."""
    graph = colour_graph_of(residual(12, 16), size=512)
    problem = problem_of(graph, 2**29)
    chain = Cuts(graph, Costs(graph, problem.machine).usual_seconds, backward=True)
    fewest = sorted({len(selection.kept) for selection in chain.selections()})[1]
    fit, rough = Fitter.fit, Fitter.rough_seconds

    def fitted(fitter, kept, *, closely=False, **how):
        if closely and len(kept) == fewest:
            return fit(fitter.unbounded(), kept)
        raise BudgetError("too little", budget_bytes=2**29, needed_bytes=2**40, smallest_bytes=2**40)

    monkeypatch.setattr(Fitter, "fit", fitted)
    monkeypatch.setattr(Fitter, "rough_seconds", lambda fitter, kept, **how: rough(fitter.unbounded(), kept))
    assert len(make_plan(problem).kept) == fewest


def test_a_way_that_a_rough_look_finds_hopeless_is_left():
    """Beside a plan that computes the same; nothing that was refused is looked at closely then."""
    graph = colour_graph_of(residual(6, 16), size=512)
    free = plan_of(graph)

    def best(budget, at_most):
        problem = problem_of(graph, budget)
        return choose._Chooser(problem, Costs(graph, problem.machine), None, None, lambda _: None, None).best(at_most)

    tight = int(0.4 * free.predicted_peak_bytes)
    found = best(tight, math.inf)
    assert found is not None
    assert best(tight, found.modelled_seconds) == found
    assert best(tight, 0.5 * free.modelled_seconds) is None
    assert best(tight, 0.5 * found.modelled_seconds) is None
    assert best(2 * 2**20, found.modelled_seconds) is None
    with pytest.raises(BudgetError):
        best(2 * 2**20, math.inf)
