"""List which objects and functions of Python are known: where the state of an object lies, what a call can read.

Both lists are closed. An object whose storage is not known here, and a function that may read what no traversal finds
(a clock, a file, settings of the process), are for nobody to compare: a model that uses one is traced in every call.
"""

from __future__ import annotations

import collections
import contextvars
import datetime
import functools
import operator
import random
import re
import sys
import types
import typing
import weakref
from typing import Any

import numpy as np
import torch

_POINTER = tuple.__itemsize__
CACHE: type = type(functools.lru_cache(len))
LOCAL: Any = type(sys.modules["_thread"]._local())
_ABC: type = type(vars(collections.abc.Sized)["_abc_impl"])
_LOCK, _RLOCK = (type(sys.modules["_thread"].allocate_lock()), sys.modules["_thread"].RLock)
_HELD: tuple[dict[str, int], ...] = ({}, collections.OrderedDict())
_VIEWS = [type(view) for held in _HELD for view in (held.keys(), held.values(), held.items())]

PLAIN = frozenset(
    {
        *(object, type, int, float, complex, str, bytes, BaseException, dict, list, tuple, set, frozenset, bytearray),
        *(collections.deque, collections.OrderedDict, collections.defaultdict, torch.Size, np.ndarray),
        *(types.FunctionType, types.CellType, types.MethodType, types.ModuleType, torch._C.TensorBase),
    }
)
_WHOLE = PLAIN | {weakref.ref, contextvars.ContextVar, LOCAL, CACHE}
"""Types of storage that a traversal looks into, each in its own way; `PLAIN` are those of what can be copied."""
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_MEMORY = ("array", "_ctypes", "mmap")
"""Modules of types that are pieces of memory."""
REFERRING = frozenset(
    {
        *(types.MappingProxyType, *_VIEWS, types.BuiltinFunctionType, types.MethodWrapperType, slice),
        *(property, staticmethod, classmethod, functools.partial, types.GenericAlias, types.UnionType),
        *(operator.itemgetter, operator.attrgetter, operator.methodcaller),
    }
)
"""Objects that never change themselves; what they refer to may."""
_FIXED = frozenset(
    {
        *(re.Pattern, re.Match, datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone),
        *(types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType),
        *(types.GetSetDescriptorType, types.MemberDescriptorType, types.CodeType, _LOCK, _RLOCK),
        *(typing.TypeVar, typing.ParamSpec, np.dtype, np.ufunc, _ABC),
    }
)
"""Objects that never change and lead to nothing that does; locks, and what an abstract class knows of classes that it
met, say nothing that a forward could compute with."""
_RECORD = "pybind11_"
"""The prefix of modules in which pybind11 keeps its records of functions."""
DYNAMIC = (operator.attrgetter, operator.methodcaller)
"""Objects that read attributes by names which stand in no code."""

_PURE = frozenset(
    """_abc _bisect _codecs _collections _contextvars _functools _heapq _json _operator _random _sre _statistics
    _string _struct _typing _warnings _weakref array binascii builtins cmath collections contextvars errno functools
    itertools math numpy operator random re threading torch types typing unicodedata weakref zlib""".split()
)
"""Modules of functions and methods that read only what they are given, and what traversals and guards look at."""
_READS = frozenset(
    {
        *(("builtins", name) for name in ("__import__", "breakpoint", "input")),
        *(("numpy", name) for name in ("fromfile", "geterr", "geterrobj", "_load_from_filelike")),
        *(("torch", name) for name in ("get_num_threads", "get_num_interop_threads", "initial_seed", "from_file")),
    }
)
"""Functions of such modules that read something else."""
_READERS_OF_TORCH = ("serialization.py", "hub.py", "cuda/__init__.py", "cuda/memory.py", "distributed/", "utils/data/")
"""Files of PyTorch whose Python code reads files and the state of the process."""


@functools.lru_cache(maxsize=65_536)
def storage(kind: Any) -> Any:
    """Return the type that decides where the state of such objects lies, beside `__dict__` and `__slots__`."""
    while kind not in _WHOLE and kind.__base__ is not None:
        base, own = kind.__base__, vars(kind)
        slots = sum(isinstance(part, types.MemberDescriptorType) for part in own.values()) if "__slots__" in own else 0
        known = _POINTER * (slots + ("__dict__" in own) + ("__weakref__" in own))
        if kind.__basicsize__ - base.__basicsize__ > known or kind.__itemsize__ != base.__itemsize__:
            return kind
        kind = base
    return kind


@functools.lru_cache(maxsize=65_536)
def is_fixed(kind: Any) -> bool:
    """Tell whether such objects hold nothing that changes, beside attributes: PyTorch's own are nobody's settings."""
    return any(base in _FIXED for base in kind.__mro__) or kind.__module__.startswith(("torch", _RECORD))


def is_iterator(kind: type) -> bool:
    """Tell whether the structure of such objects says how far they have come."""
    return hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools", "collections")


def is_followed(kind: type) -> bool:
    """Tell whether a traversal finds the state of what is made of a class."""
    made_of = storage(kind)
    known = made_of in _WHOLE or made_of in REFERRING or made_of in (types.GeneratorType, *GENERATORS)
    return known or is_iterator(made_of) or is_fixed(kind) or made_of.__module__ in _MEMORY


def reads_elsewhere(function: Any) -> bool:
    """Tell whether a function written in C may read what is neither given to it nor looked at by a guard."""
    holder = function.__self__
    if holder is None or issubclass(type(holder), types.ModuleType):
        module = function.__module__ or getattr(holder, "__name__", "")
    else:
        kind = holder if issubclass(type(holder), type) else type(holder)
        name = function.__name__
        found = ((base, vars(base).get(name)) for base in kind.__mro__)
        written_in_c = (base for base, part in found if part is not None and type(part) is not types.FunctionType)
        module = next(written_in_c, object).__module__
        if type(holder) in (_LOCK, _RLOCK):
            return False
    room = str(module).partition(".")[0]
    if function.__name__ in ("fspath", "intern"):
        return False
    return room not in _PURE or (room, function.__name__) in _READS


def is_reader(code: types.CodeType) -> bool:
    """Tell whether code of PyTorch's or NumPy's reads files or the state of the process."""
    filename = code.co_filename.replace("\\", "/")
    inside = filename.rpartition("/torch/")[2]
    if inside == "random.py":
        return code.co_name in ("initial_seed", "get_rng_state", "seed")
    return inside.startswith(_READERS_OF_TORCH) or "npyio" in filename or filename.endswith("memmap.py")
