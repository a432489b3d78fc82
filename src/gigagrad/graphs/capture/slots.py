"""Read, compare and restore where Python keeps what code can read and change: dictionaries, lists, cells, namespaces.

A `Slot` is one such object. Reading its contents runs no code of the user's: no property, no `__eq__`, no `__len__`.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import operator
import types
import weakref
from abc import ABC, abstractmethod
from array import ArrayType
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from gigagrad.graphs.capture.known_types import LOCAL

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
_NAMESPACE: Any = vars(type)["__dict__"]
_NESTS = (tuple, list, set, frozenset, dict)
_SIZED = (dict, OrderedDict, list, set, deque, bytearray)


def is_atom(value: Any) -> bool:
    """Tell whether the value can never change and reaches nothing that can."""
    if type(value) is types.BuiltinFunctionType:
        return value.__self__ is None or issubclass(type(value.__self__), (type, types.ModuleType))
    return type(value) in _ATOMS or issubclass(type(value), np.generic)


def is_plain(value: Any) -> bool:
    """Tell whether a value consists of numbers, text and nests of them: it means the same wherever it is copied to."""
    if type(value) in _NESTS or type(value) is torch.Size:
        items = [*value, *value.values()] if type(value) is dict else list(value)
        return all(map(is_plain, items))
    return is_atom(value)


def same(one: Any, other: Any) -> bool:
    """Tell whether no code could tell two values apart, as far as that can be seen without running any."""
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
    """Tell whether the contents are the very same objects."""
    return (
        len(one[0]) == len(other[0])
        and all(map(operator.is_, one[1], other[1]))
        and all(map(operator.is_, one[0], other[0]))
    )


class Slot(ABC):
    """Holds values by key. `path` says where it was found; with `attributes` its keys are names in code."""

    restorable = True

    def __init__(self, holder: Any, path: str, *, attributes: bool = False) -> None:
        self.holder = holder
        self.path = path
        self.attributes = attributes

    @abstractmethod
    def read(self) -> Contents:
        """Return the contents as they are now."""

    def views(self) -> tuple[Collection[Any], ...]:
        """Return live views, of Python's own types, of its values, or of its keys and its values; none where it has
        none.
        """
        return ()

    def getters(self) -> list[Callable[[], Any]]:
        """Return calls of Python's own that give its values one by one where it has no views. One raises AttributeError
        or ValueError where the value is not there.
        """
        return []

    def holds(self, contents: Contents) -> bool:
        """Tell whether it holds these very objects."""
        return are_identical(self.read(), contents)

    def put(self, contents: Contents) -> None:
        """Restore earlier contents; of what is not `restorable` nothing can be done."""

    def described(self, key: Any) -> str:
        """Name the entry as a person would."""
        if self.attributes:
            return f"{self.path}.{key}"
        if type(key) is str and key == "":
            return self.path
        return f"{self.path}[{repr(key) if is_plain(key) else f'<{type(key).__name__} at {id(key):#x}>'}]"


class DictSlot(Slot):
    """A dictionary, an object's attributes among them."""

    def read(self) -> Contents:
        return tuple(dict.keys(self.holder)), tuple(dict.values(self.holder))

    def views(self) -> tuple[Collection[Any], ...]:
        return dict.keys(self.holder), dict.values(self.holder)

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


class OrderedSlot(Slot):
    """An `OrderedDict`, which keeps an order of its own."""

    def read(self) -> Contents:
        keys = tuple(OrderedDict.__iter__(self.holder))
        return keys, tuple([dict.__getitem__(self.holder, key) for key in keys])

    def views(self) -> tuple[Collection[Any], ...]:
        return OrderedDict.keys(self.holder), OrderedDict.values(self.holder)

    def put(self, contents: Contents) -> None:
        OrderedDict.clear(self.holder)
        for key, value in zip(*contents, strict=True):
            OrderedDict.__setitem__(self.holder, key, value)


class LocalSlot(Slot):
    """The attributes of a `threading.local` for this thread."""

    @property
    def _mine(self) -> DictSlot:
        return DictSlot(LOCAL.__getattribute__(self.holder, "__dict__"), self.path, attributes=True)

    def read(self) -> Contents:
        return self._mine.read()

    def put(self, contents: Contents) -> None:
        self._mine.put(contents)


class ItemsSlot(Slot):
    """A list, a deque or a bytearray, told by positions, or a set."""

    def __init__(self, holder: Any, path: str) -> None:
        super().__init__(holder, path)
        self._kind: Any = next(kind for kind in (list, deque, bytearray, set) if isinstance(holder, kind))

    def read(self) -> Contents:
        values = tuple(self._kind.__iter__(self.holder))
        return values if self._kind is set else tuple(range(len(values))), values

    def views(self) -> tuple[Collection[Any], ...]:
        return (self.holder,) if type(self.holder) is self._kind else ()

    def put(self, contents: Contents) -> None:
        self._kind.clear(self.holder)
        (set.update if self._kind is set else self._kind.extend)(self.holder, contents[1])


class NamesSlot(Slot):
    """Globals that code mentions."""

    def __init__(self, holder: dict[str, Any], path: str, names: Collection[str]) -> None:
        super().__init__(holder, path, attributes=True)
        self.names = tuple(names)

    def read(self) -> Contents:
        return self.names, tuple([self.holder.get(name, MISSING) for name in self.names])

    def getters(self) -> list[Callable[[], Any]]:
        return [partial(self.holder.get, name, MISSING) for name in self.names]

    def put(self, contents: Contents) -> None:
        for name, value in zip(*contents, strict=True):
            if value is MISSING:
                self.holder.pop(name, None)
            else:
                self.holder[name] = value


class ClassSlot(Slot):
    """A class's own attributes."""

    def read(self) -> Contents:
        own = _NAMESPACE.__get__(self.holder)
        return tuple(own), tuple(own.values())

    def views(self) -> tuple[Collection[Any], ...]:
        own = _NAMESPACE.__get__(self.holder)
        return own.keys(), own.values()

    def put(self, contents: Contents) -> None:
        then = dict(zip(*contents, strict=True))
        for name, value in dict(_NAMESPACE.__get__(self.holder)).items():
            if name not in then:
                type.__delattr__(self.holder, name)
            elif then[name] is not value:
                type.__setattr__(self.holder, name, then[name])


CELL = [("", vars(types.CellType)["cell_contents"])]
"""The descriptor of a variable of an enclosing function."""
FUNCTION = [(part, vars(types.FunctionType)[part]) for part in ("__code__", "__defaults__", "__kwdefaults__")]
"""Those of the code and the defaults of a function; its cells are slots of their own."""


class DescriptorSlot(Slot):
    """Values that descriptors read of an object, its `__slots__` for one: (key, descriptor) pairs."""

    def __init__(self, holder: Any, path: str, slots: Collection[tuple[str, Any]], *, attributes: bool = True) -> None:
        super().__init__(holder, path, attributes=attributes)
        self.keys, self.slots = zip(*slots, strict=True)

    def read(self) -> Contents:
        return self.keys, tuple([self._value(slot) for slot in self.slots])

    def getters(self) -> list[Callable[[], Any]]:
        return [partial(slot.__get__, self.holder) for slot in self.slots]

    def _value(self, slot: Any) -> Any:
        try:
            return slot.__get__(self.holder)
        except (AttributeError, ValueError):
            return MISSING

    def put(self, contents: Contents) -> None:
        for slot, value in zip(self.slots, contents[1], strict=True):
            if self._value(slot) is not value:
                slot.__delete__(self.holder) if value is MISSING else slot.__set__(self.holder, value)


class BytesSlot(Slot):
    """The values of a NumPy array, or of anything else that is a piece of memory: its bytes, or a digest of many."""

    _MOST_BYTES = 2**20

    def __init__(self, holder: Any, path: str) -> None:
        super().__init__(holder, path)
        self.restorable = self._array().nbytes <= self._MOST_BYTES

    def _array(self) -> np.ndarray[Any, Any]:
        if isinstance(self.holder, np.ndarray):
            return np.ndarray.view(self.holder, np.ndarray)
        view = memoryview(self.holder)
        return np.frombuffer(view if view.contiguous else view.tobytes(), np.uint8)

    def read(self) -> Contents:
        array = self._array()
        if array.nbytes <= self._MOST_BYTES:
            values = array.tobytes()
        else:
            memory = np.ascontiguousarray(array).view(np.uint8).reshape(-1).data
            values = hashlib.blake2b(memory, digest_size=16).digest()
        return ("",), ((array.shape, array.dtype.str, values),)

    def put(self, contents: Contents) -> None:
        shape, _, values = contents[1][0]
        array = self._array()
        if array.shape == shape and array.flags.writeable:
            array[...] = np.frombuffer(values, array.dtype).reshape(shape)
        elif isinstance(self.holder, ArrayType):
            del array  # who looks at its memory keeps it from changing its length
            del self.holder[:]
            self.holder.frombytes(values)


class ObjectsSlot(Slot):
    """A NumPy array of objects, in all of its fields."""

    restorable = False

    def read(self) -> Contents:
        found = np.ndarray.ravel(self.holder).tolist()
        values = tuple(found) if self.holder.dtype == object else tuple(_leaves(found))
        return tuple(range(len(values))), values


class ContextSlot(Slot):
    """A context variable."""

    def __init__(self, holder: Any, path: str) -> None:
        super().__init__(holder, path)
        self.restorable = holder.get(MISSING) is not MISSING  # nobody can unset one

    def read(self) -> Contents:
        return ("",), (self.holder.get(MISSING),)

    def put(self, contents: Contents) -> None:
        if contents[1][0] is not MISSING:
            self.holder.set(contents[1][0])


class WeakSlot(Slot):
    """Tells whether the referent of a weak reference is still there. Nothing here keeps it."""

    restorable = False

    def read(self) -> Contents:
        return ("",), (weakref.ref.__call__(self.holder) is None,)


class CacheSlot(Slot):
    """The entries of an `lru_cache`: any later call would find anyway what joins. Tensors are not left there: those
    that joined were traced."""

    def read(self) -> Contents:
        found = gc.get_referents(self.holder)
        held = [part for one in found for part in (one.values() if type(one) is dict else (one,))]
        return ("",), (tuple(sorted({id(one): one for one in held}.values(), key=id)),)

    def holds(self, contents: Contents) -> bool:
        return set(map(id, contents[1][0])) <= set(map(id, self.read()[1][0]))

    def put(self, contents: Contents) -> None:
        known = set(map(id, contents[1][0]))
        joined = [value for value in self.read()[1][0] if id(value) not in known]
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(joined)):
            self.holder.cache_clear()


class RandomSlot(Slot):
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


class IteratorSlot(Slot):
    """The position of an iterator. It cannot be put back."""

    restorable = False

    def read(self) -> Contents:
        if type(self.holder) is not types.GeneratorType:
            own = object.__basicsize__, type(self.holder).__basicsize__ - object.__basicsize__
            return ("",), (ctypes.string_at(id(self.holder) + own[0], own[1]),)
        frame = self.holder.gi_frame
        values = () if frame is None else tuple(v if is_plain(v) else id(v) for v in frame.f_locals.values())
        return ("",), ((-1 if frame is None else frame.f_lasti, repr(values)),)


class Unchanged:
    """Compares what many slots hold with what they held, in a few loops of C: every step does, of thousands."""

    def __init__(self, seen: Iterable[tuple[Slot, Contents]]) -> None:
        self._empty: list[Collection[Any]] = []
        self._views: list[Collection[Any]] = []
        self._lengths: list[int] = []
        self._entries: list[Any] = []
        """The entries of all views, one after the other."""
        self._getters: list[Callable[[], Any]] = []
        self._values: list[Any] = []
        """The values that they gave."""
        self._others: list[tuple[Slot, Contents]] = []
        for slot, contents in seen:
            views, getters = slot.views(), slot.getters()
            if views and not contents[1]:
                self._empty.append(slot.holder if type(slot.holder) in _SIZED else views[-1])
            elif views:
                self._views += views
                for entries in contents[-len(views) :]:
                    self._lengths.append(len(entries))
                    self._entries += entries
            elif getters and not any(value is MISSING for value in contents[1]):
                self._getters += getters
                self._values += contents[1]
            else:
                self._others.append((slot, contents))

    def holds(self) -> bool:
        """Tell whether each slot holds the very objects that it held."""
        try:
            return (
                not any(map(len, self._empty))
                and list(map(len, self._views)) == self._lengths
                and all(map(operator.is_, chain.from_iterable(self._views), self._entries))
                and all(map(operator.is_, map(operator.call, self._getters), self._values))
                and all(slot.holds(contents) for slot, contents in self._others)
            )
        except (AttributeError, ValueError):  # a value is no longer there
            return False


def _leaves(records: Any) -> Iterator[Any]:
    """Yield the entries of structured arrays' records, which may be nested."""
    for value in records:
        yield from _leaves(value) if type(value) in (tuple, list) else (value,)


def _frozen(state: Any) -> Any:
    """Turn a generator's state into nested tuples that `same` can compare."""
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
