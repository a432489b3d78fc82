"""Which values are intensities 0 and 1: of bytes, of 16 bits, of floats, as the model's name has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gigagrad.errors import ImageError, ModelError
from gigagrad.images import open_image
from gigagrad.models import Normalise, Preprocess, load_model, resolve, save_model
from gigagrad.models.networks import IMAGENET_MEAN, IMAGENET_STD, check_intensities

RNG = np.random.default_rng(1)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32", "float32", "float64"])
def test_a_scale_is_the_same_in_every_dtype(dtype):
    x = torch.from_numpy(RNG.integers(0, 120, (1, 3, 8, 9)).astype(dtype))
    means, stds = (torch.tensor(each).reshape(1, 3, 1, 1) for each in (IMAGENET_MEAN, IMAGENET_STD))
    of_each = Normalise(scale=(10, 110, 0, 50, -20, 20))(x)
    low, high = (torch.tensor(each).reshape(1, 3, 1, 1) for each in ([10.0, 0.0, -20.0], [110.0, 50.0, 20.0]))
    assert of_each.dtype == torch.float32
    torch.testing.assert_close(of_each, ((x.float() - low) / (high - low) - means) / stds)
    torch.testing.assert_close(Normalise(scale=(10, 110))(x), ((x.float() - 10) / 100 - means) / stds)
    luma = torch.tensor((0.299, 0.587, 0.114)).reshape(1, 3, 1, 1)
    for invert in (True, False):
        grey = (luma * (x.float() - 10) / 100).sum(1, keepdim=True)
        front = Preprocess(invert=invert, scale=(10, 110))
        torch.testing.assert_close(front(x), 1 - grey if invert else grey)
        one = (x[:, :1].float() - 10) / 100
        torch.testing.assert_close(front(x[:, :1]), 1 - one if invert else one, atol=1e-6, rtol=1e-6)


def test_without_one_nothing_has_changed():
    x = torch.from_numpy(RNG.integers(0, 256, (1, 3, 8, 9), np.uint8))
    assert torch.equal(Normalise(scale=(0, 255))(x), Normalise()(x))
    assert torch.equal(Preprocess(scale=(0, 255))(x), Preprocess()(x))


def test_a_saved_model_has_the_scale_of_its_name(tmp_path):
    name = "paper-unet?scale=0,10000"
    model = resolve(name).eval()
    save_model(tmp_path / "m.pt", name, model)
    _, loaded = load_model(tmp_path / "m.pt")
    x = torch.from_numpy(RNG.integers(0, 10000, (1, 3, 160, 160), np.uint16))
    assert torch.equal(loaded(x), model(x))
    assert loaded.preprocess.scale == (0, 10000)


def test_libraries_take_a_scale_for_all_channels_or_for_each():
    of_each = "0,1,0,2,0,4,0,8"
    model = resolve(
        f"smp:Unet?encoder_name=resnet18&encoder_depth=3&decoder_channels=8,8,8&in_channels=4&scale={of_each}"
    )
    factor = model.get_buffer("preprocess.factor")
    np.testing.assert_allclose(
        factor.flatten(), np.divide(1, (1, 2, 4, 8)) / (*IMAGENET_STD, IMAGENET_STD[0]), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        ("5,5", "HIGH above LOW; got (5, 5)"),
        ("0,1,0,2", "LOW,HIGH for all of 1 channels or for each"),
        ("0,1,2", "got (0, 1, 2)"),
        ("10", "got (10,)"),
        ("low,high", "scale is LOW,HIGH"),
    ],
)
def test_no_scale_is_one_clear_line(scale, said):
    with pytest.raises(ModelError) as caught:
        resolve(f"paper-unet?scale={scale}")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_floats_beyond_are_asked_about_and_nan_is_refused():
    floats = RNG.uniform(0, 9000, (3, 60, 60)).astype(np.float32)
    with pytest.raises(ImageError, match=r"which values are 0 and 1, as in smp:Unet\?scale="):
        check_intensities(resolve("paper-unet"), open_image(floats))
    check_intensities(resolve("paper-unet?scale=0,9000"), open_image(floats))
    floats[:] = np.nan
    with pytest.raises(ImageError, match="gdal_edit -a_nodata nan"):
        check_intensities(resolve("paper-unet?scale=0,9000"), open_image(floats))
