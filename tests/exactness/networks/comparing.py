"""The steps of a recipe by gigagrad against plain autograd on the whole image."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import gigagrad as gg
from tests.exactness.comparison import compiled, order_cotangents

from .cases import buffers, gradients, make_case, step
from .recipe import Recipe


@dataclass(frozen=True)
class Outcome:
    """Relative errors of the loss, of the worst gradient and of the worst buffer (2-norms), and the tiles run."""

    loss_error: float
    gradient_error: float
    buffer_error: float
    worst_parameter: str
    worst_buffer: str
    tile_count: int

    @property
    def worst(self) -> float:
        return max(self.loss_error, self.gradient_error, self.buffer_error)


def compare_step(recipe: Recipe, device: str = "cpu") -> Outcome:
    """The steps of a recipe by gigagrad and by plain autograd on the whole image."""
    plain, tiled = make_case(recipe), make_case(recipe)
    order_cotangents(plain.model)
    expected = step(plain, recipe.steps)
    engine = compiled(
        tiled.model,
        tiled.loss,
        tiled.image,
        tiled.target,
        tile=tiled.tile,
        device=device,
        layout=recipe.layout or None,
    )
    losses = step(tiled, recipe.steps, lambda: engine.backward(tiled.image, tiled.target))
    wanted, got = gradients(plain), gradients(tiled)
    loss_error = max(_relative(b, a) for a, b in zip(expected, losses, strict=True))
    scale = torch.stack([g.norm() for g in wanted.values()]).norm().item()
    # A gradient that is zero but for rounding (a bias before a batch norm) has no relative error: the rounding of the
    # whole gradient and of the loss is then its scale.
    floor = max(1e-4 * scale, 1e-5 * abs(expected[-1].item()))
    gradient_error, parameter = _worst(got, wanted, floor)
    buffer_error, buffer = _worst(buffers(tiled), buffers(plain), 1e-4)
    tiles = engine.plan(tiled.image, tiled.target).tile_count
    return Outcome(loss_error, gradient_error, buffer_error, parameter, buffer, tiles)


def ill_conditioned(recipe: Recipe, error: float) -> bool:
    """Whether an error may be rounding: plain autograd's own answers move as far when the image hardly does.

    A channel that is the same everywhere and then normalised does this, and so does a tie for a maximum.
    """
    return error <= 100 * conditioning(recipe)


def conditioning(recipe: Recipe) -> float:
    """How far plain autograd's own loss, gradients and buffers move when the image moves by one part in 10^14."""
    case, moved = make_case(recipe), make_case(recipe)
    noise = torch.randn(case.image.shape, dtype=case.image.dtype, generator=torch.Generator().manual_seed(1))
    moved.image.mul_(1 + 1e-14 * noise)
    losses, others = step(case, recipe.steps), step(moved, recipe.steps)
    wanted = gradients(case)
    scale = torch.stack([g.norm() for g in wanted.values()]).norm().item()
    floor = max(1e-4 * scale, 1e-5 * abs(losses[-1].item()))
    return max(
        _relative(others[-1], losses[-1]),
        _worst(gradients(moved), wanted, floor)[0],
        _worst(buffers(moved), buffers(case), 1e-4)[0],
    )


def compare_forward(recipe: Recipe, device: str = "cpu") -> float:
    """The relative error of the first output, predicted tile by tile in evaluation mode."""
    case = make_case(recipe)
    first = First(case.model).eval()
    with torch.no_grad():
        expected = first(case.image[None])
    got = gg.compile(first, tile=case.tile, device=device).forward(case.image)
    assert isinstance(got, Tensor)
    return _relative(got.cpu(), expected)


class First(nn.Module):
    """The first output of a model alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        output = self.model(image)
        if isinstance(output, Tensor):
            return output
        return output["out"] if isinstance(output, dict) else output[0]


def _relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|; infinite where it is not a number or the shapes differ."""
    if a.shape != b.shape:
        return math.inf
    error = (a - b).double().norm().item() / max(b.double().norm().item(), 1e-300)
    return error if math.isfinite(error) else math.inf


def _worst(got: dict[str, Tensor], wanted: dict[str, Tensor], floor: float) -> tuple[float, str]:
    """The largest relative error and its name. What only one side has must be zero."""
    worst, name_of_worst = 0.0, ""
    for name in sorted(got.keys() | wanted.keys()):
        reference = wanted.get(name, torch.zeros(()))
        value = got.get(name, torch.zeros(()))
        if name in got and name in wanted and value.shape != reference.shape:
            return math.inf, name
        size = max(reference.double().norm().item(), floor, 1e-300)
        error = (value - reference).double().norm().item() / size
        if not error < worst and error:
            worst, name_of_worst = (error if math.isfinite(error) else math.inf), name
    return worst, name_of_worst
