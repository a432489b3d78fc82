"""Operators that only move values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.boxes import Span
from gigagrad.graphs.op_rules import NotTileable

BOX = Span(2, 6), Span(3, 5)


@given(st.sampled_from([0, 1, 2, 3, -1, -2, -3]), st.integers(1, 4), st.integers(1, 3), st.data())
def test_concatenation(bench, some_box, noise, dim, first, second, data):
    b = bench()
    shapes = []
    for length in (first, second, 2):
        shape = [1, 2, 5, 6]
        shape[dim] = length
        shapes.append(shape)
    parts = [b.field(noise(*shape)) for shape in shapes]
    y = b.aten("cat.default", [*parts, parts[0]], dim)
    b.check(y, some_box(data, b.node(y)))


def test_concatenation_promotes_where_one_operand_is_seen(bench, noise):
    b = bench()
    y = b.aten("cat.default", [b.field(noise(1, 1, 4, 4).float()), b.field(noise(1, 1, 4, 4))], 2)
    spans = b.check(y, (Span(0, 2), Span(0, 4)))
    assert spans == ((Span(0, 2), Span(0, 4)), None)


def test_concatenation_with_a_global_is_refused(bench, noise):
    b = bench()
    with pytest.raises(NotTileable, match="no spatial axes"):
        b.aten("cat.default", [b.field(noise(1, 1, 4, 4)), b.weight(noise(1, 1, 4, 4))], 1)


bounds = st.one_of(st.none(), st.integers(-12, 12))


@given(st.sampled_from([1, 2, 3, -1, -2]), bounds, bounds, st.integers(1, 4), st.data())
def test_slicing(bench, some_box, noise, dim, start, end, step, data):
    b = bench()
    x = b.field(noise(1, 4, 9, 8))
    length = len(range(*slice(start, end, step).indices([1, 4, 9, 8][dim])))
    if length == 0:
        with pytest.raises(NotTileable, match="no pixels"):
            b.aten("slice.Tensor", x, dim, start, end, step)
        return
    y = b.aten("slice.Tensor", x, dim, start, end, step)
    b.check(y, some_box(data, b.node(y)))


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("permute.default", ([0, 2, 3, 1],)),
        ("permute.default", ([2, 0, 3, 1],)),
        ("transpose.int", (0, 1)),
        ("transpose.int", (1, -1)),
        ("unsqueeze.default", (0,)),
        ("unsqueeze.default", (-1,)),
        ("unsqueeze.default", (2,)),
        ("squeeze.dim", (0,)),
        ("squeeze.dim", (1,)),
        ("squeeze.dims", ([0, 1],)),
        ("select.int", (1, -1)),
        ("select.int", (0, 0)),
        ("view.default", ([2, 2, 8, 7],)),
        ("reshape.default", ([4, 8, 7],)),
        ("view.default", ([1, 1, 2, 2, 8, 7],)),
        ("expand.default", ([3, 4, 8, 7],)),
        ("expand.default", ([-1, -1, 8, 7],)),
        ("pixel_shuffle.default", (2,)),
    ],
)
def test_moving(bench, noise, op, arguments):
    b = bench()
    if arguments == (1, -1) and op == "transpose.int":
        with pytest.raises(NotTileable, match="swaps"):
            b.aten(op, b.field(noise(1, 4, 8, 7)), *arguments)
        return
    b.check(b.aten(op, b.field(noise(1, 4, 8, 7)), *arguments), BOX)


@pytest.mark.parametrize(
    ("op", "arguments", "reason"),
    [
        ("permute.default", ([0, 1, 3, 2],), "swaps"),
        ("select.int", (2, 3), "one row or column"),
        ("view.default", ([1, 4, 56],), "folds"),
        ("view.default", ([1, 32, 7],), "folds"),
        ("squeeze.dim", (2,), "squeezes an axis"),
        ("slice_scatter.default", None, "along an axis"),
    ],
)
def test_what_moves_the_images_axes_is_refused(bench, noise, op, arguments, reason):
    b = bench()
    x = b.field(noise(1, 4, 8, 7))
    arguments = arguments or (b.aten("slice.Tensor", x, 2, 0, 3), 2, 0, 3)
    with pytest.raises(NotTileable, match=reason):
        b.aten(op, x, *arguments)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.data())
def test_depth_to_space_and_back(bench, some_box, noise, factor, height, width, data):
    b = bench()
    up = b.aten("pixel_shuffle.default", b.field(noise(1, 2 * factor**2, height, width)), factor)
    b.check(up, some_box(data, b.node(up)))
    down = b.aten("pixel_unshuffle.default", up, factor)
    b.check(down, some_box(data, b.node(down)))
    assert torch.equal(b.values[down.id], b.values[0])


def test_scatter_into_a_channel(bench, noise):
    b = bench()
    x, y = b.field(noise(1, 4, 8, 7)), b.field(noise(1, 8, 7))
    b.check(b.aten("select_scatter.default", x, y, 1, 2), BOX)
    two = b.aten("slice.Tensor", b.field(noise(1, 4, 8, 7)), 1, 0, 2)
    b.check(b.aten("slice_scatter.default", x, two, 1, 1, 3), BOX)
    with pytest.raises(NotTileable, match="without spatial axes into"):
        b.aten("slice_scatter.default", x, b.weight(noise(1, 2, 8, 7)), 1, 1, 3)
