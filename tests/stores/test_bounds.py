"""The predicted error of a weight's gradient against the error that rounding causes."""

import pytest
import torch
from torch.nn.grad import conv2d_weight

from gigagrad.boxes import Box, tiles
from gigagrad.stores import Half, Quantised
from gigagrad.stores.rounding import gradient_error, noisy_shares, noisy_squares

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
        assert not noisy_squares(noisy_shares(field), torch.randn(1, 3, 18, 18)).any()


class TestHalf:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_no_error_is_larger_than_the_bound(self, layer, dtype):
        field, cotangent = layer
        field, cotangent = field[..., :128, :128], cotangent[..., :126, :126]
        errors = weight_errors(field, cotangent, Half(dtype)).abs().amax((2, 3))
        for out in range(5):
            for channel in range(6):
                norms = field[0, channel].norm().item() * cotangent[0, out].norm().item()
                assert 0 < errors[out, channel].item() <= torch.finfo(dtype).eps / 2 * norms  # Cauchy-Schwarz


class TestNoisySquares:
    def test_tiles_add_up_where_zeros_are_even(self):
        field = torch.ones(1, 4, 20, 30)
        field[:, :2] = 0
        cotangent = torch.randn(1, 3, 20, 30)
        total = torch.zeros(3, dtype=torch.float64)
        for box in tiles(20, 30, 7, 8):
            index = (..., slice(box.y0, box.y1), slice(box.x0, box.x1))
            total += noisy_squares(noisy_shares(field[index]), cotangent[index])
        assert total.tolist() == pytest.approx(noisy_squares(noisy_shares(field), cotangent).tolist())
        expected = [gradient_error(0.1, 0.5, cotangent[0, channel].norm().item(), 36) for channel in range(3)]
        assert [gradient_error(0.1, 1.0, norm, 36) for norm in total.sqrt().tolist()] == pytest.approx(expected)

    def test_tiles_see_where_the_zeros_are(self):
        """All of the cotangent where the field is zero: no error, which a share over the whole image cannot know."""
        field, cotangent = torch.ones(1, 1, 8, 16), torch.zeros(1, 1, 8, 16)
        field[..., 8:] = 0
        cotangent[..., 8:] = 1
        halves = [
            noisy_squares(noisy_shares(field[..., part]), cotangent[..., part]) for part in (slice(8), slice(8, 16))
        ]
        assert (halves[0] + halves[1]).tolist() == [0]
        assert noisy_squares(noisy_shares(field), cotangent).tolist() == [32]

    def test_every_group_sees_its_own_channels(self):
        field, cotangent = torch.ones(1, 4, 8, 8), torch.ones(1, 6, 8, 8)
        field[:, 2:] = 0
        assert noisy_squares(noisy_shares(field), cotangent, groups=2).tolist() == [64, 64, 64, 0, 0, 0]

    def test_a_gain_counts_squared(self):
        field, cotangent = torch.ones(1, 2, 8, 8), torch.ones(1, 1, 8, 8)
        shares = noisy_shares(field, torch.tensor([1.0, 3.0]))
        assert noisy_squares(shares, cotangent).tolist() == [64 * 5]
