"""Find everything that the code of a model and a loss can see: from them over attributes, closures and globals.

A traversal finds `slots` (where something can change) and `tensors`. It follows data wherever it leads, and the globals
of code only once that code has run (`executed`), as a compiler that guards its assumptions does (PyTorch's TorchDynamo,
Ansel et al., ASPLOS 2024): code that never ran has read nothing.
"""

from __future__ import annotations

import builtins
import contextvars
import copy
import functools
import gc
import logging
import sys
import sysconfig
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from gigagrad.graphs.capture import known_types, slots
from gigagrad.graphs.capture.slots import MISSING, Slot, is_atom

_MOST_SLOTS = 500_000
"""A traversal that leads this far has left the model; slots beyond are not watched."""
_LIBRARIES = tuple(f"{path}/".replace("\\", "/") for path in (Path(torch.__file__).parent, Path(np.__file__).parent))
_TOOLS = ("/site-packages/sympy/", "/site-packages/mpmath/")
"""Libraries with which PyTorch computes shapes."""
_STANDARD_LIBRARY = sysconfig.get_path("stdlib").replace("\\", "/")
_OWN = str(Path(__file__).parents[1]).replace("\\", "/")
_DYNAMIC = frozenset({"getattr", "vars", "__dict__", "attrgetter", "methodcaller", "eval", "deepcopy", "asdict"})
"""Names in code that reads attributes by names which are not in the code."""
KEY = " (a key)"
_ASKING = frozenset({"getattr", "hasattr"})
_TELLING = ("logging/", "warnings.py", "linecache.py", "traceback.py")
_ROOTS = sys.stdlib_module_names - {"__main__"} | {"torch", "numpy", "sympy", "mpmath"}
_FOLLOWED = ("os", "sys")
"""Modules of Python's own that people keep settings in."""
_SLOTS: Mapping[type, Callable[[Any, str], Slot]] = {
    **dict.fromkeys((list, deque, bytearray, set), slots.ItemsSlot),
    **dict.fromkeys(known_types.GENERATORS, slots.RandomSlot),
    dict: slots.DictSlot,
    OrderedDict: slots.OrderedSlot,
    types.CellType: lambda value, path: slots.DescriptorSlot(value, path, slots.CELL, attributes=False),
    np.ndarray: lambda value, path: (slots.ObjectsSlot if value.dtype.hasobject else slots.BytesSlot)(value, path),
}
"""The slots of objects whose classes are these or made of them."""


@functools.lru_cache(maxsize=65_536)
def is_library(filename: str) -> bool:
    """Tell whether code belongs to Python, PyTorch, NumPy or to capture itself: its globals are nobody's settings."""
    slashed = filename.replace("\\", "/")
    standard = slashed.startswith(_STANDARD_LIBRARY) and "site-packages" not in slashed
    return standard or slashed.startswith((*_LIBRARIES, _OWN, "<frozen")) or any(tool in slashed for tool in _TOOLS)


@functools.lru_cache(maxsize=65_536)
def _is_pythons(filename: str) -> bool:
    """Tell whether code belongs to Python's own library. Logs and warnings are read by somebody else."""
    if filename.startswith("<frozen "):
        return not filename.startswith("<frozen importlib")
    slashed = filename.replace("\\", "/")
    inside = slashed.removeprefix(f"{_STANDARD_LIBRARY}/")
    return inside != slashed and not inside.startswith(("site-packages/", "dist-packages/", *_TELLING))


class ExecutedCode:
    """The code that ran while a model was tried, and the names in it: attributes and globals that it may have read."""

    def __init__(self) -> None:
        self.globals: dict[tuple[int, int], tuple[types.CodeType, dict[str, Any]]] = {}
        self.names: set[str] = set()
        self.any_name = False
        self.asks_ids = False
        """True if it matters which object a tensor is."""
        self.unfollowed: str | None = None
        """The function that was called and may answer otherwise later, which nobody can compare, and where."""

    def add(self, frame: types.FrameType) -> bool:
        """Note the code of a frame; tell whether it is new and has globals that may be somebody's settings."""
        code, globals_ = frame.f_code, frame.f_globals
        key = id(code), id(globals_)  # one code may run with several
        if key in self.globals:
            return False
        self.globals[key] = code, globals_
        names = _texts(code)
        self.names.update(names)
        own = self.is_users(code, globals_)
        self.asks_ids = self.asks_ids or (own and "id" in names)
        self.any_name = self.any_name or (own and not _DYNAMIC.isdisjoint(names))
        if not own and known_types.is_reader(code) and (line := _users_line(frame.f_back)):
            self.unfollowed = self.unfollowed or f"{code.co_name} at {line}"
        return own

    def add_call(self, function: Any, frame: types.FrameType) -> None:
        """Note a call of a function written in C."""
        if self.unfollowed is None and (line := _users_line(frame)) and known_types.reads_elsewhere(function):
            self.unfollowed = f"{function.__qualname__} at {line}"

    @staticmethod
    def is_users(code: types.CodeType, globals_: dict[str, Any]) -> bool:
        """Tell whether code is the user's; that which a program makes, as of data classes, belongs to who made it."""
        made = code.co_filename.startswith("<")
        return not is_library(str(globals_.get("__file__", code.co_filename)) if made else code.co_filename)

    def users(self) -> list[tuple[types.CodeType, dict[str, Any]]]:
        """Return the user's code among it, with its globals."""
        return [(code, globals_) for code, globals_ in self.globals.values() if self.is_users(code, globals_)]

    def reads(self, name: Any) -> bool:
        return self.any_name or name in self.names


def _users_line(frame: types.FrameType | None) -> str:
    """Return `file:line` of the user's code that a frame is or that Python's library runs for; empty if neither."""
    while frame is not None and _is_pythons(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or is_library(frame.f_code.co_filename):
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Traversal:
    """Places and tensors that can be reached from `roots` (by the names they go by).

    With `executed`, of objects' attributes only those whose names stand in code that ran, and that code's globals.
    """

    def __init__(self, roots: Mapping[str, Any], executed: ExecutedCode | None = None) -> None:
        self.slots: list[Slot] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.objects: list[Any] = []
        """Those with attributes of their own, whose class may be exchanged."""
        self.uncopied: list[Any] = []
        """Objects that a copy of a model can only share with it."""
        self.unfollowed: str | None = None
        """The first object that is reached and cannot be read, by its name and type."""
        self.any_name = False
        """True once something was met that reads attributes whose names stand in no code."""
        self._executed = executed
        self._seen: dict[int, Any] = {}
        self._namespaces: dict[int, dict[str, None]] = {}
        self._modules: dict[int, types.ModuleType] = {}
        self._names: set[str] = set()
        self._asked: set[str] = set()
        self._weakly: set[int] = set()
        for path, root in roots.items():
            self.visit(root, path)
        if executed is not None:
            self.visit_executed(executed)

    def visit(self, value: Any, path: str) -> None:
        """Visit a value and all that it leads to."""
        waiting = [(value, path)]
        while waiting and len(self.slots) < _MOST_SLOTS:
            found, where = waiting.pop()
            if issubclass(type(found), torch.Tensor):
                self.tensors.append((where, found))  # under every name: which are one tensor matters, too
                if id(found) not in self._seen and type(found) is not FakeTensor:
                    self._seen[id(found)] = found
                    waiting.extend(self._noted(slots.DictSlot(vars(found), where, attributes=True)))
                continue
            if is_atom(found) or found is MISSING or id(found) in self._seen:
                continue
            self._seen[id(found)] = found
            waiting.extend(reversed(list(self._note(found, where))))

    def visit_executed(self, executed: ExecutedCode) -> None:
        """Visit the globals of all the user's code that ran."""
        for code, globals_ in executed.users():
            self.visit_globals(code, globals_)

    def visit_globals(self, code: types.CodeType, globals_: dict[str, Any]) -> None:
        """Visit the globals that code mentions, the modules that it imports, and their entries that it may read."""
        names = _all_names(code)
        self._visit_names(globals_, names, str(globals_.get("__name__", "globals")), vars(builtins).keys())
        self._visit_names(sys.modules, _imported(names, str(globals_.get("__package__"))), "sys.modules")
        for module in [space.get(name) for name in names for space in (globals_, sys.modules)]:
            if type(module) is types.ModuleType and module.__name__ in sys.stdlib_module_names:
                for name in names & vars(module).keys():
                    self._note_class(vars(module)[name], f"{module.__name__}.{name}")
        new = names - self._names
        self._names |= new
        if not _ASKING.isdisjoint(names):
            self._asked |= names
        for module in list(self._modules.values()):
            self._visit_names(vars(module), new, module.__name__, self._asked)

    def _visit_module(self, module: types.ModuleType) -> None:
        if module.__name__ not in _FOLLOWED and is_library_module(module):
            return
        self._modules[id(module)] = module
        self._visit_names(vars(module), self._names | {"environ"}, module.__name__, self._asked)

    def _visit_names(self, space: dict[str, Any], names: Set[str], path: str, absent: Set[str] = frozenset()) -> None:
        """Visit those names of a namespace that it has; those in `absent` matter even where they are not there yet."""
        known = self._namespaces.setdefault(id(space), {})
        new = [name for name in names if name not in known and (name in space or name in absent)]
        if not new:
            return
        known.update(dict.fromkeys(sorted(new)))
        slot = slots.NamesSlot(space, path, sorted(new))
        self.slots.append(slot)
        for name in slot.names:
            value = space.get(name, MISSING)
            self.visit(value, slot.described(name))
            self._note_class(value, slot.described(name))

    def _note(self, value: Any, path: str) -> Iterator[tuple[Any, str]]:
        """Note the kind of slot that a value is, by its type, and yield what it leads to; none of its code is run."""
        kind: Any = type(value)
        made_of = known_types.storage(kind)
        if issubclass(kind, logging.Handler):  # what is logged comes back to nobody
            return
        if issubclass(kind, logging.Logger):  # what follows from levels, which capture itself makes it forget
            cache = object.__getattribute__(value, "_cache")
            self._seen[id(cache)] = cache
        if value is sys.modules:
            users = [n for n, m in value.items() if not isinstance(m, types.ModuleType) or not is_library_module(m)]
            self._visit_names(value, frozenset(users), path)
        elif (slot := _slot(kind)) is not None:
            yield from self._noted(slot(value, path))
        elif issubclass(kind, tuple | frozenset):
            items = (tuple if issubclass(kind, tuple) else frozenset).__iter__(value)
            yield from ((item, f"{path}[{index}]") for index, item in enumerate(items))
        elif kind is types.FunctionType:
            yield from self._note_function(value, path)
            return
        elif kind is types.MethodType:
            yield from ((value.__func__, path), (value.__self__, f"{path}.__self__"))
        elif issubclass(kind, type):
            yield from self._note_type(value, path)
            return
        elif issubclass(kind, types.ModuleType):
            self._visit_module(value)
            self._share(value)
            return
        else:
            yield from self._note_object(value, made_of, path)
        yield from self._attributes(value, path)

    def _note_object(self, value: Any, made_of: type, path: str) -> Iterator[tuple[Any, str]]:
        """Note the kind of slot that an object written in C is, and yield what it leads to."""
        if made_of in known_types.PLAIN:
            return
        self._share(value)
        if made_of is weakref.ref:
            self.slots.append(slots.WeakSlot(value, path))
            referent = weakref.ref.__call__(value)
            self._weakly.add(id(referent))
            yield referent, path
        elif made_of is contextvars.ContextVar:
            yield from self._noted(slots.ContextSlot(value, path))
        elif made_of is known_types.LOCAL:
            yield from self._noted(slots.LocalSlot(value, path, attributes=True))
        elif made_of is known_types.CACHE:
            self.slots.append(slots.CacheSlot(value, path))
            yield value.__wrapped__, path
        elif made_of is types.GeneratorType or known_types.is_iterator(made_of):
            self.slots.append(slots.IteratorSlot(value, path))
            yield from ((part, path) for part in gc.get_referents(value))
        elif made_of in known_types.REFERRING:
            yield from ((part, path) for part in gc.get_referents(value))
            self.any_name = self.any_name or made_of in known_types.DYNAMIC
        elif not known_types.is_fixed(type(value)):  # type: ignore[arg-type]
            try:
                self.slots.append(slots.BytesSlot(value, path))
            except (TypeError, ValueError, BufferError):
                self._note_unfollowed(value, path)

    def _note_class(self, kind: Any, path: str) -> None:
        """Note a class that code mentions, where nobody could follow what is made of it."""
        if issubclass(type(kind), type) and not known_types.is_followed(kind):
            self._note_unfollowed(kind, path)

    def _note_unfollowed(self, value: Any, path: str) -> None:
        kind = value if issubclass(type(value), type) else type(value)
        self.unfollowed = self.unfollowed or f"'{path}' ({kind.__module__}.{kind.__qualname__})"

    def _share(self, value: Any) -> None:
        """Note a value if no copy can be made of it. None of the user's code is asked."""
        if type(value) not in copy._deepcopy_dispatch and not hasattr(value, "__deepcopy__"):  # type: ignore[attr-defined]
            try:
                object.__reduce_ex__(value, 4)
            except Exception:  # what is written in C says it in words of its own
                self.uncopied.append(value)

    def _note_function(self, function: types.FunctionType, path: str) -> Iterator[tuple[Any, str]]:
        if is_library(function.__code__.co_filename) and function.__closure__ is None:
            if function.__module__ in _FOLLOWED:
                yield sys.modules[function.__module__], path
            return
        yield from self._noted(slots.DescriptorSlot(function, path, slots.FUNCTION, attributes=False))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield cell, f"{path}.{name}"
        if function.__dict__:
            yield from self._noted(slots.DictSlot(function.__dict__, path, attributes=True))

    def _note_type(self, kind: type, path: str) -> Iterator[tuple[Any, str]]:
        for base in kind.__mro__[:-1]:
            if base.__module__ == "builtins" or (base is not kind and id(base) in self._seen):
                continue
            self._seen[id(base)] = base
            own = not _is_in_library(base)
            if not own and not issubclass(base, nn.Module):
                continue
            slot = slots.ClassSlot(base, base.__qualname__, attributes=True)
            if own:
                yield from self._noted(slot)
            else:
                self.slots.append(slot)
        if type(kind) is not type:
            yield type(kind), type(kind).__qualname__

    def _attributes(self, value: Any, path: str) -> Iterator[tuple[Any, str]]:
        """Note the attributes in a `__dict__` and in `__slots__`, and yield them and the class."""
        kind: Any = type(value)
        if kind is OrderedDict:  # a model has hundreds, of hooks, and nobody gives them attributes
            return
        own, parts = _descriptors(kind)
        try:
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            attributes = None
        if type(attributes) is dict:
            yield from self._noted(slots.DictSlot(attributes, path, attributes=True))
        if own:
            yield from self._noted(slots.DescriptorSlot(value, path, own))
        if parts:
            yield from self._noted(slots.DescriptorSlot(value, path, parts, attributes=False))
        if kind.__module__ != "builtins" and (own or attributes is not None):
            if id(value) not in self._weakly:
                self.objects.append(value)
            yield kind, kind.__qualname__

    def _noted(self, slot: Slot) -> Iterator[tuple[Any, str]]:
        self.slots.append(slot)
        keys, values = slot.read()
        for key, value in zip(keys, values, strict=True):
            if not slot.attributes or self._executed is None or self._executed.reads(key):
                yield value, slot.described(key)
            if not slot.attributes and key is not value and not is_atom(key):
                yield key, f"{slot.path}{KEY}"


@functools.lru_cache(maxsize=65_536)
def _slot(kind: Any) -> Callable[[Any, str], Slot] | None:
    return next((_SLOTS[base] for base in kind.__mro__ if base in _SLOTS), None)


@functools.lru_cache(maxsize=65_536)
def _descriptors(kind: Any) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Return the descriptors of such objects: of `__slots__`, and of what a type written in C shows of itself."""
    own, parts = list[tuple[str, Any]](), list[tuple[str, Any]]()
    for base in kind.__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType):
                if "__slots__" in vars(base):
                    own.append((name, slot))
                elif not name.startswith("__"):
                    parts.append((name, slot))
    if issubclass(kind, BaseException):
        parts.append(("args", vars(BaseException)["args"]))
    return own, parts


def _is_in_library(kind: type) -> bool:
    """Tell whether a class belongs to Python's library, PyTorch's or NumPy's: those made while a program runs do not,
    though they may be called as if."""
    module = sys.modules.get(kind.__module__)
    root = kind.__qualname__.partition(".")[0]
    return module is not None and is_library_module(module) and root in vars(module)


def _imported(names: Set[str], package: str) -> frozenset[str]:
    """Return the modules that people keep settings in, among those that names can stand for."""
    found = {name: sys.modules.get(name) for given in names for name in (given, f"{package}.{given}")}
    return frozenset(
        name
        for name, module in found.items()
        if isinstance(module, types.ModuleType) and (name in _FOLLOWED or not is_library_module(module))
    )


def is_library_module(module: types.ModuleType) -> bool:
    """Tell whether a module belongs to Python, PyTorch, NumPy or gigagrad's capture."""
    file = vars(module).get("__file__")
    if file is None:
        return module.__name__.partition(".")[0] in _ROOTS
    return is_library(str(file)) or module.__name__.startswith("torch.")


@functools.lru_cache(maxsize=65_536)
def _texts(code: types.CodeType) -> tuple[str, ...]:
    """Return the names in code, and texts that could be those of an attribute or of a module."""
    return (
        *code.co_names,
        *code.co_freevars,
        *(t for t in code.co_consts if isinstance(t, str) and t.replace(".", "_").isidentifier()),
    )


@functools.lru_cache(maxsize=65_536)
def _all_names(code: types.CodeType) -> frozenset[str]:
    """Return the names in code and in the functions and comprehensions inside it, and texts that may be names."""
    inner = (_all_names(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(_texts(code)).union(*inner)
