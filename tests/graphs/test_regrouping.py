"""Views that split and join axes: blocks of pixels, patches as a batch, windows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.boxes import Span
from gigagrad.graphs.graph import Patches
from gigagrad.graphs.op_rules import NotTileable
from gigagrad.graphs.ops.regrouping import Regrouping, regrouped

SIZES = st.integers(2, 4)


@given(SIZES, SIZES, SIZES, SIZES, st.data())
def test_an_image_is_cut_into_patches_and_put_together_again(bench, some_box, noise, rows, columns, p, q, data):
    b = bench()
    blocks = b.aten("view.default", b.field(noise(1, 3, rows * p, columns * q)), [1, 3, rows, p, columns, q])
    turned = b.aten("permute.default", blocks, [0, 2, 4, 1, 3, 5])
    patches = b.aten("reshape.default", turned, [rows * columns, 3, p, q])
    node = b.node(patches)
    assert (node.axes, node.patches) == ((-4, -4), Patches(rows, columns))
    assert (node.stored_shape, node.stored_axes) == ((rows, columns, 3, p, q), (-5, -4))
    apart = b.aten("view.default", patches, [1, rows, columns, 3, p, q])
    back = b.aten("permute.default", apart, [0, 3, 1, 4, 2, 5])
    image = b.aten("reshape.default", back, [1, 3, rows * p, columns * q])
    for ref in (blocks, turned, patches, apart, back, image):
        b.check(ref, some_box(data, b.node(ref)))
    assert torch.equal(b.values[image.id], b.values[0])


@given(SIZES, SIZES, SIZES, st.data())
def test_tokens_of_patches_are_joined_with_their_axis_and_split_again(bench, some_box, noise, rows, columns, k, data):
    b = bench()
    x = b.field(noise(1, 5, rows, columns * k))
    turned = b.aten("permute.default", x, [0, 2, 3, 1])
    tokens = b.aten("view.default", turned, [rows * columns * k, 5])
    apart = b.aten("view.default", tokens, [rows * columns, k, 5])
    joined = b.aten("view.default", apart, [rows * columns * k, 5])
    by_rows = b.aten("view.default", tokens, [rows, columns * k, 5])
    for ref in (tokens, apart, joined, by_rows):
        b.check(ref, some_box(data, b.node(ref)))
    assert b.node(apart).patches == Patches(rows, columns)
    assert b.node(by_rows).patches is None


@given(st.integers(2, 9), SIZES, SIZES, st.data())
def test_a_bag_is_regrouped(bench, some_box, noise, count, k, width, data):
    b = bench()
    x = b.bag(noise(count * k, 1, 1, width))
    assert b.node(x).patches == Patches(count * k, 1)
    flat = b.aten("view.default", x, [count * k * width])
    groups = b.aten("view.default", x, [count, k, width])
    for ref in (flat, groups):
        b.check(ref, some_box(data, b.node(ref)))
    assert (b.node(flat).patches, b.node(groups).patches) == (Patches(count * k, 1, width), Patches(count, 1))


@given(SIZES, SIZES, SIZES, SIZES, st.data())
def test_tokens_come_before_patches(bench, some_box, noise, rows, columns, tokens, width, data):
    b = bench()
    image = b.field(noise(1, tokens * width, rows, columns))
    turned = b.aten("permute.default", image, [0, 2, 3, 1])
    patches = b.aten("view.default", turned, [rows * columns, tokens, width])
    first = b.aten("transpose.int", patches, 0, 1)
    joined = b.aten("reshape.default", first, [tokens * rows * columns, width])
    node = b.node(joined)
    assert (node.axes, node.patches) == ((-2, -2), Patches(rows, columns, 1, tokens))
    assert node.stored_shape == (tokens, rows, columns, width)
    doubled = b.aten("mul.Tensor", joined, b.weight(noise(tokens * rows * columns, 1)))
    heads = b.aten("view.default", doubled, [tokens * rows * columns * width])
    apart = b.aten("view.default", heads, [tokens, rows * columns, width])
    for ref in (first, joined, doubled, heads, apart):
        b.check(ref, some_box(data, b.node(ref)))


@pytest.mark.parametrize(
    ("old", "axes", "patches", "new", "reason"),
    [
        ((1, 3, 8, 6), (-2, -1), None, (1, 3, 48), "no batch"),
        ((1, 3, 8, 6), (-2, -1), None, (24, 6), "folds"),
        ((1, 3, 8, 6), (-2, -1), None, (1, 3, 16, 3), "no batch"),
        ((8, 6, 4), (-3, -2), None, (24, 8), "no batch"),
        ((6, 5, 4), (-3, -3), Patches(2, 3), (5, 24), "folds|divides"),
        ((6, 4), (-2, -2), Patches(3, 2), (4, 6), "divides"),
        ((1, 3, 1, 6), (-2, -1), None, (3, 6, 1), "one pixel"),
    ],
)
def test_what_mixes_axes_is_refused(old, axes, patches, new, reason):
    with pytest.raises(NotTileable, match=reason):
        regrouped(old, axes, patches, new)


def test_trailing_axes_stay_whatever_their_length():
    assert regrouped((1, 4, 1, 1), (-2, -1), None, (2, 2, 1, 1)) == Regrouping((-2, -1), None)


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 3, -1, -2]), st.data())
def test_windows_of_an_axis(bench, some_box, noise, size, step, dim, data):
    b = bench()
    y = b.aten("unfold.default", b.field(noise(1, 4, 7, 8)), dim, size, step)
    b.check(y, some_box(data, b.node(y)))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 1), st.integers(1, 2), st.data())
def test_windows_as_columns(bench, some_box, noise, kernel, stride, padding, dilation, data):
    b = bench()
    pairs = ([kernel] * 2, [dilation] * 2, [padding] * 2, [stride] * 2)
    y = b.aten("im2col.default", b.field(noise(1, 2, 7, 8)), *pairs)
    b.check(y, some_box(data, b.node(y)))


def test_patches_are_expanded_but_for_their_axis(bench, noise):
    b = bench()
    x = b.bag(noise(6, 1, 3, 2))
    b.check(b.aten("expand.default", x, [6, 4, 3, 2]), (Span(1, 4), Span(0, 1)))
    with pytest.raises(NotTileable, match="expands an axis"):
        b.aten("expand.default", b.field(noise(1, 1, 4, 1)), [1, 1, 4, 5])
