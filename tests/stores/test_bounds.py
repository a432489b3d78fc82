"""The predicted error of a weight's gradient against the error that rounding causes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.grad import conv2d_weight

from gigagrad.boxes import Box, tiles
from gigagrad.stores import Half, Quantised
from gigagrad.stores.bounds import Norms, gradient_error, half_gradient_error

BOUND = 0.02
SEEDS = 8


@pytest.fixture(scope="module")
def layer():
    """A field after ReLU, smooth and with a flat part, and the cotangent of a 3 x 3 convolution that reads it."""
    torch.manual_seed(0)
    smooth = torch.nn.functional.avg_pool2d(torch.randn(1, 6, 134, 134), 7, 1) * 3
    field = smooth.relu()
    field[..., :40] = 0.3137
    cotangent = torch.nn.functional.avg_pool2d(torch.randn(1, 5, 130, 130), 5, 1) * torch.arange(1, 6)[:, None, None]
    return field, cotangent


def weight_errors(field, cotangent, rounding):
    """`(O, C, 3, 3)`: the weight's gradient is linear in the field, so its error is that of the field's error."""
    error = rounding.round(field, Box.whole(*field.shape[-2:]), (-2, -1)) - field
    shape = (cotangent.shape[1], field.shape[1], 3, 3)
    return conv2d_weight(error.double(), shape, cotangent.double())


class TestQuantised:
    def test_the_prediction_is_right_within_a_fifth(self, layer):
        field, cotangent = layer
        field, cotangent = field[..., :128, :128], cotangent[..., :126, :126]
        squares = sum(
            weight_errors(field, cotangent, Quantised(BOUND, seed)).square().sum((1, 2, 3)) for seed in range(SEEDS)
        )
        measured = (squares / SEEDS).sqrt()
        share = (field != 0).double().mean().item()
        for channel in range(5):
            norm = cotangent[0, channel].norm().item()
            predicted = gradient_error(BOUND, share, norm, taps=6 * 9)
            assert 1 / 1.2 < measured[channel].item() / predicted < 1.2

    def test_rounding_without_dither_would_not_obey_it(self, layer):
        """Why the dither is there: on a flat field plain rounding errors are all the same and add up."""
        field, cotangent = torch.full((1, 6, 128, 128), 0.3137), torch.ones(1, 5, 126, 126)
        step = Quantised(BOUND).step(torch.float32)
        error = (field / step).round() * step - field
        plain = conv2d_weight(error.double(), (5, 6, 3, 3), cotangent.double()).square().sum((1, 2, 3)).sqrt()
        predicted = gradient_error(BOUND, 1.0, cotangent[0, 0].norm().item(), taps=6 * 9)
        assert plain.min().item() > 10 * predicted
        dithered = weight_errors(field, cotangent, Quantised(BOUND)).square().sum((1, 2, 3)).sqrt()
        assert dithered.max().item() < 2 * predicted  # the taps share their errors here: one draw scatters more

    def test_zeros_add_nothing(self):
        field = torch.zeros(1, 2, 20, 20)
        assert not weight_errors(field, torch.randn(1, 3, 18, 18), Quantised(BOUND)).any()
        assert Norms.of(field, torch.randn(1, 3, 18, 18)).gradient_errors(BOUND, 18) == (0, 0, 0)


class TestHalf:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_no_error_is_larger_than_the_bound(self, layer, dtype):
        field, cotangent = layer
        field, cotangent = field[..., :128, :128], cotangent[..., :126, :126]
        errors = weight_errors(field, cotangent, Half(dtype)).abs().amax((2, 3))
        for out in range(5):
            for channel in range(6):
                norms = field[0, channel].norm().item(), cotangent[0, out].norm().item()
                assert 0 < errors[out, channel].item() <= half_gradient_error(dtype, *norms)


class TestNorms:
    def test_tiles_add_up_where_zeros_are_even(self):
        field = torch.ones(1, 4, 20, 30)
        field[:, :2] = 0
        cotangent = torch.randn(1, 3, 20, 30)
        total = Norms((0.0, 0.0, 0.0))
        for box in tiles(20, 30, 7, 8):
            index = (..., slice(box.y0, box.y1), slice(box.x0, box.x1))
            total += Norms.of(field[index], cotangent[index])
        assert total.noisy_squares == pytest.approx(Norms.of(field, cotangent).noisy_squares)
        expected = [gradient_error(0.1, 0.5, cotangent[0, channel].norm().item(), 36) for channel in range(3)]
        assert total.gradient_errors(0.1, 36) == pytest.approx(expected)

    def test_tiles_see_where_the_zeros_are(self):
        """All of the cotangent where the field is zero: no error, which a share over the whole image cannot know."""
        field, cotangent = torch.ones(1, 1, 8, 16), torch.zeros(1, 1, 8, 16)
        field[..., 8:] = 0
        cotangent[..., 8:] = 1
        tiled = Norms.of(field[..., :8], cotangent[..., :8]) + Norms.of(field[..., 8:], cotangent[..., 8:])
        assert tiled.noisy_squares == (0,)
        assert Norms.of(field, cotangent).noisy_squares == (32,)

    @given(steps=st.lists(st.floats(0, 1e6), min_size=1, max_size=30), weight=st.floats(0.01, 1))
    def test_the_average_follows_the_steps(self, steps, weight):
        average = Norms((steps[0],))
        for step in steps:
            average = average.refreshed(Norms((step,)), weight)
        assert min(steps) * (1 - 1e-9) <= average.noisy_squares[0] <= max(steps) * (1 + 1e-9)
        for _ in range(int(20 / weight)):
            average = average.refreshed(Norms((7.0,)), weight)
        assert math.isclose(average.noisy_squares[0], 7.0, abs_tol=1e-2)
