"""Convolution and pooling on crops."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gigagrad.boxes import Span
from gigagrad.graphs import Call, lookup
from gigagrad.graphs.graph import Ref
from gigagrad.graphs.rows.windows import Window, inside_or_nearest, padded_groups_bytes, select
from gigagrad.graphs.table import Refused, Site
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
    arguments = {**y.arguments, "input": x, "weight": weight, "bias": bias}
    spans = Span(0, 45), Span(0, 46)
    found = {}
    with operator_threads(1):
        for values in (True, False):
            site = Site(spans, (spans, None, None), values)
            with torch.profiler.profile() as profile:
                made = lookup(y.op).run(call, arguments, site)
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


@given(sides, st.tuples(st.integers(2, 5), st.integers(2, 5)), strides, st.booleans(), st.data())
def test_max_pooling(bench, some_box, noise, size, kernel, stride, ceil_mode, data):
    padding = [data.draw(st.integers(0, k // 2)) for k in kernel]
    dilation = data.draw(st.sampled_from([[1, 1], [2, 1]]))
    assume(all(s + 2 * p > d * (k - 1) for s, p, d, k in zip(size, padding, dilation, kernel, strict=True)))
    b = bench()
    y = b.aten(
        "max_pool2d.default", b.field(noise(1, 2, *size)), list(kernel), list(stride), padding, dilation, ceil_mode
    )
    assume(b.values[y.id].isfinite().all())  # a window of nothing but padding has no maximum and no gradient
    b.check(y, some_box(data, b.node(y)))


@given(sides, st.tuples(st.integers(1, 5), st.integers(1, 5)), strides, st.booleans(), st.booleans(), st.data())
def test_average_pooling(bench, some_box, noise, size, kernel, stride, ceil_mode, include, data):
    padding = [data.draw(st.integers(0, k // 2)) for k in kernel]
    divisor = data.draw(st.sampled_from([None, 3]))
    assume(all(s + 2 * p >= k for s, p, k in zip(size, padding, kernel, strict=True)))
    b = bench()
    x = b.field(noise(1, 2, *size))
    y = b.aten("avg_pool2d.default", x, list(kernel), list(stride), padding, ceil_mode, include, divisor)
    b.check(y, some_box(data, b.node(y)))


def test_a_pool_without_a_stride_steps_by_its_kernel(bench, noise):
    b = bench()
    y = b.aten("avg_pool2d.default", b.field(noise(1, 1, 9, 9)), [3, 2])
    assert b.check(y, (Span(1, 2), Span(2, 4)))[0] == (Span(3, 6), Span(4, 8))


@given(st.integers(1, 7), st.integers(1, 5), small, st.integers(1, 3), st.integers(-5, 20), st.integers(1, 9))
def test_reads_and_writers_are_what_the_definition_says(kernel, stride, padding, dilation, start, length):
    window, out = Window(kernel, stride, padding, dilation), Span(start, start + length)
    taps = {o * stride - padding + j * dilation for o in range(out.start, out.stop) for j in range(kernel)}
    assert window.reads(out) == Span(min(taps), max(taps) + 1)
    # Transposed: input i writes to i s - p + j d. Every one that meets `out` lies in the span, the ends included.
    inputs = range(-60, 90)
    writers = [i for i in inputs if any(start <= i * stride - padding + j * dilation < out.stop for j in range(kernel))]
    assert all(window.writers(out).start <= i < window.writers(out).stop for i in writers)


def test_reads_nothing_but_padding():
    assert inside_or_nearest(Span(-4, -1), 5) == Span(0, 1)
    assert inside_or_nearest(Span(7, 9), 5) == Span(4, 5)


def test_same_padding_with_a_stride_is_refused(bench, noise):
    b = bench()
    with pytest.raises((Refused, RuntimeError)):
        b.aten("conv2d.padding", b.field(noise(1, 1, 9, 9)), b.weight(noise(1, 1, 3, 3)), None, [2, 2], "same")


def test_weights_that_are_fields_are_refused(bench, noise):
    b = bench()
    with pytest.raises(Refused, match="depends on the image"):
        b.aten("conv2d.default", b.field(noise(1, 1, 9, 9)), b.field(noise(1, 1, 3, 3)))


def test_max_pooling_of_negative_pixels_ignores_the_padding(bench, noise):
    b = bench()
    y = b.aten("max_pool2d.default", b.field(-1 - noise(1, 1, 7, 7).abs()), [3, 3], [2, 2], [1, 1])
    b.check(y, (Span(0, 4), Span(0, 4)))
    assert (b.values[y.id] < 0).all()


def test_predicted_workspace_grows_with_the_crop(bench, noise):
    from gigagrad.graphs import Call, lookup

    b = bench()
    x, w = b.field(noise(1, 1, 40, 40)), b.weight(noise(1, 1, 3, 3))
    y = b.aten("conv2d.default", x, w)
    call, row = Call(b.node(y), (b.node(x), b.node(w))), lookup("aten.conv2d.default")
    small_crop = row.workspace_bytes(call, 64, ((Span(0, 10), Span(0, 10)), None))
    assert 0 < small_crop < row.workspace_bytes(call, 900, ((Span(0, 32), Span(0, 32)), None))
    assert torch.float64.itemsize * 9 * 64 <= small_crop


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


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "a view"])
@given(st.lists(st.integers(1, 4), min_size=3, max_size=5), st.sampled_from([-3, -2, -1]), st.data())
def test_selected_pixels_and_their_gradients_are_those_of_index_select(layout, shape, dim, data):
    shape = (shape * 2)[:4] if layout == "channels last" else shape
    crop = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    if layout == "channels last":
        crop = crop.contiguous(memory_format=torch.channels_last)
    elif layout == "a view":
        crop = crop.movedim(0, -1)
    crop = crop.detach().requires_grad_()
    index = torch.tensor(data.draw(st.lists(st.integers(0, crop.shape[dim] - 1), min_size=1, max_size=6)))
    found, expected = select(crop, dim, index), crop.index_select(dim, index)
    assert torch.equal(found, expected)
    cotangent = torch.arange(1.0, found.numel() + 1).reshape(found.shape)
    gradients = [torch.autograd.grad(value, crop, cotangent)[0] for value in (found, expected)]
    assert torch.equal(*gradients)
