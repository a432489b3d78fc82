"""What ranks compute, hold and send: every pixel once, and nothing missing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gigagrad.boxes import Box
from gigagrad.plans import split_stages
from gigagrad.plans.partition import Partition
from gigagrad.plans.parts import ReductionTree, joined

HEIGHT, WIDTH = 47, 31


class Chain(nn.Module):
    """Two kept fields, and a skip: the first one is read by two later stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 5, padding=2), nn.Conv2d(2, 2, 7, padding=3)
        self.last = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.second(x).relu())


@pytest.fixture(scope="module")
def partition_of(graph_of, plan_for):
    graph = graph_of(Chain(), lambda o, t: (o - t).square().mean(), (HEIGHT, WIDTH))
    kept = [node.id for node in graph.nodes if node.is_field and "conv" in node.op][:2]
    stages = split_stages(graph, kept)

    def make(tiles, count):
        plan = plan_for(graph, tiles=tuple(tiles), kept=dict.fromkeys(kept, "memory"))
        return Partition(graph, plan, count), stages, kept

    return make


def painted(boxes: list[Box]) -> np.ndarray:
    field = np.zeros((HEIGHT, WIDTH), int)
    for box in boxes:
        field[box.y0 : box.y1, box.x0 : box.x1] += 1
    return field


tiles = st.lists(st.tuples(st.integers(4, 50), st.integers(4, 40)), min_size=3, max_size=3)
counts = st.integers(1, 9)


@given(tiles, counts)
def test_ranks_write_every_pixel_once_and_hold_what_they_read(partition_of, tiles, count):
    partition, stages, kept = partition_of(tiles, count)
    for field in kept:
        assert (sum(painted(partition.written(field, rank)) for rank in range(count)) == 1).all()
        for rank in range(count):
            held, missing = painted(partition.held(field, rank)), painted(partition.held(field, rank))
            assert held.max() <= 1
            missing -= painted(partition.written(field, rank))
            assert missing.min() >= 0
            came = sum(painted(partition.halo(field, sender, rank)) for sender in range(count) if sender != rank)
            assert (missing == came).all()
            for stage in stages:
                if field in stage.reads:
                    parts = partition.parts(stage.index)
                    for part in partition.own(stage.index, rank):
                        for position in parts.tiles(part):
                            box = parts.tile(position).box(field)
                            assert box is None or painted([box])[held == 0].sum() == 0


@given(tiles, counts)
def test_cotangents_reach_whoever_wants_them_next(partition_of, tiles, count):
    """Pixel by pixel: the rank that is the first to reach it adds up its tiles, then parts of later ranks follow."""
    partition, _, kept = partition_of(tiles, count)
    for field in kept:
        for index in partition.adding(field):
            parts = partition.parts(index)
            touched = {
                part: painted([box for p in parts.tiles(part) if (box := parts.tile(p).box(field)) is not None]) > 0
                for part in range(len(parts))
            }
            expected: list[set[int]] = [set() for _ in range(HEIGHT * WIDTH)]
            for part, pixels in touched.items():
                for pixel in np.flatnonzero(pixels):
                    expected[pixel].add(part)
            found: list[set[int]] = [set() for _ in range(HEIGHT * WIDTH)]
            for rank in range(count):
                wanted = painted(partition.wanted_next(index, field, rank))
                summed = sum(painted(partition.sums(index, field, sender, rank)) for sender in range(count))
                assert (summed == wanted).all()
                for sender in range(count):
                    own = partition.own(index, sender)
                    base = painted(partition.sums(index, field, sender, rank)) > 0
                    for part in own:
                        for pixel in np.flatnonzero(touched[part] & base):
                            found[pixel].add(part)
                    for part, box in partition.overlaps(index, field, sender, rank):
                        for pixel in np.flatnonzero(touched[part] & (painted([box]) > 0)):
                            assert part not in found[pixel]
                            found[pixel].add(part)
            assert found == expected


@given(tiles, st.integers(1, 70))
def test_what_ranks_have_of_sums_is_joined_to_one(partition_of, tiles, count):
    partition, stages, _ = partition_of(tiles, count)
    stage, order = stages[0].index, ReductionTree()
    parts = partition.parts(stage)
    for rank in range(count):
        own = [part for part in partition.own(stage, rank) if parts.tiles(part)]
        found = joined(parts, partition.own(stage, rank))
        assert set(found) <= set(own)
        assert bool(found) == bool(own)
        for part in found:
            order.append(part)
    order.join_before(len(parts))
    assert len(order.parts) == 1


@given(tiles, st.sampled_from([2, 4, 8]))
def test_ranks_that_divide_the_parts_have_one_sum_each(partition_of, tiles, count):
    partition, stages, _ = partition_of(tiles, count)
    parts = partition.parts(stages[0].index)
    for rank in range(count):
        own = partition.own(stages[0].index, rank)
        if own == range(len(parts) * rank // count, len(parts) * (rank + 1) // count) and parts.tiles(own[0]):
            assert len(joined(parts, own)) == 1
