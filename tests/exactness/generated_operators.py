"""Random uses of single operators on images of every dtype and of the smallest sizes, for comparison with PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gigagrad as gg

DTYPES = (
    *(torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
SIZES = ((1, 1), (1, 23), (19, 1), (2, 3), (17, 26), (33, 40))
Operator = Callable[[Tensor], Tensor]


class Use(nn.Module):
    """One operator as a model."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.operator(x)


@dataclass(frozen=True)
class Case:
    name: str
    operator: Operator
    image: Tensor
    tile: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} of {self.image.dtype} {tuple(self.image.shape)} in tiles of {self.tile}"


def make_case(seed: int) -> Case:
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype, (height, width) = draw.choice(DTYPES), draw.choice(SIZES)
    shape = (draw.choice((1, 2, 3, 4)), height, width)
    image = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    if dtype == torch.bool:
        image = image > 0
    elif not dtype.is_floating_point:
        ends = torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max, 0, 1])
        image = (30 * image).abs() if dtype == torch.uint8 else 30 * image
        chosen = ends[torch.randint(4, shape, generator=generator)]
        image = torch.where(torch.rand(shape, generator=generator) < 0.1, chosen, image.to(torch.int64))
    elif draw.random() < 0.2:
        image = image.round()  # equal values, and both zeros
    name, operator = draw.choice(MAKERS)(draw)
    tile = draw.randint(1, height + 2), draw.randint(1, width + 2)
    if height * width > 100:
        tile = max(5, tile[0]), max(7, tile[1])
    return Case(name, operator, image.to(dtype), tile)


def outcome(case: Case) -> str:
    """What comes of it: "same", "both refuse", "more" where only PyTorch refuses, "no image" where the output is none,
    "refused: ..." where only we do, or what is wrong.
    """
    wants = case.image.is_floating_point()
    theirs = case.image.clone().requires_grad_(wants)
    gradient = None
    try:
        expected = case.operator(theirs[None])
        if wants and expected.requires_grad:
            (gradient,) = torch.autograd.grad(_loss(expected, None), theirs)
    except (RuntimeError, IndexError, TypeError, ValueError):
        expected = None
    model = Use(case.operator)
    ours = case.image.clone()
    try:
        found = gg.compile(model, tile=case.tile, progress=False).forward(ours)
        if gradient is not None:
            ours.requires_grad_()
            gg.compile(model, _loss, tile=case.tile, progress=False).backward(ours, torch.zeros(1))
    except gg.GigagradError as error:
        if "must be laid out as (N, C, H, W)" in str(error):
            return "no image"
        return "both refuse" if expected is None else f"refused: {error}"
    except Exception as error:
        return f"foreign error {type(error).__name__}: {error}"
    if expected is None:
        return "more"
    found = found if found.ndim == expected.ndim else found[None]
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"{found.dtype} {tuple(found.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    return _difference("values", found, expected.detach()) or _difference("gradients", ours.grad, gradient) or "same"


def _loss(output: Tensor, _: Tensor | None) -> Tensor:
    wide = output.double() if output.dtype == torch.float64 else output.float()
    weights = torch.arange(output.numel(), dtype=wide.dtype).mul(0.7).cos().reshape(output.shape)
    return (wide * weights).sum()


def _difference(what: str, found: Tensor | None, expected: Tensor | None) -> str:
    if expected is None:
        return ""
    if found is None:
        return "" if not expected.any() else f"{what}: none"
    if not expected.is_floating_point():
        return "" if torch.equal(found, expected) else f"{what}: {(found != expected).sum()} of {found.numel()} differ"
    if not expected.numel():
        return ""
    eps = torch.finfo(expected.dtype).eps
    scale = expected.double().nan_to_num(0, 0, 0).abs().max().item()
    close = torch.isclose(found.double(), expected.double(), rtol=32 * eps, atol=32 * eps * scale, equal_nan=True)
    return "" if close.all() else f"{what}: {(~close).sum()} of {close.numel()} differ"


Made = tuple[str, Operator]


def _pointwise(draw: random.Random) -> Made:
    number = draw.choice((-3, -1, 2, 3, 0.5, -0.7, 7))
    found: dict[str, Operator] = {
        "abs": torch.abs,
        "neg": torch.neg,
        "sign": torch.sign,
        "relu": torch.relu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "exp": torch.exp,
        "sqrt": torch.sqrt,
        "log": torch.log,
        "erf": torch.erf,
        "floor": torch.floor,
        "ceil": torch.ceil,
        "round": torch.round,
        "trunc": torch.trunc,
        "square": torch.square,
        "reciprocal": torch.reciprocal,
        "rsqrt": torch.rsqrt,
        "isnan": torch.isnan,
        "isfinite": torch.isfinite,
        "logical_not": torch.logical_not,
        "bitwise_not": torch.bitwise_not,
        "nan_to_num": torch.nan_to_num,
        "add": lambda x: x + number,
        "rsub": lambda x: number - x,
        "mul": lambda x: x * number,
        "div": lambda x: x / number,
        "rdiv": lambda x: number / x,
        "pow": lambda x: x**number,
        "rpow": lambda x: 2**x,
        "fmod": lambda x: torch.fmod(x, number),
        "remainder": lambda x: x % number,
        "floor_divide": lambda x: x.detach() // number,
        "trunc_divide": lambda x: torch.div(x, number, rounding_mode="trunc"),
        "floored": lambda x: torch.div(x, number, rounding_mode="floor"),
        "clamp": lambda x: x.clamp(-2, number),
        "clamp_min": lambda x: x.clamp(min=number),
        "eq": lambda x: x == number,
        "lt": lambda x: x < number,
        "where": lambda x: torch.where(x > 0, x, number),
        "masked_fill": lambda x: x.masked_fill(x > 1, number),
        "maximum": lambda x: torch.maximum(x, x.flip(1)),
        "minimum": lambda x: torch.minimum(x, x.roll(1, 1)),
        "to float": lambda x: x.to(torch.float32),
        "to uint8": lambda x: x.abs().clamp(max=200).to(torch.uint8),
        "to bool": lambda x: x.to(torch.bool),
        "to int": lambda x: x.to(torch.int32),
        "and": lambda x: x & x.flip(1),
        "shift": lambda x: x << 1,
        "xor": lambda x: x ^ 3,
        "fmod by pixels": lambda x: torch.fmod(x, x.flip(1).abs() + 1),
        "remainder by pixels": lambda x: torch.remainder(x, x.flip(1).abs() + 2),
        "zeros_like": lambda x: torch.zeros_like(x) + 1,
        "full_like": lambda x: torch.full_like(x, 3),
        "leaky": lambda x: F.leaky_relu(x, 0.1),
        "gelu": F.gelu,
        "hardtanh": F.hardtanh,
        "softplus": F.softplus,
        "one_hot": lambda x: F.one_hot((x[:, 0].abs().clamp(max=3)).long(), 5),
    }
    name = draw.choice(list(found))
    return f"{name} {number}", found[name]


def _reduction(draw: random.Random) -> Made:
    dims = draw.choice([(2, 3), (-2, -1), (0, 2, 3), (1, 2, 3), (0, 1, 2, 3), (1,), (-1,), (2,), (-3,), (3, 2), (0,)])
    keep = draw.random() < 0.5
    one = dims[0]
    correction = draw.choice((0, 1, 2))
    found: dict[str, Operator] = {
        "sum": lambda x: x.sum(dims, keepdim=keep),
        "mean": lambda x: x.mean(dims, keepdim=keep),
        "amax": lambda x: x.amax(dims, keepdim=keep),
        "amin": lambda x: x.amin(dims, keepdim=keep),
        "max of all": lambda x: x.max(),
        "min of all": lambda x: x.min(),
        "max": lambda x: x.max(one, keepdim=keep)[0],
        "min": lambda x: x.min(one, keepdim=keep)[0],
        "argmax": lambda x: x.argmax(one, keepdim=keep),
        "argmin": lambda x: x.argmin(one, keepdim=keep),
        "argmax of all": lambda x: x.argmax(),
        "var": lambda x: x.var(dims, keepdim=keep, correction=correction),
        "std": lambda x: x.std(dims, keepdim=keep, correction=correction),
        "any": lambda x: x.any(one, keepdim=keep),
        "all": lambda x: x.all(one, keepdim=keep),
        "prod": lambda x: x.prod(one, keepdim=keep),
        "logsumexp": lambda x: x.logsumexp(dims, keepdim=keep),
        "norm": lambda x: x.norm(dim=dims, keepdim=keep),
        "cumsum": lambda x: x.cumsum(one),
        "softmax": lambda x: x.softmax(one),
        "log_softmax": lambda x: x.log_softmax(one),
        "aminmax": lambda x: torch.aminmax(x)[0] + torch.aminmax(x)[1],
        "count": lambda x: x.count_nonzero(one),
        "mean of all": lambda x: x.mean(),
        "sum of all": lambda x: x.sum(),
        "flip": lambda x: x.flip(one),
        "centred": lambda x: x - x.mean(dims, keepdim=True),
        "minmax": lambda x: x - x.amin(dims, keepdim=True),
    }
    name = draw.choice(list(found))
    return f"{name} {dims} {keep} {correction}", found[name]


def _window(draw: random.Random) -> Made:
    kernel, stride, dilation = draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 2)
    padding, ceil = draw.randint(0, kernel // 2), draw.random() < 0.5
    found: dict[str, Operator] = {
        "max_pool": lambda x: F.max_pool2d(x, kernel, stride, padding, dilation, ceil),
        "min_pool": lambda x: -F.max_pool2d(-x, kernel, stride, padding, dilation, ceil),
        "avg_pool": lambda x: F.avg_pool2d(x, kernel, stride, padding, ceil, draw_include),
        "adaptive_avg": lambda x: F.adaptive_avg_pool2d(x, (kernel, stride)),
        "adaptive_max": lambda x: F.adaptive_max_pool2d(x, 1),
        "lp_pool": lambda x: F.lp_pool2d(x, 2, kernel, stride),
        "unfold": lambda x: F.unfold(x, kernel, dilation, padding, stride),
        "instance_norm": lambda x: F.instance_norm(x),
        "group_norm": lambda x: F.group_norm(x, 1),
        "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    }
    draw_include = draw.random() < 0.5
    name = draw.choice(list(found))
    return f"{name} {kernel} {stride} {padding} {dilation} {ceil} {draw_include}", found[name]


def _resizing(draw: random.Random) -> Made:
    factor = draw.choice((draw.uniform(0.3, 4), 2, 1, 2.005, 1.004, 0.5))
    size = draw.randint(1, 50), draw.randint(1, 50)
    mode = draw.choice(("nearest", "nearest-exact", "bilinear", "bicubic", "area"))
    by_size, recompute = draw.random() < 0.3, draw.choice((None, True))
    align = draw.random() < 0.3 if mode in ("bilinear", "bicubic") else None
    if by_size:
        return f"{mode} to {size} {align}", lambda x: F.interpolate(x, size=size, mode=mode, align_corners=align)
    return f"{mode} by {factor} {align} {recompute}", lambda x: F.interpolate(
        x, scale_factor=factor, mode=mode, align_corners=align, recompute_scale_factor=recompute
    )


def _moving(draw: random.Random) -> Made:
    pad = [draw.randint(-1, 2) for _ in range(4)]
    value, mode = draw.choice((0, 1, -1, 255, 2.5)), draw.choice(("reflect", "replicate", "circular"))
    positive = [abs(p) for p in pad]
    start, step = draw.randint(-4, 4), draw.randint(1, 3)
    dim = draw.choice((1, 2, 3, -1, -2, -3))
    found: dict[str, Operator] = {
        "pad": lambda x: F.pad(x, pad, value=value),
        mode: lambda x: F.pad(x, positive, mode=mode),
        "slice": lambda x: x[:, :, start::step],
        "slice x": lambda x: x[..., start::step],
        "cat": lambda x: torch.cat([x, x.flip(1)], dim),
        "roll": lambda x: x.roll(start, dim),
        "permute": lambda x: x.permute(0, 2, 3, 1),
        "transpose": lambda x: x.transpose(2, 3),
        "flatten": lambda x: x.flatten(2),
        "select": lambda x: x.select(dim, 0),
        "unsqueeze": lambda x: x.unsqueeze(dim),
        "pixel_unshuffle": lambda x: F.pixel_unshuffle(F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2)), 2),
        "pixel_shuffle": lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
        "rot90": lambda x: x.rot90(1, (2, 3)),
        "repeat": lambda x: x.repeat(1, 1, 2, 1),
        "narrow": lambda x: x.narrow(dim, 0, 1),
        "tril": lambda x: x.tril(),
        "index": lambda x: x[:, [0, 0]],
        "gather": lambda x: x.gather(1, torch.zeros_like(x, dtype=torch.long)),
        "squeeze": lambda x: x.squeeze(),
        "split": lambda x: x.split(1, dim)[0],
        "chunk": lambda x: x.chunk(2, dim)[-1],
        "as_strided": lambda x: x.permute(0, 2, 3, 1).as_strided((x.shape[2], 1), (x.shape[3], 1)),
        "stack": lambda x: torch.stack([x, x], dim),
        "expand": lambda x: x.sum((2, 3), keepdim=True).expand_as(x),
        "copysign": lambda x: torch.diff(x, dim=dim),
        "cat of rows": lambda x: torch.cat([x, x[:, :, :1]], 2),
    }
    name = draw.choice(list(found))
    return f"{name} {pad} {value} {start} {step} {dim}", found[name]


MAKERS = (_pointwise, _reduction, _reduction, _window, _resizing, _moving)
