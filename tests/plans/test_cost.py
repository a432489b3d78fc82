"""What rates make of a graph: seconds, and tiles."""

import dataclasses
import math
from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn

from gigagrad.devices import Machine
from gigagrad.devices.machine import BYTE_RATES, Gpu
from gigagrad.plans import split_segments
from gigagrad.plans.cost import Costs, tile_shapes
from tests.plans.networks import graph_of as colour_graph_of
from tests.plans.networks import kept_at_best, plan_of, residual


def test_a_backward_takes_longer_and_two_threads_less(unet, gate):
    tiles = ((40, 40),)
    for graph in (unet, gate):
        full = plan_of(graph, machine=Machine(), tiles=tiles).predicted_seconds
        assert 0 < plan_of(graph, machine=Machine(), backward=False, tiles=tiles).predicted_seconds < full
        # Of so small tiles the calls take longest, which threads do not share; so they cost nothing, and work much.
        rates: dict[str, Any] = {"seconds_per_operator": 0.0, "flops_per_second": 1e6}
        alone, both = (Machine(threads=threads, **rates) for threads in (1, 2))
        full, shared = (plan_of(graph, machine=machine, tiles=tiles).predicted_seconds for machine in (alone, both))
        assert shared < full


def test_passes_share_out_the_predicted_time(gate):
    plan = plan_of(gate, machine=Machine())
    assert len(plan.passes) > 1
    assert sum(plan.pass_shares) == pytest.approx(1)
    timed = dataclasses.replace(plan, timed_seconds=(3.0, 1.0, *(0.0 for _ in plan.passes[2:])))
    assert timed.predicted_seconds == 4
    assert timed.pass_shares[:2] == (0.75, 0.25)


def test_dearer_calls_make_larger_tiles(unet):
    """What the rates say decides: where every call costs a fortune, there are few of them."""
    cheap = plan_of(unet, machine=Machine(seconds_per_operator=0.0))
    dear = plan_of(unet, machine=Machine(seconds_per_operator=10.0))
    assert dear.tile_count == 1 <= cheap.tile_count


def test_every_tile_takes_the_host_of_a_gpu_its_time(gate):
    """And a pass some calls; operators themselves take none here."""
    free: dict[str, float] = {"seconds_per_operator": 0.0, "seconds_per_pass": 0.0}
    fast = Gpu(flops_per_second=1e30, memory_bytes_per_second=1e30, seconds_per_tile=0.5, **free)  # type: ignore[arg-type]
    plan = plan_of(gate, machine=fast, tiles=((16, 16),))
    assert plan.tile_count > len(plan.passes)
    assert plan.predicted_seconds == pytest.approx(0.5 * plan.tile_count)


def test_tiles_that_are_dear_on_a_gpu_are_large(unet):
    free, dear = (plan_of(unet, machine=Gpu(seconds_per_tile=seconds)) for seconds in (0.0, 10.0))
    assert dear.tile_count == len(dear.passes) <= free.tile_count


def test_what_is_no_field_is_moved_for_every_tile(graph_of):
    """Weights are read, and their gradients added up, once a tile: small tiles of a wide layer take long."""
    wide = nn.Sequential(nn.Conv2d(1, 256, 1), nn.Conv2d(256, 256, 3, padding=1), nn.Conv2d(256, 1, 1))
    graph = graph_of(wide, F.mse_loss, (64, 64))
    (segment,) = split_segments(graph)
    endless: dict[str, Any] = dict.fromkeys(("flops_per_second", *BYTE_RATES), 1e30)
    endless["memory_bytes_per_second"] = Machine().memory_bytes_per_second
    costs = Costs(graph, Machine(seconds_per_operator=0.0, **endless))
    sixteen, whole = (costs.of(segment, (side, side), backward=True).backward_seconds for side in (16, 64))
    assert sixteen > 8 * whole


def test_calls_are_counted_in_every_tile_of_a_sweep(graph_of):
    """Backward three times: what asks for no gradient is computed again, and not pulled back."""
    graph = graph_of(nn.Conv2d(1, 4, 3, padding=1), F.mse_loss, (64, 64))
    (segment,) = split_segments(graph)
    cost = Costs(graph, Machine()).of(segment, (16, 32), backward=True)
    pulled = sum(graph[i].differentiable for i in segment.fields)
    assert pulled > 0
    assert cost.forward_calls == 8 * len(segment.fields)
    assert cost.backward_calls == 8 * (len(segment.fields) + 2 * pulled)
    assert Costs(graph, Machine()).of(segment, (16, 32), backward=False).backward_calls == cost.forward_calls


def test_a_kept_convolution_is_not_run_again_to_be_pulled_back():
    """Of a convolution alone the backward pass costs its gradient, two forwards, and not a third one."""
    graph = colour_graph_of(nn.Sequential(nn.Conv2d(3, 64, 7, padding=3), nn.BatchNorm2d(64), nn.Conv2d(64, 1, 1)))
    convolution = next(node.id for node in graph.nodes if node.op == "aten.conv2d.default")
    endless: dict[str, Any] = dict.fromkeys(BYTE_RATES, 1e18)
    free = Machine(seconds_per_operator=0.0, **endless)
    for kept, forwards in (([convolution], 2.0), ([], 3.0)):
        first = split_segments(graph, kept)[0]
        cost = Costs(graph, free).of(first, (64, 64), backward=True)
        assert cost.backward_seconds == pytest.approx(forwards * cost.forward_seconds, rel=1e-3)


@pytest.mark.parametrize("kernel", [3, 5])
def test_the_gradient_of_a_large_depthwise_weight_unfolds_windows(kernel):
    depthwise = nn.Conv2d(32, 32, kernel, padding=kernel // 2, groups=32)
    graph = colour_graph_of(nn.Sequential(nn.Conv2d(3, 32, 1), depthwise, nn.Conv2d(32, 1, 1)))
    endless: dict[str, Any] = dict.fromkeys(("flops_per_second", *BYTE_RATES), 1e30)
    costs = Costs(graph, Machine(seconds_per_operator=0.0, unfolded_flops_per_second=1e6, **endless))
    (segment,) = split_segments(graph)
    height, width = (next(node for node in graph.nodes if node.is_field).size(axis) for axis in (0, 1))
    cost = costs.of(segment, (height, width), backward=True)
    assert cost.forward_seconds == pytest.approx(0, abs=1e-9)
    products = 2 * 32 * 25 * height * width if kernel == 5 else 0
    assert cost.backward_seconds == pytest.approx(products / 1e6, abs=1e-9)


def test_whole_fields_are_kernels_of_autograd(graph_of):
    """As those of a whole image they make new tensors, which no cache holds, and call each at autograd's cost."""
    graph = graph_of(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GELU()), F.mse_loss, (64, 64)).with_whole(64 * 64)
    endless: dict[str, Any] = dict.fromkeys(("flops_per_second", *BYTE_RATES), 1e30)
    free = Machine(seconds_per_operator=0.0, seconds_per_autograd_call=0.0).with_rates(endless)
    seconds = {
        rate: Costs(graph, free.with_rates({rate: 1e6})).whole_seconds(backward=True, on_host=False)
        for rate in ("cached_bytes_per_second", "memory_bytes_per_second")
    }
    assert seconds["cached_bytes_per_second"] < 1e-9 < seconds["memory_bytes_per_second"]
    calling = Costs(graph, free.with_rates({"seconds_per_autograd_call": 1.0}))
    assert calling.whole_seconds(backward=False, on_host=False) >= 2


def test_moments_have_a_rate_of_their_own():
    moving = Machine(flops_per_second=1e18, seconds_per_operator=0.0, cache_bytes=0)
    seconds = []
    for norm in (nn.BatchNorm2d(64), nn.Identity()):
        graph = colour_graph_of(nn.Sequential(nn.Conv2d(3, 64, 1), norm, nn.Conv2d(64, 1, 1)))
        convolution = next(node for node in graph.nodes if node.op == "aten.conv2d.default")
        first = split_segments(graph, [convolution.id])[0]
        seconds.append(Costs(graph, moving).of(first, (64, 64), backward=True).forward_seconds)
    assert seconds[0] - seconds[1] == pytest.approx(convolution.nbytes / moving.statistics_bytes_per_second, rel=0.01)


@pytest.mark.parametrize("size", [(64, 100), (331, 517), (1000, 47), (16, 5)])
def test_tiles_cut_a_field_evenly(graph_of, size):
    graph = graph_of(nn.Conv2d(1, 1, 3, padding=1), F.mse_loss, size)
    (segment,) = split_segments(graph)
    shapes = tile_shapes(graph, segment)
    assert shapes[-1] == size
    for tile in shapes:
        for side, whole in zip(tile, size, strict=True):
            assert side == whole or side % 16 == 0
            if side > 16:  # the next smaller one would make more tiles of it
                assert math.ceil(whole / (math.ceil(side / 16) * 16 - 16)) > math.ceil(whole / side)


@pytest.mark.parametrize("pixels", [0, 64**2])
def test_equal_blocks_are_costed_once(pixels):
    """Also in the graph with whole fields; by themselves they cost the same, node by node."""
    coarse = nn.Sequential(nn.MaxPool2d(4), nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Upsample(scale_factor=4))
    graph = colour_graph_of(nn.Sequential(residual(4), coarse, nn.Conv2d(4, 1, 1)))
    first = Costs(graph, Machine())
    shared = first.with_whole(pixels) if pixels else first
    others = split_segments(graph, kept_at_best(graph)) if pixels else ()
    segments = split_segments(shared.graph, kept_at_best(shared.graph))
    forms = [*map(first.form, others), *map(shared.form, segments)]
    assert len({*forms}) <= len(forms) - len(segments) // 3
    for costs, segment in [*((first, each) for each in others), *((shared, each) for each in segments)]:
        alone = Costs(costs.graph, Machine())
        assert costs.usual_seconds(segment) == alone.usual_seconds(segment)
        for how in ({"roughly": True}, {}):
            found, right = (each.of(segment, (32, 48), backward=True, **how) for each in (costs, alone))
            assert dataclasses.asdict(found) == dataclasses.asdict(right)
            assert set(found.crops) <= {*segment.reads, *segment.kept}


def test_blocks_that_differ_are_not_alike():
    """In an operator, in how far a kernel reaches, in what wants a gradient."""
    alike, other, wide, frozen = (nn.Conv2d(4, 4, 3, padding=reach, dilation=reach) for reach in (1, 1, 2, 1))
    frozen.requires_grad_(requires_grad=False)
    layers = [nn.Conv2d(3, 4, 1), nn.ReLU(), alike, nn.ReLU(), other, nn.Sigmoid(), wide, nn.ReLU(), frozen, nn.ReLU()]
    graph = colour_graph_of(nn.Sequential(*layers, nn.Conv2d(4, 1, 1)))
    costs = Costs(graph, Machine())
    made = [node.id for node in graph.nodes if node.is_field and not node.is_source and node.shape[1] == 4]
    segments = split_segments(graph, made[1::2])[:-1]
    assert len(segments) == 5
    assert len({costs.form(segment) for segment in segments}) == 5
