"""One tile of a segment, run by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gigagrad.boxes import Box
from gigagrad.errors import OperatorError
from gigagrad.execution.tile_program import PassContext, SegmentPrograms
from gigagrad.graphs import Call, InputSpec, capture
from gigagrad.plans import Grid, split_segments
from gigagrad.plans.memory import workspace_bytes

SIZE = (21, 26)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(1, 2, 5, 2, 2)
        self.b = nn.Conv2d(3, 1, 3, padding=1)

    def forward(self, x):
        up = F.interpolate(torch.tanh(self.a(x)), size=x.shape[-2:], mode="bilinear")
        return self.b(torch.cat([x, up], 1))


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    net, image = Net().double(), torch.rand(1, 1, *SIZE, dtype=torch.float64)
    graph = capture(net, None, InputSpec((1, 1, *SIZE), torch.float64, field=True), None)
    (segment,) = split_segments(graph)
    values = {
        i: dict(net.named_parameters())[graph[i].arguments["name"].removeprefix("model.")] for i in segment.globals
    }
    return graph, segment, values, image, net(image).detach()


@given(st.tuples(st.integers(1, 30), st.integers(1, 30)), st.data())
def test_a_tile_is_the_crop_of_the_whole(case, tile, data):
    graph, segment, values, image, whole = case
    grid = Grid(graph, segment, tile)
    geometry = grid[data.draw(st.integers(0, len(grid) - 1))]
    source = graph.source("image").id
    box = geometry.box(source)
    crops = {source: image[..., box.y0 : box.y1, box.x0 : box.x1]}
    programs = SegmentPrograms(graph, segment, torch.device("cpu"))
    with torch.no_grad():
        shares = programs.at(geometry).run(geometry, crops, values)
    assert crops == {}, "the images' crops are handed over, so that they can be freed"
    own = geometry.wanted(graph.output)
    torch.testing.assert_close(
        shares[graph.output], whole[..., own.y0 : own.y1, own.x0 : own.x1], rtol=1e-12, atol=1e-13
    )


def test_a_target_coarser_than_the_grid_is_shared_out_once():
    class Two(nn.Module):
        def forward(self, x):
            return x.mean() + F.avg_pool2d(x, 8).sum()

    image = torch.rand(1, 1, 40, 40, dtype=torch.float64)
    graph = capture(
        Two(),
        lambda o, t: o,
        InputSpec((1, 1, 40, 40), torch.float64, field=True),
        InputSpec((), torch.float64, field=False),
    )
    (segment,) = split_segments(graph)
    grid = Grid(graph, segment, (5, 5))
    programs = SegmentPrograms(graph, segment, torch.device("cpu"))
    source, totals, empty = graph.source("image").id, dict.fromkeys(segment.reductions, 0.0), 0
    for tile_id in range(len(grid)):
        geometry = grid[tile_id]
        box = geometry.box(source)
        program = programs.at(geometry)
        shares = program.run(geometry, {source: image[..., box.y0 : box.y1, box.x0 : box.x1]}, {})
        empty += len(shares) < len(grid.targets)
        for reduction, value in program.partial_sums(geometry, shares).items():
            totals[reduction] += value.item()
    assert empty > 0
    expected = sorted([image.sum().item(), F.avg_pool2d(image, 8).sum().item()])
    assert sorted(totals.values()) == pytest.approx(expected, rel=1e-12)


def test_a_tile_reads_no_more_than_it_says(case):
    """Crops of exactly the boxes named are enough; one pixel less is noticed."""
    graph, segment, values, image, _ = case
    geometry = Grid(graph, segment, (6, 6))[5]
    source = graph.source("image").id
    box = geometry.box(source)
    assert box != Box.whole(*SIZE)
    programs = SegmentPrograms(graph, segment, torch.device("cpu"))
    with torch.no_grad(), pytest.raises((OperatorError, AssertionError)):
        programs.at(geometry).run(geometry, {source: image[..., box.y0 : box.y1 - 1, box.x0 : box.x1]}, values)


def test_tiles_that_are_alike_share_a_program():
    """Off the border all are: three of them along each axis are enough, whatever the number of tiles."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Upsample(scale_factor=2))
    graph = capture(net, None, InputSpec((1, 1, 96, 128), torch.float32, field=True), None)
    (segment,) = split_segments(graph)
    grid = Grid(graph, segment, (8, 8))
    programs = SegmentPrograms(graph, segment, torch.device("cpu"))
    found = {programs.at(grid[index]) for index in range(len(grid))}
    assert (len(grid), len(found)) == (12 * 16, 9)
    assert programs.at(Grid(graph, segment, (8, 8))[40]) in found, "another grid of the same tiles"


def test_large_blocks_are_announced_before_they_are_taken():
    """Forward the results, backward the gradients, with what operators take for themselves: 16 channels of 384 x 384 px
    are 9 MiB, one of them is not large.
    """

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(1, 16, 1), nn.Conv2d(16, 1, 1)

        def forward(self, x):
            return self.last(self.first(x).sigmoid())

    size = (384, 384)
    specs = (InputSpec((1, 1, *size), torch.float32, field=True) for _ in range(2))
    graph = capture(Net(), F.mse_loss, *specs)  # type: ignore[arg-type]
    (segment,) = split_segments(graph)
    geometry = Grid(graph, segment, size)[0]
    told: list[Any] = []
    program = SegmentPrograms(graph, segment, torch.device("cpu")).at(geometry)
    context = PassContext(make_room=told.append)
    values = {i: torch.rand(graph[i].shape).requires_grad_() for i in segment.globals}
    crops = {i: torch.rand(graph[i].shape) for i in segment.reads}
    large = 4 * 16 * 384 * 384
    own = {i: workspace_bytes(Call(graph[i], graph.operands(graph[i])), geometry) for i in segment.fields}
    taken = [large + own[i] for i in segment.fields if graph[i].nbytes == large]
    first, sigmoid = taken
    assert first > large == sigmoid
    with torch.no_grad():
        program.run(geometry, dict(crops), values, context)
    assert told == taken
    told.clear()
    shares = program.run(geometry, crops, values, context)
    assert told == taken
    torch.autograd.grad(shares[segment.targets(graph)[0]].sum(), list(values.values()), allow_unused=True)
    last = max(i for i in segment.fields if graph[i].op.startswith("aten.conv"))
    weights = 4 * (16 + 1)
    assert told == [*taken, large + weights + own[last], large]
