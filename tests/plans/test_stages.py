"""The graph split at its reductions."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gigagrad.graphs import FIELD_SUM
from gigagrad.plans import split_stages


def test_a_local_network_with_a_mean_is_one_stage(unet):
    (stage,) = split_stages(unet)
    assert stage.index == 0
    assert stage.output is None
    assert len(stage.reductions) == 1
    assert {unet[i].op for i in stage.reads} == {"image", "target"}
    assert set(stage.fields) == {n.id for n in unet.nodes if n.is_field and not n.is_source}


def test_stages_compute_what_they_need_from_what_is_known(gate):
    first, second = split_stages(gate)
    known: set[Any] = set()
    for stage in (first, second):
        assert list(stage.fields) == sorted(stage.fields)
        inside = {*stage.fields, *stage.reads}
        for field in stage.fields:
            for operand in gate[field].operands:
                assert operand in (inside if gate[operand].is_field else stage.globals)
        needed_sums = {a for a in gate.ancestors(stage.globals) if gate[a].op == FIELD_SUM}
        assert needed_sums <= known
        known |= set(stage.reductions)
    assert known == {n.id for n in gate.nodes if n.op == FIELD_SUM}
    # The convolution is computed again: nothing is kept between stages.
    convolution = next(n.id for n in gate.nodes if "conv2d" in n.op)
    assert convolution in first.fields
    assert convolution in second.fields
    assert [gate[i].op for i in first.reads] == ["image"]


def test_the_output_field_is_delivered_by_the_stage_that_has_it(graph_of, models):
    graph = graph_of(models.Gate(), None, (16, 12))
    first, second = split_stages(graph)
    assert first.output is None
    assert second.output == graph.output
    assert second.targets(graph) == (graph.output,)


def test_reductions_of_one_depth_share_a_stage(graph_of):
    def dice(o, t):
        return 1 - 2 * (o * t).sum() / (o.sum() + t.sum())

    graph = graph_of(nn.Conv2d(1, 1, 1), dice, (8, 8))
    (stage,) = split_stages(graph)
    assert len(stage.reductions) == 3
    assert len(stage.targets(graph)) == 3
    assert any(graph[i].op == "target" for i in stage.targets(graph))


def test_a_chain_of_reductions_is_a_chain_of_stages(graph_of):
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 1)

        def forward(self, x):
            for _ in range(3):
                x = self.conv(x) - self.conv(x).mean()
            return x

    stages = split_stages(graph_of(Chain(), F.mse_loss, (8, 8)))
    assert [stage.index for stage in stages] == [0, 1, 2, 3]
    assert [len(stage.reductions) for stage in stages] == [1, 1, 1, 1]


def test_a_graph_without_fields_has_no_stage(graph_of):
    assert split_stages(graph_of(nn.Conv2d(1, 1, 1), lambda o, t: torch.zeros(()), (8, 8))) == ()
