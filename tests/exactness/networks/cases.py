"""A recipe made, and its training steps on the whole image or by whatever else runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .losses import LOSSES, Loss
from .network import Network
from .recipe import Recipe, T


@dataclass(frozen=True)
class Case:
    """A recipe made: float64, `image` is `(C, H, W)`."""

    model: nn.Module
    loss: Callable[[Any, Tensor], Tensor]
    image: Tensor
    target: Tensor
    tile: tuple[int, int]


def make_case(recipe: Recipe) -> Case:
    """The model, loss, image and target of a recipe. Raises whatever PyTorch does if a node cannot run."""
    generator = torch.Generator().manual_seed(recipe.seed)
    image = torch.randn(recipe.image, dtype=torch.float64, generator=generator)
    network = Network(image, recipe.seed)
    for node in recipe.nodes:
        network.grow(node)
    output = network.values[recipe.outputs[0]].shape
    network.finish(recipe.outputs, named=recipe.loss_options.get("named", False))
    network.values = []
    network.train(recipe.training)
    for module in network.modules():
        if getattr(module, "stays_in_evaluation", False):
            module.eval()
    for i in recipe.frozen:
        network.parts[i - 1].requires_grad_(False)
    size = image.shape[-2:] if recipe.loss_options.get("target") == "image" else output[-2:]
    target = LOSSES[recipe.loss].target(generator, output[1], size)
    return Case(network, Loss(recipe.loss, recipe.loss_options, output[1]).double(), image, target, recipe.tile)


def step(case: Case, steps: int, backward: Callable[[], Tensor] | None = None) -> list[Tensor]:
    """The losses of the steps, by `backward` or by plain autograd.

    Gradients of all steps add up; between two steps every parameter moves by one hundredth, so that whatever was kept
    from the step before is out of date.
    """
    losses = []
    for i in range(steps):
        if i:
            with torch.no_grad():
                for parameter in [*case.model.parameters(), *case.loss.parameters()]:  # type: ignore[attr-defined]
                    parameter.mul_(1.01)
        if backward is not None:
            losses.append(backward())
            continue
        target = case.target[None] if case.target.ndim == 3 else case.target
        value = case.loss(case.model(case.image[None]), target)
        value.backward()
        losses.append(value.detach())
    return losses


def gradients(case: Case) -> dict[str, Tensor]:
    named = [*_named("model", case.model.named_parameters()), *_named("loss", case.loss.named_parameters())]  # type: ignore[attr-defined]
    return {name: p.grad for name, p in named if p.grad is not None}


def buffers(case: Case) -> dict[str, Tensor]:
    return dict([*_named("model", case.model.named_buffers()), *_named("loss", case.loss.named_buffers())])  # type: ignore[attr-defined]


def _named(prefix: str, items: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    return [(f"{prefix}.{name}", item) for name, item in items]
