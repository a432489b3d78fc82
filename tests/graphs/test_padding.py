"""`aten.pad` on crops, all modes, negative amounts (cropping) included."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gigagrad.boxes import Span
from gigagrad.graphs.op_rules import NotTileable


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.lists(st.integers(-3, 6), min_size=4, max_size=4),
    st.sampled_from(["constant", "reflect", "replicate", "circular"]),
    st.data(),
)
def test_padding(bench, some_box, noise, size, pad, mode, data):
    height, width = size
    assume(height + pad[2] + pad[3] >= 1)
    assume(width + pad[0] + pad[1] >= 1)
    # PyTorch's own limits; cropping is not legal in every mode either.
    most = {"reflect": 1, "circular": 0}.get(mode)
    assume(min(height + min(0, pad[2]) + min(0, pad[3]), width + min(0, pad[0]) + min(0, pad[1])) >= 0)
    if mode != "constant":
        assume(min(pad) >= 0)
    if most is not None:
        assume(max(pad[:2]) <= width - most)
        assume(max(pad[2:]) <= height - most)
    b = bench()
    value = data.draw(st.sampled_from([None, 2.5])) if mode == "constant" else None
    y = b.aten("pad.default", b.field(noise(1, 2, *size)), pad, mode, value)
    b.check(y, some_box(data, b.node(y)))


def test_padding_of_one_axis(bench, noise):
    b = bench()
    y = b.aten("pad.default", b.field(noise(1, 2, 5, 6)), [1, 2])
    assert b.check(y, (Span(0, 5), Span(0, 9)))[0] == (Span(0, 5), Span(0, 6))


def test_circular_padding_reads_across_the_image_only_at_the_border(bench, noise):
    b = bench()
    y = b.aten("pad.default", b.field(noise(1, 1, 20, 20)), [2, 2, 2, 2], "circular")
    assert b.check(y, (Span(5, 9), Span(0, 4)))[0] == (Span(3, 7), Span(0, 20))


def test_padding_of_channels_is_refused(bench, noise):
    b = bench()
    with pytest.raises(NotTileable, match="not the image's"):
        b.aten("pad.default", b.field(noise(1, 2, 5, 6)), [0, 0, 0, 0, 1, 0])
