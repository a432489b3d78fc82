"""Everything that the code of a model and a loss can see: a walk from them over attributes, closures and globals.

The walk finds `places` (what can change) and `tensors`. It follows data wherever it leads, and the globals of code only
once that code has run (`ran`), as a compiler that guards its assumptions does (PyTorch's TorchDynamo, Ansel et al.,
ASPLOS 2024): what code never ran has read nothing.
"""

from __future__ import annotations

import builtins
import functools
import random
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gigagrad.graphs.places import (
    ITERATORS,
    MISSING,
    SEQUENCES,
    ArrayPlace,
    CellPlace,
    ClassPlace,
    DictPlace,
    FunctionPlace,
    IteratorPlace,
    ListPlace,
    NamesPlace,
    Place,
    RandomPlace,
    SetPlace,
    SlotsPlace,
    is_atom,
)

_MOST_PLACES = 500_000
"""A walk that leads this far has left the model; what lies beyond is not watched."""
_LIBRARIES = tuple(f"{path}/".replace("\\", "/") for path in (Path(torch.__file__).parent, Path(np.__file__).parent))
_TOOLS = ("/site-packages/sympy/", "/site-packages/mpmath/")
"""What PyTorch computes shapes with."""
_STANDARD_LIBRARY = sysconfig.get_path("stdlib").replace("\\", "/")
_OWN = str(Path(__file__).parent).replace("\\", "/")
_DYNAMIC = frozenset({"getattr", "vars", "__dict__", "attrgetter", "methodcaller", "eval", "deepcopy", "asdict"})
"""Names in code that reads attributes by names which are not in the code."""
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


@functools.lru_cache(maxsize=65_536)
def is_library(filename: str) -> bool:
    """Whether code belongs to Python, PyTorch, NumPy or to capture itself: its globals are nobody's settings."""
    slashed = filename.replace("\\", "/")
    standard = slashed.startswith(_STANDARD_LIBRARY) and "site-packages" not in slashed
    return standard or slashed.startswith((*_LIBRARIES, _OWN, "<frozen")) or any(tool in slashed for tool in _TOOLS)


class Ran:
    """The code that ran while a model was tried, and the names in it: attributes and globals that it may have read."""

    def __init__(self) -> None:
        self.globals: dict[int, tuple[types.CodeType, dict[str, Any]]] = {}
        self.names: set[str] = set()
        self.any_name = False

    def add(self, code: types.CodeType, globals_: dict[str, Any]) -> bool:
        """Whether this is new code with globals that may be somebody's settings."""
        if id(code) in self.globals:
            return False
        self.globals[id(code)] = code, globals_
        names = [*code.co_names, *(text for text in code.co_consts if isinstance(text, str) and text.isidentifier())]
        self.names.update(names)
        own = self.is_users(code)
        self.any_name = self.any_name or (own and not _DYNAMIC.isdisjoint(names))
        return own

    @staticmethod
    def is_users(code: types.CodeType) -> bool:
        return not is_library(code.co_filename)

    def users(self) -> list[tuple[types.CodeType, dict[str, Any]]]:
        """The user's code among it, with its globals."""
        return [(code, globals_) for code, globals_ in self.globals.values() if self.is_users(code)]

    def reads(self, name: Any) -> bool:
        return self.any_name or name in self.names


class Walk:
    """Places and tensors that can be reached from `roots` (by the names they go by).

    With `ran`, of objects' attributes only those whose names stand in code that ran, and that code's globals.
    """

    def __init__(self, roots: Mapping[str, Any], ran: Ran | None = None) -> None:
        self.places: list[Place] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._ran = ran
        self._seen: dict[int, Any] = {}
        self._namespaces: dict[int, dict[str, None]] = {}
        for path, root in roots.items():
            self.visit(root, path)
        if ran is not None:
            self.visit_ran(ran)

    def visit(self, value: Any, path: str) -> None:
        """The value and all that it leads to."""
        waiting = [(value, path)]
        while waiting and len(self.places) < _MOST_PLACES:
            found, where = waiting.pop()
            if isinstance(found, torch.Tensor):
                self.tensors.append((where, found))  # under every name: which are one tensor matters, too
                continue
            if is_atom(found) or found is MISSING or id(found) in self._seen:
                continue
            self._seen[id(found)] = found
            waiting.extend(reversed(list(self._look(found, where))))

    def visit_ran(self, ran: Ran) -> None:
        """The globals of all the user's code that ran."""
        for code, globals_ in ran.globals.values():
            if ran.is_users(code):
                self.visit_globals(code, globals_)

    def visit_globals(self, code: types.CodeType, globals_: dict[str, Any]) -> None:
        """The globals that code mentions, and attributes of modules among them."""
        module = str(globals_.get("__name__", "globals"))
        self._visit_names(globals_, _all_names(code), module)

    def _visit_names(self, space: dict[str, Any], names: frozenset[str], path: str) -> None:
        known = self._namespaces.setdefault(id(space), {})
        new = [name for name in names if name not in known and (name in space or name in vars(builtins))]
        if not new:
            return
        known.update(dict.fromkeys(sorted(new)))
        place = NamesPlace(space, path, sorted(new))
        self.places.append(place)
        for name in place.names:
            value = space.get(name, MISSING)
            if type(value) is types.ModuleType:
                if not is_library(getattr(value, "__file__", None) or "<frozen>") or value.__name__ == "os":
                    self._visit_names(vars(value), names, value.__name__)
            else:
                self.visit(value, place.described(name))

    def _look(self, value: Any, path: str) -> Iterator[tuple[Any, str]]:
        """Note what kind of place a value is; what it leads to."""
        kind = type(value)
        if isinstance(value, dict):
            yield from self._noted(DictPlace(value, path))
            yield from self._attributes(value, path)
        elif kind in SEQUENCES:
            yield from self._noted(ListPlace(value, path))
        elif isinstance(value, list | tuple | frozenset):
            if isinstance(value, list):
                self.places.append(ListPlace(value, path))
            yield from ((item, f"{path}[{index}]") for index, item in enumerate(value))
            yield from self._attributes(value, path)
        elif isinstance(value, set):
            yield from self._noted(SetPlace(value, path))
        elif kind is types.FunctionType:
            yield from self._look_function(value, path)
        elif kind is types.MethodType:
            yield from ((value.__func__, path), (value.__self__, f"{path}.__self__"))
        elif kind is types.CellType:
            yield from self._noted(CellPlace(value, path))
        elif isinstance(value, type):
            yield from self._look_class(value, path)
        elif isinstance(value, np.ndarray):
            self.places.append(ArrayPlace(value, path))
            if value.dtype == object:
                yield from ((item, f"{path}[{index}]") for index, item in enumerate(value.flat))
        elif isinstance(value, GENERATORS):
            self.places.append(RandomPlace(value, path))
        elif kind in ITERATORS:
            self.places.append(IteratorPlace(value, path))
        elif isinstance(value, weakref.ref):
            yield value(), path
        elif kind is not types.ModuleType:
            yield from self._look_object(value, path)

    def _look_object(self, value: Any, path: str) -> Iterator[tuple[Any, str]]:
        if isinstance(value, property):
            yield from ((part, path) for part in (value.fget, value.fset) if part is not None)
        elif isinstance(value, staticmethod | classmethod):
            yield value.__func__, path
        elif isinstance(value, functools.partial):
            yield from ((value.func, path), (value.args, path), (value.keywords, path))
        yield from self._attributes(value, path)

    def _look_function(self, function: types.FunctionType, path: str) -> Iterator[tuple[Any, str]]:
        if is_library(function.__code__.co_filename) and function.__closure__ is None:
            return
        yield from self._noted(FunctionPlace(function, path))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield cell, f"{path}.{name}"
        if function.__dict__:
            yield from self._noted(DictPlace(function.__dict__, path, attributes=True))

    def _look_class(self, kind: type, path: str) -> Iterator[tuple[Any, str]]:
        for base in kind.__mro__[:-1]:
            if base.__module__ == "builtins" or (base is not kind and id(base) in self._seen):
                continue
            self._seen[id(base)] = base
            own = not is_library(getattr(sys.modules.get(base.__module__), "__file__", None) or "")
            if not own and not issubclass(base, nn.Module):
                continue
            place = ClassPlace(base, base.__qualname__, attributes=True)
            if own:
                yield from self._noted(place)
            else:
                self.places.append(place)

    def _attributes(self, value: Any, path: str) -> Iterator[tuple[Any, str]]:
        """Those in a `__dict__` and those in slots, and the class."""
        if type(value).__module__ in ("builtins", "collections"):
            return
        try:
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            attributes = None
        if type(attributes) is dict:
            yield from self._noted(DictPlace(attributes, path, attributes=True))
        slots = [
            (name, slot)
            for base in type(value).__mro__
            for name, slot in vars(base).items()
            if isinstance(slot, types.MemberDescriptorType) and "__slots__" in vars(base)
        ]
        if slots:
            yield from self._noted(SlotsPlace(value, path, slots))
        yield type(value), type(value).__qualname__

    def _noted(self, place: Place) -> Iterator[tuple[Any, str]]:
        self.places.append(place)
        for key, value in zip(*place.read(), strict=True):
            if not place.attributes or self._ran is None or self._ran.reads(key):
                yield value, place.described(key)


@functools.lru_cache(maxsize=65_536)
def _all_names(code: types.CodeType) -> frozenset[str]:
    """The names in code and in the functions and comprehensions inside it."""
    inner = (_all_names(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(code.co_names).union(*inner)
