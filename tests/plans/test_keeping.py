"""What is kept, when it is in memory, and what is given up under a budget."""

from itertools import cycle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gigagrad.bricks import Bricks
from gigagrad.errors import BudgetError
from gigagrad.graphs import GATHER, InputSpec, capture
from gigagrad.plans import DISK, MEMORY, Limits, Machine, lifetimes, make_plan, split_stages
from gigagrad.plans.keeping import bytes_by_pass, fields_to_keep
from gigagrad.plans.schedule import make_passes

SIZE = 256
MIB = 2**20


def graph_of(model, loss=F.mse_loss, size=SIZE):
    image = InputSpec((1, 3, size, size), torch.float32, field=True)
    target = InputSpec((1, 1, size, size), torch.float32, field=True)
    return capture(model.train(), loss, image, target)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm_a, self.norm_b = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))))


def residual(blocks, width=8):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), *(Block(width) for _ in range(blocks)), nn.Conv2d(width, 1, 1)
    )


def operators(graph, fields):
    return sorted(graph[i].op.split(".")[1] for i in fields)


def test_a_local_network_keeps_nothing():
    graph = graph_of(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 1, 3)))
    assert fields_to_keep(graph) == frozenset()


def test_a_norm_keeps_what_it_normalises():
    graph = graph_of(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1)))
    assert operators(graph, fields_to_keep(graph)) == ["conv2d"]


def test_a_norm_of_the_image_keeps_nothing():
    graph = graph_of(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 1, 3, padding=1)))
    assert fields_to_keep(graph) == frozenset()


def test_of_a_long_chain_of_sums_some_are_kept():
    graph = graph_of(residual(8))
    kept = operators(graph, fields_to_keep(graph))
    assert kept.count("conv2d") == 17  # all but the head's
    assert 0 < kept.count("relu") < 8


def test_what_whole_field_operators_read_is_always_kept():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 1, 1)

        def forward(self, x):
            return self.b(self.a(x).flip(2))

    graph = graph_of(Turned())
    (gather,) = (node for node in graph.nodes if node.op == GATHER)
    assert fields_to_keep(graph) == frozenset(gather.operands)
    assert split_stages(graph)[0].kept == gather.operands


@pytest.mark.parametrize("share", [0, 1, 2, 3])
def test_kept_fields_are_in_memory_whenever_they_are_read(share):
    graph = graph_of(residual(3))
    kept = sorted(fields_to_keep(graph))[:: share + 1] if share < 3 else []
    stages = split_stages(graph, kept)
    passes = make_passes(graph, stages, backward=True)
    values = {life.field: life for life in lifetimes(graph, stages, passes) if not life.cotangent}
    cotangents = {life.field: life for life in lifetimes(graph, stages, passes) if life.cotangent}
    assert set(values) == set(kept) == set(cotangents)
    for index, step in enumerate(passes):
        stage = stages[step.stage]
        for field in stage.reads:
            if field in values:
                assert values[field].first < index <= values[field].last
                assert step.phase == "forward" or cotangents[field].first <= index < cotangents[field].last
        for field in stage.kept:
            assert values[field].first <= index <= values[field].last
            assert step.phase == "forward" or cotangents[field].last == index
    tiers = dict(zip(kept, cycle([MEMORY, DISK]), strict=False))
    for tier in (MEMORY, DISK):
        held = bytes_by_pass(graph, stages, passes, tiers, tier)
        assert len(held) == len(passes)
        fields = [graph[i] for i in kept if tiers[i] == tier]
        assert max(held, default=0) <= 2 * sum(_file_bytes(field) if tier == DISK else field.nbytes for field in fields)


def _file_bytes(field):
    return Bricks(field.size(0), field.size(1), field.bytes_per_pixel).file_bytes


def plan_with(graph, budget):
    limits = Limits(budget_bytes=budget, base_bytes=0, peak_bytes=0, reader_cache_bytes=0, runtime_bytes=0)
    return make_plan(
        graph, limits, Machine(), image_shape=(1, 3, SIZE, SIZE), backward=True, device="cpu",
        memory_format="contiguous", tiles=None,
    )  # fmt: skip


def test_a_tight_budget_gives_up_kept_fields_and_a_tighter_one_is_refused():
    graph = graph_of(residual(4, width=16))
    roomy = plan_with(graph, None)
    assert len(roomy.kept) > 6
    lean = plan_with(graph, roomy.kept_bytes * 2 // 3)
    assert lean.predicted_peak_bytes <= roomy.kept_bytes * 2 // 3
    assert 0 < len(lean.kept) < len(roomy.kept)
    assert {field.node for field in lean.kept} < {field.node for field in roomy.kept}
    with pytest.raises(BudgetError) as caught:
        plan_with(graph, MIB)
    assert plan_with(graph, caught.value.smallest_bytes).predicted_peak_bytes <= caught.value.smallest_bytes


def test_the_plan_names_what_it_keeps_and_what_runs_whole():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1)

        def forward(self, x):
            return self.head(torch.fft.fft2(self.norm(self.stem(x))).abs())

    plan = plan_with(graph_of(Gate()), None)
    assert {field.module for field in plan.kept} == {"stem", "norm"}
    assert {entry.operator for entry in plan.whole_field} >= {"aten.fft_fft2.default", "aten.abs.default"}
    text = str(plan)
    assert "aten.conv2d.default [1, 4, 256, 256]  (stem)" in text
    assert "Operators that run on whole fields" in text
    assert "aten.fft_fft2.default" in text
