"""Three things that PyTorch's modules do and its export cannot follow, done otherwise on the copy that is traced.

- Instance norm writes its running statistics where functionalisation does not see it: they are computed beside it.
- Batch norm with `momentum=None` turns the number of its steps into a Python number: a tensor does as well.
- A module with buffers under two names makes aliases of them: the second name gets a module that calls the first.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def make_traceable(module: nn.Module) -> None:
    """Change a copy of a model in place; its meaning stays, and its parameters and buffers stay under their names."""
    for part in module.modules():
        if isinstance(part, _BatchNorm) and part.momentum is None and part.track_running_stats and part.training:
            part.forward = types.MethodType(_cumulative, part)  # type: ignore[method-assign]
    seen: set[int] = set()
    for part in list(module.modules()):
        for name, child in part._modules.items():
            if child is None or next(child.buffers(), None) is None:
                continue
            if id(child) in seen:
                part._modules[name] = _Same(child)
            seen.add(id(child))


class _Same(nn.Module):
    """Calls a module that is registered elsewhere, and has its attributes."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["_original"] = (original,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_original"][0](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"][0], name)


def _cumulative(self: _BatchNorm, field: torch.Tensor) -> torch.Tensor:
    """Training-mode batch norm whose running statistics are the plain average of all steps so far."""
    assert self.training  # the guard watches what is read, and PyTorch's own forward reads it
    assert self.num_batches_tracked is not None
    assert self.running_mean is not None
    assert self.running_var is not None
    with torch.no_grad():
        self.num_batches_tracked.add_(1)
        share = 1.0 / self.num_batches_tracked.to(self.running_mean.dtype)
        dims = [0, *range(2, field.ndim)]
        variance, mean = torch.var_mean(field, dims, correction=1)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.copy_((1 - share) * running + share * new)
    return F.batch_norm(field, None, None, self.weight, self.bias, True, 0.0, self.eps)


def instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`torch.nn.functional.instance_norm` with its updates in the open."""
    if use_input_stats and running_mean is not None and running_var is not None:
        with torch.no_grad():
            variance, mean = torch.var_mean(input, list(range(2, input.ndim)), correction=1)
            for running, new in ((running_mean, mean), (running_var, variance)):
                running.copy_((1 - momentum) * running + momentum * new.mean(0).to(running.dtype))
        running_mean = running_var = None
    return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
