"""Resizing on crops, by PyTorch's kernel where the factor is whole and by explicit weights elsewhere."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gigagrad.boxes import Span
from gigagrad.graphs.op_rules import NotTileable

side = st.integers(1, 20)
factors = st.sampled_from([0.5, 1.0, 1.1, 1.3, 1.5, 2.0, 2.7, 3.0, 4.0, 1 / 3, 0.37])


def resized(b, x, mode, size, scale, align):
    name = {"nearest-exact": "_upsample_nearest_exact2d"}.get(mode, f"upsample_{mode}2d")
    extra = [] if mode.startswith("nearest") else [align]
    return b.aten(f"{name}.vec", x, size, *extra, scale)


@given(
    st.tuples(side, side),
    st.sampled_from(["nearest", "nearest-exact", "bilinear", "bicubic"]),
    st.one_of(st.tuples(side, side), st.tuples(factors, factors).map(list)),
    st.booleans(),
    st.data(),
)
def test_resizing(bench, some_box, noise, size, mode, to, align, data):
    by_factor = isinstance(to, list)
    assume(not by_factor or all(int(n * f) >= 1 for n, f in zip(size, to, strict=True)))
    b = bench()
    y = resized(b, b.field(noise(1, 2, *size)), mode, None if by_factor else list(to), to if by_factor else None, align)
    # By a factor that leaves the size, PyTorch's bicubic forward interpolates and its backward copies (decision 8).
    assume(not (by_factor and mode == "bicubic" and b.node(y).shape[-2:] == size))
    b.check(y, some_box(data, b.node(y)), tolerance=1e-11)


@given(st.sampled_from(["nearest", "bilinear", "bicubic"]), st.integers(1, 12), st.integers(1, 40), st.data())
def test_float32_coordinates_are_pytorchs(bench, some_box, noise, mode, size, to, data):
    b = bench()
    y = resized(b, b.field(noise(1, 1, size, size).float()), mode, [to, to], None, False)
    b.check(y, some_box(data, b.node(y)), tolerance=2e-5)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("size", [(1, 7), (13, 40), (60, 100), (120, 60)])
def test_nearest_by_factors_near_those_that_pytorch_counts(bench, mode, size):
    """Small outputs that are once or twice as long are counted by PyTorch, whatever the factor; large ones are not,
    although their gradients are (decision 8).
    """
    image = torch.randint(0, 256, (1, 1, *size), dtype=torch.uint8)
    for factor in (0.334, 0.5, 0.998, 1.004, 1.02, 1.3, 1.996, 2.0, 2.005, 2.02, 3.001):
        if min(size) * factor < 1:
            continue
        b = bench()
        y = resized(b, b.field(image), mode, None, [factor, factor], None)
        whole = [Span(0, n) for n in b.node(y).shape[-2:]]
        b.check(y, (whole[0], whole[1]), tolerance=0)
        b.check(y, (Span(whole[0].stop // 2, whole[0].stop), Span(whole[1].stop // 3, whole[1].stop)), tolerance=0)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_far_out_in_a_wide_field(bench, mode):
    """At 60000 px the rounding of float32 coordinates decides which pixel is copied."""
    b = bench()
    y = resized(b, b.field(torch.arange(20011.0)[None, None, None]), mode, [1, 60000], None, False)
    b.check(y, (Span(0, 1), Span(59_000, 60_000)), tolerance=0)


def test_half_precision_is_interpolated_in_float32(bench, noise):
    b = bench()
    y = resized(b, b.field(noise(1, 1, 9, 9).bfloat16()), "bilinear", [23, 23], None, False)
    b.check(y, (Span(3, 20), Span(0, 23)), tolerance=1e-2)
    exact = torch.nn.functional.interpolate(b.values[0].detach().float(), size=(23, 23), mode="bilinear").bfloat16()
    assert torch.equal(b.values[y.id], exact)


def test_masks_are_copied_but_not_interpolated(bench):
    b = bench()
    mask = b.field(torch.randint(0, 255, (1, 1, 8, 8), dtype=torch.uint8))
    b.check(resized(b, mask, "nearest", [13, 5], None, False), (Span(2, 9), Span(1, 4)))
    with pytest.raises(NotTileable, match="convert to float"):
        resized(b, mask, "bilinear", [13, 5], None, False)


def test_a_whole_factor_reads_one_pixel_around(bench, noise):
    b = bench()
    y = resized(b, b.field(noise(1, 1, 16, 16)), "bilinear", None, [2.0, 2.0], False)
    assert b.check(y, (Span(8, 12), Span(0, 32)))[0] == (Span(3, 7), Span(0, 16))
