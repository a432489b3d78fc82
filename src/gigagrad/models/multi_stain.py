"""Several registered stains of one section into one segmentation: an encoder path per stain, densely cross-linked.

After IVD-Net (Dolz, Desrosiers and Ben Ayed, 2018, arXiv 1811.08305), which was made for the modalities of one MRI
volume: each modality has an encoder path of its own; at every level each path reads what all paths computed at all
levels above; convolutions of several shapes and dilations run side by side; one decoder with skips reads all paths.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gigagrad.errors import ImageError
from gigagrad.models.preprocess import Normalise

LEVELS = 4
"""Levels of the encoder paths; the bridge below them sees the image at 1/16."""
STRIDE = 2**LEVELS
RGB = 3


class MultiStainNet(nn.Module):
    """`stains` images `(N, 3, H, W)`, registered to each other -> `(N, classes, H, W)` logits.

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
