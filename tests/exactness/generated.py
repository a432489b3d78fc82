"""Random networks, images, targets and tiles, made from a seed: the cases of the exactness suite and its campaign."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One comparison: everything float64, `image` is `(C, H, W)`."""

    seed: int
    model: nn.Module
    loss: Loss
    image: Tensor
    target: Tensor
    tile: tuple[int, int]
    description: str


class Lambda(nn.Module):
    def __init__(self, name: str, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.name = name
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.name


class Residual(nn.Module):
    """x + body(x), where the body keeps the size."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class DownUp(nn.Module):
    """Down, up to exactly the same size by a transposed convolution, joined to the way in by a concatenation."""

    def __init__(self, channels: int, kernel: int, stride: int) -> None:
        super().__init__()
        padding = (kernel - stride + 1) // 2
        self.down = nn.Conv2d(channels, channels + 1, kernel, stride, padding)
        self.up = nn.ConvTranspose2d(channels + 1, channels, kernel, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(F.relu(self.down(x)), output_size=x.shape[-2:])
        return torch.cat([x, y], 1)


class Gate(nn.Module):
    """Squeeze and excitation: the field is scaled by a function of its own mean, so there are two segments."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, 2)
        self.excite = nn.Linear(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.sigmoid(self.excite(torch.tanh(self.squeeze(x.mean((2, 3))))))
        return x * weight[:, :, None, None]


class Joined(nn.Module):
    """Two crops of one field laid side by side along an axis of the image."""

    def __init__(self, axis: int, cut: int) -> None:
        super().__init__()
        self.axis, self.cut = axis, cut

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.narrow(self.axis, 0, self.cut), x * 0.5], self.axis)

    def extra_repr(self) -> str:
        return f"axis={self.axis}, cut={self.cut}"


def _pair(rng: random.Random, low: int, high: int) -> tuple[int, int]:
    return rng.randint(low, high), rng.randint(low, high)


def _convolution(rng: random.Random, c: int) -> tuple[nn.Module, int]:
    groups = rng.choice([1, 1, c])
    out = groups * rng.randint(1, 3)
    mode = rng.choice(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"])
    padding: tuple[int, int] | str = _pair(rng, 0, 3)
    stride = _pair(rng, 1, 3)
    if rng.random() < 0.15:
        padding, stride = "same", (1, 1)
    layer = nn.Conv2d(
        c,
        out,
        _pair(rng, 1, 5),
        stride,
        padding,
        dilation=_pair(rng, 1, 2),
        groups=groups,
        bias=rng.random() < 0.7,
        padding_mode=mode,  # type: ignore[arg-type]
    )
    return layer, out


def _transposed(rng: random.Random, c: int) -> tuple[nn.Module, int]:
    stride, dilation = _pair(rng, 1, 3), _pair(rng, 1, 2)
    groups = rng.choice([1, c])
    out = groups * rng.randint(1, 2)
    extra = [rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
    layer = nn.ConvTranspose2d(
        c,
        out,
        _pair(rng, 1, 5),
        stride,
        _pair(rng, 0, 2),
        extra,  # type: ignore[arg-type]
        groups,
        rng.random() < 0.7,
        dilation,
    )
    return layer, out


def _max_pool(rng: random.Random, c: int) -> tuple[nn.Module, int]:
    kernel = _pair(rng, 2, 3)
    padding = tuple(rng.randint(0, k // 2) for k in kernel)
    return nn.MaxPool2d(kernel, _pair(rng, 1, 3), padding, rng.randint(1, 2), ceil_mode=rng.random() < 0.5), c


def _average_pool(rng: random.Random, c: int) -> tuple[nn.Module, int]:
    kernel = _pair(rng, 2, 3)
    padding = tuple(rng.randint(0, k // 2) for k in kernel)
    layer = nn.AvgPool2d(
        kernel,
        _pair(rng, 1, 3),
        padding,  # type: ignore[arg-type]
        ceil_mode=rng.random() < 0.5,
        count_include_pad=rng.random() < 0.5,
        divisor_override=rng.choice([None, None, 3]),
    )
    return layer, c


def _resize(rng: random.Random, c: int) -> tuple[nn.Module, int]:
    mode = rng.choice(["nearest", "nearest", "nearest-exact", "bilinear", "bilinear", "bicubic"])
    align = rng.random() < 0.5 if mode in ("bilinear", "bicubic") else None
    if rng.random() < 0.6:
        factor = rng.choice([2, 2, 3, 4, 1.7, 0.6, (2.0, 1.3)])
        return nn.Upsample(scale_factor=factor, mode=mode, align_corners=align), c  # type: ignore[arg-type]
    return nn.Upsample(size=_pair(rng, 5, 40), mode=mode, align_corners=align), c


def _norm(rng: random.Random, c: int) -> tuple[nn.Module, int]:
    layer = nn.BatchNorm2d(c)
    nn.init.uniform_(layer.weight, 0.5, 1.5)
    nn.init.normal_(layer.bias)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    return layer, c


def _activation(rng: random.Random, c: int) -> tuple[nn.Module, int]:
    options = [nn.ReLU, nn.SiLU, nn.GELU, nn.Sigmoid, nn.LeakyReLU, nn.Hardswish, nn.Tanh, nn.ELU, nn.Softplus]
    return rng.choice(options)(), c


def _pad(rng: random.Random, c: int) -> tuple[nn.Module, int]:
    amounts = tuple(rng.randint(0, 3) for _ in range(4))
    return rng.choice([nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d])(amounts), c  # type: ignore[arg-type]


def _slice(rng: random.Random, c: int) -> tuple[nn.Module, int]:
    y0, x0, sy, sx = rng.randint(0, 2), rng.randint(0, 2), rng.randint(1, 2), rng.randint(1, 2)
    y1, x1 = rng.choice([None, -1]), rng.choice([None, -2])
    return Lambda(f"[{y0}:{y1}:{sy}, {x0}:{x1}:{sx}]", lambda x: x[:, :, y0:y1:sy, x0:x1:sx]), c


def _shuffle(rng: random.Random, c: int) -> tuple[nn.Module, int]:
    if rng.random() < 0.5:
        return nn.Sequential(nn.Conv2d(c, 8, 1), nn.PixelShuffle(2)), 2
    return nn.PixelUnshuffle(2), 4 * c


def _mix(rng: random.Random, c: int) -> tuple[nn.Module, int]:
    functions: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("softmax", lambda x: x.softmax(1)),
        ("channel mean", lambda x: x - x.mean(1, keepdim=True)),
        ("chunks", lambda x: torch.cat([part * (i + 1) for i, part in enumerate(x.unbind(1))], 0)[None]),
        ("stack", lambda x: torch.stack([x, x.sin()], 0).sum(0)),
        ("channels last", lambda x: (x.permute(0, 2, 3, 1) * 2).permute(0, 3, 1, 2)),
        ("square", lambda x: (x**2).clamp(max=3.0)),
        ("where", lambda x: torch.where(x > 0, x, 0.1 * x)),
    ]
    return Lambda(*rng.choice(functions)), c


def _block(rng: random.Random, c: int) -> tuple[nn.Module, int]:
    kind = rng.randrange(4)
    if kind == 0:
        kernel = rng.choice([1, 3, 5])
        return Residual(nn.Sequential(nn.Conv2d(c, c, kernel, padding=kernel // 2), nn.Tanh())), c
    if kind == 1:
        stride = rng.randint(2, 4)
        kernel = stride + rng.randint(0, 4)
        return DownUp(c, kernel, stride), 2 * c
    if kind == 2:
        return Joined(rng.choice([2, 3]), rng.randint(1, 4)), c
    return Gate(c), c


_LAYERS = [
    *[_convolution] * 5,
    *[_transposed] * 3,
    *[_resize] * 3,
    *[_block] * 3,
    _max_pool,
    _average_pool,
    _norm,
    _activation,
    _activation,
    _pad,
    _slice,
    _shuffle,
    _mix,
]


def _loss(rng: random.Random, model: nn.Module, image: Tensor) -> tuple[str, Loss, Tensor]:
    with torch.no_grad():
        output = model(image[None])
    dense = torch.rand(output.shape[1:], dtype=torch.float64)
    classes = torch.randint(0, output.shape[1], (1, *output.shape[-2:]))
    weight = torch.rand(output.shape[1], dtype=torch.float64) + 0.5
    smoothing = rng.choice([0.0, 0.1])
    reduction = rng.choice(["mean", "sum"])

    def cross_entropy(o: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(o, t[:, 0], weight, ignore_index=0, label_smoothing=smoothing, reduction=reduction)

    def dice(o: Tensor, t: Tensor) -> Tensor:
        p = torch.sigmoid(o)
        return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)

    choices: list[tuple[str, Loss, Tensor]] = [
        ("bce", lambda o, t: F.binary_cross_entropy_with_logits(o, t, reduction=reduction), dense),
        ("mse", lambda o, t: F.mse_loss(o, t, reduction=reduction), dense),
        ("mean", lambda o, t: (o * t).mean() * 3 - o.sum() / 100, dense),
        ("log of mean", lambda o, t: torch.log(1 + (o * t).square().mean()), dense),
        ("bce + dice", lambda o, t: F.binary_cross_entropy_with_logits(o, t) + dice(o, t), dense),
        ("class head", lambda o, t: F.cross_entropy(o.mean((2, 3)), t), torch.tensor([output.shape[1] - 1])),
    ]
    if output.shape[1] > 1:
        choices += [("cross entropy", cross_entropy, classes)] * 2
    return rng.choice(choices)


def make_case(seed: int) -> Case:
    """The case of a seed. Layers that would make the field vanish or explode are left out."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    channels = rng.randint(1, 3)
    image = torch.randn(channels, rng.randint(9, 48), rng.randint(9, 48), dtype=torch.float64)
    layers: list[nn.Module] = [nn.Conv2d(channels, channels, 1)]
    wanted = rng.randint(2, 6)
    field, c = image[None], channels
    for _ in range(40):
        if len(layers) > wanted:
            break
        layer, c_next = rng.choice(_LAYERS)(rng, c)
        layer = layer.double().eval()
        try:
            with torch.no_grad():
                after = layer(field)
        except (RuntimeError, ValueError):
            continue
        h, w = after.shape[-2:]
        if h < 2 or w < 2 or h * w > 6000 or after.shape[1] > 12 or after.shape[0] != 1:
            continue
        layers.append(layer)
        field, c = after, c_next if after.shape[1] == c_next else after.shape[1]
    model = nn.Sequential(*layers).double().eval()
    name, loss, target = _loss(rng, model, image)
    tile = rng.randint(1, 25), rng.randint(1, 25)
    while -(-field.shape[-2] // tile[0]) * -(-field.shape[-1] // tile[1]) > 60:
        tile = 2 * tile[0], 2 * tile[1]
    text = f"seed {seed}: image {tuple(image.shape)}, tile {tile}, loss {name}\n{model}"
    return Case(seed, model, loss, image, target, tile, text)
