"""Do otherwise, while a model is traced, what PyTorch's own modules and functions do and its export cannot follow.

- Instance norm writes its running statistics where functionalisation does not see it: they are computed beside it.
- Batch norm with `momentum=None` turns the number of its steps into a Python number: a tensor does as well.
- `as_strided` reads memory, whose order a gathered field has not: it reads a copy in that order.
- `random_` between two numbers is an operator whose name is a word of Python's.
- A module with buffers under two names makes aliases of them: the second name gets a tensor that nobody reads.

And masks of class ids come to PyTorch's losses of them as images are, `(N, 1, H, W)` of any integers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from gigagrad.errors import CaptureError

_FORWARD = _BatchNorm.forward


def untie(exported: torch.export.ExportedProgram) -> None:
    """Give the second name of a parameter or buffer a tensor of its own: the traced code reads it by one name only."""
    state, seen = exported.state_dict, set[int]()
    used = {spec.target for spec in exported.graph_signature.input_specs if _is_read(exported, spec.arg.name)}
    for name, tensor in sorted(state.items(), key=lambda item: item[0] not in used):
        if id(tensor) in seen and name not in used:
            own = tensor.detach().clone()
            state[name] = nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own
        seen.add(id(tensor))


def _is_read(exported: torch.export.ExportedProgram, placeholder: str) -> bool:
    return any(node.name == placeholder and node.users for node in exported.graph.nodes)


@contextmanager
def batch_norm_traceable() -> Iterator[None]:
    """Count the steps of batch norms without momentum in tensors; subclasses that call `super().forward` included."""
    _BatchNorm.forward = _batch_norm_forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        _BatchNorm.forward = _FORWARD  # type: ignore[method-assign]


def _batch_norm_forward(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    if self.momentum is None and self.track_running_stats and self.training:
        return _cumulative(self, input)
    return _FORWARD(self, input)


def _cumulative(self: _BatchNorm, field: torch.Tensor) -> torch.Tensor:
    """Training-mode batch norm whose running statistics are the plain average of all steps so far."""
    self._check_input_dim(field)  # type: ignore[no-untyped-call]
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


def _of_class_ids(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The loss for targets that it would refuse: class ids with an axis for one channel, and in small integers."""

    @functools.wraps(loss)
    def called(input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool):
            one_channel = target.ndim == input.ndim > 2 and target.shape[1] == 1
            target = (target.squeeze(1) if one_channel else target).long()
        return loss(input, target, *args, **kwargs)

    return called


class TakingClassIds(TorchFunctionMode):
    """PyTorch's losses of class ids take them as masks hold them, in the block."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _LOSSES.get(func, func)(*args, **(kwargs or {}))


def as_strided(
    input: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """`torch.as_strided` of the values in the order in which they lie in memory. Raises CaptureError where `input` is
    a part of what lies there.
    """
    strides = input.stride()
    order = sorted(range(input.ndim), key=lambda axis: (-strides[axis], axis))
    lying = input.permute(order)
    if not lying.is_contiguous() or input.storage_offset() or _held(input) != input.numel():
        raise CaptureError(
            "the model or the loss uses as_strided on a part of a tensor, which reads beside it in memory; use slices, "
            "unfold, or as_strided of input.contiguous()"
        )
    return torch.as_strided(lying.reshape(-1), size, stride, storage_offset)


def _held(tensor: torch.Tensor) -> int:
    """Of how many values the memory is."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def random_(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.Tensor.random_`, of whose operator `random.from` no program can be written: Python keeps the word."""
    bounds = {**dict(zip(("from", "to"), args, strict=False)), **kwargs}
    if "from" not in bounds or bounds.get("to") is None:
        return input.random_(*args, **kwargs)
    return input.copy_(torch.randint_like(input, bounds["from"], bounds["to"]))


_LOSSES: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {F.cross_entropy: _of_class_ids(F.cross_entropy), F.nll_loss: _of_class_ids(F.nll_loss)}
)
INSTEAD: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        **_LOSSES,
        F.instance_norm: instance_norm,
        torch.as_strided: as_strided,
        torch.Tensor.as_strided: as_strided,
        torch.Tensor.random_: random_,
    }
)
"""What is called in the place of functions of PyTorch."""
