"""Small random networks to time: the layers that published networks are made of, in random sizes and orders.

What a layer costs depends on what ran before it (what is in the cache, what the allocator holds), so layers are timed
inside networks and never alone. Networks are drawn from a seed: two calibrations time the same ones.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

_WIDTHS = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_ACTIVATIONS: tuple[type[nn.Module], ...] = (nn.ReLU, nn.ReLU, nn.ReLU, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.Hardswish)


def draw_network(seed: int) -> nn.Module:
    """A network for uint8 images `(1, 3, H, W)` with an output `(1, 1, H, W)` or, as a classifier, `(1, 4)`."""
    draw = random.Random(seed)  # noqa: S311  (no secret depends on it)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: nn.Module = _Classifier(draw) if draw.random() < 0.3 else _Segmenter(draw)
    return network.train(draw.random() < 0.65)


def is_dense(model: nn.Module) -> bool:
    """Whether the target of a drawn network is a mask of the image's size, else a class label."""
    return isinstance(model, _Segmenter)


def flops(model: nn.Module, size: tuple[int, int]) -> float:
    """Multiplications and additions of one forward of an image of this size; nothing is computed."""
    hollow = copy.deepcopy(model).eval().to("meta")
    with FlopCounterMode(display=False) as counter:
        hollow(torch.empty((1, 3, *size), dtype=torch.uint8, device="meta"))
    return float(counter.get_total_flops())


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of a map, cross-entropy of class scores."""
    if output.ndim == 2:
        return F.cross_entropy(output, target)
    return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))


class _Norm(nn.Module):
    """Layer norm over channels of `(N, C, H, W)`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        y: Tensor = self.norm(x_NCHW.permute(0, 2, 3, 1))
        return y.permute(0, 3, 1, 2)


class _Gate(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(channels, max(1, channels // 4), 1)
        self.up = nn.Conv2d(max(1, channels // 4), channels, 1)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        scores: Tensor = self.up(F.relu(self.down(x_NCHW.mean((2, 3), keepdim=True))))
        return x_NCHW * scores.sigmoid()


class _Mlp(nn.Module):
    """A ConvNeXt block: depthwise, layer norm, two linear layers on channels last."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.wide, self.narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        y: Tensor = self.norm(self.depthwise(x_NCHW).permute(0, 2, 3, 1))
        y = self.narrow(F.gelu(self.wide(y)))
        return x_NCHW + y.permute(0, 3, 1, 2)


class _Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x_NCHW: Tensor) -> Tensor:
        y: Tensor = self.body(x_NCHW)
        return F.relu(x_NCHW + y)


class _Segmenter(nn.Module):
    """Encoder, decoder, skips that are added or concatenated; the output has the image's size."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.add = draw.random() < 0.4
        self.mode = draw.choice(("nearest", "bilinear"))
        style = _Style(draw)
        widths = style.widths(draw.randint(2, 4))
        self.stem = style.stem(widths[0])
        self.down, self.up, self.fuse = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for narrow, wide in pairwise(widths):
            self.down.append(nn.Sequential(style.shrink(narrow, wide), style.block(wide)))
            self.up.append(style.grow(wide, narrow))
            self.fuse.append(style.layer(narrow if self.add else 2 * narrow, narrow, 3))
        self.head = style.head(widths[0])

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image.float() / 255)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        for up, fuse, skip in zip(reversed(self.up), reversed(self.fuse), reversed(skips), strict=True):
            x = up(x)
            if x.shape[-2:] != skip.shape[-2:]:
                x = F.interpolate(x, size=skip.shape[-2:], mode=self.mode)
            x = fuse(x + skip if self.add else torch.cat([x, skip], 1))
        y: Tensor = self.head(x)
        return y if y.shape[-2:] == image.shape[-2:] else F.interpolate(y, size=image.shape[-2:], mode=self.mode)


class _Classifier(nn.Module):
    """An encoder, its mean and a linear layer."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        style = _Style(draw)
        widths = style.widths(draw.randint(2, 4))
        parts: list[nn.Module] = [style.stem(widths[0])]
        for narrow, wide in pairwise(widths):
            parts += [style.shrink(narrow, wide), style.block(wide)]
        self.body = nn.Sequential(*parts)
        self.head = nn.Linear(widths[-1], 4)

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(image.float() / 255).mean((2, 3)))
        return scores


class _Style:
    """The choices that layers of one network share, and the layers themselves."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._activation = draw.choice(_ACTIVATIONS)
        norms: tuple[Callable[[int], nn.Module], ...] = (
            nn.BatchNorm2d,
            nn.BatchNorm2d,
            nn.BatchNorm2d,
            lambda channels: nn.GroupNorm(max(1, channels // 8), channels),
            _Norm,
            lambda channels: nn.Identity(),
        )
        self._norm = draw.choice(norms)
        self._large = draw.random() < 0.25
        self._stride = draw.choice((4, 5, 8, 8))

    def widths(self, count: int) -> list[int]:
        if self._large:
            return [self._draw.choice((3, 3, 4, 8))] * 2
        first = self._draw.randint(0, len(_WIDTHS) - 5)
        steps = [self._draw.choice((0, 1, 2, 2, 3)) for _ in range(count - 1)]
        positions = [first]
        for step in steps:
            positions.append(min(positions[-1] + step, len(_WIDTHS) - 1))
        return [_WIDTHS[p] for p in positions]

    def stem(self, width: int) -> nn.Module:
        if self._large:  # few channels, large kernels, high strides
            kernel = 2 * self._stride - self._draw.choice((0, 1))
            return nn.Sequential(nn.Conv2d(3, width, kernel, self._stride, kernel // 2), self._activation())
        kernel, stride = self._draw.choice(((3, 1), (3, 1), (3, 2), (5, 1), (7, 2), (7, 2), (4, 4)))
        return self.layer(3, width, kernel, stride)

    def layer(self, into: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
        plain = isinstance(self._norm(out), nn.Identity)
        conv = nn.Conv2d(into, out, kernel, stride, kernel // 2, groups=groups, bias=plain)
        return nn.Sequential(conv, self._norm(out), self._activation())

    def block(self, width: int) -> nn.Module:
        draw = self._draw
        kind = draw.choice(("plain", "residual", "residual", "bottleneck", "inverted", "next", "gated", "grouped"))
        if kind == "plain":
            return nn.Sequential(
                *(self.layer(width, width, draw.choice((1, 3, 3, 5))) for _ in range(draw.randint(1, 2)))
            )
        if kind == "residual":
            return nn.Sequential(
                *(
                    _Residual(
                        nn.Sequential(self.layer(width, width, 3), nn.Conv2d(width, width, 3, 1, 1), self._norm(width))
                    )
                    for _ in range(draw.randint(1, 2))
                )
            )
        if kind == "bottleneck":
            wide = draw.choice((2, 4)) * width
            return nn.Sequential(
                self.layer(width, wide, 1),
                _Residual(
                    nn.Sequential(self.layer(wide, width, 1), self.layer(width, width, 3), self.layer(width, wide, 1))
                ),
                self.layer(wide, width, 1),
            )
        if kind == "grouped":
            return self.layer(width, width, 3, groups=max(1, width // 8))
        if kind == "next":
            return _Mlp(width, draw.choice((3, 7, 7)))
        wide = draw.choice((2, 4, 6)) * width
        parts = [self.layer(width, wide, 1), self.layer(wide, wide, draw.choice((3, 3, 5)), groups=wide)]
        if kind == "gated":
            parts.append(_Gate(wide))
        return _Residual(nn.Sequential(*parts, nn.Conv2d(wide, width, 1), self._norm(width)))

    def shrink(self, into: int, out: int) -> nn.Module:
        kind = self._draw.choice(("conv", "conv", "max", "average", "patch"))
        if self._large:
            return self.layer(into, out, 9, self._draw.choice((3, 4, 5)))
        if kind == "max":
            kernel, padding = self._draw.choice(((2, 0), (3, 1)))
            return nn.Sequential(nn.MaxPool2d(kernel, 2, padding), self.layer(into, out, 3))
        if kind == "average":
            return nn.Sequential(nn.AvgPool2d(2), self.layer(into, out, 1))
        if kind == "patch":
            return nn.Sequential(self._norm(into), nn.Conv2d(into, out, 2, 2))
        return self.layer(into, out, 3, 2)

    def grow(self, into: int, out: int) -> nn.Module:
        if self._large:
            return self._spread(into, out, self._draw.choice((3, 4, 5)))
        kind = self._draw.choice(("resize", "resize", "smooth", "transposed", "wide"))
        if kind == "transposed":
            return nn.ConvTranspose2d(into, out, 2, 2)
        if kind == "wide":
            return nn.ConvTranspose2d(into, out, 4, 2, 1)
        smooth = nn.Upsample(scale_factor=2, mode="bilinear" if kind == "smooth" else "nearest")
        return nn.Sequential(smooth, nn.Conv2d(into, out, self._draw.choice((1, 3)), padding="same"))

    def head(self, width: int) -> nn.Module:
        """To one channel; in a network of large strides, back to the image's resolution before."""
        if not self._large:
            return nn.Conv2d(width, 1, self._draw.choice((1, 3)), padding="same")
        return nn.Sequential(self._spread(width, 3, self._stride), self._activation(), nn.Conv2d(3, 1, 3, padding=1))

    @staticmethod
    def _spread(into: int, out: int, stride: int) -> nn.Module:
        return nn.ConvTranspose2d(into, out, 2 * stride - 1, stride, stride - 1)
