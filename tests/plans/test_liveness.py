"""What is kept, when it is in memory, and what is given up under a budget."""

import re
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import nn

from gigagrad.allowances import whole_pages
from gigagrad.errors import BudgetError
from gigagrad.plans import estimate, lifetimes, split_segments
from gigagrad.plans.liveness import held_by_pass
from gigagrad.plans.segments import make_passes
from gigagrad.stores import DiskTier, MemoryTier
from gigagrad.stores.disk import Bricks
from tests.plans.networks import MIB, graph_of, kept_at_best, plan_of, problem_of, residual


@pytest.mark.parametrize("share", [0, 1, 2, 3])
def test_kept_fields_are_in_memory_whenever_they_are_read(share):
    graph = graph_of(residual(3))
    kept = kept_at_best(graph)[:: share + 1] if share < 3 else []
    segments = split_segments(graph, kept)
    passes = make_passes(graph, segments, backward=True)
    lives = lifetimes(graph, segments, passes)
    values, cotangents = (
        {i: when for (i, of), when in lives.items() if of == cotangent} for cotangent in (False, True)
    )
    assert set(values) == set(kept) == set(cotangents)
    for index, step in enumerate(passes):
        segment = segments[step.segment]
        for field in segment.reads:
            if field in values:
                assert index in values[field][1:]
                assert step.phase == "forward" or index in cotangents[field][:-1]
        for field in segment.kept:
            assert index in values[field]
            assert step.phase == "forward" or cotangents[field][-1] == index
    problem = problem_of(graph, tiers=(MemoryTier(), DiskTier(Path())))
    tiers = dict(zip(kept, cycle(["memory", "disk"]), strict=False))
    for tier in problem.tiers:
        held = held_by_pass(problem, segments, passes, tiers, tier)
        assert len(held) == len(passes)
        fields = [graph[i] for i in kept if tiers[i] == tier.name]
        sizes = [_file_bytes(field) if tier.name == "disk" else whole_pages(field.nbytes) for field in fields]
        for at_once in zip(*held, strict=True):  # of fields, and of their cotangents
            assert max(at_once) <= sum(sizes)


def held_in(plan):
    """Fields and cotangents in memory, at most."""
    return plan.most(estimate.FIELDS, estimate.COTANGENTS)


def _file_bytes(field):
    return Bricks(field.size(0), field.size(1), field.bytes_per_pixel).file_bytes


@pytest.mark.slow
def test_a_tight_budget_gives_up_kept_fields_and_a_tighter_one_is_refused():
    graph = graph_of(residual(4, width=16))
    roomy = plan_of(graph, None)
    assert len(roomy.kept) > 6
    lean = plan_of(graph, held_in(roomy) * 2 // 3)
    assert lean.predicted_peak_bytes <= held_in(roomy) * 2 // 3
    assert 0 < len(lean.kept) < len(roomy.kept)
    assert {field.node for field in lean.kept} < {field.node for field in roomy.kept}
    with pytest.raises(BudgetError) as caught:
        plan_of(graph, MIB)
    assert plan_of(graph, caught.value.smallest_bytes).predicted_peak_bytes <= caught.value.smallest_bytes


@pytest.mark.slow
def test_single_fields_are_given_up_where_whole_cuts_do_not_fit():
    smp = pytest.importorskip("segmentation_models_pytorch")
    graph = graph_of(smp.Unet("resnet18", encoder_weights=None), size=1024)
    roomy = plan_of(graph, None)
    budget = held_in(roomy) * 6 // 10
    lean = plan_of(graph, budget)
    assert lean.predicted_peak_bytes <= budget
    assert 10 < len(lean.kept) < len(roomy.kept)
    with pytest.raises(BudgetError) as caught:
        plan_of(graph, budget // 2)
    assert plan_of(graph, caught.value.smallest_bytes).predicted_peak_bytes <= caught.value.smallest_bytes


def test_the_plan_names_what_it_keeps_and_what_runs_whole():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1)

        def forward(self, x):
            return self.head(torch.fft.fft2(self.norm(self.stem(x))).abs())

    plan = plan_of(graph_of(Gate()), None)
    assert "norm" in {field.module for field in plan.kept}
    assert {entry.operator for entry in plan.whole_field} >= {"aten.fft_fft2.default", "aten.abs.default"}
    text = str(plan)
    assert re.search(r"memory  exact +\S+ +1 x 4 x 256 x 256  norm ", text)
    assert "Operators that run on whole fields" in text
    assert "aten.fft_fft2.default" in text
