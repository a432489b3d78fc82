"""Tiles partition every target, and what a tile reads is inside the fields and enough."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gigagrad.boxes import Box, Span
from gigagrad.graphs import Call, lookup
from gigagrad.plans import Grid, split_segments
from gigagrad.plans.geometry import Steps, lattice

sides = st.tuples(st.integers(1, 200), st.integers(1, 200))


def grids(graph, tile):
    return [Grid(graph, segment, tile) for segment in split_segments(graph)]


@given(sides)
def test_tiles_partition_every_target(unet, gate, tile):
    for graph in (unet, gate):
        for grid in grids(graph, tile):
            for axis in (0, 1):
                for target in grid.targets:
                    spans = [grid.axis_geometry(axis, i).wanted[target] for i in range(grid.shape[axis])]
                    assert [i for s in spans for i in range(s.start, s.stop)] == list(range(graph[target].size(axis)))


@given(sides, st.data())
def test_what_a_tile_computes_covers_what_its_operators_read(unet, gate, residual, tile, data):
    for graph in (unet, gate, residual):
        for grid in grids(graph, tile):
            geometry = grid[data.draw(st.integers(0, len(grid) - 1))]
            for field in grid.segment.fields:
                if geometry.box(field) is None:
                    continue
                _, operands = geometry.site(field)
                for operand, spans in zip(graph[field].operands, operands, strict=True):
                    assert (spans is None) == (not graph[operand].is_field)
                    if spans is not None:
                        whole = Box.whole(graph[operand].size(0), graph[operand].size(1))
                        assert Box.of(*spans).within(geometry.box(operand))
                        assert geometry.box(operand).within(whole)


class Mixed(nn.Module):
    """Strides that no tile need be a multiple of, paddings that read elsewhere, resampling by odd factors."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 2, 5, 3, 2, padding_mode="reflect")
        self.wide = nn.Conv2d(2, 2, 3, padding=2, dilation=2, padding_mode="replicate")
        self.up = nn.ConvTranspose2d(2, 2, 4, 3, 1)

    def forward(self, x):
        y = F.max_pool2d(self.wide(self.down(x).relu()), 2, ceil_mode=True)
        z = F.interpolate(y, scale_factor=2.0, mode="bilinear", align_corners=False)
        w = self.up(F.interpolate(z, size=(40, 31), mode="nearest"))
        return w.mean() + F.avg_pool2d(w, 5, 3).square().mean() + y[:, :, 1:].sum()


@pytest.fixture(scope="module")
def mixed(graph_of):
    return graph_of(Mixed(), lambda o, t: o, (331, 517))


def walked(graph, segment, axis, wanted):
    """The spans of all fields, one operator after the other."""
    spans = {target: span for target, span in wanted.items() if not span.empty}
    for node in (graph[i] for i in reversed(segment.fields) if i in spans):
        needs = lookup(node.op).needs(Call(node, graph.operands(node)), axis, spans[node.id])
        for operand, need in zip(node.operands, needs, strict=True):
            if need is not None:
                spans[operand] = need.hull(spans.get(operand))
    return spans


@given(sides, st.data())
def test_fields_have_the_spans_that_their_readers_need(unet, gate, mixed, tile, data):
    for graph in (unet, gate, mixed):
        steps = Steps.of(graph)
        for segment in split_segments(graph):
            alone, remembering = Grid(graph, segment, tile), Grid(graph, segment, tile, steps)
            for axis in (0, 1):
                for _ in range(3):
                    index = data.draw(st.integers(0, alone.shape[axis] - 1))
                    found = alone.axis_geometry(axis, index)
                    assert remembering.axis_geometry(axis, index) == found
                    assert found.spans == walked(graph, segment, axis, found.wanted)


@given(st.tuples(st.integers(1, 60), st.integers(1, 60)))
def test_every_tile_has_its_like_in_the_sample(unet, gate, mixed, tile):
    """As far as memory goes: as many pixels of everything."""

    def lengths(geometry):
        own = tuple(span.length for span in geometry.wanted.values())
        computed = [i for i in geometry.spans if i in grid.segment.fields]
        read = tuple(tuple(s and s.length for s in geometry.needs(i)) for i in computed)
        return own, tuple((i, span.length) for i, span in geometry.spans.items()), read

    for graph in (unet, gate, mixed):
        for grid in grids(graph, tile):
            for axis in (0, 1):
                count = grid.shape[axis]
                there = {lengths(grid.axis_geometry(axis, index)) for index in range(count)}
                assert {lengths(grid.axis_geometry(axis, index)) for index in grid.sample(axis, count)} == there


def test_of_many_tiles_few_are_looked_at(graph_of, models):
    graph = graph_of(models.UNet(), F.binary_cross_entropy_with_logits, (160000, 160000))
    (grid,) = grids(graph, (800, 800))
    assert len(grid.sample(0, 6)) <= 5


def test_targets_of_several_sizes_are_cut_in_proportion(graph_of):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 3, 1, 1)

        def forward(self, x):
            y = self.conv(x)
            return y.mean() + F.avg_pool2d(y, 7).mean()

    graph = graph_of(Two(), lambda o, t: o, (50, 30))
    (grid,) = grids(graph, (9, 4))
    assert len(grid.targets) == 2
    coarse = min(grid.targets, key=lambda i: graph[i].size(0))
    covered = torch.zeros(graph[coarse].size(0), graph[coarse].size(1))
    for tile_id in range(len(grid)):
        box = grid[tile_id].wanted(coarse)
        covered[box.y0 : box.y1, box.x0 : box.x1] += 1
    assert (covered == 1).all()


def test_ids_are_row_major(unet):
    (grid,) = grids(unet, (100, 100))
    assert grid.shape == (4, 6)
    assert len(grid) == 24
    assert not grid.by_rows  # wider than high: few of the file's tiles are decoded twice
    assert grid[7].wanted(grid.reference) == Box(100, 100, 200, 200)


def test_an_output_field_comes_row_by_row(graph_of):
    (grid,) = grids(graph_of(nn.Conv2d(1, 1, 3, 1, 1), None, (20, 60)), (7, 7))
    assert grid.by_rows


def test_a_halo_is_as_wide_as_the_network_looks(graph_of):
    wide = nn.Sequential(
        nn.Conv2d(1, 9, 5, 1, 2), nn.Conv2d(9, 1, 3, 1, 1)
    )  # of fewer channels, crops are in whole groups
    graph = graph_of(wide, None, (100, 100))
    (grid,) = grids(graph, (10, 10))
    image = graph.source("image").id
    assert grid[0].box(image) == Box(0, 0, 13, 13)
    assert grid[55].box(image) == Box(47, 47, 63, 63)


def test_lattice_is_the_coarsest_stride(graph_of, models, gate):
    unet = graph_of(models.UNet(), F.binary_cross_entropy_with_logits, (16000, 63999))
    assert lattice(unet, split_segments(unet)[0]) == (40, 40)
    assert lattice(gate, split_segments(gate)[1]) == (1, 1)


def test_a_tile_that_sees_one_part_of_a_join_reads_only_that(graph_of):
    class Joined(nn.Module):
        def forward(self, x):
            return torch.cat([x.sin(), x.cos()], 2)

    graph = graph_of(Joined(), None, (10, 8))
    (grid,) = grids(graph, (10, 8))
    operators = {graph[i].op: i for i in grid.segment.fields}
    first, second = grid[0], grid[1]
    assert first.box(operators["aten.cos.default"]) is None
    assert second.box(operators["aten.sin.default"]) is None
    assert second.y.spans[operators["aten.cos.default"]] == Span(0, 10)


def test_spans_that_are_remembered_are_told_apart_by_shapes_and_dtypes(graph_of):
    """Which of a convolution depend on its kernel's size, and on the dtype: few channels are in groups in float32."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large = nn.Conv2d(2, 2, 3, padding=2), nn.Conv2d(2, 2, 5, padding=2)
            self.short = nn.Conv2d(2, 2, 3, padding=2, dtype=torch.bfloat16)

        def forward(self, x):
            x = torch.cat([x, x], 1)
            return self.small(x) + self.short(x.bfloat16()).float(), self.large(x)

    graph = graph_of(Net(), None, (40, 41))
    steps, out = Steps.of(graph), Span(11, 20)
    for node in (node for node in graph.nodes if node.op.startswith("aten.conv2d")):
        for axis in (0, 1):
            call, (_, needs) = Call(node, graph.operands(node)), steps[axis][node.id]
            assert needs.of(out) == lookup(node.op).needs(call, axis, out)
