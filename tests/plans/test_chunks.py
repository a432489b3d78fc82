"""Chunks cover the tiles, and their fronts and overlaps are what the tiles' boxes say, pixel by pixel."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gigagrad.boxes import Box
from gigagrad.plans import Chunks, Grid, split_segments
from gigagrad.plans.chunks import MOST_PARTS, ReductionTree, chunk_count, waiting_sums

MIB = 2**20
HEIGHT, WIDTH = 47, 31


@pytest.fixture(scope="module")
def grid_of(graph_of):
    """Two convolutions with the first one's output kept: the second segment reads it with a halo."""
    net = nn.Sequential(nn.Conv2d(1, 2, 5, padding=2), nn.Conv2d(2, 1, 7, padding=3))
    graph = graph_of(net, F.mse_loss, (HEIGHT, WIDTH))
    (kept,) = [node.id for node in graph.nodes if node.is_field and "conv" in node.op][:1]
    segments = split_segments(graph, [kept])
    return lambda tile: (Grid(graph, segments[1], tile), kept)


def painted(boxes: list[Box]) -> np.ndarray:
    field = np.zeros((HEIGHT, WIDTH), bool)
    for box in boxes:
        field[box.y0 : box.y1, box.x0 : box.x1] = True
    return field


tiles = st.tuples(st.integers(3, 50), st.integers(3, 40))


@given(tiles, st.sampled_from([1, 2, 4, 8, 64]), st.booleans())
def test_parts_cover_the_tiles_once_and_in_order(grid_of, tile, count, by_rows):
    grid, _ = grid_of(tile)
    chunks = Chunks(grid, count, by_rows=by_rows)
    positions = [position for chunk in range(len(chunks)) for position in chunks.tiles(chunk)]
    assert positions == list(range(len(grid)))
    ids = [chunks.tile(position).id for position in positions]
    assert sorted(ids) == positions
    rows = [divmod(i, grid.shape[1]) for i in ids]
    assert rows == sorted(rows, key=None if by_rows else lambda pair: pair[::-1])


def test_parts_are_of_whole_lines_where_there_are_as_many(grid_of):
    grid, _ = grid_of((5, 10))  # ten rows of four
    chunks = Chunks(grid, 4, by_rows=True)
    assert [len(chunks.tiles(chunk)) for chunk in range(4)] == [8, 12, 8, 12]


@given(tiles, st.sampled_from([2, 4, 64]), st.booleans())
def test_fronts_and_strips_are_what_the_boxes_say(grid_of, tile, count, by_rows):
    grid, field = grid_of(tile)
    chunks = Chunks(grid, count, by_rows=by_rows)
    earlier: list[Box] = []
    for chunk in range(count):
        boxes = [box for p in chunks.tiles(chunk) if (box := chunks.tile(p).box(field)) is not None]
        reached, boundary = painted(earlier), chunks.boundary(field, chunk)
        overlaps = [box for box in chunks.overlaps(field, chunk) if box is not None]
        for box in boxes:
            pieces = list(boundary.split(box))
            assert sum(piece.area for piece, _ in pieces) == box.area
            for piece, which in pieces:
                inside = reached[piece.y0 : piece.y1, piece.x0 : piece.x1]
                assert inside.all() if which is not None else not inside.any()
                assert which is None or piece.within(chunks.overlaps(field, chunk)[which] or Box.whole(0, 0))
        assert (painted(overlaps) & reached >= painted(boxes) & reached).all()
        assert not (painted(overlaps) & ~reached).any()
        earlier += boxes


@given(tiles, st.booleans(), st.data())
def test_what_a_run_of_tiles_reads_is_the_hull_of_each_line(grid_of, tile, by_rows, data):
    grid, field = grid_of(tile)
    chunks = Chunks(grid, 8, by_rows=by_rows)
    start = data.draw(st.integers(0, len(grid) - 1))
    run = range(start, data.draw(st.integers(start + 1, len(grid))))
    read = painted([box for p in run if (box := chunks.tile(p).box(field)) is not None])
    assert (painted(chunks.read(field, run)) == read).all()
    (target,) = grid.targets
    written = painted([chunks.tile(p).wanted(target) for p in run])
    assert (painted(chunks.written(target, run)) == written).all()


def test_there_are_fewer_parts_where_sums_are_large():
    assert chunk_count(0) == chunk_count(10 * MIB) == MOST_PARTS
    assert chunk_count(20 * MIB) == 8
    assert chunk_count(100 * MIB) == 1
    assert waiting_sums(64, 1) == 0
    assert waiting_sums(64, 3) == 2
    assert waiting_sums(64, 1000) == 6


def tree_of(chunks: list[int], low: int = 0, high: int = MOST_PARTS) -> object:
    """The tree, from its definition."""
    here = [chunk for chunk in chunks if low <= chunk < high]
    if len(here) < 2:
        return here[0] if here else None
    middle = (low + high) // 2
    left, right = tree_of(chunks, low, middle), tree_of(chunks, middle, high)
    return right if left is None else left if right is None else (left, right)


class Spelled:
    """Joins what it is told to, and remembers how."""

    def __init__(self, before: int | None = None) -> None:
        self.order, self.sums = ReductionTree(before), list[object]()

    def append(self, chunk: int, value: object) -> None:
        self.join(self.order.append(chunk))
        self.sums.append(value)

    def join(self, times: int) -> None:
        for _ in range(times):
            right = self.sums.pop()
            self.sums.append((self.sums.pop(), right))


@given(st.sets(st.integers(0, MOST_PARTS - 1), min_size=1), st.lists(st.integers(0, MOST_PARTS), max_size=6))
def test_sums_are_joined_in_one_tree_whoever_has_which_parts(present, cuts):
    chunks, edges = sorted(present), [0, *sorted(cuts), MOST_PARTS]
    whole = Spelled()
    for low, high in pairwise(edges):
        before = max((p for p in chunks if p < low), default=None)
        following = min((p for p in chunks if p >= high), default=MOST_PARTS)
        own = Spelled(before)
        for chunk in chunks:
            if low <= chunk < high:
                own.append(chunk, chunk)
        own.join(own.order.join_before(following))
        for chunk, value in zip(own.order.chunks, own.sums, strict=True):
            whole.append(chunk, value)
    whole.join(len(whole.sums) - 1)
    assert whole.sums == [tree_of(chunks)]


@given(st.sets(st.integers(0, MOST_PARTS - 1), min_size=1))
def test_no_more_sums_wait_than_are_counted(present):
    order, most = ReductionTree(), 0
    for chunk in sorted(present):
        most = max(most, len(order.chunks))
        order.append(chunk)
    assert most <= waiting_sums(MOST_PARTS, MOST_PARTS)
