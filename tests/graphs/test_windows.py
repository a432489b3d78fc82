"""Convolution and pooling on crops."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gigagrad.boxes import Span
from gigagrad.graphs import Call, lookup
from gigagrad.graphs.ops.windows import Window, inside_or_nearest, select

small = st.integers(0, 3)
pairs = st.tuples(small, small)
strides = st.tuples(st.integers(1, 4), st.integers(1, 4))
sides = st.tuples(st.integers(1, 14), st.integers(1, 14))


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


def test_max_pooling_of_negative_pixels_ignores_the_padding(bench, noise):
    b = bench()
    y = b.aten("max_pool2d.default", b.field(-1 - noise(1, 1, 7, 7).abs()), [3, 3], [2, 2], [1, 1])
    b.check(y, (Span(0, 4), Span(0, 4)))
    assert (b.values[y.id] < 0).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_max_pooling_of_integers(bench, dtype):
    b = bench()
    pixels = torch.randint(torch.iinfo(dtype).min, 3, (1, 1, 8, 9), dtype=dtype)
    pixels[..., -3:] = torch.iinfo(dtype).min
    y = b.aten("max_pool2d.default", b.field(pixels), [3, 3], [2, 2], [1, 1], [1, 1], True)
    b.check(y, (Span(0, 5), Span(0, 5)))
    b.check(y, (Span(3, 5), Span(4, 5)))


def test_predicted_workspace_grows_with_the_crop(bench, noise):

    b = bench()
    x, w = b.field(noise(1, 1, 40, 40)), b.weight(noise(1, 1, 3, 3))
    y = b.aten("conv2d.default", x, w)
    call, row = Call(b.node(y), (b.node(x), b.node(w))), lookup("aten.conv2d.default")
    small_crop = row.workspace_bytes(call, 64, ((Span(0, 10), Span(0, 10)), None))
    assert 0 < small_crop < row.workspace_bytes(call, 900, ((Span(0, 32), Span(0, 32)), None))
    assert torch.float64.itemsize * 9 * 64 <= small_crop


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
