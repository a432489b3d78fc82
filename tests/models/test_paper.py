"""The founding experiment's network and its preprocessing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gigagrad.errors import ImageError
from gigagrad.models import Normalise, PaperUNet, Preprocess


def test_has_exactly_the_published_number_of_parameters_and_layers():
    model = PaperUNet()
    assert sum(parameter.numel() for parameter in model.parameters()) == 4492
    layers = [m for m in model.modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.ConvTranspose2d))]
    assert len(layers) == 7
    assert [layer.stride[0] for layer in layers[:3]] == [8, 5, 4]


@given(st.integers(159, 700), st.integers(159, 700))
@settings(max_examples=60)
def test_every_image_size_is_legal_and_kept(height, width):
    with torch.no_grad():
        output = PaperUNet().to("meta")(torch.empty(1, 1, height, width, device="meta"))
    assert output.shape == (1, 1, height, width)


def test_sizes_of_one_whole_period_really_compute():
    # Steps of 7 meet every remainder of the strides 8 and 5 within a period of 160.
    model = PaperUNet()
    with torch.no_grad():
        for size in range(159, 319 + 7 * 8, 7):
            assert model(torch.zeros(1, 1, size, 160)).shape[-2:] == (size, 160)


@pytest.mark.parametrize("size", [(158, 400), (400, 158), (8, 8)])
def test_too_small_an_image_says_what_is_needed(size):
    with pytest.raises(ImageError, match=r"159 px or more"):
        PaperUNet()(torch.zeros(1, 1, *size))


def test_every_parameter_has_a_gradient():
    torch.manual_seed(0)
    model = torch.nn.Sequential(Preprocess(), PaperUNet())
    model(torch.randint(0, 256, (1, 3, 400, 400), dtype=torch.uint8)).mean().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_preprocess_is_the_luma_inverted_and_scaled():
    x = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8)
    r, g, b = x.double().unbind(1)
    expected = 1 - (0.299 * r + 0.587 * g + 0.114 * b) / 255
    got = Preprocess()(x)
    assert got.dtype == torch.float32
    assert got.shape == (2, 1, 5, 7)
    torch.testing.assert_close(got[:, 0].double(), expected, atol=2e-7, rtol=0)


@pytest.mark.parametrize(("level", "expected"), [(255, 0.0), (0, 1.0)])
@pytest.mark.parametrize("channels", [1, 3])
def test_preprocess_maps_white_to_zero_and_black_to_one(level, expected, channels):
    x = torch.full((1, channels, 2, 2), level, dtype=torch.uint8)
    torch.testing.assert_close(Preprocess()(x), torch.full((1, 1, 2, 2), expected), atol=1e-6, rtol=0)


def test_preprocess_without_inversion_follows_the_dtypes_full_scale():
    keep = Preprocess(invert=False)
    for full in (torch.tensor(255, dtype=torch.uint8), torch.tensor(32767, dtype=torch.int16), torch.tensor(1.0)):
        torch.testing.assert_close(keep(full.expand(1, 3, 2, 2)), torch.ones(1, 1, 2, 2), atol=1e-6, rtol=0)


def test_preprocess_follows_double():
    assert Preprocess().double()(torch.zeros(1, 3, 2, 2, dtype=torch.uint8)).dtype == torch.float64


@pytest.mark.parametrize("channels", [2, 4])
def test_preprocess_refuses_other_channel_counts(channels):
    with pytest.raises(ImageError, match=f"got an image of {channels} channels"):
        Preprocess()(torch.zeros(1, channels, 2, 2, dtype=torch.uint8))


def test_constants_are_not_part_of_the_saved_weights():
    assert not Preprocess().state_dict()
    assert not Normalise().state_dict()


def test_normalise_gives_mean_zero_and_unit_spread():
    normalise = Normalise(mean=(0.5, 0.2, 1.0), std=(0.25, 0.1, 0.5))
    x = torch.tensor([255, 51, 0], dtype=torch.uint8).reshape(1, 3, 1, 1)
    torch.testing.assert_close(normalise(x).flatten(), torch.tensor([2.0, 0.0, -2.0]), atol=1e-6, rtol=0)
    with pytest.raises(ImageError, match="takes 3"):
        normalise(torch.zeros(1, 1, 2, 2, dtype=torch.uint8))


@pytest.mark.parametrize("arguments", [{"mean": (0.5,), "std": (0.1, 0.1)}, {"mean": (0.5,), "std": (0.0,)}])
def test_normalise_refuses_impossible_constants(arguments):
    with pytest.raises(ValueError, match="one value per channel"):
        Normalise(**arguments)


@pytest.mark.parametrize("front", [Preprocess(), Normalise()])
def test_preprocessing_can_be_captured_and_adds_no_work_on_constants(front):
    program = torch.export.export(front.to("meta"), (torch.empty(1, 3, 64, 64, dtype=torch.uint8, device="meta"),))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert targets <= {"aten.slice.Tensor", "aten.mul.Tensor", "aten.add.Tensor"}
