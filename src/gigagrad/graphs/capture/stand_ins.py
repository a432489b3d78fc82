"""Put others in the places of functions of PyTorch and Python while a model is traced.

Some do what PyTorch's do in a way that its export can follow:

- Instance norm writes its running statistics where functionalisation does not see it: they are computed beside it.
- Batch norm with `momentum=None` turns the number of its steps into a Python number: a tensor does as well.
- `as_strided` reads memory, whose order a gathered field has not: it reads a copy in that order.
- `random_` between two numbers is an operator whose name is a word of Python's.

Losses of class ids take them as images are, `(N, 1, H, W)` of any integers. The others show code what it would see if
it ran and were not traced: plain tensors, the user's own objects, and no compiler at work.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._export import utils as export_utils
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from gigagrad.errors import CaptureError

_FORWARD = _BatchNorm.forward


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
    """Make a loss take targets that it would refuse: class ids with an axis for one channel, and in small integers."""

    @functools.wraps(loss)
    def called(input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool):
            one_channel = target.ndim == input.ndim > 2 and target.shape[1] == 1
            target = (target.squeeze(1) if one_channel else target).long()
        return loss(input, target, *args, **kwargs)

    return called


class TakingClassIds(TorchFunctionMode):
    """Have PyTorch's losses of class ids take them as masks hold them, in the block."""

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
    """Return for how many values there is memory."""
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
"""Functions by those of PyTorch in whose places they are called."""


_FLAGS = "_is_compiling_flag", "_is_exporting_flag"


@contextmanager
def not_compiling() -> Iterator[None]:
    """Have `torch.compiler.is_compiling()` say no, where export says yes; transforms of functions (vmap) are told."""
    held = {flag: getattr(torch.compiler, flag) for flag in _FLAGS if hasattr(torch.compiler, flag)}

    def exporting_mode() -> Any:
        for flag, value in held.items():
            setattr(torch.compiler, flag, value)
        try:
            return find_mode()  # type: ignore[no-untyped-call]
        finally:
            for flag in held:
                setattr(torch.compiler, flag, False)

    find_mode = export_utils._maybe_find_pre_dispatch_tf_mode_for_export
    export_utils._maybe_find_pre_dispatch_tf_mode_for_export = exporting_mode
    try:
        for flag in held:
            setattr(torch.compiler, flag, False)
        yield
    finally:
        export_utils._maybe_find_pre_dispatch_tf_mode_for_export = find_mode
        for flag, value in held.items():
            setattr(torch.compiler, flag, value)


@contextmanager
def modules_themselves() -> Iterator[None]:
    """Keep export from handing out a stand-in of each module where one is registered twice."""
    tracer: Any = proxy_tensor._ModuleStackTracer
    original = tracer.__init__

    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        self.enable_attr_proxy = False

    tracer.__init__ = init
    try:
        yield
    finally:
        tracer.__init__ = original


class _AsRun(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            if type(args[0]) is FakeTensor:
                return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor
            return type(args[0])
        return type(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)


class _Type(type, metaclass=_AsRun):
    """Stand for the builtin `type`, and name the class that a fake tensor stands for."""


_originals: dict[int, int] = {}
"""Ids of objects in the copy that runs, with those of the objects that they are copies of."""


@contextmanager
def ids_of(originals: dict[int, int]) -> Iterator[None]:
    """Have code that asks for an `id` in the block get that of the original."""
    held = dict(_originals)
    _originals.clear()
    _originals.update(originals)
    try:
        yield
    finally:
        _originals.clear()
        _originals.update(held)


def _id_of_original(value: Any, /) -> int:
    return _originals.get(id(value), id(value))


_SHOWN = {"type": _Type, "id": _id_of_original}


class PlainTypes:
    """Put another `type` and `id` into the global names of code that asks for them, as long as it is traced."""

    def __init__(self) -> None:
        self._into: list[tuple[dict[str, Any], str]] = []

    def add(self, code: types.CodeType, globals_: dict[str, Any]) -> None:
        """Have this code see plain tensors, and the identities of the user's objects."""
        for name, shown in _SHOWN.items():
            if name in code.co_names and name not in globals_:
                globals_[name] = shown
                self._into.append((globals_, name))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the global names as they were meanwhile."""
        try:
            for globals_, name in self._into:
                del globals_[name]
            yield
        finally:
            for globals_, name in self._into:
                globals_[name] = _SHOWN[name]

    def remove(self) -> None:
        """Leave the global names as they were."""
        for globals_, name in self._into:
            globals_.pop(name, None)
        self._into.clear()


@contextmanager
def plain_types(ran: Iterable[tuple[types.CodeType, dict[str, Any]]]) -> Iterator[None]:
    """Have this code, with its global names, see plain tensors."""
    types_ = PlainTypes()
    try:
        for code, globals_ in ran:
            types_.add(code, globals_)
        yield
    finally:
        types_.remove()
