"""Which cuts are chosen: what people would expect, and never much worse than an exact integer program."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import nn

from gigagrad.graphs import GATHER, InputSpec, capture
from gigagrad.plans import Problem, make_plan, split_segments
from gigagrad.plans.cuts import Cuts
from gigagrad.plans.segments import gathered, is_read, levels
from tests.plans.networks import Ladder, chain_of, graph_of, kept_at_best, residual


def operators(graph, fields):
    return sorted(graph[i].op.split(".")[1] for i in fields)


def test_a_local_network_keeps_nothing():
    graph = graph_of(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 1, 3)))
    assert kept_at_best(graph) == []


def test_a_norm_keeps_what_it_normalises():
    graph = graph_of(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1)))
    assert operators(graph, kept_at_best(graph)) == ["conv2d"]


def test_a_norm_of_the_image_keeps_nothing():
    graph = graph_of(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 1, 3, padding=1)))
    assert kept_at_best(graph) == []


def test_of_a_long_chain_of_sums_some_are_kept():
    graph = graph_of(residual(8))
    kept = operators(graph, kept_at_best(graph))
    assert kept.count("conv2d") > 8
    assert 0 < kept.count("relu") + kept.count("add") < 8


def test_what_whole_field_operators_read_is_always_kept():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 1, 1)

        def forward(self, x):
            return self.b(self.a(x).flip(2))

    graph = graph_of(Turned())
    (gather,) = (node for node in graph.nodes if node.op == GATHER)
    assert kept_at_best(graph) == sorted(gather.operands)
    assert split_segments(graph)[0].kept == gather.operands


def test_a_deep_local_network_is_cut_where_that_is_cheaper_than_a_halo():
    layers = [layer for _ in range(24) for layer in (nn.Conv2d(16, 16, 5, padding=2), nn.ReLU())]
    graph = graph_of(nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *layers, nn.Conv2d(16, 1, 1)), size=1024)
    selections = chain_of(graph).selections()
    assert 2 < len(selections[0].kept) < 25
    assert selections[0].seconds < 0.7 * selections[-1].seconds
    assert selections[-1].kept == frozenset()


def test_less_memory_costs_more_time():
    found = chain_of(graph_of(residual(6))).selections()
    assert len(found) > 5
    for roomy, lean in pairwise(found):
        assert roomy.nbytes > lean.nbytes
        assert roomy.seconds < lean.seconds


class Exact:
    """The same choice as an integer program, after Checkmate (Jain et al., 2020): in each sweep every field is computed
    at most once, from what it computes itself and from what is kept of earlier passes. Any subset of the candidates may
    be kept; a field costs the same wherever it is computed, without halos.
    """

    def __init__(self, graph, candidates):
        self.graph, self.candidates = graph, candidates
        self.level = levels(graph, gathered(graph))
        self.fields = [n.id for n in graph.nodes if n.is_field and not is_read(graph, n.id)]
        self.ends = {n.operands[0] for n in graph.nodes if n.is_reduction and not is_read(graph, n.operands[0])}
        self.last = max(self.level[i] for i in self.ends)

    def cost(self, field):
        node = self.graph[field]
        return node.nbytes * (20.0 if "conv" in node.op else 1.0)

    def segment_seconds(self, segment):
        forward = sum(self.cost(i) for i in segment.fields)
        return forward, 3 * forward

    def seconds(self, memory_bytes):
        """The least time in this memory; the last sweep also goes back, all others run once and go back once."""
        keep = {f: i for i, f in enumerate(self.candidates)}
        run: dict[Any, Any] = {}
        for level in range(self.last + 1):
            for f in self.fields:
                if self.level[f] <= level:
                    run[level, f] = len(keep) + len(run)
        objective = [0.0] * (len(keep) + len(run))
        rows, lower = [], []

        def at_least(coefficients, bound):
            row = [0.0] * len(objective)
            for variable, value in coefficients:
                row[variable] += value
            rows.append(row)
            lower.append(bound)

        for (level, f), variable in run.items():
            objective[variable] = self.cost(f) * (3 if level == self.last else 4)
            if f in self.ends and self.level[f] == level:
                at_least([(variable, 1)], 1)
            if f in keep and self.level[f] == level:
                at_least([(variable, 1), (keep[f], -1)], 0)
            for g in set(self.graph[f].operands):
                if (level, g) in run:
                    stored = [(keep[g], 1)] if g in keep and self.level[g] < level else []
                    at_least([(run[level, g], 1), (variable, -1), *stored], 0)
        at_least([(v, -float(self.graph[f].nbytes)) for f, v in keep.items()], -float(memory_bytes))
        solved = milp(objective, constraints=LinearConstraint(rows, lb=lower), integrality=1, bounds=Bounds(0, 1))  # type: ignore[arg-type]
        assert solved.success, solved.message
        return solved.fun


def straight(norms):
    widths = [4 + 2 * (i % 3) for i in range(norms + 1)]
    layers = [
        layer
        for i in range(norms)
        for layer in (nn.Conv2d(widths[i], widths[i + 1], 3, padding=1), nn.BatchNorm2d(widths[i + 1]), nn.ReLU())
    ]
    return nn.Sequential(nn.Conv2d(3, widths[0], 1), *layers, nn.Conv2d(widths[-1], 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "most"),
    [(straight(5), 1.0), (straight(9), 1.0), (residual(3), 1.2), (Ladder(), 1.05)],
    ids=["chain of 5", "chain of 9", "residual", "U-Net"],
)
def test_the_chain_is_solved_as_well_as_by_an_integer_program(model, most):
    """On chains the same time for the same memory; with skips, which a cut keeps as a whole, at most a little more."""
    graph = graph_of(model, size=64)
    exact = Exact(graph, Cuts(graph, lambda segment: (0.0, 0.0), backward=True).candidates)
    found = Cuts(graph, exact.segment_seconds, backward=True).selections()
    ratios = [selection.seconds / exact.seconds(selection.nbytes) for selection in found]
    assert len(ratios) > 3
    assert all(0.999 < ratio < most + 0.001 for ratio in ratios), ratios


def test_a_deep_encoder_of_patches_is_cut_behind_its_end():
    """Further away than pieces are long: else it would be computed for the weights, and again for their sum."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(24)), nn.Linear(64, 4))
            self.scores, self.head = nn.Linear(4, 1), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            features = self.layers(x.flatten(1))
            return self.head(self.scores(features).softmax(0).T @ features)

    bag = InputSpec((500, 1, 8, 8), torch.float32, field=True, bag=True)
    graph = capture(Pooled(), F.cross_entropy, bag, InputSpec((1,), torch.int64, field=False))
    plan = make_plan(Problem(graph=graph, backward=True, budget_bytes=8 * 2**20))
    assert len(plan.segments) > 1
    computing = [sum(i in segment.fields for segment in plan.computed) for i in range(len(graph.nodes))]
    assert max(computing) == 1
