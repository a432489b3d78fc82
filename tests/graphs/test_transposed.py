"""Transposed convolution on crops, by PyTorch's kernel (float64) and by block products (float32, bfloat16)."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gigagrad.boxes import Span
from gigagrad.graphs import Call, Site, lookup

ROW = "aten.conv_transpose2d.input"


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
    st.sampled_from([1, 2]),
    st.data(),
)
def test_by_kernel(bench, some_box, noise, size, kernel, stride, padding, groups, data):
    dilation = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)), "dilation")
    extra = [data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
    out = [
        (n - 1) * s - 2 * p + d * (k - 1) + e + 1
        for n, s, p, d, k, e in zip(size, stride, padding, dilation, kernel, extra, strict=True)
    ]
    assume(min(out) >= 1)
    b = bench()
    x, w = b.field(noise(1, 2, *size)), b.weight(noise(2, 4 // groups, *kernel))
    bias = b.weight(noise(4)) if data.draw(st.booleans(), "bias") else None
    y = b.aten("conv_transpose2d.input", x, w, bias, list(stride), list(padding), extra, groups, list(dilation))
    b.check(y, some_box(data, b.node(y)))


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 15), st.integers(1, 15)),
    st.integers(4, 8),
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
    st.data(),
)
def test_by_blocks(bench, some_box, noise, size, kernel, stride, padding, data):
    extra = data.draw(st.tuples(st.integers(0, stride - 1), st.integers(0, stride - 1)), "output padding")
    out = [(n - 1) * stride - 2 * p + k + e for n, p, k, e in zip(size, padding, kernel, extra, strict=True)]
    assume(min(out) >= 1)
    b = bench()
    x, w = b.field(noise(1, 2, *size).float()), b.weight(noise(2, 3, *kernel).float())
    bias = b.weight(noise(3).float()) if data.draw(st.booleans(), "bias") else None
    y = b.aten("conv_transpose2d.input", x, w, bias, [stride, stride], list(padding), list(extra))
    b.check(y, some_box(data, b.node(y)), tolerance=2e-4)


def test_blocks_in_bfloat16(bench, noise):
    """Against float32 of the same numbers: PyTorch 2.13's own bfloat16 gives wrong gradients where padding is cut."""
    b = bench()
    given = [noise(*shape).bfloat16() for shape in ((1, 3, 9, 11), (3, 3, 15, 15), (3,))]
    refs = [b.field(given[0]), b.weight(given[1]), b.weight(given[2])]
    node = b.node(b.aten("conv_transpose2d.input", *refs, [8, 8], [4, 4], [1, 1]))
    leaves = [value.clone().requires_grad_() for value in given]
    out = (Span(0, node.shape[2]), Span(0, node.shape[3]))
    call = Call(node, tuple(b.node(ref) for ref in refs))
    found = lookup(ROW).bind(call, Site(out, ((Span(0, 9), Span(0, 11)), None, None)))(leaves)
    plain = [value.float().requires_grad_() for value in given]
    expected = torch.conv_transpose2d(plain[0], plain[1], plain[2], [8, 8], [4, 4], [1, 1])
    cotangent = torch.rand_like(expected)
    gradients = torch.autograd.grad(found, leaves, cotangent.bfloat16())
    wanted = torch.autograd.grad(expected, plain, cotangent)
    for value, reference in zip((found, *gradients), (expected, *wanted), strict=True):
        assert value.dtype == torch.bfloat16
        assert (value.float() - reference).norm() <= 2**-6 * reference.norm()


@pytest.mark.parametrize(
    ("dtype", "stride", "groups", "channels", "blocks"),
    [
        (torch.float32, (8, 8), 1, 3, True),
        (torch.bfloat16, (8, 8), 1, 3, True),
        (torch.float64, (8, 8), 1, 3, False),
        (torch.float32, (2, 2), 1, 3, False),
        (torch.float32, (8, 4), 1, 3, False),
        (torch.float32, (8, 8), 2, 4, False),
        (torch.float32, (8, 8), 1, 64, False),
    ],
)
def test_where_blocks_are_used(bench, dtype, stride, groups, channels, blocks):
    b = bench()
    x = b.field(torch.ones(1, channels, 3, 3, dtype=dtype))
    w = b.weight(torch.ones(channels, channels // groups, 9, 9, dtype=dtype))
    y = b.aten("conv_transpose2d.input", x, w, None, list(stride), [0, 0], [0, 0], groups)
    assert lookup(ROW).suits_blocks(Call(b.node(y), (b.node(x), b.node(w)))) is blocks  # type: ignore[attr-defined]


def test_outputs_of_one_length_are_compiled_for_where_they_begin(bench):
    """A stride of 2 begins with one tap or another, and the operator pads accordingly; blocks compile nothing."""
    b = bench()
    x, w = b.field(torch.ones(1, 2, 40, 40)), b.weight(torch.ones(2, 2, 3, 3))
    y = b.node(b.aten("conv_transpose2d.input", x, w, None, [2, 2], [1, 1]))
    call = Call(y, (b.node(x), b.node(w)))
    row = lookup(ROW)
    found = [row.compiled_for(call, 0, out, row.needs(call, 0, out)) for out in (Span(i, i + 8) for i in range(10, 14))]
    assert found[0] == found[2] != found[1] == found[3]
    wide = b.node(b.aten("conv_transpose2d.input", x, b.weight(torch.ones(2, 2, 8, 8)), None, [8, 8]))
    call = Call(wide, (b.node(x), b.node(w)))
    assert row.compiled_for(call, 0, Span(0, 8), row.needs(call, 0, Span(0, 8))) == ()
