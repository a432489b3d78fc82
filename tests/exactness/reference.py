"""Plain autograd, protected from a fault of its own (docs/decisions/0008-where-plain-autograd-is-wrong.md)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


def order_cotangents(model: nn.Module) -> None:
    """From now on cotangents reach the model's batch and instance norms in contiguous layout."""

    def ordered(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(Tensor.contiguous)

    for module in model.modules():
        if isinstance(module, _BatchNorm | _InstanceNorm):
            module.register_forward_hook(ordered)
