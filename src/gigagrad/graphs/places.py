"""Where Python keeps what code can read and change: dictionaries, lists, cells, namespaces, generators of numbers.

A `Place` is one such thing. What it holds can be read, compared with what it held before, and put back. Reading runs
no code of the user's: no property, no `__eq__`, no `__len__`.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import types
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

Contents = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Keys, and the value of each."""

MISSING: Any = object()
"""The value of a name that is not there."""

_ATOMS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    types.NoneType,
    types.EllipsisType,
    types.CodeType,
    types.BuiltinFunctionType,
    range,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_NESTS = (tuple, list, set, frozenset, dict)


def is_atom(value: Any) -> bool:
    """Whether the value can never change and reaches nothing that can."""
    return type(value) in _ATOMS or isinstance(value, np.generic)


def is_plain(value: Any) -> bool:
    """Whether the value consists of numbers, text and nests of them: it means the same wherever it is copied to."""
    if type(value) in _NESTS or type(value) is torch.Size:
        items = [*value, *value.values()] if type(value) is dict else list(value)
        return all(map(is_plain, items))
    return is_atom(value)


def same(one: Any, other: Any) -> bool:
    """Whether no code could tell two values apart, as far as that can be seen without running any."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) in (tuple, torch.Size):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) in (float, complex):
        return repr(one) == repr(other)  # signed zeros differ, and one nan is like another
    if isinstance(one, np.generic):
        return bool(one.dtype == other.dtype) and one.tobytes() == other.tobytes()
    if type(one) is types.MethodType:
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    return type(one) in _ATOMS and bool(one == other)


def are_identical(one: tuple[Collection[Any], Collection[Any]], other: Contents) -> bool:
    """Whether the contents are the very same objects."""
    return (
        len(one[0]) == len(other[0])
        and all(map(operator.is_, one[1], other[1]))
        and all(map(operator.is_, one[0], other[0]))
    )


class Place(ABC):
    """Something that holds values by key. `path` says where it was found; `attributes`: its keys are names in code."""

    restorable = True

    def __init__(self, holder: Any, path: str, *, attributes: bool = False) -> None:
        self.holder = holder
        self.path = path
        self.attributes = attributes

    @abstractmethod
    def read(self) -> Contents:
        """What it holds now."""

    def holds(self, contents: Contents) -> bool:
        """Whether it holds these very objects. Called for thousands of places in every step."""
        return are_identical(self.read(), contents)

    @abstractmethod
    def put(self, contents: Contents) -> None:
        """Hold this instead."""

    def described(self, key: Any) -> str:
        """How a person would name the entry."""
        if self.attributes:
            return f"{self.path}.{key}"
        return self.path if key == "" else f"{self.path}[{key!r}]"


class DictPlace(Place):
    """A dictionary, an object's attributes among them."""

    def read(self) -> Contents:
        return tuple(dict.keys(self.holder)), tuple(dict.values(self.holder))

    def holds(self, contents: Contents) -> bool:
        return are_identical((dict.keys(self.holder), dict.values(self.holder)), contents)

    def put(self, contents: Contents) -> None:
        holder = self.holder
        for key in [key for key in dict.keys(holder) if key not in contents[0]]:
            dict.__delitem__(holder, key)
        for key, value in zip(*contents, strict=True):
            if dict.get(holder, key, MISSING) is not value:
                dict.__setitem__(holder, key, value)
        if tuple(dict.keys(holder)) != contents[0]:  # what had gone came back last
            dict.clear(holder)
            dict.update(holder, zip(*contents, strict=True))


class ListPlace(Place):
    """A list, a deque or a bytearray, told by positions."""

    def read(self) -> Contents:
        values = tuple(self.holder)
        return tuple(range(len(values))), values

    def put(self, contents: Contents) -> None:
        self.holder.clear()
        self.holder.extend(contents[1])


class SetPlace(Place):
    def read(self) -> Contents:
        keys = tuple(self.holder)
        return keys, keys

    def put(self, contents: Contents) -> None:
        self.holder.clear()
        self.holder.update(contents[0])


class NamesPlace(Place):
    """Globals that code mentions."""

    def __init__(self, holder: dict[str, Any], path: str, names: Collection[str]) -> None:
        super().__init__(holder, path, attributes=True)
        self.names = tuple(names)

    def read(self) -> Contents:
        return self.names, tuple([self.holder.get(name, MISSING) for name in self.names])

    def put(self, contents: Contents) -> None:
        for name, value in zip(*contents, strict=True):
            if value is MISSING:
                self.holder.pop(name, None)
            else:
                self.holder[name] = value


class ClassPlace(Place):
    """A class's own attributes."""

    def read(self) -> Contents:
        own = vars(self.holder)
        return tuple(own), tuple(own.values())

    def put(self, contents: Contents) -> None:
        then = dict(zip(*contents, strict=True))
        for name, value in dict(vars(self.holder)).items():
            if name not in then:
                type.__delattr__(self.holder, name)
            elif then[name] is not value:
                type.__setattr__(self.holder, name, then[name])


class SlotsPlace(Place):
    """What descriptors read of an object, its `__slots__` for one: (key, descriptor) pairs."""

    def __init__(self, holder: Any, path: str, slots: Collection[tuple[str, Any]], *, attributes: bool = True) -> None:
        super().__init__(holder, path, attributes=attributes)
        self.keys, self.slots = zip(*slots, strict=True)

    def read(self) -> Contents:
        return self.keys, tuple([self._value(slot) for slot in self.slots])

    def _value(self, slot: Any) -> Any:
        try:
            return slot.__get__(self.holder)
        except (AttributeError, ValueError):
            return MISSING

    def put(self, contents: Contents) -> None:
        for slot, value in zip(self.slots, contents[1], strict=True):
            if value is not MISSING:
                slot.__set__(self.holder, value)
            elif self._value(slot) is not MISSING:
                slot.__delete__(self.holder)


class CellPlace(SlotsPlace):
    """A variable of an enclosing function."""

    def __init__(self, holder: Any, path: str) -> None:
        super().__init__(holder, path, [("", vars(types.CellType)["cell_contents"])], attributes=False)


class FunctionPlace(SlotsPlace):
    """What a function is made of, besides its cells."""

    def __init__(self, holder: Any, path: str) -> None:
        parts = [(part, vars(types.FunctionType)[part]) for part in ("__code__", "__defaults__", "__kwdefaults__")]
        super().__init__(holder, path, parts, attributes=False)


class ArrayPlace(Place):
    """A NumPy array's values: their bytes, or a digest of them where they are many."""

    _MOST_BYTES = 2**20

    @property
    def restorable(self) -> bool:  # type: ignore[override]
        return bool(self.holder.nbytes <= self._MOST_BYTES and self.holder.dtype != object)

    def read(self) -> Contents:
        array = self.holder
        values = b"" if array.dtype == object else array.tobytes() if self.restorable else _digest(array)
        return ("",), ((array.shape, array.dtype.str, values),)

    def put(self, contents: Contents) -> None:
        shape, dtype, values = contents[1][0]
        if self.restorable and self.holder.shape == shape:
            self.holder[...] = np.frombuffer(values, dtype).reshape(shape)


class RandomPlace(Place):
    """The state of a generator of random numbers: Python's or NumPy's."""

    def read(self) -> Contents:
        holder = self.holder
        if hasattr(holder, "bit_generator"):
            state: Any = holder.bit_generator.state
        else:
            state = holder.getstate() if hasattr(holder, "getstate") else holder.get_state()
        return ("",), (_frozen(state),)

    def put(self, contents: Contents) -> None:
        state = contents[1][0]
        if hasattr(self.holder, "bit_generator"):
            self.holder.bit_generator.state = _thawed(state)
        elif hasattr(self.holder, "setstate"):
            self.holder.setstate(state)
        else:
            self.holder.set_state(_thawed(state))


class IteratorPlace(Place):
    """How far an iterator has come. It cannot be put back."""

    restorable = False

    def read(self) -> Contents:
        if isinstance(self.holder, types.GeneratorType):
            frame = self.holder.gi_frame
            values = () if frame is None else tuple(v if is_plain(v) else id(v) for v in frame.f_locals.values())
            return ("",), ((-1 if frame is None else frame.f_lasti, repr(values)),)
        left = getattr(self.holder, "__length_hint__", None)
        return ("",), (repr(self.holder) if left is None else left(),)

    def put(self, contents: Contents) -> None:
        """Nothing can be done."""


def _digest(array: np.ndarray[Any, Any]) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data, digest_size=16).digest()


def _frozen(state: Any) -> Any:
    """A generator's state as nested tuples that `same` can compare."""
    if isinstance(state, dict):
        return ("dict", *((key, _frozen(value)) for key, value in state.items()))
    if isinstance(state, np.ndarray):
        return ("array", state.dtype.str, state.tobytes())
    return tuple(map(_frozen, state)) if isinstance(state, tuple) else state


def _thawed(state: Any) -> Any:
    if isinstance(state, tuple) and state and state[0] == "dict":
        return {key: _thawed(value) for key, value in state[1:]}
    if isinstance(state, tuple) and state and state[0] == "array":
        return np.frombuffer(state[2], state[1])
    return tuple(map(_thawed, state)) if isinstance(state, tuple) else state


ITERATORS: tuple[type, ...] = (
    types.GeneratorType,
    itertools.count,
    *map(type, (iter([]), iter(()), iter({}), iter(set[int]()), iter(range(0)))),
)
SEQUENCES = (list, deque, bytearray)
