"""The graph split at its reductions."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gigagrad.graphs import FIELD_SUM
from gigagrad.plans import Tiles, split_segments
from gigagrad.plans.segments import Cotangents, last_cotangents, make_passes


def test_a_local_network_with_a_mean_is_one_segment(unet):
    (segment,) = split_segments(unet)
    assert segment.index == 0
    assert segment.output is None
    assert len(segment.reductions) == 1
    assert {unet[i].op for i in segment.reads} == {"image", "target"}
    assert set(segment.fields) == {n.id for n in unet.nodes if n.is_field and not n.is_source}


def test_segments_compute_what_they_need_from_what_is_known(gate):
    first, second = split_segments(gate)
    known: set[Any] = set()
    for segment in (first, second):
        assert list(segment.fields) == sorted(segment.fields)
        inside = {*segment.fields, *segment.reads}
        for field in segment.fields:
            for operand in gate[field].operands:
                assert operand in (inside if gate[operand].is_field else segment.globals)
        needed_sums = {a for a in gate.ancestors(segment.globals) if gate[a].op == FIELD_SUM}
        assert needed_sums <= known
        known |= set(segment.reductions)
    assert known == {n.id for n in gate.nodes if n.op == FIELD_SUM}
    # The convolution is computed again: nothing is kept between segments.
    convolution = next(n.id for n in gate.nodes if "conv2d" in n.op)
    assert convolution in first.fields
    assert convolution in second.fields
    assert [gate[i].op for i in first.reads] == ["image"]


def test_the_output_field_is_delivered_by_the_segment_that_has_it(graph_of, models):
    graph = graph_of(models.Gate(), None, (16, 12))
    first, second = split_segments(graph)
    assert first.output is None
    assert second.output == graph.output
    assert second.targets(graph) == (graph.output,)


def test_reductions_of_one_depth_share_a_segment(graph_of):
    def dice(o, t):
        return 1 - 2 * (o * t).sum() / (o.sum() + t.sum())

    graph = graph_of(nn.Conv2d(1, 1, 1), dice, (8, 8))
    (segment,) = split_segments(graph)
    assert len(segment.reductions) == 3
    assert len(segment.targets(graph)) == 3
    assert any(graph[i].op == "target" for i in segment.targets(graph))


def test_a_chain_of_reductions_is_a_chain_of_segments(graph_of):
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 1)

        def forward(self, x):
            for _ in range(3):
                x = self.conv(x) - self.conv(x).mean()
            return x

    segments = split_segments(graph_of(Chain(), F.mse_loss, (8, 8)))
    assert [segment.index for segment in segments] == [0, 1, 2, 3]
    assert [len(segment.reductions) for segment in segments] == [1, 1, 1, 1]


def test_a_graph_without_fields_has_no_segment(graph_of):
    assert split_segments(graph_of(nn.Conv2d(1, 1, 1), lambda o, t: torch.zeros(()), (8, 8))) == ()


AFFINE, SCALED, AFTER = Cotangents


class LearnedWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, o, t):
        return self.weight * (o * t).mean() + self.weight**2


LOSSES = {
    "mean": (lambda o, t: F.mse_loss(o, t), AFFINE),
    "sum": (lambda o, t: F.mse_loss(o, t, reduction="sum"), AFFINE),
    "weighted sum": (lambda o, t: 3 * (o * t).mean() - o.sum() / 7 + 2, AFFINE),
    "difference": (lambda o, t: 1 - (o * t).mean(), AFFINE),
    "plus a count": (lambda o, t: o.mean() + (t > 0).sum(), AFFINE),
    "learned factor": (LearnedWeight(), AFFINE),
    "mean of channel sums": (lambda o, t: o.sum((0, 2, 3)).mean(), AFFINE),
    "times itself": (lambda o, t: (lambda m: m * m.detach())(o.mean()), SCALED),
    "logarithm": (lambda o, t: torch.log(1 + (o * t).square().mean()), SCALED),
    "square": (lambda o, t: o.mean() ** 2, SCALED),
    "over a count": (lambda o, t: (o * (t > 0)).sum() / (t > 0).sum(), SCALED),
    "one over": (lambda o, t: 1 / (1 + o.square().mean()), SCALED),
    "product of two": (lambda o, t: o.mean() * (o * t).mean(), AFTER),
    "dice": (lambda o, t: 1 - 2 * (o * t).sum() / (o.sum() + t.sum()), AFTER),
    "bce and dice": (
        lambda o, t: F.binary_cross_entropy_with_logits(o, t) + (o * t).sum() / (o + t).sum(),
        AFTER,
    ),
    "norm of a vector": (lambda o, t: torch.cat([o, o * t], 1).mean((2, 3)).square().sum(), AFTER),
}


@pytest.mark.parametrize("name", LOSSES)
def test_rule(graph_of, name):
    loss, rule = LOSSES[name]
    graph = graph_of(nn.Conv2d(1, 1, 1), loss, (6, 5))
    (segment,) = segments = split_segments(graph)
    assert last_cotangents(graph, segment) is rule
    passes = make_passes(graph, segments, backward=True)
    both = (Tiles(0, "forward"), Tiles(0, "backward"))
    assert passes == (both if rule is AFTER else (Tiles(0, "one pass"),))
    assert make_passes(graph, segments, backward=False) == (Tiles(0, "forward"),)


def test_segments_run_backward_in_reverse(gate):
    assert make_passes(gate, split_segments(gate), backward=True) == (
        Tiles(0, "forward"),
        Tiles(1, "one pass"),
        Tiles(0, "backward"),
    )


def test_a_frozen_network_has_no_backward(graph_of):
    graph = graph_of(nn.Conv2d(1, 1, 1).requires_grad_(False), F.mse_loss, (6, 5))
    assert make_passes(graph, split_segments(graph), backward=True) == (Tiles(0, "forward"),)


def test_a_segment_before_the_first_parameter_is_not_differentiated(graph_of):
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 1)

        def forward(self, x):
            return self.conv(x - x.mean())

    graph = graph_of(Normalised(), F.mse_loss, (6, 5))
    assert make_passes(graph, split_segments(graph), backward=True) == (Tiles(0, "forward"), Tiles(1, "one pass"))
