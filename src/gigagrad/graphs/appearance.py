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
    """Stands for the builtin `type`, and names the class that a fake tensor stands for."""


_originals: dict[int, int] = {}
"""By the id of an object of the copy that runs: the id of what it is a copy of."""


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
    """Puts another `type` and `id` into the global names of code that asks for them, as long as it is traced."""

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
