"""What ranks compute, hold and send: every pixel once, and nothing missing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gigagrad.boxes import Box
from gigagrad.plans import split_segments
from gigagrad.plans.chunks import ReductionTree, joined
from gigagrad.plans.partition import Partition

HEIGHT, WIDTH = 47, 31


class Chain(nn.Module):
    """Two kept fields, and a skip: the first one is read by two later segments."""

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
    segments = split_segments(graph, kept)

    def make(tiles, count):
        plan = plan_for(graph, tiles=tuple(tiles), kept=dict.fromkeys(kept, "memory"))
        return Partition(graph, plan, count), segments, kept

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
    partition, segments, kept = partition_of(tiles, count)
    for field in kept:
        assert (sum(painted(partition.written(field, rank)) for rank in range(count)) == 1).all()
        for rank in range(count):
            held, missing = painted(partition.held(field, rank)), painted(partition.held(field, rank))
            assert held.max() <= 1
            missing -= painted(partition.written(field, rank))
            assert missing.min() >= 0
            came = sum(painted(partition.halo(field, sender, rank)) for sender in range(count) if sender != rank)
            assert (missing == came).all()
            for segment in segments:
                if field in segment.reads:
                    chunks = partition.chunks(segment.index)
                    for chunk in partition.own(segment.index, rank):
                        for position in chunks.tiles(chunk):
                            box = chunks.tile(position).box(field)
                            assert box is None or painted([box])[held == 0].sum() == 0


@given(tiles, counts)
def test_cotangents_reach_whoever_wants_them_next(partition_of, tiles, count):
    """Pixel by pixel: the rank that is the first to reach it adds up its tiles, then chunks of later ranks follow."""
    partition, _, kept = partition_of(tiles, count)
    for field in kept:
        for index in partition.adding(field):
            chunks = partition.chunks(index)
            touched = {
                chunk: painted([box for p in chunks.tiles(chunk) if (box := chunks.tile(p).box(field)) is not None]) > 0
                for chunk in range(len(chunks))
            }
            expected: list[set[int]] = [set() for _ in range(HEIGHT * WIDTH)]
            for chunk, pixels in touched.items():
                for pixel in np.flatnonzero(pixels):
                    expected[pixel].add(chunk)
            found: list[set[int]] = [set() for _ in range(HEIGHT * WIDTH)]
            for rank in range(count):
                wanted = painted(partition.wanted_next(index, field, rank))
                summed = sum(painted(partition.sums(index, field, sender, rank)) for sender in range(count))
                assert (summed == wanted).all()
                for sender in range(count):
                    own = partition.own(index, sender)
                    base = painted(partition.sums(index, field, sender, rank)) > 0
                    for chunk in own:
                        for pixel in np.flatnonzero(touched[chunk] & base):
                            found[pixel].add(chunk)
                    for chunk, box in partition.overlaps(index, field, sender, rank):
                        for pixel in np.flatnonzero(touched[chunk] & (painted([box]) > 0)):
                            assert chunk not in found[pixel]
                            found[pixel].add(chunk)
            assert found == expected


@given(tiles, st.integers(1, 70))
def test_what_ranks_have_of_sums_is_joined_to_one(partition_of, tiles, count):
    partition, segments, _ = partition_of(tiles, count)
    segment, order = segments[0].index, ReductionTree()
    chunks = partition.chunks(segment)
    for rank in range(count):
        own = [chunk for chunk in partition.own(segment, rank) if chunks.tiles(chunk)]
        found = joined(chunks, partition.own(segment, rank))
        assert set(found) <= set(own)
        assert bool(found) == bool(own)
        for chunk in found:
            order.append(chunk)
    order.join_before(len(chunks))
    assert len(order.chunks) == 1


@given(tiles, st.sampled_from([2, 4, 8]))
def test_ranks_that_divide_the_parts_have_one_sum_each(partition_of, tiles, count):
    partition, segments, _ = partition_of(tiles, count)
    chunks = partition.chunks(segments[0].index)
    for rank in range(count):
        own = partition.own(segments[0].index, rank)
        if own == range(len(chunks) * rank // count, len(chunks) * (rank + 1) // count) and chunks.tiles(own[0]):
            assert len(joined(chunks, own)) == 1
