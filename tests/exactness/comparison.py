"""Compares an engine with plain autograd on the whole image."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

import gigagrad as gg
from tests.exactness.steering import with_layout


@dataclass(frozen=True)
class Comparison:
    """Relative errors of the loss, of the worst parameter's gradient (2-norms) and of the worst buffer after the step,
    and the plan that was run."""

    loss_error: float
    gradient_error: float
    worst_parameter: str
    buffer_error: float
    plan: Any


def compiled(
    model: nn.Module,
    loss: Callable[[Any, Tensor], Tensor],
    image: Tensor,
    target: Tensor,
    *,
    tile: tuple[int, int] | None,
    device: str = "cpu",
    layout: str | None = None,
) -> gg.Engine:
    """An engine that runs this image's tiles in the memory layout "contiguous" or "channels_last".

    With None the choice is the engine's own, and for convolutions in double precision that is always "contiguous".
    """
    engine = gg.compile(model, loss, tile=tile, device=device)
    return engine if layout is None else with_layout(engine, image, target, layout)


def order_cotangents(model: nn.Module) -> None:
    """From now on cotangents reach the model's batch and instance norms in contiguous layout.

    In another one plain autograd gets some of them wrong (docs/decisions/0008-where-plain-autograd-is-wrong.md).
    """

    def ordered(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(Tensor.contiguous)

    for module in model.modules():
        if isinstance(module, _BatchNorm | _InstanceNorm):
            module.register_forward_hook(ordered)


def compare(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    image: Tensor,
    target: Tensor,
    *,
    tile: tuple[int, int] | None,
    device: str = "cpu",
    layout: str | None = None,
) -> Comparison:
    """`image` is `(C, H, W)` or a bag `(N, C, h, w)`; a dense `target` is `(C, H, W)` too, and a label is passed as it
    is. `layout` as in `compiled`."""
    reference_model = copy.deepcopy(model)
    reference_model.zero_grad()
    order_cotangents(reference_model)
    batch = image if image.ndim == 4 else image[None]
    whole = loss(reference_model(batch), target[None] if target.ndim == 3 else target)
    whole.backward()
    expected = {name: p.grad for name, p in reference_model.named_parameters() if p.grad is not None}
    model.zero_grad()
    engine = compiled(model, loss, image, target, tile=tile, device=device, layout=layout)
    value = engine.backward(image, target)
    scale = torch.stack([g.norm() for g in expected.values()]).norm().item() if expected else 0.0
    worst, worst_name = 0.0, ""
    for name, parameter in model.named_parameters():
        reference = expected.get(name)
        if reference is None:
            assert parameter.grad is None or not parameter.grad.any(), f"{name} has a gradient, autograd gives none"
            continue
        assert parameter.grad is not None, f"{name} has no gradient"
        # A gradient that is zero but for rounding has no relative error: the rounding of the whole gradient and of
        # the loss is then its scale (at a tolerance of 1e-11 the latter floor is the loss's machine epsilon).
        size = max(reference.norm().item(), 1e-4 * scale, 1e-5 * abs(whole.item()))
        error = (parameter.grad - reference).norm().item() / size if size else 0.0
        if error >= worst:
            worst, worst_name = error, name
    loss_error = abs(value.item() - whole.item()) / max(abs(whole.item()), 1e-300)
    buffers = zip(model.buffers(), reference_model.buffers(), strict=True)
    differences = [
        ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1.0)).item()
        for a, b in buffers
        if b.numel()
    ]
    return Comparison(loss_error, worst, worst_name, max(differences, default=0.0), engine.plan(image, target))
