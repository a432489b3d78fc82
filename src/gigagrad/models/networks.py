"""Build the project's own networks, and what stands in front of any network as part of the model: bytes to floats.

The networks are the founding experiment's, and one for several registered stains of a section.
A read tile so travels as bytes. `Preprocess` and `Normalise` multiply the integers by float weights directly (PyTorch
promotes inside the operation), so no float copy of the bytes is ever made; the weights are finished constants, so that
nothing but the image is computed with.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gigagrad.boxes import spread
from gigagrad.errors import ImageError
from gigagrad.images.bag import Bag
from gigagrad.images.image import Image
from gigagrad.images.pixels import LUMA_BT601, Pixels, is_floating

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_FULL_UINT8 = 255.0
_LOOKED_AT = 9
"""Patches."""
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
                f"got an image of {channels} channels; Preprocess takes 1 (grey) or 3 (RGB): choose some, as "
                "--bands 1 2 3 or image[:3]"
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
                "means), or choose channels, as --bands 1 2 3 or image[:3]"
            )
        factor = self.factor if self.scale else _for_dtype(self.factor, x_NCHW.dtype)
        return _in_dtype_of(factor, x_NCHW) * factor + self.shift


def _in_dtype_of(weight: Tensor, x_NCHW: Tensor) -> Tensor:
    """Floats in the weights' dtype, as data in float64 are no reason for a network of float64; integers as they are."""
    return x_NCHW.to(weight.dtype) if x_NCHW.dtype.is_floating_point else x_NCHW


def check_intensities(model: nn.Module, slide: Image | Bag) -> None:
    """Raises `ImageError` for a slide of floats that the model's `Preprocess` or `Normalise` cannot take: beyond 0..1
    where that has no scale, and NaN.

    Looks at boxes spread over the slide, at patches spread over a bag.
    """
    front = next(model.children(), None)
    if not isinstance(front, (Preprocess, Normalise)) or not is_floating(slide.dtype):
        return
    for pixels in map(torch.as_tensor, _spread(slide)):
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


def _spread(slide: Image | Bag) -> Iterator[Pixels]:
    if isinstance(slide, Image):
        yield from map(slide.read, spread(slide.height, slide.width))
    else:
        yield from (slide.read(place, place + 1) for place in range(0, len(slide), -(-len(slide) // _LOOKED_AT)))


WIDTH = 3
SMALLEST_SIDE_PX = 159
"""The shortest image side whose stride-160 field still has one element."""


class PaperUNet(nn.Module):
    """`(N, 1, H, W)` intensities in 0..1 -> `(N, 1, H, W)` logits, for any `H, W >= 159` px.

    A U-Net small enough to train on a whole gigapixel slide (Remedios et al., MIDL 2023): 7 convolutional layers,
    exactly 4,492 parameters, few large kernels with large strides first (no pooling), skips by addition. The layer
    sizes were not published; those below fit every number that was.

    Three strided convolutions (15 stride 8, 9 stride 5, 4 stride 4) reach stride 160, where an element has seen 199 px;
    three transposed ones mirror them, with the encoder's output added at strides 40 and 8. A 3 x 3 head finishes at
    full resolution. Biases are on, ReLU follows every layer but the head:
    `678 + 732 + 147 + 147 + 732 + 2028 + 28 = 4492` parameters.

    A transposed convolution can produce exactly those sizes that its mirror image maps to one coarse size (kernel 15,
    stride 8, padding 4: 8m - 1 ... 8m + 6 px for m elements; 9, 5, 2: 5m ... 5m + 4; 4, 4, 0: 4m ... 4m + 3), so asking
    for the encoder's own size with `output_size=` makes every image size legal without padding or cropping.

    Raises `ImageError` for an image with a side below 159 px.
    """

    def __init__(self) -> None:
        super().__init__()
        self.down8 = nn.Conv2d(1, WIDTH, 15, stride=8, padding=4)
        self.down40 = nn.Conv2d(WIDTH, WIDTH, 9, stride=5, padding=2)
        self.down160 = nn.Conv2d(WIDTH, WIDTH, 4, stride=4)
        self.up40 = nn.ConvTranspose2d(WIDTH, WIDTH, 4, stride=4)
        self.up8 = nn.ConvTranspose2d(WIDTH, WIDTH, 9, stride=5, padding=2)
        self.up1 = nn.ConvTranspose2d(WIDTH, WIDTH, 15, stride=8, padding=4)
        self.head = nn.Conv2d(WIDTH, 1, 3, padding=1)

    def forward(self, x_N1HW: Tensor) -> Tensor:
        height, width = x_N1HW.shape[-2:]
        if min(height, width) < SMALLEST_SIDE_PX:
            raise ImageError(
                f"got an image of {height} x {width} px; paper-unet needs {SMALLEST_SIDE_PX} px or more on both sides; "
                "choose a larger image or a finer pyramid level"
            )
        at8 = torch.relu(self.down8(x_N1HW))
        at40 = torch.relu(self.down40(at8))
        at160 = torch.relu(self.down160(at40))
        up40 = torch.relu(self.up40(at160, output_size=at40.shape[-2:]) + at40)
        up8 = torch.relu(self.up8(up40, output_size=at8.shape[-2:]) + at8)
        up1 = torch.relu(self.up1(up8, output_size=(height, width)))
        logits: Tensor = self.head(up1)
        return logits


LEVELS = 4
"""Levels of the encoder paths; the bridge below them sees the image at 1/16."""
STRIDE = 2**LEVELS
RGB = 3


class MultiStainNet(nn.Module):
    """`stains` images `(N, 3, H, W)`, registered to each other -> `(N, classes, H, W)` logits.

    After IVD-Net (Dolz, Desrosiers and Ben Ayed, 2018, arXiv 1811.08305), which was made for the modalities of one MRI
    volume: each modality has an encoder path of its own; at every level each path reads what all paths computed at all
    levels above; convolutions of several shapes and dilations run side by side; one decoder with skips reads all paths.

    Called as `model(he, ihc)`, or with one image `(N, 3 * stains, H, W)` of all. Bytes are scaled to 0..1 first; floats
    are taken as 0..1 already. At level `l` each path makes `width * 2**l` channels. Any `H, W` will do: pooling keeps a
    last odd row or column, and what the decoder makes of it beyond the skip's border is cut off. In training mode one
    side must exceed 16 px, because BatchNorm cannot normalise a single value.

    Raises `ImageError` for another number of images, images of different sizes, and other channel counts.
    """

    def __init__(self, stains: int = 2, classes: int = 1, width: int = 8) -> None:
        super().__init__()
        if stains < 2 or classes < 1 or width < 1:
            raise ValueError(
                "MultiStainNet takes two or more stains, one or more classes and a width of one or more; "
                f"got stains={stains}, classes={classes}, width={width}"
            )
        self.stains = stains
        widths = [width * 2**level for level in range(LEVELS + 1)]
        self.scale = Normalise(mean=(0.0,) * RGB, std=(1.0,) * RGB)
        self.encoder = nn.ModuleList()
        channels = RGB
        for level in range(LEVELS):
            self.encoder.append(CrossLinkedLevel(stains, channels, widths[level]))
            channels += stains * widths[level]
        self.bridge = ParallelBlock(channels + (stains - 1) * RGB, widths[LEVELS])
        self.up = nn.ModuleList()
        self.decoder = nn.ModuleList()
        for level in reversed(range(LEVELS)):
            self.up.append(nn.ConvTranspose2d(widths[level + 1], widths[level], 2, stride=2))
            self.decoder.append(ParallelBlock((1 + stains) * widths[level], widths[level]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, *images_N3HW: Tensor) -> Tensor:
        if len(images_N3HW) == 1 and images_N3HW[0].shape[1] == RGB * self.stains:
            images_N3HW = torch.split(images_N3HW[0], RGB, dim=1)
        self._check(images_N3HW)
        known = [self.scale(image) for image in images_N3HW]  # per stain, what the next level of its path reads
        skips = []
        for level in self.encoder:
            made = level(known)
            skips.append(torch.cat(made, dim=1))
            # Own features first: that order, and the stain's own image at the end, tell the paths apart.
            known = [
                F.max_pool2d(torch.cat([*made[s:], *made[:s], x], dim=1), 2, ceil_mode=True)
                for s, x in enumerate(known)
            ]
        # All paths now hold the same features, in another order, but for the image.
        x = self.bridge(torch.cat([known[0], *(path[:, -RGB:] for path in known[1:])], dim=1))
        for up, block, skip in zip(self.up, self.decoder, reversed(skips), strict=True):
            height, width = skip.shape[-2:]
            x = block(torch.cat([up(x)[..., :height, :width], skip], dim=1))
        logits: Tensor = self.head(x)
        return logits

    def _check(self, images_N3HW: tuple[Tensor, ...]) -> None:
        if len(images_N3HW) != self.stains:
            raise ImageError(f"got {len(images_N3HW)} image(s); this network takes {self.stains}, one for each stain")
        sizes = [tuple(image.shape[-2:]) for image in images_N3HW]
        if len(set(sizes)) > 1:
            listed = ", ".join(f"{height} x {width}" for height, width in sizes)
            raise ImageError(f"got images of {listed} px; the stains must be registered and of one size; resample them")
        if self.training and max(sizes[0]) <= STRIDE:
            raise ImageError(
                f"got images of {sizes[0][0]} x {sizes[0][1]} px; training needs a side of more than {STRIDE} px, "
                "because BatchNorm cannot normalise a single value; choose larger images"
            )


class CrossLinkedLevel(nn.Module):
    """One level of all paths: a block per stain, on that stain's `(N, inputs, H, W)`."""

    def __init__(self, stains: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ParallelBlock(inputs, outputs) for _ in range(stains))

    def forward(self, known: list[Tensor]) -> list[Tensor]:
        return [block(x_NCHW) for block, x_NCHW in zip(self.blocks, known, strict=True)]


class ParallelBlock(nn.Module):
    """Convolutions of five shapes side by side, then mixed: `(N, inputs, H, W)` -> `(N, outputs, H, W)`.

    One looks at a pixel, two at rows and columns in turn (3 and 5 px: asymmetric kernels), two at a dilated 3 x 3
    neighbourhood (dilations 2 and 4), so that a level sees fine and coarse structure without further pooling.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        each = max(outputs // 2, 1)
        self.branches = nn.ModuleList(
            [
                _convolution(inputs, each, (1, 1)),
                nn.Sequential(_convolution(inputs, each, (1, 3)), _convolution(each, each, (3, 1))),
                nn.Sequential(_convolution(inputs, each, (1, 5)), _convolution(each, each, (5, 1))),
                _convolution(inputs, each, (3, 3), dilation=2),
                _convolution(inputs, each, (3, 3), dilation=4),
            ]
        )
        self.mix = _convolution(len(self.branches) * each, outputs, (1, 1))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        y_NCHW: Tensor = self.mix(torch.cat([branch(x_NCHW) for branch in self.branches], dim=1))
        return y_NCHW


def _convolution(inputs: int, outputs: int, kernel: tuple[int, int], *, dilation: int = 1) -> nn.Sequential:
    """Convolution that keeps the size, BatchNorm, ReLU. BatchNorm has the shift, so the convolution has no bias."""
    padding = (dilation * (kernel[0] // 2), dilation * (kernel[1] // 2))
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=padding, dilation=dilation, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())
