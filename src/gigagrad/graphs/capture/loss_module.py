"""Model and loss as one module, watched while a copy of it is traced."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from gigagrad.errors import CaptureError
from gigagrad.graphs.capture.constants import Constants
from gigagrad.graphs.capture.stand_ins import (
    INSTEAD,
    Calling,
    batch_norm_traceable,
    ids_of,
    not_compiling,
    taking_class_ids,
)
from gigagrad.graphs.capture.traversal import is_library
from gigagrad.graphs.capture.writes import Learned, Writes, at

SOURCE = "gigagrad source"
CLOSED = "closed"
"""The prefix of tensors that the model and the loss read although no module of theirs holds them."""
_VERSION: Any = torch.Tensor._version.__get__  # type: ignore[attr-defined]
HOOKS = frozenset({torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook})
_ONLY_WHILE_TRACED = (
    CaptureError,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    GuardOnDataDependentSymNode,
)
_DUAL = frozenset({torch._VF._make_dual, torch._VF._unpack_dual})
_NO_NUMPY = ".numpy() is not supported"

Trace = Callable[[Any, Any, Any, Any], None]
"""Called after every call of PyTorch with the function, its arguments by position and by name, and its result."""


class LossModule(nn.Module):
    """Computes `loss(model(*images), target)` as one module, so that parameters of a loss module are found too.

    `precision` is the dtype that the model and the loss run in: a half precision as autocast would, a full one as if
    the parameters, buffers and images were cast; None: as they are.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None, precision: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.precision = precision
        self.training = model.training

    def forward(self, images: tuple[torch.Tensor, ...], target: Any = None) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return what the loss or the model returns, and the buffers that were replaced by new tensors on the way."""
        before = dict(self.named_buffers())
        fake_copy: FakeCopy = self.__dict__["_fake_copy"]
        with fake_copy.observed() as writes:
            output = self._output(images)
            result = output if self.loss is None else self.loss(output, target)
            if self.loss is not None:
                writes.checkpoints.run_again()
        writes.finish()
        own = [(name, now) for name, now in self.named_buffers() if not name.startswith(f"{CLOSED}.")]
        replaced = {name: writes.current(now) for name, now in own if now is not before.get(name)}
        stored = ((name, now) for name, now in (*own, *self.named_parameters()) if id(now) in writes.exchanged)
        return writes.current(result), replaced | {name: writes.exchanged[id(now)] for name, now in stored}

    @property
    def is_compiled(self) -> bool:
        """True where a module is one that `torch.compile` made."""
        return any(type(one).__name__ == "OptimizedModule" or one._compiled_call_impl for one in self.modules())

    def plainly(self, images: tuple[torch.Tensor, ...], target: Any = None) -> Any:
        """Return what the loss or the model returns where PyTorch runs them, nothing watched or replaced."""
        output = self._output(images)
        if self.loss is None:
            return output
        with taking_class_ids():
            return self.loss(output, target)

    def _output(self, images: tuple[torch.Tensor, ...]) -> Any:
        """Call the model; with its batch axis an image that asks for a gradient is no leaf."""
        return self.model(*(image.view_as(image) if image.requires_grad else image for image in images))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all parameters and buffers."""
        return (*self.parameters(), *self.buffers())

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return all parameters and buffers under each of their names: `named_parameters` and `named_buffers`, with
        duplicates, in a fifth of their time.
        """
        found: dict[str, torch.Tensor] = {}

        def visit(module: nn.Module, prefix: str) -> None:
            for own, tensor in chain(module._buffers.items(), module._parameters.items()):
                if tensor is not None:
                    found[prefix + own] = tensor
            for own, child in module._modules.items():
                if child is not None:
                    visit(child, f"{prefix}{own}.")

        visit(self, "")
        return found

    @property
    def autocast(self) -> torch.dtype | None:
        return self.precision if self.precision in (torch.bfloat16, torch.float16) else None

    def dtype_of(self, given: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter, a buffer or an image of the given one takes part."""
        full = self.precision is not None and self.autocast is None and given.is_floating_point
        return self.precision if full and self.precision is not None else given


class FakeCopy:
    """A copy of a loss module with fake parameters and buffers, on `home` if it is named.

    `trace` is told of every call while the copy runs. With `adopting`, a real tensor that is met becomes one of the
    copy's own, as `closed.0`, `closed.1`, ...
    """

    def __init__(
        self,
        original: LossModule,
        mode: FakeTensorMode,
        outside: Iterable[torch.Tensor],
        closed: Iterable[torch.Tensor],
        home: torch.device | None = None,
    ) -> None:
        """The memo keeps deepcopy from ever copying a real tensor. Tensors that are `outside` all modules stay
        themselves, and so do modules of Python; those that are `closed` over become parameters and buffers of the copy.
        """
        self._mode, self._home = mode, home
        self._named = {id(t): name for name, t in [*original.named_parameters(), *original.named_buffers()]}
        self.real = dict(original.named_buffers())
        """The model's buffers, and tensors from outside, by their names in the copy."""
        self.asked: dict[str, torch.Tensor] = {}
        """The values of those that code asked for numbers."""
        self.closed: list[torch.Tensor] = []
        self.adopting = False
        self.trace: Trace | None = None
        self.stopped: Exception | None = None
        """The error of a call that plain PyTorch would have let pass, whoever catches it."""
        self.known_writes: Learned | None = None
        self.writes: Writes
        """The in-place writes of the last run."""
        memo: dict[int, Any] = {id(shared): shared for shared in (*outside, *sys.modules.values())}
        for tensor in original.tensors():
            asks = isinstance(tensor, nn.Parameter)
            fake = mode.from_tensor(tensor.detach() if asks else tensor).to(home, original.dtype_of(tensor.dtype))
            memo[id(tensor)] = made = nn.Parameter(fake, tensor.requires_grad) if asks else fake
            vars(made).update(vars(tensor))  # people write on tensors how they are to be treated
        self.module: LossModule = copy.deepcopy(original, memo)
        self.module.add_module(CLOSED, nn.Module())
        self.module.__dict__["_fake_copy"] = self
        self.ids = {id(copied): original_id for original_id, copied in memo.items()}
        self._ids_by_name = {name: id(tensor) for name, tensor in original.named_tensors().items()}
        for tensor in closed:
            self.adopt(tensor)

    @contextmanager
    def observed(self) -> Iterator[Writes]:
        """Write into the traced graph what export would leave out, and put the copy's own tensors in the place of the
        model's where code reaches for those from outside: a loss that closes over the model, say.
        """
        asking = {id(parameter): parameter.requires_grad for parameter in self.module.parameters()}
        buffers = {id(buffer) for buffer in self.module.buffers()}
        self.writes = Writes(self.known_writes, asking, buffers)
        constants = Constants(self.module, self.real, self.asked)
        with (
            Calling(lambda func, args, kwargs: self._call(func, args, kwargs, constants)),
            not_compiling(),
            ids_of(self.ids_now()),
            batch_norm_traceable(),
            self.writes.checkpoints.watched(),
        ):
            yield self.writes

    def _call(self, func: Any, args: Any, kwargs: Any, constants: Constants) -> Any:
        """Return the result of a call of PyTorch.

        - Its nodes are marked with the user's line: export keeps frames of functions named `forward` only.
        - What autograd does not see: `torch.no_grad` regions and writes through detached tensors (`Writes`).
        - Hooks on tensors would be dropped: they are refused.
        """
        frame = sys._getframe(3)
        self.writes.line = line = user_line(frame)
        if func in HOOKS:
            raise hook_error(line)
        if kwargs.get("generator") is not None:
            raise CaptureError(
                f"the model or the loss draws from a generator of its own{at(line)} (generator=...), which tiles and "
                "ranks cannot share; leave it out: torch.manual_seed, or seed= of gg.compile, decides what is drawn"
            )
        if getattr(func, "__module__", None) == "torch._functorch.predispatch" or func in _DUAL:
            return func(*args, **kwargs)  # a transform, which export sees in calls of its own
        if func == _VERSION and is_user_code(frame.f_code.co_filename):
            raise CaptureError(
                f"the model or the loss reads a tensor's _version at {line}, which is another one in the copy that is "
                "traced; count in an attribute when the tensor is changed"
            )
        args = tuple(map(self.replacement, args))
        kwargs = {name: self.replacement(value) for name, value in kwargs.items()}
        func = INSTEAD.get(func, func)
        try:
            with _written_by(line):
                result = constants.call(func, args, kwargs, self.writes)
        except Exception as error:
            if isinstance(error, _ONLY_WHILE_TRACED) or _NO_NUMPY in str(error):
                self.stopped = self.stopped or error
            raise
        if self.trace is not None:
            self.trace(func, args, kwargs, result)
        return result

    def adopt(self, tensor: torch.Tensor) -> None:
        name = str(len(self.closed))
        self.closed.append(tensor)
        self._named[id(tensor)] = f"{CLOSED}.{name}"
        fake = self._mode.from_tensor(tensor.detach()).to(self._home)
        holder = self.module.get_submodule(CLOSED)
        if tensor.requires_grad:
            holder.register_parameter(name, nn.Parameter(fake))
        else:
            holder.register_buffer(name, fake)
            self.real[f"{CLOSED}.{name}"] = tensor

    def replacement(self, value: Any) -> Any:
        """Return the copy's own tensor for a real one, and everything else as it is, in nests too."""
        if isinstance(value, torch.Tensor):
            name = self._named.get(id(value))
            if name is None:
                is_one = type(value) in (torch.Tensor, nn.Parameter) and not is_functorch_wrapped_tensor(value)
                if not (self.adopting and is_one):
                    return value
                self.adopt(value)
                name = self._named[id(value)]
            path, _, own = name.rpartition(".")
            holder = self.module.get_submodule(path)
            found = holder._parameters.get(own)
            return holder._buffers.get(own) if found is None else found
        if type(value) in (list, tuple):
            return type(value)(map(self.replacement, value))
        return value

    def replacing(self) -> TorchFunctionMode:
        """Put the copy's own tensors in their places in every call of PyTorch in the block."""

        def call(func: Any, args: Any, kwargs: Any) -> Any:
            named = {name: self.replacement(value) for name, value in kwargs.items()}
            return func(*map(self.replacement, args), **named)

        return Calling(call)

    def ids_now(self) -> dict[int, int]:
        """Map the ids of the copies, as they are now, to those of the originals: export puts other parameters and
        buffers in their places while it traces.
        """
        known, named = self._ids_by_name, self.module.named_tensors()
        return self.ids | {id(tensor): known[name] for name, tensor in named.items() if name in known}

    def is_original(self, tensor: torch.Tensor) -> bool:
        """Tell whether a parameter or a buffer of the copy stands for it."""
        return not self._named.get(id(tensor), CLOSED).startswith(CLOSED)

    def stands_for(self, value: Any, original: Any) -> bool:
        """Tell whether a value is the copy's replacement of an original tensor."""
        known = isinstance(original, torch.Tensor) and id(original) in self._named
        return known and self.replacement(original) is value


@contextmanager
def _written_by(line: str) -> Iterator[None]:
    """Mark nodes that are traced in the block with a line, like `torch.fx.traceback.annotate`, which 2.9 has not."""
    meta = fx_traceback.get_current_meta()
    before = meta.get("custom")
    meta["custom"] = {**(before or {}), SOURCE: line}
    try:
        yield
    finally:
        del meta["custom"]
        if before is not None:
            meta["custom"] = before


def hook_error(line: str) -> CaptureError:
    return CaptureError(
        f"the model or the loss registers a hook on a gradient{at(line)}, which would see tiles, not the image; hooks "
        "on parameters outside of forward are called as in PyTorch, gradients can be clipped after backward"
    )


def user_line(frame: FrameType | None) -> str:
    """Return `file:line` of the innermost frame that is the user's, inside model or loss."""
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = None if frame.f_code is LossModule.forward.__code__ else frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def is_user_code(filename: str) -> bool:
    """Tell whether a file holds code whose lines can be named to a user."""
    return not is_library(filename) and "<" not in filename
