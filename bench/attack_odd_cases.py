"""The cases that generators of networks do not draw: what somebody who wants a wrong gradient would try.

Each is a function of a `random.Random` in `ODD`, under the name that the campaign prints, and gives a `Case` in
float64. Called twice with equal seeds it gives equal cases that share no tensor.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.exactness import habits
from tests.exactness.written import draw as draw_written

Function = Callable[[Any, Any], Tensor]


@dataclass
class Case:
    """A model, its loss and what both are given; `others` are tensors beside the model whose gradients count too.

    `images` are `(C, H, W)`, one for each argument of the model. `seeded`: random numbers are drawn, so that the
    reference is an engine of the same seed in one tile.
    """

    model: nn.Module
    loss: Function
    images: tuple[Tensor, ...]
    target: Tensor
    others: Mapping[str, Tensor] = field(default_factory=dict)
    seeded: bool = False


ODD: dict[str, Callable[[random.Random], Case]] = {}


def _odd(make: Callable[[random.Random], Case]) -> Callable[[random.Random], Case]:
    ODD[make.__name__.strip("_").replace("_", " ")] = make
    return make


class Lambda(nn.Module):
    """`function(module, *images)` with whatever parts it is given."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, *images: Tensor) -> Any:
        return self.function(self, *images)


class Norm(nn.Module):
    def __init__(self, channels: int, kind: str) -> None:
        super().__init__()
        self.body = {
            "batch": lambda: nn.BatchNorm2d(channels),
            "group": lambda: nn.GroupNorm(1, channels),
            "instance": lambda: nn.InstanceNorm2d(channels, affine=True),
            "none": nn.Identity,
        }[kind]()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


def _conv(inputs: int, outputs: int, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, padding=size // 2).double()


def _activation(rng: random.Random) -> nn.Module:
    made: nn.Module = rng.choice([nn.ReLU, nn.SiLU, nn.GELU, nn.Tanh, nn.ELU, nn.Softplus])()
    return made


def _network(rng: random.Random, inputs: int = 2, outputs: int = 1) -> nn.Sequential:
    """A few layers that keep the size, with a norm over the image in most."""
    width = rng.randint(2, 4)
    layers: list[nn.Module] = [_conv(inputs, width, rng.choice([1, 3, 5]))]
    for _ in range(rng.randint(1, 2)):
        kind = rng.choice(["batch", "group", "instance", "none"])
        layers += [Norm(width, kind), _activation(rng), _conv(width, width)]
    return nn.Sequential(*layers, _activation(rng), _conv(width, outputs, 1)).double().train()


def _mean_square(o: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(o, t)


def _dice(o: Tensor, t: Tensor) -> Tensor:
    p = o.sigmoid()
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def _log_of_mean(o: Tensor, t: Tensor) -> Tensor:
    return torch.log(1 + (o * t).square().mean())


_LOSSES: tuple[Function, ...] = (
    _mean_square,
    _dice,
    _log_of_mean,
    lambda o, t: F.binary_cross_entropy_with_logits(o, t),
    lambda o, t: F.l1_loss(o, t, reduction="sum") / 100,
    lambda o, t: F.huber_loss(o, t),
    lambda o, t: (o.std() - t.std()).square() + o.mean(),
    lambda o, t: (o - t).square().amax() + (o * t).mean(),
    lambda o, t: torch.logsumexp(o.flatten() * t.flatten(), 0),
    lambda o, t: 1 - F.cosine_similarity(o.flatten(), t.flatten(), 0),
    lambda o, t: (o[..., 1:] - o[..., :-1]).abs().mean() + F.mse_loss(o, t),
    lambda o, t: ((o - t).square() * (t > 0.5)).sum() / ((t > 0.5).sum() + 1),
)


def _loss(rng: random.Random) -> Function:
    return rng.choice(_LOSSES)


def _pair(rng: random.Random, channels: int = 2, low: int = 9, high: int = 40) -> tuple[Tensor, Tensor]:
    size = rng.randint(low, high), rng.randint(low, high)
    return torch.randn(channels, *size, dtype=torch.float64), torch.rand(1, *size, dtype=torch.float64)


def _usual(rng: random.Random) -> Case:
    image, target = _pair(rng)
    return Case(_network(rng), _loss(rng), (image,), target)


# The loss and what it closes over.


@_odd
def _penalty_on_parameters(rng: random.Random) -> Case:
    case = _usual(rng)
    model, base = case.model, case.loss
    kind = rng.randrange(6)
    chosen = rng.choice(list(model.parameters()))

    def penalty() -> Tensor:
        if kind == 0:
            return torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()
        if kind == 1:
            return torch.stack([p.abs().sum() for p in model.parameters()]).sum()
        if kind == 2:
            return chosen.square().mean()
        if kind == 3:
            return torch.cat([p.flatten() for p in model.parameters()]).norm()
        if kind == 4:
            return model.get_parameter("0.weight").amax()
        return torch.linalg.matrix_norm(model.get_parameter("0.weight").flatten(1))

    case.loss = lambda o, t: base(o, t) + 0.1 * penalty()
    return case


@_odd
def _penalty_times_the_loss(rng: random.Random) -> Case:
    case = _usual(rng)
    weight, base = case.model.get_parameter("0.weight"), case.loss
    case.loss = lambda o, t: base(o, t) * (1 + weight.square().sum()) + (o * weight.mean()).mean()
    return case


@_odd
def _closed_over_tensor(rng: random.Random) -> Case:
    case = _usual(rng)
    base, kind = case.loss, rng.randrange(4)
    shape = {0: (), 1: (1, 1, 1, 1), 2: tuple(case.target.shape), 3: (1,)}[kind]
    scale = torch.rand(shape, dtype=torch.float64).requires_grad_()
    case.loss = lambda o, t: base(o * scale, t) + scale.square().mean()
    case.others = {"scale": scale}
    return case


@_odd
def _derived_tensor_in_the_loss(rng: random.Random) -> Case:
    """Its history is PyTorch's own and older than the step."""
    case = _usual(rng)
    base = case.loss
    leaf = torch.rand((), dtype=torch.float64).requires_grad_()
    derived = leaf.exp() * 2
    case.loss = lambda o, t: base(o, t) * derived
    case.others = {"leaf": leaf}
    return case


@_odd
def _plain_tensor_of_the_model(rng: random.Random) -> Case:
    """A tensor that requires a gradient and is no parameter."""
    scale = torch.rand(2, 1, 1, dtype=torch.float64).requires_grad_()
    held = {"scale": scale} if rng.random() < 0.5 else [scale]
    function = (
        (lambda m, x: m.body(x * m.held["scale"])) if isinstance(held, dict) else (lambda m, x: m.body(x * m.held[0]))
    )
    case = _usual(rng)
    case.model = Lambda(function, body=case.model, held=held)
    case.others = {"scale": scale}
    return case


@_odd
def _module_as_the_loss(rng: random.Random) -> Case:
    case = _usual(rng)
    base = case.loss
    learned = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))
    critic = _network(rng, 1)
    case.loss = Lambda(
        lambda m, o, t: m.learned[0].exp() * base(o, t) + m.critic(o).mean() + m.learned[1],
        learned=learned,
        critic=critic,
    )
    case.others = {f"critic {name}": p for name, p in critic.named_parameters()} | {"learned": learned}
    return case


@_odd
def _loss_that_ignores(rng: random.Random) -> Case:
    """The model, the target, or both; all or a part of what reaches it."""
    case = _usual(rng)
    weight = case.model.get_parameter("0.weight")
    case.loss = rng.choice(
        [
            lambda o, t: t.mean(),
            lambda o, t: torch.tensor(3.0, dtype=torch.float64),
            lambda o, t: weight.square().sum(),
            lambda o, t: o.detach().mean() + 0 * o.sum(),
            lambda o, t: (o.detach() * o).mean(),
            lambda o, t: o.square().mean(),
            lambda o, t: o[:, :, 0, 0].sum(),
            lambda o, t: o[..., 1:3, 2:5].mean(),
            lambda o, t: 0.0 * o.mean(),
            lambda o, t: t.mean() + o.mean().detach(),
        ]
    )
    return case


@_odd
def _target_of_odd_shape(rng: random.Random) -> Case:
    case = _usual(rng)
    shape = rng.choice([(0,), (0, 3), (1,), (), (7,), (2, 3, 4), (0, 4, 4), (1, 0, 0)])
    case.target = torch.rand(shape, dtype=torch.float64)
    case.loss = rng.choice([lambda o, t: o.square().mean() + t.sum(), lambda o, t: (o * (1 + t.sum())).mean()])
    return case


@_odd
def _empty_mask(rng: random.Random) -> Case:
    """0 / 0, as plain PyTorch has it."""
    case = _usual(rng)
    case.loss = rng.choice(
        [
            lambda o, t: (o * (t > 2)).sum() / (t > 2).sum(),
            lambda o, t: F.cross_entropy(torch.cat([o, -o], 1), (t[:, 0] * 0).long() + 255, ignore_index=255),
            lambda o, t: torch.where(t > 2, o, torch.zeros_like(o)).mean(),
            lambda o, t: o[t > 0.5].mean(),
        ]
    )
    return case


# Pixels.


def _spoilt(rng: random.Random, image: Tensor) -> Tensor:
    for _ in range(rng.randint(1, 3)):
        value = rng.choice([float("inf"), -float("inf"), float("nan"), float("inf"), 1e308, 5e-324])
        image[rng.randrange(image.shape[0]), rng.randrange(image.shape[1]), rng.randrange(image.shape[2])] = value
    return image


_ROBUST: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.clamp(-3, 3),
    lambda x: x.nan_to_num(0.5, 2, -2),
    lambda x: torch.where(x.isfinite(), x, torch.zeros_like(x)),
    lambda x: x.masked_fill(~x.isfinite(), 0.25),
    lambda x: x.tanh(),
    lambda x: x.sigmoid(),
    lambda x: x.relu().clamp(max=5),
    lambda x: F.hardtanh(x),
    lambda x: x.minimum(torch.ones_like(x)),
    lambda x: 1 / (1 + x.square()),
)


@_odd
def _bad_pixels_made_good(rng: random.Random) -> Case:
    """Infinities and NaN that the first layer takes away."""
    case = _usual(rng)
    robust = rng.choice(_ROBUST)
    case.images = (_spoilt(rng, case.images[0]),)
    case.model = Lambda(lambda m, x: m.body(robust(x)), body=case.model)
    return case


@_odd
def _bad_pixels(rng: random.Random) -> Case:
    """Infinities and NaN that reach whatever comes: numbers must be missing where they are missing for PyTorch."""
    case = _usual(rng)
    case.images = (_spoilt(rng, case.images[0]),)
    return case


@_odd
def _bad_pixels_and_extremes(rng: random.Random) -> Case:
    case = _usual(rng)
    pool = rng.choice(
        [
            lambda x: x.amax((2, 3), keepdim=True) + 0 * x.nan_to_num(0, 0, 0),
            lambda x: F.max_pool2d(x, 3, 1, 1),
            lambda x: F.adaptive_max_pool2d(x, 4).mean((2, 3), keepdim=True) + x.nan_to_num(0, 1, 1),
            lambda x: x.amin((2, 3), keepdim=True) * x.clamp(-1, 1),
            lambda x: F.avg_pool2d(x, 3, 1, 1),
            lambda x: x.softmax(1),
            lambda x: x.cummax(-1).values,
        ]
    )
    loss = rng.choice(
        [lambda o, t: o.amax(), lambda o, t: o.amax((2, 3)).sum(), lambda o, t: o.clamp(-9, 9).mean(), _dice]
    )
    case.images = (_spoilt(rng, case.images[0]),)
    case.model = Lambda(lambda m, x: m.scale * pool(x), scale=nn.Parameter(torch.rand((), dtype=torch.float64)))
    case.loss = loss
    case.target = torch.rand(2, *case.images[0].shape[1:], dtype=torch.float64)
    return case


@_odd
def _one_infinite_output(rng: random.Random) -> Case:
    """`log` of 0, division by 0 and square roots of 0 inside: their gradients are infinite or no numbers."""
    case = _usual(rng)
    edge = rng.choice(
        [
            lambda x: x.relu().log().clamp(min=-9),
            lambda x: x.relu().sqrt(),
            lambda x: torch.where(x > 0, x.log(), x),
            lambda x: 1 / x.relu().clamp(min=1e-9),
            lambda x: x.relu() ** 0.5,
            lambda x: x.abs().pow(1.5),
        ]
    )
    case.model = Lambda(lambda m, x: edge(m.body(x)), body=case.model)
    return case


@_odd
def _thin_images(rng: random.Random) -> Case:
    case = _usual(rng)
    size = rng.choice([(1, rng.randint(2, 60)), (rng.randint(2, 60), 1), (1, 1), (2, 1), (1, 2), (2, 2), (1, 3)])
    case.images = (torch.randn(2, *size, dtype=torch.float64),)
    case.target = torch.rand(1, *size, dtype=torch.float64)
    return case


@_odd
def _images_that_are_views(rng: random.Random) -> Case:
    case = _usual(rng)
    _, h, w = case.images[0].shape
    base = torch.randn(2, h, w, dtype=torch.float64)
    case.images = (
        rng.choice(
            [
                lambda: torch.randn(h, w, 2, dtype=torch.float64).permute(2, 0, 1),
                lambda: torch.randn(2, w, h, dtype=torch.float64).transpose(1, 2),
                lambda: torch.randn(4, 2 * h, 3 * w, dtype=torch.float64)[1::2, ::2, 1::3],
                lambda: torch.randn(1, 1, w, dtype=torch.float64).expand(2, h, w),
                lambda: torch.randn(2, 1, 1, dtype=torch.float64).expand(2, h, w),
                lambda: torch.randn(2 * h * w + 7, dtype=torch.float64)[7:].view(2, h, w),
                lambda: base.flip(2),
                lambda: torch.randn(h * w + 2, dtype=torch.float64).as_strided((2, h, w), (1, w, 1)),
            ]
        )(),
    )
    case.target = torch.rand(w, h, dtype=torch.float64).T[None]
    return case


@_odd
def _image_with_a_gradient(rng: random.Random) -> Case:
    case = _usual(rng)
    image = case.images[0].requires_grad_()
    case.others = {"image": image}
    if rng.random() < 0.4:
        case.model.requires_grad_(False)
    return case


@_odd
def _several_images(rng: random.Random) -> Case:
    case = _usual(rng)
    other = torch.randn_like(case.images[0])
    combine = rng.choice(
        [
            lambda m, a, b: m.body(a) * m.second(b).sigmoid(),
            lambda m, a, b: m.body(a * b.mean((2, 3), keepdim=True)),
            lambda m, a, b: m.body(torch.where(a > b, a, b)),
            lambda m, a, b: m.body(a) + m.body(b),
            lambda m, a, b: m.body(a),
        ]
    )
    case.model = Lambda(combine, body=case.model, second=_network(rng))
    case.images = (case.images[0], other if rng.random() < 0.8 else case.images[0])
    if rng.random() < 0.4:
        case.others = {"second image": other.requires_grad_()}
        case.images = (case.images[0], other)
    return case


@_odd
def _bytes(rng: random.Random) -> Case:
    case = _usual(rng)
    case.images = (torch.randint(0, 256, case.images[0].shape, dtype=torch.uint8),)
    convert = rng.choice(
        [
            lambda x: x.double() / 255,
            lambda x: (x >> 2).double() / 64,
            lambda x: (255 - x).double() / 255,
            lambda x: (x + 200).double() / 255,
            lambda x: (x > 128).double(),
            lambda x: (x // 16).double() / 16,
        ]
    )
    case.model = Lambda(lambda m, x: m.body(convert(x)), body=case.model)
    return case


# Parameters.


@_odd
def _tied_weights(rng: random.Random) -> Case:
    kind = rng.randrange(5)
    case = _usual(rng)
    conv = _conv(2, 2)
    if kind == 0:
        case.model = nn.Sequential(conv, nn.Tanh(), conv, nn.ReLU(), conv, _conv(2, 1, 1))
    elif kind == 1:
        second = _conv(2, 2)
        second.weight = conv.weight
        case.model = nn.Sequential(conv, nn.Tanh(), second, _conv(2, 1, 1))
    elif kind == 2:
        case.model = Lambda(
            lambda m, x: F.conv_transpose2d(m.conv(x).tanh(), m.conv.weight, padding=1)[:, :1], conv=conv
        )
    elif kind == 3:
        case.model = Lambda(lambda m, x: m.conv(x) * m.conv.weight.mean() + m.conv.bias.sum(), conv=conv, last=None)
        case.model = nn.Sequential(case.model, _conv(2, 1, 1))
    else:
        norm = nn.BatchNorm2d(2).double()
        norm.weight = conv.bias  # type: ignore[assignment]
        case.model = nn.Sequential(conv, norm, _conv(2, 1, 1))
    return case


@_odd
def _frozen_parameters(rng: random.Random) -> Case:
    case = _usual(rng)
    parameters = list(case.model.parameters())
    share = rng.choice([0.3, 0.7, 1.0])
    for parameter in parameters:
        if rng.random() < share:
            parameter.requires_grad_(False)
    if rng.random() < 0.3:
        image = case.images[0].requires_grad_()
        case.others = {"image": image}
    return case


@_odd
def _nothing_to_train(rng: random.Random) -> Case:
    case = _usual(rng)
    case.model = rng.choice(
        [
            lambda: nn.AvgPool2d(3, 1, 1),
            lambda: Lambda(lambda m, x: x * 2),
            nn.Identity,
            lambda: Lambda(lambda m, x: x / (1 + x.square().mean())),
        ]
    )()
    case.loss = lambda o, t: F.mse_loss(o, t.expand_as(o))
    return case


@_odd
def _odd_parameters(rng: random.Random) -> Case:
    """Of no elements, of no dimensions, used by nobody, used in half, expanded, of another dtype."""
    case = _usual(rng)
    kind = rng.randrange(6)
    base = case.model
    made = {
        0: nn.Parameter(torch.empty(0, dtype=torch.float64)),
        1: nn.Parameter(torch.rand((), dtype=torch.float64)),
        2: nn.Parameter(torch.rand(3, dtype=torch.float64)),
        3: nn.Parameter(torch.rand(5, dtype=torch.float64)),
        4: nn.Parameter(torch.rand(1, 2, 1, 1, dtype=torch.float64)),
        5: nn.Parameter(torch.rand(2, 1, 1, dtype=torch.float32)),
    }[kind]
    function: dict[int, Callable[..., Any]] = {
        0: lambda m, x: m.body(x) + m.extra.sum(),
        1: lambda m, x: m.body(x) * m.extra,
        2: lambda m, x: m.body(x),
        3: lambda m, x: m.body(x) * m.extra[1] + m.extra[3:].sum(),
        4: lambda m, x: m.body(x * m.extra.expand(1, 2, *x.shape[2:])),
        5: lambda m, x: m.body(x * m.extra),
    }
    case.model = Lambda(function[kind], body=base, extra=made)
    return case


@_odd
def _gradients_that_are_there_already(rng: random.Random) -> Case:
    case = _usual(rng)
    for parameter in case.model.parameters():
        if rng.random() < 0.6:
            parameter.grad = torch.randn_like(parameter)
    return case


def _trebled(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3)


@_odd
def _hooks_on_parameters(rng: random.Random) -> Case:
    case = _usual(rng)
    parameters = list(case.model.parameters())
    for parameter in rng.sample(parameters, min(2, len(parameters))):
        kind = rng.randrange(3)
        if kind == 0:
            parameter.register_hook(lambda g: 2 * g)
        elif kind == 1:
            parameter.register_hook(lambda g: g.clamp(-0.01, 0.01))
        else:
            parameter.register_post_accumulate_grad_hook(_trebled)
    return case


@_odd
def _parametrised_weights(rng: random.Random) -> Case:
    case = _usual(rng)
    first = case.model.get_submodule("0")
    kind = rng.randrange(3)
    if kind == 0:
        nn.utils.parametrizations.weight_norm(first)
    elif kind == 1:
        nn.utils.parametrizations.spectral_norm(first)
    else:
        nn.utils.parametrize.register_parametrization(first, "weight", Lambda(lambda m, w: w - w.mean()))
    return case


# What forward does.


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * g


def _clipped(x: Tensor) -> Tensor:
    y = x * 1.0
    if y.requires_grad:
        y.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    return y


def _without(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2
    return x + y


def _assigned(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :, ::2] = 0.5
    y[..., 1] *= 2
    return y


_STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "straight through": lambda x: _StraightThrough.apply(x * 4) / 4,
    "tensor hook": _clipped,
    "no_grad": _without,
    "assignment": _assigned,
    "in place": lambda x: x.mul(2).add_(1).relu_(),
    "detached half": lambda x: x + (x.round() - x).detach(),
    "checkpoint": lambda x: checkpoint(lambda y: y.tanh() * y, x, use_reentrant=False),
    "roll": lambda x: x.roll((2, -3), (2, 3)),
    "flip": lambda x: x.flip(3),
    "transpose": lambda x: x.transpose(2, 3).cumsum(3).transpose(2, 3) / 10,
    "rot90": lambda x: x + x.rot90(2, (2, 3)),
    "sort": lambda x: x.sort(3).values,
    "median": lambda x: x - x.median(3, keepdim=True).values,
    "quantile": lambda x: x - torch.quantile(x, 0.3),
    "topk": lambda x: x * x.flatten(2).topk(3, 2).values.mean(),
    "fft": lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 0.5, s=x.shape[-2:]),
    "einsum": lambda x: torch.einsum("nchw,nkhw->nck", x, x).sum(1)[..., None, None] * x / x[0, 0].numel(),
    "unfold": lambda x: F.fold(F.unfold(x, 3, padding=1), x.shape[-2:], 3, padding=1) / 9,
    "grid_sample": lambda x: F.grid_sample(
        x,
        F.affine_grid(torch.eye(2, 3, dtype=x.dtype)[None] * 0.9, list(x.shape), align_corners=False),
        align_corners=False,
    ),
    "variance": lambda x: x / (x.var((2, 3), keepdim=True, correction=0) + 0.1).sqrt(),
    "norm of all": lambda x: x / x.norm(),
    "softmax over positions": lambda x: x.flatten(2).softmax(2).view_as(x) * x[0, 0].numel(),
    "attention": lambda x: (
        (x.flatten(2).transpose(1, 2) @ x.flatten(2)).softmax(-1).mean(1)[..., None, None][:, :1] * x
    ),
    "where of mean": lambda x: torch.where(x > x.mean(), x, 0.1 * x),
    "coordinates": lambda x: x + torch.linspace(0, 1, x.shape[3], dtype=x.dtype) * torch.arange(x.shape[2])[:, None],
    "shape as a number": lambda x: x * x.shape[2] / x.shape[3],
    "float32 inside": lambda x: x.float().double(),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x).square()).sum(-1),
    "diagonal": lambda x: x + x.diagonal(dim1=2, dim2=3).mean(),
    "gather": lambda x: x.gather(3, torch.arange(x.shape[3] - 1, -1, -1).expand_as(x).contiguous()),
    "scatter": lambda x: torch.zeros_like(x).scatter_add(3, (x > 0).long(), x),
    "argmax": lambda x: x * x.argmax(1, keepdim=True),
    "cross": lambda x: x * x.mean(2, keepdim=True) + x.amax(3, keepdim=True),
    "local response": lambda x: F.local_response_norm(x, 3),
    "resize to a number": lambda x: F.interpolate(F.interpolate(x, (7, 5), mode="bilinear"), x.shape[-2:]),
    "prefix of rows": lambda x: x.cumsum(2) / 20,
}


@_odd
def _odd_steps(rng: random.Random) -> Case:
    """One or two operations in the middle of a network that generators leave out."""
    case = _usual(rng)
    chosen = [_STEPS[name] for name in rng.sample(sorted(_STEPS), rng.randint(1, 2))]

    def function(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        for step in chosen:
            y = step(y)
        out: Tensor = m.body(y)
        return out

    case.model = Lambda(function, first=_conv(2, 2), body=case.model)
    return case


@_odd
def _state_of_the_model(rng: random.Random) -> Case:
    """Buffers that forward reads and writes."""
    case = _usual(rng)
    kind = rng.randrange(3)

    def function(m: Any, x: Tensor) -> Tensor:
        y = m.body(x)
        if kind == 0:
            m.seen.mul_(0.9).add_(0.1 * y.detach().mean())
            return y - m.seen
        if kind == 1:
            m.seen.copy_(x.mean())
            return y * m.seen
        m.seen += 1
        return y / m.seen

    case.model = Lambda(function, body=case.model)
    case.model.register_buffer("seen", torch.ones((), dtype=torch.float64))
    return case


def _doubled(module: nn.Module, cotangents: Any, _: Any) -> Any:
    return tuple(None if cotangent is None else 2 * cotangent for cotangent in cotangents)


@_odd
def _hooks_on_modules(rng: random.Random) -> Case:
    case = _usual(rng)
    part = case.model.get_submodule("0")
    kind = rng.randrange(4)
    if kind == 0:
        part.register_forward_hook(lambda m, i, o: o * 2)
    elif kind == 1:
        part.register_forward_pre_hook(lambda m, i: (i[0] + 1,))
    elif kind == 2:
        part.register_full_backward_hook(_doubled)
    else:
        case.model.register_forward_hook(lambda m, i, o: o + i[0].mean())
    return case


@_odd
def _random_numbers(rng: random.Random) -> Case:
    case = _usual(rng)
    case.seeded = True
    step = rng.choice(
        [
            lambda x: F.dropout(x, 0.4),
            lambda x: F.dropout2d(x, 0.4),
            lambda x: F.dropout(x, 1.0) + x,
            lambda x: F.dropout(x, 0.0),
            lambda x: x + 0.1 * torch.randn_like(x),
            lambda x: x * torch.rand_like(x),
            lambda x: F.alpha_dropout(x, 0.3, True),
            lambda x: F.rrelu(x, training=True),
            lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
        ]
    )
    case.model = Lambda(lambda m, x: m.body(step(m.first(x))), first=_conv(2, 2), body=case.model)
    return case


@_odd
def _values_from_outside(rng: random.Random) -> Case:
    """Numbers of Python, NumPy and closures in forward."""
    import numpy as np

    case = _usual(rng)
    held: Sequence[Any] = [rng.random(), np.float64(rng.random()), np.full(1, 0.3), torch.rand(()), rng.randint(1, 3)]
    value = rng.choice(held)
    kept = torch.as_tensor(value)
    case.model = Lambda(
        lambda m, x: m.body(x * value if not isinstance(value, np.ndarray) else x * kept), body=case.model
    )
    return case


@_odd
def _written_in_place(rng: random.Random) -> Case:
    """Values that change where autograd does not look."""
    while True:
        model = draw_written(rng.randrange(10**6)).double()
        image, target = torch.rand(2, 22, 26).double(), torch.rand(1, 22, 26).double()
        try:
            F.mse_loss(copy.deepcopy(model)(image[None]), target[None]).backward()
        except RuntimeError:  # PyTorch refuses it
            continue
        return Case(model, F.mse_loss, (image,), target)


@_odd
def _modules_by_identity(rng: random.Random) -> Case:
    """One module at two places, told by its class, its number, itself or its id; checkpoints around norms."""
    norm = rng.choice([nn.BatchNorm2d, _DoubledNorm])(3, momentum=rng.choice([0.1, 0.5, None]))
    again = rng.choice([norm, nn.BatchNorm2d(3)])
    layers = nn.ModuleList([_conv(2, 3), norm, _conv(3, 3), again, _conv(3, 1)])
    reentrant = rng.choice([True, False])
    asks: Sequence[Callable[[Any, int, Any], bool]] = [
        lambda m, i, layer: isinstance(layer, nn.BatchNorm2d),
        lambda m, i, layer: layer is m.layers[1],
        lambda m, i, layer: id(layer) == id(m.layers[3]),
        lambda m, i, layer: type(layer) is _DoubledNorm,
        lambda m, i, layer: i == 3,
        lambda m, i, layer: layer in list(m.layers)[3:4],
        lambda m, i, layer: {m.layers[1]: True}.get(layer, False),
    ]
    ask, checkpointed = rng.choice(asks), rng.random() < 0.4

    def forward(m: Any, x: Tensor) -> Tensor:
        for index, layer in enumerate(m.layers):
            plain = not checkpointed or not isinstance(layer, nn.BatchNorm2d)
            x = layer(x) if plain else checkpoint(layer, x, use_reentrant=reentrant)
            if ask(m, index, layer):
                x = 2 * x.relu()
        return x

    image, target = torch.rand(2, 24, 30).double(), torch.rand(1, 24, 30).double()
    return Case(Lambda(forward, layers=layers).double(), F.mse_loss, (image,), target)


class _DoubledNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@_odd
def _code_that_asks_how_it_is_run(rng: random.Random) -> Case:
    asks: Sequence[Callable[[Any, Tensor], bool]] = [
        lambda m, x: torch.compiler.is_compiling(),
        lambda m, x: type(x) is torch.Tensor,
        lambda m, x: type(m.body) is nn.Conv2d and isinstance(type(x), type),
        lambda m, x: type(m.body.weight) is nn.Parameter,
        lambda m, x: torch.is_grad_enabled(),
        lambda m, x: m.body(x).requires_grad,
        lambda m, x: x.requires_grad,
        lambda m, x: m.body(x).is_leaf,
        lambda m, x: m.body(x)._base is None,
        lambda m, x: m.body.weight.grad_fn is None,
        lambda m, x: torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting(),
        lambda m, x: torch.is_inference_mode_enabled(),
        lambda m, x: x.device.type == "cpu" and not x.is_meta,
    ]
    ask = rng.choice(asks)
    model = Lambda(lambda m, x: m.body(x) * (2.0 if ask(m, x) else 1.0), body=_conv(2, 1)).double()
    image = torch.rand(2, 24, 30).double().requires_grad_(rng.random() < 0.5)
    return Case(model, F.mse_loss, (image,), torch.rand(1, 24, 30).double(), {"image": image})


@_odd
def _habit(rng: random.Random) -> Case:
    """Transforms, TorchScript, wrappers, values taken out of tensors (tests/exactness/habits.py)."""
    while True:
        found = habits.HABITS[rng.choice(sorted(habits.HABITS))]()
        if found.as_plain is None and isinstance(found.model, nn.Module):  # plain PyTorch takes the same target
            break
    others = {f"{index} {name}": p for index, part in enumerate(found.others) for name, p in part.named_parameters()}
    return Case(found.model, found.loss, (habits.image(),), found.target, others)


def make_odd(name: str, seed: int) -> Case:
    """The case of that name and seed."""
    torch.manual_seed(seed)
    return ODD[name](random.Random(seed))
