"""From a slide's bytes to the floats a network takes, as part of the model: a read tile then travels as bytes.

Both modules multiply the integers by float weights directly (PyTorch promotes inside the operation), so no float copy
of the bytes is ever made; the weights are finished constants, so that nothing but the image is computed with.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gigagrad.boxes import spread
from gigagrad.errors import ImageError
from gigagrad.images.image import Image
from gigagrad.images.pixels import LUMA_BT601, is_floating

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_FULL_UINT8 = 255.0
_BEYOND = 0.5
"""Margin beyond intensities from 0 to 1: resampling and sharpening go a little beyond; bytes as floats go far."""


def _for_dtype(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight made for bytes, for images of `dtype`: full intensity is the largest integer, or 1 for floats."""
    if dtype == torch.uint8:
        return weight
    return weight * (_FULL_UINT8 if dtype.is_floating_point else _FULL_UINT8 / torch.iinfo(dtype).max)


def _ranges(scale: Sequence[float], channels: int) -> tuple[list[float], list[float]]:
    """The lowest value of each channel, and how far it is to the highest. Raises `ValueError` for no such scale."""
    numbers = all(isinstance(value, int | float) for value in scale)
    lows, highs = list(scale[::2]), list(scale[1::2])
    if not numbers or len(scale) not in (2, 2 * channels) or any(map(operator.ge, lows, highs)):
        raise ValueError(f"scale is LOW,HIGH for all of {channels} channels or for each, HIGH above LOW; got {scale}")
    times = channels // len(lows)
    return lows * times, list(map(operator.sub, highs, lows)) * times


class Preprocess(nn.Module):
    """Greyscale, invert, scale: `(N, C, H, W)` integers with `C` of 1 or 3 -> `(N, 1, H, W)` floats in 0..1.

    Greyscale is the luma of ITU-R BT.601, `0.299 R + 0.587 G + 0.114 B`, in real arithmetic without rounding to
    integers. With `invert` white becomes 0, so that empty glass and the zero padding of a convolution look alike.
    Full intensity is the dtype's largest integer (255 for uint8); float images are taken as 0..1 already; unless
    `scale` says which values are 0 and 1, `(low, high)`, beyond which intensities go on in a line.
    The result has the module's dtype (`.double()` gives float64). Raises `ImageError` for any other channel count.
    """

    red: Tensor
    green: Tensor
    blue: Tensor
    grey: Tensor

    def __init__(
        self, *, invert: bool = True, grey_weights: Sequence[float] = LUMA_BT601, scale: Sequence[float] = ()
    ) -> None:
        super().__init__()
        if len(grey_weights) != 3:
            raise ValueError(f"grey_weights takes one weight for each of R, G, B; got {len(grey_weights)}")
        self.invert = invert
        self.grey_weights = tuple(grey_weights)
        self.scale = tuple(scale)
        (low,), (full,) = _ranges(scale, 1) if scale else ([0.0], [_FULL_UINT8])
        sign = -1.0 if invert else 1.0
        self.offset = float(invert) - sign * low / full * sum(grey_weights)
        for name, weight in zip(("red", "green", "blue", "grey"), (*grey_weights, sum(grey_weights)), strict=True):
            constant = torch.full((1, 1, 1, 1), sign * weight / full)
            # Not persistent: a constant of the recipe, not something a trained model has to store.
            self.register_buffer(name, constant, persistent=False)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        channels = x_NCHW.shape[1]
        weights: tuple[Tensor, ...]
        if channels == 3:
            weights = (self.red, self.green, self.blue)
        elif channels == 1:
            weights = (self.grey,)
        else:
            raise ImageError(
                f"got an image of {channels} channels; Preprocess takes 1 (grey) or 3 (RGB): choose some, as image[:3]"
            )
        x_NCHW, dtype = _in_dtype_of(self.grey, x_NCHW), x_NCHW.dtype
        if not self.scale:
            weights = tuple(_for_dtype(weight, dtype) for weight in weights)
        y_N1HW = x_NCHW[:, 0:1] * weights[0]
        for channel, weight in enumerate(weights[1:], start=1):
            y_N1HW = y_N1HW + x_NCHW[:, channel : channel + 1] * weight
        return y_N1HW + self.offset if self.offset else y_N1HW

    def extra_repr(self) -> str:
        return f"invert={self.invert}, grey_weights={self.grey_weights}, scale={self.scale}"


class Normalise(nn.Module):
    """`(N, C, H, W)` integers -> floats of the same shape, `(x / full - mean) / std` per channel.

    This is what networks with published weights expect. `mean` and `std` refer to intensities in 0..1; the defaults are
    ImageNet's. Full intensity is as in `Preprocess`, and so is `scale`, which may have a pair for each channel, one
    after the other. The result has the module's dtype. Raises `ImageError` when the image's channel count is not that
    of `mean`.
    """

    factor: Tensor
    shift: Tensor

    def __init__(
        self,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        scale: Sequence[float] = (),
    ) -> None:
        super().__init__()
        count = len(mean)
        if count != len(std) or min(std) <= 0:
            raise ValueError(f"mean and std take one value per channel, std above 0; got {list(mean)} and {list(std)}")
        self.scale = tuple(scale)
        lows, fulls = _ranges(scale, count) if scale else ([0.0] * count, [_FULL_UINT8] * count)
        factor_C = [1 / (full * s) for full, s in zip(fulls, std, strict=True)]
        shift_C = [-(m + low / full) / s for m, s, low, full in zip(mean, std, lows, fulls, strict=True)]
        self.register_buffer("factor", torch.tensor(factor_C).reshape(1, -1, 1, 1), persistent=False)
        self.register_buffer("shift", torch.tensor(shift_C).reshape(1, -1, 1, 1), persistent=False)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        channels, expected = x_NCHW.shape[1], self.factor.shape[1]
        if channels != expected:
            raise ImageError(
                f"got an image of {channels} channels; this model takes {expected}: build one that takes {channels} "
                f"(in_channels={channels} for smp and monai, in_chans={channels} for timm, else Normalise with as many "
                "means), or choose channels, as image[:3]"
            )
        factor = self.factor if self.scale else _for_dtype(self.factor, x_NCHW.dtype)
        return _in_dtype_of(factor, x_NCHW) * factor + self.shift


def _in_dtype_of(weight: Tensor, x_NCHW: Tensor) -> Tensor:
    """Floats in the weights' dtype, as data in float64 are no reason for a network of float64; integers as they are."""
    return x_NCHW.to(weight.dtype) if x_NCHW.dtype.is_floating_point else x_NCHW


def check_intensities(model: nn.Module, slide: Image) -> None:
    """Raises `ImageError` for a slide of floats that the model's `Preprocess` or `Normalise` cannot take: beyond 0..1
    where that has no scale, and NaN.

    Looks at boxes spread over the slide.
    """
    front = next(model.children(), None)
    if not isinstance(front, (Preprocess, Normalise)) or not is_floating(slide.dtype):
        return
    for box in spread(slide.height, slide.width):
        pixels = torch.as_tensor(slide.read(box))
        low, high = float(pixels.min()), float(pixels.max())
        if math.isnan(low):
            raise ImageError(
                f"{slide.name} holds NaN, which would make every number NaN; name it as nodata, as with "
                "gdal_edit -a_nodata nan FILE"
            )
        if not front.scale and (low < -_BEYOND or high > 1 + _BEYOND):
            raise ImageError(
                f"{slide.name} holds floats from {low:g} to {high:g}; {type(front).__name__} takes floats as "
                "intensities from 0 to 1: say in the model's name which values are 0 and 1, as in smp:Unet?scale="
                f"{low:.3g},{high:.3g}, divide them by their largest value, or save the slide as integers"
            )
