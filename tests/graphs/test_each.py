"""Operators that take the items of a batch apart, on the patches of a bag and of an image."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.boxes import Span
from gigagrad.graphs.graph import Patches
from gigagrad.graphs.op_rules import NotTileable

SOME = (Span(2, 5), Span(0, 1))


def patches_of(b, noise, *shape):
    """2 x 3 patches of an image, in one axis."""
    image = b.field(noise(2, 3, *shape).permute(2, 3, 4, 0, 1).reshape(1, -1, 2, 3))
    turned = b.aten("permute.default", b.aten("view.default", image, [*shape, 2, 3]), [3, 4, 0, 1, 2])
    return b.aten("reshape.default", turned, [6, *shape])


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("max_pool2d.default", ([2, 2], [2, 2], [1, 1])),
        ("avg_pool2d.default", ([3, 3], [2, 2], [1, 1])),
        ("adaptive_avg_pool2d.default", ([1, 1],)),
        ("adaptive_avg_pool2d.default", ([2, 3],)),
        ("adaptive_max_pool2d.default", ([1, 1],)),
        ("max_pool2d_with_indices.default", ([2, 2],)),
        ("group_norm.default", (2,)),
        ("instance_norm.default", (None, None, None, None, True, 0.1, 1e-5, False)),
        ("upsample_nearest2d.vec", ([8, 10], None)),
        ("upsample_bilinear2d.vec", ([8, 10], False, None)),
        ("constant_pad_nd.default", ([1, 2, 0, 1],)),
        ("reflection_pad2d.default", ([1, 2, 0, 1],)),
        ("pixel_shuffle.default", (2,)),
        ("im2col.default", ([2, 2], [1, 1], [0, 0], [2, 2])),
        ("roll.default", ([1, 2], [-1, -2])),
        ("channel_shuffle.default", (2,)),
    ],
)
@pytest.mark.parametrize("place", ["bag", "image"])
def test_each_patch_by_itself(bench, noise, op, arguments, place):
    b = bench()
    shape = (4, 4, 5)
    x = b.bag(noise(6, *shape)) if place == "bag" else patches_of(b, noise, *shape)
    y = b.aten_each(op, x, *arguments)
    b.check(y, SOME if place == "bag" else (Span(0, 2), Span(1, 3)))


@given(st.integers(1, 2), st.integers(0, 2), st.sampled_from([1, 2]), st.data())
def test_convolution_of_patches(bench, some_box, noise, stride, padding, groups, data):
    b = bench()
    weight, bias = b.weight(noise(6, 4 // groups, 3, 3)), b.weight(noise(6))
    x = patches_of(b, noise, 4, 5, 6)
    y = b.aten_each("conv2d.default", x, weight, bias, [stride] * 2, [padding] * 2, [1, 1], groups)
    b.check(y, some_box(data, b.node(y)))


@pytest.mark.parametrize("turned", [False, True])
def test_another_batch_is_refused(bench, noise, turned):
    b = bench()
    x = b.bag(noise(6, 2, 4, 4))
    x = b.aten("transpose.int", x, 0, 1) if turned else b.aten("select.int", x, 1, 0)
    with pytest.raises(NotTileable, match="another axis"):
        b.aten_each("max_pool2d.default", x, [2, 2])


@pytest.mark.parametrize(
    ("op", "arguments", "reason"),
    [
        ("roll.default", ([1], [0]), "from patch to patch"),
        ("roll.default", ([1],), "from patch to patch"),
        ("constant_pad_nd.default", ([0, 0, 0, 0, 0, 0, 1, 1],), "pads the patches"),
    ],
)
def test_what_moves_patches_is_refused(bench, noise, op, arguments, reason):
    b = bench()
    with pytest.raises(NotTileable, match=reason):
        b.aten_each(op, b.bag(noise(6, 2, 4, 4)), *arguments)


def tokens(b, noise, *shape):
    return b.aten("view.default", b.bag(noise(6, shape[0], 1, int(torch.tensor(shape[1:]).prod()))), [6, *shape])


@pytest.mark.parametrize("op", ["matmul.default", "bmm.default"])
def test_products_of_patches(bench, noise, op):
    b = bench()
    one, two = tokens(b, noise, 3, 4), tokens(b, noise, 4, 5)
    b.check(b.aten(op, one, two), SOME)


def test_products_with_weights(bench, noise):
    b = bench()
    x, weight = tokens(b, noise, 3, 4), b.weight(noise(4, 5))
    b.check(b.aten("matmul.default", x, weight), SOME)
    b.check(b.aten("matmul.default", b.weight(noise(1, 2, 3)), x), SOME)
    rows = b.aten("select.int", x, 1, 0)
    b.check(b.aten("mm.default", rows, weight), SOME)
    b.check(b.aten("addmm.default", b.weight(noise(5)), rows, weight), SOME)
    b.check(b.aten("baddbmm.default", b.weight(noise(5)), x, tokens(b, noise, 4, 5)), SOME)


def test_products_that_mix_patches_are_refused(bench, noise):
    b = bench()
    rows = b.aten("select.int", tokens(b, noise, 3, 4), 1, 0)
    with pytest.raises(NotTileable, match="different positions"):
        b.aten("mm.default", b.aten("transpose.int", rows, 0, 1), rows)
    with pytest.raises(NotTileable, match="from elsewhere"):
        b.aten("matmul.default", b.weight(noise(2, 6)), rows)
    with pytest.raises(NotTileable, match="from elsewhere"):
        b.aten("bmm.default", tokens(b, noise, 3, 4), b.weight(noise(6, 4, 5)))


@pytest.mark.parametrize("mask", [None, (1, 1, 3, 3), (3, 3)])
def test_attention_within_patches(bench, noise, mask):
    b = bench()
    q, k, v = (tokens(b, noise, 2, 3, 4) for _ in range(3))
    mask = None if mask is None else b.weight(noise(*mask))
    b.check(b.aten("scaled_dot_product_attention.default", q, k, v, mask), SOME)


def test_attention_among_patches_is_refused(bench, noise):
    b = bench()
    q, k, v = (b.aten("transpose.int", tokens(b, noise, 2, 3, 4), 0, 2) for _ in range(3))
    with pytest.raises(NotTileable, match="mixes patches"):
        b.aten("scaled_dot_product_attention.default", q, k, v)


def test_numbers_of_places_and_random_numbers(bench, noise):
    b = bench()
    for x in (b.bag(noise(6, 2, 4, 4)), patches_of(b, noise, 2, 4, 4)):
        seed = b.constant(torch.tensor(7))
        y = b.call("gigagrad.uniform", {"like": x, "seed": seed})
        b.check(y, SOME if b.node(x).patches == Patches(6, 1) else (Span(0, 2), Span(1, 3)))


def test_a_value_for_every_patch_from_elsewhere_is_narrowed(bench, noise):
    b = bench()
    for x in (b.bag(noise(6, 2, 4, 4)), patches_of(b, noise, 2, 4, 4)):
        y = b.aten("add.Tensor", x, b.weight(noise(6, 2, 1, 1)))
        b.check(y, (Span(1, 2), Span(0, 1)) if b.node(x).patches == Patches(6, 1) else (Span(1, 2), Span(0, 2)))


def test_some_of_the_patches_are_no_tile(bench, noise):
    b = bench()
    x = b.bag(noise(6, 2, 4, 4))
    with pytest.raises(NotTileable, match="some of the patches"):
        b.aten("slice.Tensor", x, 0, 1, 3)
    with pytest.raises(NotTileable, match="some of the patches"):
        b.aten("cat.default", [x, x], 0)
