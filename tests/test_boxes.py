"""Integer rectangles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.boxes import Box, Span, split, tiles

number = st.integers(-30, 30)
spans = st.builds(Span, number, number)
boxes = st.builds(Box, number, number, number, number)


def members(span: Span) -> set[int]:
    return set(range(span.start, span.stop))


def pixels(box: Box) -> set[tuple[int, int]]:
    return {(y, x) for y in range(box.y0, box.y1) for x in range(box.x0, box.x1)}


@given(spans, spans, st.integers(0, 20))
def test_spans_are_sets_of_integers(a, b, size):
    assert a.length == len(members(a))
    assert a.empty == (not members(a))
    assert members(a.clamp(size)) == members(a) & set(range(size))
    assert members(a) | members(b) <= members(a.hull(b))
    assert a.hull(None) == a
    assert not a.within(b) or members(a) <= members(b)
    assert a.within(b) == (members(a) <= members(b))
    assert members(a.shift(3)) == {i + 3 for i in members(a)}


@given(spans, spans)
def test_the_hull_is_the_smallest(a, b):
    both = members(a) | members(b)
    hull = a.hull(b)
    assert members(hull) == (set(range(min(both), max(both) + 1)) if both else set())


@given(boxes, boxes, st.integers(0, 20), st.integers(0, 20))
def test_boxes_are_sets_of_pixels(a, b, height, width):
    assert a.area == len(pixels(a))
    assert a.empty == (not pixels(a))
    assert pixels(a.intersect(b)) == pixels(a) & pixels(b)
    assert pixels(a.clamp(height, width)) == pixels(a) & pixels(Box.whole(height, width))
    assert pixels(a.shift(1, -2)) == {(y + 1, x - 2) for y, x in pixels(a)}
    assert Box.of(a.y, a.x) == a
    if not a.empty:
        assert a.within(b) == (pixels(a) <= pixels(b))


@given(st.integers(0, 40), st.integers(1, 50))
def test_split_is_a_partition_in_order(size, step):
    parts = split(size, step)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(size))
    assert all(part.length == step for part in parts[:-1])


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 25), st.integers(1, 25))
def test_tiles_are_a_partition_row_by_row(height, width, tile_height, tile_width):
    boxes = list(tiles(height, width, tile_height, tile_width))
    assert sorted(p for box in boxes for p in pixels(box)) == sorted(pixels(Box.whole(height, width)))
    assert boxes == sorted(boxes)


def test_a_tile_has_at_least_one_pixel():
    with pytest.raises(ValueError, match="at least 1 px"):
        split(5, 0)


def test_a_box_prints_y_before_x():
    assert str(Box(1, 2, 3, 4)) == "[1, 3) x [2, 4)"
