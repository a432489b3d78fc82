"""Fields of few pixels computed whole between tiles of the others: exact, in the memory that was counted, planned."""

from __future__ import annotations

import copy
import dataclasses
import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.devices import Machine
from gigagrad.devices.machine import BYTE_RATES
from gigagrad.errors import BudgetError
from gigagrad.graphs import Graph, InputSpec, capture
from gigagrad.plans import Amount, Plan, Problem, check, estimate, make_plan
from gigagrad.plans.memory import passing_values, whole_field_bytes
from tests.exactness import generated, networks

TOLERANCE = 1e-9
MIB = 2**20


class Deep(nn.Module):
    """An encoder and a decoder with norms of three kinds, skips, a pooling with indices' sizes, and attention at its
    coarsest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.down = nn.Conv2d(6, 8, 3, 2, 1)
        self.coarse = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True)])
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Conv2d(14, 1, 3, padding=1)

    def forward(self, x):
        fine = self.norm(self.stem(x)).relu()
        y = self.down(fine)
        for conv, norm in zip(self.coarse, self.norms, strict=True):
            y = F.relu(y + norm(conv(y)), inplace=True)
        z = F.max_pool2d(y, 2)
        tokens = z.flatten(2).transpose(1, 2)
        z = z + self.attention(tokens, tokens, tokens)[0].transpose(1, 2).unflatten(2, z.shape[-2:])
        y = y + F.interpolate(z, size=y.shape[-2:], mode="bilinear")
        return self.head(torch.cat([F.interpolate(y, size=fine.shape[-2:], mode="nearest"), fine], 1))


def areas(graph: Graph) -> list[int]:
    """The sizes of the graph's images in pixels, but for the largest."""
    return sorted({n.size(0) * n.size(1) for n in graph.nodes if n.is_field and len(n.shape) == 4})[:-1]


def planned(problem: Problem, pixels: int, tile: tuple[int, int]) -> Plan:
    return make_plan(problem, tiles=(tile,), whole_pixels=pixels)


def agree(model, loss, image, target, tile, pixels) -> Plan:
    """The plan with fields of so many pixels whole; asserts that a step of it is that of plain autograd."""
    plain = copy.deepcopy(model)
    engine = gg.compile(model, loss, progress=False)
    engine._planner.make = partial(planned, pixels=pixels, tile=tile)  # type: ignore[method-assign]
    found = engine.backward(image, target)
    plan = engine.plan(image, target)
    assert plan.whole_pixels == pixels
    assert check(engine.problem(image, target), plan) == ()
    expected = loss(plain(image[None]), target[None])
    asked = [(mine, own) for mine, own in zip(model.parameters(), plain.parameters(), strict=True) if own.requires_grad]
    wanted = torch.autograd.grad(expected, [own for _, own in asked], allow_unused=True)
    assert abs(found - expected) <= TOLERANCE * max(1, abs(expected))
    scale = torch.stack([g.norm() for g in wanted if g is not None]).norm()
    for (parameter, _), gradient in zip(asked, wanted, strict=True):
        if gradient is not None and parameter.grad is not None:
            assert (parameter.grad - gradient).norm() <= TOLERANCE * max(gradient.norm(), 1e-4 * scale)
    for own, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert (own.double() - other.double()).abs().max() <= TOLERANCE
    return plan


def pair(size=(48, 40)):
    torch.manual_seed(0)
    return torch.rand(3, *size, dtype=torch.float64), torch.rand(1, *size, dtype=torch.float64)


def graph_of(model, size=(48, 40), dtype=torch.float64) -> Graph:
    image, target = (InputSpec((1, channels, *size), dtype, field=True) for channels in (3, 1))
    return capture(model, F.mse_loss, image, target)


def test_any_size_of_fields_may_be_whole():
    torch.manual_seed(1)
    model = Deep().double().train()
    segments = []
    for pixels in areas(graph_of(model)):
        image, target = pair()
        segments.append(len(agree(copy.deepcopy(model), F.mse_loss, image, target, (16, 13), pixels).segments))
    assert len(segments) == 2
    assert segments[1] < segments[0]  # norms inside cost no pass


@pytest.mark.parametrize("seed", range(6))
def test_generated_networks(seed):
    case = generated.make_case(seed)
    target = case.target
    image = InputSpec((1, *case.image.shape), case.image.dtype, field=True)
    dense = InputSpec((1, *target.shape), target.dtype, field=True)
    sizes = areas(capture(case.model, case.loss, image, dense))
    if sizes:
        agree(case.model, case.loss, case.image, target, case.tile, random.Random(seed).choice(sizes))


def test_values_that_nothing_reads_any_more_are_given_back():
    graph = graph_of(Deep().double().train()).with_whole(24 * 20)
    passing = passing_values(graph)
    assert any(node.whole and "batch_norm" in node.op for node in graph.nodes)
    assert {node.id for node in graph.nodes if node.whole and node.op == "aten.add.Tensor"} & passing
    every = sum(node.nbytes for node in graph.nodes if node.whole)
    assert whole_field_bytes(graph, backward=False) < every


def problem_of(graph: Graph, budget: int | None) -> Problem:
    held = (Amount(estimate.PROCESS, MIB),)
    # Of a device where tiles take long, and so do calls and passes.
    moved = dict.fromkeys(BYTE_RATES, 1e12) | {"cached_bytes_per_second": 2e12}
    machine = Machine(flops_per_second=1e11, seconds_per_operator=150e-6, seconds_per_pass=25 * 150e-6)._with(moved)
    whole = graph.whole.get(True)  # on a device whose allocator keeps what is freed, where new blocks cost nothing
    return Problem(
        graph=graph, backward=True, machine=machine, device="cuda", budget_bytes=budget, held=held, whole=whole
    )


class Blocks(nn.Module):
    """Most of its time is in many norms at a fourth of the size, most of its memory before them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 1, 3, padding=1)
        convs = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()) for _ in range(16)]
        self.body = nn.Sequential(*convs)

    def forward(self, x):
        y = self.stem(x).relu()
        z = self.body(F.avg_pool2d(y, 4))
        return self.head(y + F.interpolate(z, scale_factor=4.0))


def test_a_plan_chooses_it_where_it_is_faster_and_fits():
    graph = graph_of(Blocks().train(), (1024, 1024), torch.float32)
    tiled = make_plan(dataclasses.replace(problem_of(graph, None), whole=None))
    whole = make_plan(problem_of(graph, None))
    assert (tiled.whole, whole.whole) == (None, "forward and backward")
    between = (3 * tiled.predicted_peak_bytes + whole.predicted_peak_bytes) // 4
    found = make_plan(problem_of(graph, between))
    assert found.whole is None
    assert found.whole_pixels == 256 * 256
    assert len(found.segments) < len(tiled.segments)
    assert found.predicted_peak_bytes <= between
    assert check(problem_of(graph, between), found) == ()
    assert Plan.from_dict(found.to_dict()) == found
    with pytest.raises(BudgetError):
        make_plan(problem_of(graph, MIB))


class Spectrum(nn.Module):
    """No field but the image: all operators read it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1.0, 40, dtype=torch.float64))

    def forward(self, x):
        return torch.fft.fft(x.cumsum(-1) * self.weight, dim=-2).abs().mean((1, 2, 3))


def test_a_network_of_whole_fields_alone_gets_its_gradient():
    model, (image, _) = Spectrum(), pair()
    engine = gg.compile(model, F.mse_loss, progress=False)
    engine.in_tiles = True
    target = torch.zeros(1, dtype=torch.float64)
    engine.backward(image, target)
    assert all(step.phase == "forward" for step in engine.plan(image, target).passes)
    (expected,) = torch.autograd.grad(F.mse_loss(model(image[None]), target), [model.weight])
    assert model.weight.grad is not None
    assert (model.weight.grad - expected).norm() <= TOLERANCE * expected.norm()


def test_the_choice_is_part_of_an_engine_s_state():
    torch.manual_seed(1)
    model = Deep().double().train()
    image, target = pair()
    first, second = gg.compile(model, F.mse_loss), gg.compile(copy.deepcopy(model), F.mse_loss)
    first._planner.make = partial(planned, pixels=24 * 20, tile=(16, 13))  # type: ignore[method-assign]
    first.backward(image, target)
    second.load_state_dict(first.state_dict())
    second.backward(image, target)
    assert second.plan(image, target).whole_pixels == 24 * 20
    for own, other in zip(model.parameters(), second.model.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert torch.equal(own.grad, other.grad)


def test_recipes_of_the_exactness_suite():
    rng, seen = random.Random(5), 0
    while seen < 2:
        recipe = networks.draw_recipe(rng.randint)
        if recipe is None or recipe.steps > 1:
            continue
        case = networks.make_case(recipe)
        if case.target.ndim != 3 or not case.target.dtype.is_floating_point:
            continue
        image, target = (InputSpec((1, *one.shape), one.dtype, field=True) for one in (case.image, case.target))
        sizes = areas(capture(case.model, case.loss, image, target))
        if sizes and not networks.ill_conditioned(recipe, 1e-10):
            agree(case.model, case.loss, case.image, case.target, (16, 16), rng.choice(sizes))
            seen += 1
