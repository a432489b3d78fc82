"""Shows code what it would see if it ran and were not traced: plain tensors, and no compiler at work."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._export import utils as export_utils
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor

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
    tracer = proxy_tensor._ModuleStackTracer
    original = tracer.__init__

    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        self.enable_attr_proxy = False

    tracer.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        tracer.__init__ = original  # type: ignore[method-assign]


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
    """Stands for the builtin `type`, and names the class that a fake tensor stands for."""


class PlainTypes:
    """Puts another `type` into the global names of code that asks for types, as long as it is traced."""

    def __init__(self) -> None:
        self._into: list[dict[str, Any]] = []

    def add(self, code: types.CodeType, globals_: dict[str, Any]) -> None:
        """Have this code see plain tensors."""
        if "type" in code.co_names and "type" not in globals_:
            globals_["type"] = _Type
            self._into.append(globals_)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the global names as they were meanwhile."""
        try:
            for globals_ in self._into:
                del globals_["type"]
            yield
        finally:
            for globals_ in self._into:
                globals_["type"] = _Type

    def remove(self) -> None:
        """Leave the global names as they were."""
        for globals_ in self._into:
            globals_.pop("type", None)
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
