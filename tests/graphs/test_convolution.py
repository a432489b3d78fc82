"""Convolution on crops."""

from unittest.mock import Mock

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from gigagrad.boxes import Span
from gigagrad.graphs import Call, lookup
from gigagrad.graphs.graph import Ref
from gigagrad.graphs.op_rules import NotTileable, Site
from gigagrad.graphs.ops import convolution
from gigagrad.graphs.ops.convolution import by_groups
from gigagrad.graphs.ops.windows import padded_groups_bytes
from gigagrad.threads import operator_threads

small = st.integers(0, 3)
pairs = st.tuples(small, small)
strides = st.tuples(st.integers(1, 4), st.integers(1, 4))
sides = st.tuples(st.integers(1, 14), st.integers(1, 14))


@given(
    sides, st.tuples(st.integers(1, 5), st.integers(1, 5)), strides, pairs, strides, st.sampled_from([1, 2]), st.data()
)
def test_convolution(bench, some_box, noise, size, kernel, stride, padding, dilation, groups, data):
    fits = all(s + 2 * p >= d * (k - 1) + 1 for s, p, d, k in zip(size, padding, dilation, kernel, strict=True))
    assume(fits)
    b = bench()
    x, w = b.field(noise(1, 2, *size)), b.weight(noise(4, 2 // groups, *kernel))
    bias = b.weight(noise(4)) if data.draw(st.booleans()) else None
    y = b.aten("conv2d.default", x, w, bias, list(stride), list(padding), list(dilation), groups)
    b.check(y, some_box(data, b.node(y)))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch is built without oneDNN")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_one_thread_gives_kernels_of_one_pixel_to_onednn(bench, noise, layout):
    """Which plain PyTorch does with several threads only; the result is the same."""
    x = noise(1, 12, 45, 46).float().contiguous(memory_format=layout).requires_grad_()
    weight, bias = noise(20, 12, 1, 1).float().requires_grad_(), noise(20).float().requires_grad_()
    b = bench()
    y = b.node(b.aten("conv2d.default", b.field(x.detach()), b.weight(weight.detach()), b.weight(bias.detach())))
    call = Call(y, tuple(b.node(Ref(i)) for i in y.operands))
    spans = Span(0, 45), Span(0, 46)
    found = {}
    with operator_threads(1):
        for values in (True, False):
            site = Site(spans, (spans, None, None), values)
            with torch.profiler.profile() as profile:
                made = lookup(y.op).bind(call, site)([x, weight, bias])
                found[values] = torch.autograd.grad(made, [x, weight, bias], torch.ones_like(made))
            names = {event.name for event in profile.events()}
            assert ("aten::mkldnn_convolution" in names) is values
            assert "aten::convolution_backward" in names
            assert not any("slow" in name for name in names)
            if values:
                torch.testing.assert_close(made, torch.conv2d(x, weight, bias))
    plain = torch.autograd.grad(torch.conv2d(x, weight, bias).sum(), [x, weight, bias])
    for gradients in found.values():
        torch.testing.assert_close(gradients, plain, rtol=1e-5, atol=1e-4)


@given(sides, st.tuples(st.integers(1, 4), st.integers(1, 4)), st.sampled_from(["same", "valid"]), st.data())
def test_convolution_with_named_padding(bench, some_box, noise, size, kernel, padding, data):
    dilation = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    assume(padding == "same" or all(s > d * (k - 1) for s, d, k in zip(size, dilation, kernel, strict=True)))
    b = bench()
    x, w = b.field(noise(1, 1, *size)), b.weight(noise(2, 1, *kernel))
    y = b.aten("conv2d.padding", x, w, None, [1, 1], padding, list(dilation))
    b.check(y, some_box(data, b.node(y)))


def test_same_padding_with_a_stride_is_refused(bench, noise):
    b = bench()
    with pytest.raises((NotTileable, RuntimeError)):
        b.aten("conv2d.padding", b.field(noise(1, 1, 9, 9)), b.weight(noise(1, 1, 3, 3)), None, [2, 2], "same")


def test_weights_that_are_fields_are_refused(bench, noise):
    b = bench()
    with pytest.raises(NotTileable, match="depends on the image"):
        b.aten("conv2d.default", b.field(noise(1, 1, 9, 9)), b.field(noise(1, 1, 3, 3)))


@pytest.mark.parametrize(
    ("dtype", "channels", "kernel", "dilation", "size", "measured_mib"),
    [
        (torch.bfloat16, 1152, 5, 1, (20, 28), 84),
        (torch.bfloat16, 1152, 9, 1, (20, 28), 180),
        (torch.bfloat16, 240, 5, 1, (64, 64), 68),
        (torch.bfloat16, 240, 3, 2, (64, 64), 64),
        (torch.bfloat16, 1152, 3, 1, (20, 28), 0),
        (torch.float32, 1632, 5, 1, (20, 20), 40),
        (torch.float32, 1024, 7, 1, (20, 20), 49),
        (torch.float32, 1152, 3, 1, (40, 40), 0),
    ],
    ids=str,
)
def test_depthwise_gradients_pad_their_groups(bench, noise, dtype, channels, kernel, dilation, size, measured_mib):
    """Measured on two cores with AVX-512 (docs/decisions/0013-whole-process-accounting.md)."""
    b = bench()
    x, w = (
        b.field(torch.zeros(1, channels, *size, dtype=dtype)),
        b.weight(torch.zeros(channels, 1, kernel, kernel, dtype=dtype)),
    )
    pad = [dilation * (kernel // 2)] * 2
    node = b.node(b.aten("conv2d.default", x, w, None, [1, 1], pad, [dilation] * 2, channels))
    call = Call(node, (b.node(x), b.node(w)))
    predicted = padded_groups_bytes(call, size[0] * size[1], size[0] * size[1]) / 2**20
    assert measured_mib * 0.97 <= predicted <= measured_mib * 1.25


def test_convolutions_that_pad_no_groups(bench):
    b = bench()
    x = b.field(torch.zeros(1, 32, 20, 20))
    for groups in (1, 4):
        w = b.weight(torch.zeros(32, 32 // groups, 5, 5))
        node = b.node(b.aten("conv2d.default", x, w, None, [1, 1], [2, 2], [1, 1], groups))
        assert padded_groups_bytes(Call(node, (b.node(x), b.node(w))), 400, 400) == 0


@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 6)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
)
@example(1, 1, (1, 2), (2, 1), 1, 1, False)  # views of these weights are laid out as no gradient is
def test_pixels_of_a_row_as_one(noise, channels_in, channels_out, stride, kernel, outputs, more, biased):
    """The same values and gradients."""
    pixels = outputs * stride[1]
    taps = -(-((outputs - 1) * stride[1] + kernel[1]) // pixels)
    x = noise(1, channels_in, 5, pixels * (taps - 1 + more)).contiguous(memory_format=torch.channels_last)
    weight = noise(channels_out, channels_in, *kernel).requires_grad_()
    bias = noise(channels_out).requires_grad_() if biased else None
    leaves = [value for value in (x.requires_grad_(), weight, bias) if value is not None]
    found = by_groups(x, weight, bias, stride, outputs, lambda *given: torch.conv2d(*given))
    expected = torch.conv2d(x, weight, bias, stride)[..., : found.shape[3]]
    assert found.shape[3] == more * outputs
    assert torch.allclose(found, expected, rtol=1e-12)
    cotangent = torch.rand_like(expected)
    for gradient, wanted in zip(*(torch.autograd.grad(y, leaves, cotangent) for y in (found, expected)), strict=True):
        assert torch.allclose(gradient, wanted, rtol=1e-12)


def close(found, expected, atol):
    if found.dtype == torch.bfloat16:
        return (found - expected).float().norm() <= 2**-6 * expected.float().norm()
    return torch.allclose(found, expected, rtol=1e-3, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "layout", "grouped"),
    [
        ((2, 3), 3, 1, torch.channels_last, True),
        ((2, 3), 4, 1, torch.channels_last, True),
        ((1, 5), 15, 8, torch.channels_last, True),
        ((3, 40), 4, 4, torch.channels_last, True),
        ((2, 3), 3, 1, torch.contiguous_format, False),
        ((2, 9), 3, 1, torch.channels_last, False),  # two outputs would take two vectors
        ((9, 3), 3, 1, torch.channels_last, False),
        ((3, 8), 7, 2, torch.channels_last, False),
        ((2, 3), 1, 1, torch.channels_last, False),
    ],
)
@given(st.integers(0, 100), st.integers(60, 90), st.integers(0, 4))
def test_few_channels_on_crops(
    bench, noise, channels, kernel, stride, layout, grouped, values, dtype, start, length, padding
):
    """In the middle and at the border, with a remainder or without; gradients where no values are asked for, too."""
    x, weight = noise(1, channels[0], 90, 190).to(dtype), noise(channels[1], channels[0], kernel, kernel).to(dtype)
    b = bench()
    node = b.node(b.aten("conv2d.default", b.field(x), b.weight(weight), None, [stride] * 2, [padding] * 2))
    call, row = Call(node, (b.node(Ref(0)), b.node(Ref(1)))), lookup(node.op)
    rows, columns = node.shape[2:]
    out = Span(1, rows), Span(min(start // stride, columns - 1), min((start + length) // stride + 1, columns))
    needed = [span for axis in (0, 1) if (span := row.needs(call, axis, out[axis])[0]) is not None]
    crop = x[..., needed[0].start : needed[0].stop, needed[1].start : needed[1].stop]
    crop = crop.contiguous(memory_format=layout).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        spied = Mock(wraps=by_groups)
        patch.setattr(convolution, "by_groups", spied)
        patch.setattr(convolution, "_SMALL_CROP", 0)
        weight.requires_grad_()
        found = row.bind(call, Site(out, ((needed[0], needed[1]), None), values))([crop, weight])
    assert spied.called == grouped
    whole = x.detach().requires_grad_()
    expected = torch.conv2d(whole, weight, None, stride, padding)
    expected = expected[..., out[0].start : out[0].stop, out[1].start : out[1].stop]
    assert found.shape == expected.shape
    if values:
        assert close(found, expected, atol=1e-4)
    cotangent = torch.rand_like(expected)
    to_crop, to_weight = torch.autograd.grad(found, (crop, weight), cotangent)
    to_whole, wanted = torch.autograd.grad(expected, (whole, weight), cotangent)
    to_whole = to_whole[..., needed[0].start : needed[0].stop, needed[1].start : needed[1].stop]
    assert close(to_crop, to_whole, atol=1e-4)
    assert close(to_weight, wanted, atol=1e-2)
