"""Properties of every rounding, and the error bound and the noise of quantisation."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gigagrad.boxes import Box, tiles
from gigagrad.errors import ConfigError, StoreError
from gigagrad.stores import Half, Quantised, parse_storage
from gigagrad.stores.rounding import dither

AXES = (-2, -1)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ROUNDINGS = [Half(torch.float16), Half(torch.bfloat16), Quantised(0.01), Quantised(3.0, seed=5), Quantised(1e-6)]
BOUNDS = st.floats(1e-30, 1e30) | st.floats(1e-9, 1e4) | st.sampled_from([0.01, 0.5, 1.0, 4e4, 3e-8])


@st.composite
def finite(draw, dtype):
    """A crop `(1, 3, 4, 5)` of any finite numbers of `dtype`, zeros and the largest and smallest ones among them."""
    info = torch.finfo(dtype)
    values = draw(
        hnp.arrays(
            np.float64,
            (1, 3, 4, 5),
            elements=st.floats(info.min, info.max)
            | st.floats(-100, 100)
            | st.sampled_from([0.0, -0.0, info.max, info.min, info.tiny, -info.tiny, info.tiny * info.eps]),
        )
    )
    return torch.from_numpy(values).to(dtype).clamp(info.min, info.max)


@st.composite
def cuts(draw):
    """A field's size and two ways to cut it into boxes."""
    height, width = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    steps = [(draw(st.integers(1, 12)), draw(st.integers(1, 12))) for _ in range(2)]
    return height, width, steps


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
class TestEveryRounding:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @given(data=st.data())
    def test_rounding_twice_is_rounding_once(self, rounding, dtype, data):
        values, box = data.draw(finite(dtype)), Box(7, 11, 11, 16)
        if isinstance(rounding, Half):
            values = values.clamp(-6e4, 6e4)
        once = rounding.round(values, box, AXES)
        assert once.dtype == dtype
        assert once.shape == values.shape
        assert torch.equal(rounding.round(once, box, AXES), once)

    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
    @pytest.mark.parametrize("channels", [1, 3, 8])
    @given(cut=cuts())
    def test_the_cut_makes_no_difference(self, rounding, layout, channels, cut):
        height, width, steps = cut
        field = torch.randn(2, channels, height, width).relu()
        made = []
        for step in steps:
            made.append(torch.empty_like(field))
            for box in tiles(height, width, *step):
                crop = field[..., box.y0 : box.y1, box.x0 : box.x1].contiguous(memory_format=layout)
                packed = rounding.pack(crop, box, AXES)
                assert packed.dtype == rounding.packed_dtype(field.dtype)
                made[-1][..., box.y0 : box.y1, box.x0 : box.x1] = rounding.unpack(packed, box, AXES, field.dtype)
        whole = rounding.round(field, Box.whole(height, width), AXES)
        assert torch.equal(made[0], whole)
        assert torch.equal(made[1], whole)

    def test_many_strips_are_one_field(self, rounding):
        """More values than go through the cache at a time, with a box that starts in the middle of a field."""
        field = torch.randn(1, 5, 300, 400)
        whole = rounding.round(field, Box(13, 17, 313, 417), AXES)
        part = rounding.round(field[..., 101:250, 3:4], Box(114, 20, 263, 21), AXES)
        assert torch.equal(part, whole[..., 101:250, 3:4])

    def test_zeros_stay_zeros_and_pack_to_zeros(self, rounding):
        values = torch.randn(1, 4, 20, 20).relu()
        values[..., 0] = -0.0
        box = Box.whole(20, 20)
        packed = rounding.pack(values, box, AXES)
        assert (packed[values == 0] == 0).all()
        assert (rounding.round(values, box, AXES)[values == 0] == 0).all()
        zeros = torch.zeros(1, 4, 20, 20, dtype=rounding.packed_dtype(torch.float32))
        assert torch.equal(rounding.unpack(zeros, box, AXES, torch.float32), torch.zeros(1, 4, 20, 20))

    def test_what_is_not_a_number_stays_so(self, rounding):
        values = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 1.0, 0.0]).reshape(1, 1, 2, 3)
        rounded = rounding.round(values, Box.whole(2, 3), AXES)
        assert torch.equal(rounded.isnan(), values.isnan())
        assert torch.equal(rounded.isinf(), values.isinf())
        assert torch.equal(rounded[values.isinf()], values[values.isinf()])

    def test_the_axes_may_stand_anywhere(self, rounding):
        field = torch.randn(1, 6, 7, 4)
        moved = rounding.round(field, Box(2, 3, 8, 10), (-3, -2))
        assert torch.equal(moved, rounding.round(field.movedim(-1, 1), Box(2, 3, 8, 10), AXES).movedim(1, -1))

    def test_an_empty_box_is_a_crop_too(self, rounding):
        assert rounding.round(torch.empty(1, 3, 0, 5), Box(4, 0, 4, 5), AXES).shape == (1, 3, 0, 5)

    def test_it_is_named_as_it_is_asked_for(self, rounding):
        assert parse_storage(str(rounding)) == rounding.keyed(0)


class TestQuantised:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @given(data=st.data())
    def test_the_error_bound_holds_for_all_finite_numbers(self, dtype, data):
        values, bound = data.draw(finite(dtype)), data.draw(BOUNDS)
        rounding, box = Quantised(bound, seed=data.draw(st.integers(0, 2**62))), Box(0, 3, 4, 8)
        rounded = rounding.round(values, box, AXES)
        assert rounded.isfinite().all()
        for value, stored in zip(values.flatten().tolist(), rounded.flatten().tolist(), strict=True):
            assert abs(value - stored) <= bound
        assert torch.equal(rounding.round(rounded, box, AXES), rounded)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_the_error_bound_holds_for_many_ordinary_numbers(self, dtype):
        values = (torch.randn(1, 8, 300, 300, dtype=torch.float64) * 1.5).exp().to(dtype)
        rounded = Quantised(0.01).round(values, Box.whole(300, 300), AXES)
        errors = (rounded.double() - values.double()).abs()
        assert errors.max() <= 0.01
        assert errors.max() > 0.008

    @pytest.mark.parametrize("bound", [2e-8, 3.5e-8, 5e-8, 1e-7, 1e-6])
    def test_the_error_bound_holds_where_float16_has_few_digits(self, bound):
        """Subnormal numbers lie 6e-8 apart: a multiple of such a step would be rounded to the wrong one of them."""
        values = (torch.arange(-800, 800).reshape(1, 1, 40, 40).double() * 2.0**-24).half()
        rounding, box = Quantised(bound), Box.whole(40, 40)
        rounded = rounding.round(values, box, AXES)
        assert (rounded.double() - values.double()).abs().max() <= bound
        assert torch.equal(rounding.round(rounded, box, AXES), rounded)

    def test_errors_are_uniform_and_independent(self):
        """On a field whose plain rounding errors would all be equal: a constant one."""
        field, bound = torch.full((1, 4, 256, 256), 0.7312), 0.01
        step = Quantised(bound).step(torch.float32)
        errors = (Quantised(bound).round(field, Box.whole(256, 256), AXES) - field).double() / step
        count = errors.numel()
        assert abs(errors.mean().item()) < 5 / math.sqrt(12 * count)
        assert errors.square().mean().item() == pytest.approx(1 / 12, rel=0.02)
        assert torch.histc(errors.float(), 16, -0.5, 0.5).div(count / 16).sub(1).abs().max() < 0.05
        other = (Quantised(bound, seed=1).round(field, Box.whole(256, 256), AXES) - field).double() / step
        shifted = {
            "y": (errors[:, :, 1:], errors[:, :, :-1]),
            "x": (errors[..., 1:], errors[..., :-1]),
            "8 px": (errors[..., 8:], errors[..., :-8]),
            "channel": (errors[:, 1:], errors[:, :-1]),
            "seed": (errors, other),
        }
        for name, (a, b) in shifted.items():
            assert abs(12 * (a * b).mean().item()) < 5 / math.sqrt(a.numel()), name

    def test_errors_do_not_depend_on_the_values(self):
        field = torch.linspace(-1, 1, 512).expand(1, 4, 256, 512).contiguous()
        errors = Quantised(0.05).round(field, Box.whole(256, 512), AXES) - field
        by_column = errors.square().mean((0, 1, 2)) * 12 / Quantised(0.05).step(torch.float32) ** 2
        assert by_column.mean().item() == pytest.approx(1, rel=0.01)
        assert by_column.sub(1).abs().max() < 0.2

    def test_another_key_is_another_error_of_the_same_size(self):
        values, box = torch.randn(1, 3, 50, 50), Box.whole(50, 50)
        made = [Quantised(0.1).keyed(key).round(values, box, AXES) for key in (0, 1, 0)]
        assert torch.equal(made[0], made[2])
        assert (made[0] != made[1]).float().mean() > 0.99

    def test_small_values_have_small_codes(self):
        """So that a codec finds nothing in the high bits, whatever the signs."""
        values = torch.randn(1, 4, 50, 50).clamp(-4, 4)
        codes = Quantised(0.01).pack(values, Box.whole(50, 50), AXES)
        assert codes.min() >= 2
        assert codes.max() <= 2 * (4 / 0.0196 + 2)
        assert (codes[values > 0.02] % 2 == 0).all()
        assert (codes[values < -0.02] % 2 == 1).all()

    @pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf, 1e-40])
    def test_a_bound_that_is_none_is_refused(self, bound):
        with pytest.raises(ConfigError, match="error bound of"):
            Quantised(bound)


class TestHalf:
    @pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 11), (torch.bfloat16, 8)])
    def test_the_relative_error_is_half_a_unit(self, dtype, bits):
        values = torch.randn(1, 3, 50, 50) + 5
        rounded = Half(dtype).round(values, Box.whole(50, 50), AXES)
        assert ((rounded - values).abs() <= 2.0**-bits * values.abs()).all()

    def test_a_value_beyond_the_range_is_refused(self):
        values = torch.tensor([1.0, -7e4, 2.0, math.inf]).reshape(1, 1, 2, 2)
        with pytest.raises(StoreError, match=r"holds 70000 in .*'float16' holds values up to 65504; use"):
            Half(torch.float16).pack(values, Box.whole(2, 2), AXES)


class TestDither:
    @given(seed=st.integers(0, 2**63 - 1), y0=st.integers(0, 2**22), x0=st.integers(0, 2**24 - 8))
    def test_numbers_belong_to_places(self, seed, y0, x0):
        like = torch.empty((), dtype=torch.float64)
        whole = dither(torch.Size((1, 5, 6, 7)), Box(y0, x0, y0 + 6, x0 + 7), AXES, seed, like)
        assert whole.abs().max() < 0.5
        part = dither(torch.Size((1, 5, 2, 3)), Box(y0 + 4, x0 + 2, y0 + 6, x0 + 5), AXES, seed, like)
        assert torch.equal(part, whole[..., 4:6, 2:5])
        assert whole.unique().numel() > 195  # 16 bits each: two of 210 may be equal

    def test_they_are_exact_in_float32(self):
        shape, box = torch.Size((1, 4, 64, 64)), Box.whole(64, 64)
        double = dither(shape, box, AXES, 3, torch.empty((), dtype=torch.float64))
        assert torch.equal(dither(shape, box, AXES, 3, torch.empty(())).double(), double)


class TestParseStorage:
    @pytest.mark.parametrize(
        ("text", "rounding"),
        [
            (None, None),
            ("exact", None),
            ("float16", Half(torch.float16)),
            ("bfloat16", Half(torch.bfloat16)),
            ("error 0.01", Quantised(0.01)),
            ("error 1e-3", Quantised(0.001)),
        ],
    )
    def test_the_forms(self, text, rounding):
        assert parse_storage(text) == rounding

    @pytest.mark.parametrize("text", ["", "float32", "error", "error x", "error nan", "0.01", "lossless", "error0.1"])
    def test_anything_else_is_refused_with_the_forms(self, text):
        with pytest.raises(ConfigError, match=r"got storage=.*expected 'exact', 'float16', 'bfloat16' or 'error E'"):
            parse_storage(text)

    @pytest.mark.parametrize("text", ["error 0", "error -1", "error inf"])
    def test_an_error_that_cannot_be_kept_is_refused(self, text):
        with pytest.raises(ConfigError, match="error bound"):
            parse_storage(text)
