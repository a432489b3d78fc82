"""Put others in the places of functions of PyTorch and Python while a model is traced, and leave all as it was.

Some do what PyTorch's do in a way that its export can follow:

- Instance norm writes its running statistics where functionalisation does not see it: they are computed beside it.
- Batch norm with `momentum=None` turns the number of its steps into a Python number: a tensor does as well.
- `as_strided` reads memory, whose order a gathered field has not: it reads a copy in that order.
- `random_` between two numbers is an operator whose name is a word of Python's.

Losses of class ids take them as images are, `(N, 1, H, W)` of any integers. The others show code what it would see if
it ran and were not traced: plain tensors, the user's own objects, and no compiler at work.

Tracing pushes modes onto stacks and takes them off for a moment. An interrupt (Ctrl-C) between the two leaves a stack
as it is just then; some of PyTorch's own context managers fail on their way out and hide the interrupt behind an error
of theirs; and whatever is traced afterwards meets the modes that were left (`state_kept`).
"""

from __future__ import annotations

import builtins
import functools
import logging
import math
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import _ops, nn, overrides
from torch._export import utils as export_utils
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as dispatch
from torch.utils import checkpoint

from gigagrad.errors import CaptureError
from gigagrad.threads import uncollected

_FORWARD = _BatchNorm.forward


@contextmanager
def exchanged(holder: Any, **parts: Any) -> Iterator[None]:
    """Have attributes of a module or a class be others in the block."""
    held = {name: getattr(holder, name) for name in parts}
    try:
        for name, part in parts.items():
            setattr(holder, name, part)
        yield
    finally:
        for name, part in held.items():
            setattr(holder, name, part)


def batch_norm_traceable() -> AbstractContextManager[None]:
    """Count the steps of batch norms without momentum in tensors; subclasses that call `super().forward` included."""
    return exchanged(_BatchNorm, forward=_batch_norm_forward)


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


class Calling(TorchFunctionMode):
    """Have a function make every call of PyTorch in the block: it gets the function, and the arguments by position and
    by name."""

    def __init__(self, call: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._call(func, args, kwargs or {})


def taking_class_ids() -> TorchFunctionMode:
    """Have PyTorch's losses of class ids take them as masks hold them, in the block."""
    return Calling(lambda func, args, kwargs: _LOSSES.get(func, func)(*args, **kwargs))


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

    find_mode: Any = export_utils._maybe_find_pre_dispatch_tf_mode_for_export

    def exporting_mode() -> Any:
        with exchanged(torch.compiler, **held):
            return find_mode()

    with (
        exchanged(export_utils, _maybe_find_pre_dispatch_tf_mode_for_export=exporting_mode),
        exchanged(torch.compiler, **dict.fromkeys(held, False)),
    ):
        yield


def modules_themselves() -> AbstractContextManager[None]:
    """Keep export from handing out a stand-in of each module where one is registered twice."""
    tracer: Any = proxy_tensor._ModuleStackTracer
    original = tracer.__init__

    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        self.enable_attr_proxy = False

    return exchanged(tracer, __init__=init)


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


class _Ids:
    """Ids of objects in the copy that runs, with those of the objects that they are copies of."""

    originals: Mapping[int, int] = MappingProxyType({})


def ids_of(originals: dict[int, int]) -> AbstractContextManager[None]:
    """Have code that asks for an `id` in the block get that of the original."""
    return exchanged(_Ids, originals=originals)


def _id_of_original(value: Any, /) -> int:
    return _Ids.originals.get(id(value), id(value))


_SHOWN = {"type": _Type, "id": _id_of_original}


class PlainTypes:
    """Put another `type` and `id` into the global names of code that asks for them, as long as it is traced."""

    def __init__(self) -> None:
        self.into: list[tuple[dict[str, Any], str]] = []

    def add(self, code: types.CodeType, globals_: dict[str, Any]) -> None:
        """Have this code see plain tensors, and the identities of the user's objects."""
        for name, shown in _SHOWN.items():
            if name in code.co_names and name not in globals_:
                globals_[name] = shown
                self.into.append((globals_, name))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the global names as they were meanwhile."""
        try:
            for globals_, name in self.into:
                del globals_[name]
            yield
        finally:
            for globals_, name in self.into:
                globals_[name] = _SHOWN[name]


@contextmanager
def plain_types(ran: Iterable[tuple[types.CodeType, dict[str, Any]]] = ()) -> Iterator[PlainTypes]:
    """Have this code, with its global names, see plain tensors; more may be added in the block."""
    shown = PlainTypes()
    try:
        for code, globals_ in ran:
            shown.add(code, globals_)
        yield shown
    finally:
        for globals_, name in shown.into:
            globals_.pop(name, None)


class Checkpoints:
    """Note which functions are checkpointed (`torch.utils.checkpoint`), and run those again that write into buffers.

    PyTorch runs them again in the backward pass: it counts the batches of a norm inside of one twice, and moves its
    running statistics twice.
    """

    def __init__(self) -> None:
        self._again: list[Callable[[], Any]] = []
        self._inside = False
        self._writes = False
        self.ran_again = False

    def note_write(self) -> None:
        """Note that a buffer is written."""
        self._writes = True

    def run_again(self) -> None:
        """Run the functions as the backward pass does: the last one first, and what is checkpointed in it after it."""
        again, self._again = self._again, []
        for function in reversed(again):
            self.ran_again = True
            function()
            self.run_again()

    def watched(self) -> AbstractContextManager[None]:
        """Run checkpointed functions plainly in the block, and note which they are."""
        return exchanged(
            checkpoint,
            _checkpoint_without_reentrant_generator=self._without_reentrant(
                checkpoint._checkpoint_without_reentrant_generator
            ),
            CheckpointFunction=SimpleNamespace(apply=self._reentrant),
        )

    def _without_reentrant(self, original: Callable[..., Any]) -> Callable[..., Any]:
        settings = original.__code__.co_argcount - 1

        def generator(function: Callable[..., Any], *settings_and_args: Any, **kwargs: Any) -> Iterator[None]:
            steps = original(function, *settings_and_args, **kwargs)
            given = settings_and_args[settings:]
            next(steps)
            with self._region(lambda: function(*given, **kwargs)):
                yield
            next(steps, None)

        return generator

    def _reentrant(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Run a function as the reentrant kind does: nothing has a gradient where no argument has one."""
        tracked = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in args)
        with torch.set_grad_enabled(tracked and torch.is_grad_enabled()), self._region(lambda: function(*args)):
            return function(*args)

    @contextmanager
    def _region(self, function: Callable[[], Any]) -> Iterator[None]:
        if self._inside or not torch.is_grad_enabled():
            yield
            return
        self._inside, self._writes = True, False
        try:
            yield
        finally:
            self._inside = False
        if self._writes:
            self._again.append(function)


_STACKS: tuple[tuple[Callable[[], list[Any]], Callable[[], Any], Callable[[Any], Any]], ...] = (
    (
        lambda: [None] * _ops._len_torch_dispatch_stack_pre_dispatch(),  # type: ignore[no-untyped-call]
        _ops._pop_mode_from_pre_dispatch,
        _ops._set_mode_pre_dispatch,
    ),
    (dispatch._get_current_dispatch_mode_stack, dispatch._pop_mode, dispatch._push_mode),
    (overrides._get_current_function_mode_stack, overrides._pop_mode, overrides._push_mode),
)
"""Three functions for each stack of modes: one lists it, one takes off the last mode, one puts a mode on. Of the first
only the length can be asked; outside of PyTorch's tracing it is empty."""


@contextmanager
def state_kept() -> Iterator[None]:
    """Restore PyTorch's modes, dispatch keys and generator and Python's functions; let an interrupt out as one.

    Code that `torch.compile` has compiled runs as it was written meanwhile, and no garbage is collected: what that
    calls is nobody's forward, and there is little of it, but much to look through.
    """
    modes = [read() for read, _, _ in _STACKS]
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    config = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
    with (
        uncollected(),
        exchanged(builtins, max=builtins.max, min=builtins.min),  # as export leaves them in its place
        exchanged(math, pow=math.pow),
        torch._C._ForceDispatchKeyGuard(*keys),
        torch.random.fork_rng(devices=[]),
    ):
        try:
            with torch.compiler.set_stance("force_eager"), config:
                yield
        except BaseException as error:
            for (read, pop, push), before in zip(_STACKS, modes, strict=True):
                if list(map(id, now := read())) == list(map(id, before)):
                    continue
                for _ in now:
                    pop()
                for mode in before:
                    push(mode)
            if (interrupt := _interrupt_behind(error)) is not None and interrupt is not error:
                raise interrupt from None
            raise


def _interrupt_behind(error: BaseException | None) -> BaseException | None:
    """Return the cause that was raised first if it is no error: Ctrl-C, or the end of a process."""
    while error is not None:
        if not isinstance(error, Exception):
            return error
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def quietly() -> Iterator[None]:
    """Silence torch.export: it warns about its own internals, and logs the traceback of what becomes our error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
