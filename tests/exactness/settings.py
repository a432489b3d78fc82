"""Where a model can keep a setting that changes between two calls: kinds of containers, times who holds them.

A kind makes a container, reads a number out of it as a forward would, and changes it in place. A place puts it
somewhere that forward or loss reaches. `SETTINGS` has all pairs, and ways of the process that nobody holds, by name.
"""

# mypy: disable-error-code="func-returns-value,arg-type,unused-ignore"
from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import datetime
import decimal
import enum
import functools
import importlib
import io
import itertools
import json
import mmap
import operator
import os
import queue
import sqlite3
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.exactness.changes import Reader, Way, attribute, mse, with_globals


@dataclass(frozen=True)
class Kind:
    """`change` writes a number; `read` finds it."""

    make: Callable[[], Any]
    read: Callable[[Any], Any]
    change: Callable[[Any, float], Any]


def item(key: Any, make: Callable[[], Any], read: Callable[[Any], Any] | None = None) -> Kind:
    """A container whose item is the setting."""
    return Kind(make, read or (lambda held: held[key]), lambda held, value: held.__setitem__(key, value))


def named(make: Callable[[], Any], name: str = "v", read: Callable[[Any], Any] | None = None) -> Kind:
    """An object whose attribute is the setting."""
    return Kind(make, read or operator.attrgetter(name), lambda held, value: setattr(held, name, value))


class Plain:
    v: float = 0.5


class ListOfItsOwn(list):  # type: ignore[type-arg]
    """It counts who looks through it, and says another length than it has."""

    looks = 0

    def __len__(self) -> int:
        ListOfItsOwn.looks += 1
        return 7


class DictWithAttributes(dict):  # type: ignore[type-arg]
    def __init__(self) -> None:
        super().__init__(k=1.0)
        self.v = 0.5

    def __getitem__(self, key: str) -> float:
        return float(super().__getitem__(key) * self.v)


class Computed:
    """Every attribute is looked up in a dictionary."""

    def __init__(self) -> None:
        self.__dict__["_values"] = {"v": 0.5}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._values[name] = value


class Described:
    """A descriptor that keeps the values of all objects."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def __get__(self, holder: Any, kind: Any = None) -> float:
        return self.values.get(0, 0.5)

    def __set__(self, holder: Any, value: float) -> None:
        self.values[0] = value


@dataclasses.dataclass(slots=True)
class Slots:
    v: float = 0.5


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: Slots


class Point(ctypes.Structure):
    _fields_ = [("v", ctypes.c_double)]


class Text(str):
    v: float


Record = collections.namedtuple("Record", ["inner"])


class Column:
    """As a table of some library: blocks of values, and names that say where a column is."""

    __slots__ = ("__weakref__", "_blocks", "_where")

    def __init__(self) -> None:
        self._blocks, self._where = [np.full((2, 3), 0.5)], {"v": (0, 1)}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        block, row = self._where[name]
        return float(self._blocks[block][row].mean())


def freshly_classed() -> type:
    return types.new_class("Settings", (), {}, lambda space: space.update(v=0.5))


def with_metaclass() -> type:
    meta = type("Meta", (type,), {"v": 0.5})
    return meta("Settings", (), {})


def with_property() -> Any:
    values = [0.5]
    return type("Settings", (), {"v": property(lambda self: values[0], lambda self, v: values.__setitem__(0, v))})()


def with_descriptor() -> Any:
    return type("Settings", (), {"v": Described()})()


def weakly(kind: str) -> Any:
    kept = Plain()
    made: Any = {"values": weakref.WeakValueDictionary, "keys": weakref.WeakKeyDictionary, "set": weakref.WeakSet}[
        kind
    ]()
    made.add(kept) if kind == "set" else made.update({"k": kept} if kind == "values" else {kept: 0.5})
    made.kept = kept
    return made


def structured() -> Any:
    return np.array([(0.5, 1)], dtype=[("v", "f8"), ("n", "i4")])


def of_objects() -> Any:
    made = np.empty(2, dtype=object)
    made[0], made[1] = Plain(), {"v": 0.5}
    return made


def records_of_objects() -> Any:
    made = np.empty(1, dtype=[("v", object), ("n", "i4")])
    made["v"][0] = [0.5]
    return made


def mapped() -> Any:
    held = mmap.mmap(-1, 8)
    held[:8] = np.float64(0.5).tobytes()
    return held


def write_bytes(held: Any, value: float) -> None:
    held[:8] = np.float64(value).tobytes()


def cached() -> Any:
    table = {"v": 0.5}

    @functools.lru_cache(maxsize=4)
    def read(name: str) -> float:
        return table[name]

    read.table = table  # type: ignore[attr-defined]
    read("v")
    return read


def forget(held: Any, value: float) -> None:
    held.table["v"] = value
    held.cache_clear()


def cached_property() -> Any:
    made = type("Settings", (), {})
    made.v = functools.cached_property(lambda self: self.source)  # type: ignore[attr-defined]
    made.v.__set_name__(made, "v")  # type: ignore[attr-defined]
    settings = made()
    settings.source = 0.5  # type: ignore[attr-defined]
    return settings


def refresh(held: Any, value: float) -> None:
    held.source = value
    vars(held).pop("v", None)


def dispatched() -> Any:
    @functools.singledispatch
    def read(value: Any) -> float:
        return 0.0

    read.register(int, lambda value: 0.5)
    return read


def ordered() -> Any:
    return collections.OrderedDict(a=0.5, b=1.5, c=2.5)


def reorder(held: Any, value: float) -> None:
    held.move_to_end(next(iter(held)))


def view() -> Any:
    under = {"v": 0.5}
    return types.SimpleNamespace(under=under, values=under.values())


def enumerated() -> Any:
    return enum.Enum("Settings", {"ONE": 0.5})


class Red:
    def read(self) -> float:
        return 0.5


class Blue:
    def read(self) -> float:
        return 1.5


def chained() -> Any:
    return collections.ChainMap({}, {"v": 0.5})


def generating() -> Any:
    settings = {"v": 0.5}

    def values() -> Iterator[float]:
        while True:
            yield settings["v"]

    return types.SimpleNamespace(settings=settings, values=values)


KINDS: dict[str, Kind] = {
    "array": item(0, lambda: array.array("d", [0.5])),
    "array that grows": Kind(lambda: array.array("d", [0.5]), sum, lambda held, value: held.append(value)),
    "bytearray": Kind(lambda: bytearray(b"\1"), lambda h: h[0], lambda h, value: h.__setitem__(0, int(2 * value))),
    "ctypes number": named(lambda: ctypes.c_double(0.5), "value"),
    "ctypes array": item(1, lambda: (ctypes.c_double * 2)(0.5, 0.5)),
    "ctypes structure": named(lambda: Point(0.5)),
    "memoryview": item(0, lambda: memoryview(array.array("d", [0.5]))),
    "mmap": Kind(mapped, lambda held: float(np.frombuffer(held, np.float64)[0]), write_bytes),
    "BytesIO": Kind(
        lambda: io.BytesIO(np.float64(0.5).tobytes()),
        lambda held: float(np.frombuffer(held.getvalue(), np.float64)[0]),
        lambda held, value: (held.seek(0), held.write(np.float64(value).tobytes())),
    ),
    "mapping proxy": Kind(
        lambda: (lambda under: types.SimpleNamespace(under=under, proxy=types.MappingProxyType(under)))({"v": 0.5}),
        lambda held: held.proxy["v"],
        lambda held, value: held.under.update(v=value),
    ),
    "UserDict": item("v", lambda: collections.UserDict(v=0.5)),
    "UserList": item(0, lambda: collections.UserList([0.5])),
    "ChainMap": item("v", chained),
    "ChainMap's parent": Kind(chained, lambda h: h["v"], lambda h, value: h.maps[1].update(v=value)),
    "ChainMap's child": Kind(chained, lambda h: h["v"], lambda h, value: h.maps.insert(0, {"v": value})),
    "order of an OrderedDict": Kind(ordered, lambda held: next(iter(held.values())), reorder),
    "last of an OrderedDict": Kind(ordered, lambda held: held[next(reversed(held))], reorder),
    "Counter": item("v", lambda: collections.Counter(v=1)),
    "default factory": Kind(
        lambda: collections.defaultdict(functools.partial(float, 0.5)),
        lambda held: copy.copy(held)["v"],
        lambda held, value: setattr(held, "default_factory", functools.partial(float, value)),
    ),
    "subclass of deque": item(0, lambda: type("Ring", (collections.deque,), {})([0.5])),
    "subclass of list": item(0, lambda: ListOfItsOwn([0.5])),
    "subclass of dict": named(DictWithAttributes, read=lambda held: held["k"]),
    "subclass of set": Kind(lambda: type("Set", (set,), {})({0.5}), sum, lambda held, value: held.add(value)),
    "subclass of str": named(lambda: (lambda made: (setattr(made, "v", 0.5), made)[1])(Text("a"))),
    "subclass of float": named(lambda: type("Number", (float,), {"v": 0.5})(2.0), read=lambda held: held * held.v),
    "namespace": named(lambda: types.SimpleNamespace(v=0.5)),
    "slots": named(Slots),
    "frozen around slots": Kind(
        lambda: Frozen(Slots()), lambda h: h.inner.v, lambda h, value: setattr(h.inner, "v", value)
    ),
    "named tuple": Kind(lambda: Record([0.5]), lambda h: h.inner[0], lambda h, v: h.inner.__setitem__(0, v)),
    "weak values": Kind(lambda: weakly("values"), lambda h: h["k"].v, lambda h, v: setattr(h.kept, "v", v)),
    "weak values replaced": Kind(
        lambda: weakly("values"),
        lambda h: h["k"].v if "k" in h else 3.0,
        lambda h, value: h.pop("k", None),
    ),
    "weak keys": Kind(lambda: weakly("keys"), lambda h: next(iter(h.values())), lambda h, v: h.update({h.kept: v})),
    "weak set": Kind(lambda: weakly("set"), lambda h: sum(k.v for k in h), lambda h, v: setattr(h.kept, "v", v)),
    "weak reference": Kind(
        lambda: (lambda kept: types.SimpleNamespace(kept=[kept], ref=weakref.ref(kept)))(Plain()),
        lambda held: 3.0 if held.ref() is None else held.ref().v,
        lambda held, value: held.kept.clear(),
    ),
    "weak method": Kind(
        lambda: (lambda kept: types.SimpleNamespace(kept=kept, ref=weakref.WeakMethod(kept.read)))(Red()),
        lambda held: held.ref()() * getattr(held.kept, "times", 1.0),
        lambda held, value: setattr(held.kept, "times", value),
    ),
    "context variable": Kind(
        lambda: contextvars.ContextVar("v", default=0.5), lambda held: held.get(), lambda held, v: held.set(v)
    ),
    "thread local": named(lambda: (lambda made: (setattr(made, "v", 0.5), made)[1])(threading.local())),
    "subclass of thread local": named(type("Local", (threading.local,), {"v": 0.5})),
    "queue": Kind(
        lambda: (lambda made: (made.put(0.5), made)[1])(queue.Queue()), lambda h: h.queue[-1], lambda h, v: h.put(v)
    ),
    "simple queue": Kind(
        lambda: (lambda made: (made.put(0.5), made)[1])(queue.SimpleQueue()),
        lambda held: held.qsize(),
        lambda held, value: held.put(value),
    ),
    "partial": Kind(
        lambda: functools.partial(lambda held: held[0], [0.5]), lambda h: h(), lambda h, v: h.args[0].__setitem__(0, v)
    ),
    "partial set anew": Kind(
        lambda: functools.partial(lambda value: value, 0.5),
        lambda held: held(),
        lambda held, value: held.__setstate__((held.func, (value,), {}, None)),
    ),
    "method of a dict": Kind(
        lambda: {"v": 0.5}.get, lambda held: held("v"), lambda held, value: held.__self__.update(v=value)
    ),
    "operator of a list": Kind(
        lambda: [0.5].__getitem__, lambda held: held(0), lambda held, value: held.__self__.__setitem__(0, value)
    ),
    "view of a dict": Kind(
        view, lambda held: next(iter(held.values)), lambda held, value: held.under.__setitem__("v", value)
    ),
    "attribute getter": Kind(
        lambda: types.SimpleNamespace(get=operator.attrgetter("deep.hidden"), deep=types.SimpleNamespace(hidden=0.5)),
        lambda held: held.get(held),
        lambda held, value: setattr(held.deep, "hidden", value),
    ),
    "item getter": Kind(
        lambda: types.SimpleNamespace(get=operator.itemgetter("v"), under={"v": 0.5}),
        lambda held: held.get(held.under),
        lambda held, value: held.under.update(v=value),
    ),
    "bound method": Kind(lambda: Plain().__getattribute__, lambda h: h("v"), lambda h, v: setattr(h.__self__, "v", v)),
    "objects in an array": Kind(of_objects, lambda h: h[0].v, lambda h, value: setattr(h[0], "v", value)),
    "dict in an array": Kind(of_objects, lambda h: h[1]["v"], lambda h, value: h[1].update(v=value)),
    "object replaced in an array": Kind(of_objects, lambda h: h[1]["v"], lambda h, v: h.__setitem__(1, {"v": v})),
    "list in a record": Kind(records_of_objects, lambda h: h["v"][0][0], lambda h, v: h["v"][0].__setitem__(0, v)),
    "structured array": Kind(structured, lambda h: float(h["v"][0]), lambda h, v: h["v"].__setitem__(0, v)),
    "record array": named(lambda: np.rec.array([(0.5,)], dtype=[("v", "f8")]), read=lambda held: float(held.v[0])),
    "masked array": Kind(
        lambda: np.ma.array([0.5, 2.0], mask=[False, True]),
        lambda held: float(held.sum()),
        lambda held, value: held.mask.__setitem__(1, False),
    ),
    "view of an array": Kind(
        lambda: (lambda under: types.SimpleNamespace(under=under, part=under[1::2, ::-1]))(np.full((4, 3), 0.5)),
        lambda held: float(held.part.sum()),
        lambda held, value: held.under.__setitem__((3, 0), value),
    ),
    "array of zero axes": Kind(
        lambda: np.array(0.5), lambda held: held.item(), lambda held, value: held.__setitem__((), value)
    ),
    "large array": item(200_000, lambda: np.full(2**18, 0.5), read=lambda held: float(held[200_000])),
    "tensor's NumPy view": Kind(
        lambda: torch.full((2,), 0.5).double().numpy(), lambda h: float(h[1]), lambda h, v: h.__setitem__(1, v)
    ),
    "lru_cache": Kind(cached, lambda held: held("v"), forget),
    "cached property": Kind(cached_property, lambda held: held.v, refresh),
    "single dispatch": Kind(
        dispatched, lambda held: held(1), lambda h, value: h.register(int, lambda v: value) and None
    ),
    "class": named(freshly_classed),
    "metaclass": Kind(with_metaclass, lambda held: held.v, lambda held, value: setattr(type(held), "v", value)),
    "property": named(with_property),
    "descriptor": named(with_descriptor),
    "computed attribute": named(Computed),
    "columns": Kind(Column, lambda held: held.v, lambda held, value: held._blocks[0].__setitem__(1, value)),
    "attribute of an enum's member": Kind(
        lambda: (lambda made: (setattr(made.ONE, "v", 0.5), made)[1])(enumerated()),
        lambda held: held.ONE.v,
        lambda held, value: setattr(held.ONE, "v", value),
    ),
    "another class": Kind(Red, lambda held: held.read(), lambda held, value: setattr(held, "__class__", Blue)),
    "generator function": Kind(generating, lambda h: next(h.values()), lambda h, value: h.settings.update(v=value)),
    "Decimal": named(lambda: types.SimpleNamespace(v=decimal.Decimal("0.5")), read=lambda held: float(held.v)),
    "attribute of a tensor": named(
        lambda: (lambda made: (setattr(made, "v", 0.5), made)[1])(torch.ones(()).double()), read=lambda h: h * h.v
    ),
    "dictionary of tensors": Kind(
        lambda: (lambda key: types.SimpleNamespace(key=key, by={key: 0.5}))(torch.ones(1)),
        lambda held: held.by[held.key],
        lambda held, value: held.by.update({held.key: value}),
    ),
    "dictionary of objects": Kind(
        lambda: {Plain(): 0.5},
        lambda held: sum(key.v * value for key, value in held.items()),
        lambda held, value: setattr(next(iter(held)), "v", value),
    ),
    "file in memory": Kind(
        lambda: io.StringIO("0.5"),
        lambda held: float(held.getvalue()),
        lambda held, value: (held.seek(0), held.write(f"{value:.3f}")),
    ),
    "database": Kind(
        lambda: (lambda made: (made.execute("create table s(v)"), made.execute("insert into s values(0.5)"), made)[2])(
            sqlite3.connect(":memory:", check_same_thread=False)
        ),
        lambda held: held.execute("select v from s").fetchone()[0],
        lambda held, value: held.execute("update s set v = ?", (value,)),
    ),
    "exception": Kind(
        lambda: ValueError([0.5]), lambda held: held.args[0][0], lambda held, v: held.args[0].__setitem__(0, v)
    ),
    "exit stack": Kind(
        lambda: (lambda made: (made.callback(max, 0.5, 0.25), made)[1])(contextlib.ExitStack()),
        lambda held: len(held._exit_callbacks),
        lambda held, value: held.callback(max, value, 0.0),
    ),
}


class Nested:
    def __init__(self, held: Any) -> None:
        self.held = [{"k": (held,)}]


def of_a_global(self: Any) -> Any:
    return READ(HELD)  # type: ignore[name-defined]  # noqa: F821


def of_a_module(self: Any) -> Any:
    import settings_of_a_test  # type: ignore[import-not-found]

    return settings_of_a_test.read(settings_of_a_test.held)


def module_of(read: Callable[[Any], Any], held: Any) -> types.ModuleType:
    module = types.ModuleType("settings_of_a_test")
    module.read, module.held = read, held  # type: ignore[attr-defined]
    sys.modules["settings_of_a_test"] = module
    return module


def in_a_class(read: Callable[[Any], Any], held: Any) -> nn.Module:
    kind = type("Scaled", (Reader,), {"held": held, "read_it": staticmethod(read)})
    return kind(lambda self: type(self).read_it(type(self).held))


def in_a_default(read: Callable[[Any], Any], held: Any) -> nn.Module:
    def reading(self: Any, where: Any = held) -> Any:
        return read(where)

    return Reader(reading)


def in_a_closure(read: Callable[[Any], Any], held: Any) -> nn.Module:
    return Reader(lambda self: read(held))


def in_a_module(read: Callable[[Any], Any], held: Any) -> nn.Module:
    module_of(read, held)
    return Reader(of_a_module)


def in_a_closed_module(read: Callable[[Any], Any], held: Any) -> nn.Module:
    module = module_of(read, held)
    return Reader(lambda self: module.read(module.held))


PLACES: dict[str, Callable[[Callable[[Any], Any], Any], nn.Module]] = {
    "an attribute": lambda read, held: Reader(lambda self: read(self.held), held=held),
    "a nest": lambda read, held: Reader(lambda self: read(self.nest.held[0]["k"][0]), nest=Nested(held)),
    "a closure": in_a_closure,
    "a global": lambda read, held: Reader(with_globals(of_a_global, READ=read, HELD=held)),
    "a class": in_a_class,
    "a default": in_a_default,
    "a partial": lambda read, held: Reader(functools.partial(lambda where, self: read(where), held)),
    "a module imported in forward": in_a_module,
    "a module in a closure": in_a_closed_module,
}


def setting(kind: Kind, place: Callable[[Callable[[Any], Any], Any], nn.Module]) -> Way:
    held = kind.make()
    return Way(place(kind.read, held), mse, lambda step: kind.change(held, 1.5 + step) and None)


def setting_of_a_loss(kind: Kind) -> Way:
    held, read = kind.make(), kind.read
    return Way(Reader(), lambda o, t: mse(o, t) * read(held), lambda step: kind.change(held, 1.5 + step) and None)


SETTINGS: dict[str, Callable[[], Way]] = {
    f"{kind} in {place}": functools.partial(setting, KINDS[kind], PLACES[place]) for kind in KINDS for place in PLACES
}
SETTINGS |= {f"{kind} in a loss": functools.partial(setting_of_a_loss, KINDS[kind]) for kind in KINDS}


def process(read: Callable[[Any], Any], change: Callable[[float], Any], start: Callable[[], Any]) -> Callable[[], Way]:
    """A setting of the process."""

    def make() -> Way:
        start()
        return Way(Reader(read), mse, lambda step: change(1.5 + step) and None)

    return make


def environ_inside(self: Any) -> float:
    import os

    return float(os.environ["GIGAGRAD_SCALE"])


def getenv_inside(self: Any) -> float:
    from os import getenv

    return float(getenv("GIGAGRAD_SCALE") or 0)


def set_environ(value: float = 0.5) -> None:
    os.environ["GIGAGRAD_SCALE"] = str(value)


class Closed:
    """A function of the standard library, held."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, model: Any) -> float:
        return float(self.function("GIGAGRAD_SCALE"))


FOLDER = Path(tempfile.mkdtemp(prefix="gigagrad-settings-"))


def write(value: float = 0.5) -> None:
    (FOLDER / "scale.json").write_text(json.dumps(value))
    np.save(FOLDER / "scale.npy", np.float64(value))
    torch.save(torch.tensor(value).double(), FOLDER / "scale.pt")
    np.savetxt(FOLDER / "scale.txt", [value])
    os.utime(FOLDER / "scale.json", (value, value))


def opened(self: Any) -> float:
    with open(FOLDER / "scale.json") as file:
        return float(json.load(file))


def start_module(value: float = 0.5) -> None:
    module_of(float, value)


def by_name(self: Any) -> Any:
    return getattr(sys.modules["settings_" + "of_a_test"], "he" + "ld")


def imported_by_name(self: Any) -> Any:
    return vars(importlib.import_module("settings_" + "of_a_test"))["held"]


def name_inside(self: Any) -> Any:
    from settings_of_a_test import held

    return held


def perhaps(self: Any) -> Any:
    return getattr(sys.modules["settings_of_a_test"], "later", 0.5)


def set_later(value: float) -> None:
    sys.modules["settings_of_a_test"].later = value  # type: ignore[attr-defined]


def of_globals_by_name(self: Any) -> Any:
    return globals()["GIGAGRAD_" + "SCALE"]


def of_globals_by_text(self: Any) -> Any:
    return globals()["GIGAGRAD_SCALE"]


GIGAGRAD_SCALE = 0.5


def set_global(value: float = 0.5) -> None:
    global GIGAGRAD_SCALE
    GIGAGRAD_SCALE = value


def set_precision(value: float) -> None:
    decimal.getcontext().prec = 2 + int(value)


def precision_kept() -> None:
    decimal.getcontext().prec = 28


def divided(self: Any) -> float:
    return float(decimal.Decimal(1) / decimal.Decimal(3))


CLOCK = time.time


def hour(self: Any) -> float:
    return 1.0 + datetime.datetime.now().year


def threads(value: float) -> None:
    torch.set_num_threads(1 if value < 2 else 2)


def matmul(value: float) -> None:
    torch.set_float32_matmul_precision("high" if value < 2 else "highest")


SETTINGS |= {
    "os.environ": process(lambda m: float(os.environ["GIGAGRAD_SCALE"]), set_environ, set_environ),
    "os.environ.get": process(lambda m: float(os.environ.get("GIGAGRAD_SCALE", 2)), set_environ, set_environ),
    "os.environ, imported in forward": process(environ_inside, set_environ, set_environ),
    "os.getenv": process(lambda m: float(os.getenv("GIGAGRAD_SCALE", "")), set_environ, set_environ),
    "os.getenv, imported in forward": process(getenv_inside, set_environ, set_environ),
    "os.getenv in an object": process(Closed(os.getenv), set_environ, set_environ),
    "os.environ's method in an object": process(Closed(os.environ.get), set_environ, set_environ),
    "an environment's entry that goes": process(
        lambda m: 3.0 if os.environ.get("GIGAGRAD_SCALE") is None else 1.0,
        lambda value: os.environ.pop("GIGAGRAD_SCALE", None),
        set_environ,
    ),
    "open": process(opened, write, write),
    "Path.read_text": process(lambda m: float((FOLDER / "scale.json").read_text()), write, write),
    "np.load": process(lambda m: float(np.load(FOLDER / "scale.npy")), write, write),
    "np.loadtxt": process(lambda m: float(np.loadtxt(FOLDER / "scale.txt")), write, write),
    "np.fromfile": process(lambda m: float(np.fromfile(FOLDER / "scale.npy")[-1]), write, write),
    "np.memmap": process(lambda m: float(np.memmap(FOLDER / "scale.npy", "f8", "r")[-1]), write, write),
    "torch.load": process(lambda m: torch.load(FOLDER / "scale.pt"), write, write),
    "os.stat": process(lambda m: os.stat(FOLDER / "scale.json").st_mtime, write, write),
    "os.path.getmtime": process(lambda m: os.path.getmtime(FOLDER / "scale.json"), write, write),
    "sys.modules": process(lambda m: sys.modules["settings_of_a_test"].held, start_module, start_module),
    "sys.modules by a made-up name": process(by_name, start_module, start_module),
    "importlib by a made-up name": process(imported_by_name, start_module, start_module),
    "a name imported in forward": process(name_inside, start_module, start_module),
    "a name that joins a module": process(perhaps, set_later, start_module),
    "globals by a made-up name": process(of_globals_by_name, set_global, set_global),
    "globals by a name": process(of_globals_by_text, set_global, set_global),
    "decimal's precision": process(divided, set_precision, precision_kept),
    "decimal's context": process(lambda m: decimal.getcontext().prec / 10, set_precision, precision_kept),
    "the year": process(hour, lambda value: None, lambda: None),
    "sys.argv": process(
        lambda m: float(len(sys.argv)), lambda value: sys.argv.append("x"), lambda: sys.argv.__delitem__(slice(1, None))
    ),
    "the recursion limit": process(
        lambda m: sys.getrecursionlimit() / 1000,
        lambda value: sys.setrecursionlimit(3000 + int(value)),
        lambda: sys.setrecursionlimit(3000),
    ),
    "torch's threads": process(lambda m: float(torch.get_num_threads()), threads, lambda: torch.set_num_threads(1)),
    "torch's precision of products": process(
        lambda m: float(len(torch.get_float32_matmul_precision())),
        matmul,
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "torch's seed": process(
        lambda m: float(torch.initial_seed() % 97) + 1,
        lambda value: torch.manual_seed(int(value)),
        lambda: torch.manual_seed(0),
    ),
}
MOVED: dict[str, Callable[[], Iterator[float]]] = {
    "count": lambda: itertools.count(0.5, 0.25),
    "cycle": lambda: itertools.cycle([0.5, 0.5, 0.5, 0.5, 2.0]),
    "long range": lambda: iter(range(1, 2**70)),
    "list": lambda: iter([0.5] * 9),
    "zip": lambda: map(sum, zip([0.5] * 9, [0.5] * 9, strict=True)),
    "enumerate": lambda: map(sum, enumerate([0.5] * 9)),
    "chain": lambda: itertools.chain([0.5] * 2, [0.75] * 9),
    "repeat": lambda: itertools.repeat(0.5, 9),
    "generator": lambda: (0.5 for _ in range(9)),
    "islice": lambda: itertools.islice(itertools.count(0.5), 9),
    "accumulate": lambda: itertools.accumulate([0.5] * 9),
    "reversed": lambda: reversed([0.5] * 9),
}
"""Iterators that a forward moves on: they are refused."""


def moving(make: Callable[[], Iterator[float]], place: Callable[[Callable[[Any], Any], Any], nn.Module]) -> Way:
    return Way(place(next, make()), mse)


REFUSED_SETTINGS = {f"{name} moved on in {place}": "moves on" for name in MOVED for place in PLACES}
SETTINGS |= {
    f"{name} moved on in {place}": functools.partial(moving, MOVED[name], PLACES[place])
    for name in MOVED
    for place in PLACES
}


def keyed(key: Callable[[Any], Any]) -> Callable[[], Way]:
    """A dictionary of the model whose keys are objects of it, or what identifies them."""

    def make() -> Way:
        model = Reader(lambda self: self.scales.get(key(self), 2.0), scales={})
        model.scales[key(model)] = 0.5  # type: ignore[index, operator]
        return Way(model, mse, lambda step: model.scales.update({key(model): 1.5 + step}))  # type: ignore[operator]

    return make


def outside_keyed(key: Callable[[Any], Any]) -> Callable[[], Way]:
    """Such a dictionary that the model does not hold."""

    def make() -> Way:
        scales: dict[Any, float] = {}
        model = Reader(lambda self: scales.get(key(self), 2.0))
        scales[key(model)] = 0.5
        return Way(model, mse, lambda step: scales.update({key(model): 1.5 + step}))

    return make


def replaced() -> Way:
    """The dictionary knows a parameter that the model has no more."""
    scales: dict[int, float] = {}
    model = Reader(lambda self: scales.get(id(self.conv.weight), 3.0))
    scales[id(model.conv.weight)] = 0.5
    kept = [model.conv.weight]

    def change(step: int) -> None:
        model.conv.weight = nn.Parameter(model.conv.weight.detach().clone())
        kept.append(model.conv.weight)

    return Way(model, mse, change)


SETTINGS |= {
    "keyed by a module": keyed(lambda m: m.conv),
    "keyed by a parameter": keyed(lambda m: m.conv.weight),
    "keyed by an id": keyed(lambda m: id(m.conv)),
    "keyed by a parameter, outside": outside_keyed(lambda m: m.conv.weight),
    "keyed by a parameter's id, outside": outside_keyed(lambda m: id(m.conv.weight)),
    "keyed by the id of a parameter that is replaced": replaced,
    "a tensor's version": attribute(
        torch.ones(1).double(), torch.ones(1).double(), read=lambda self: 1.0 + self.conv.weight._version
    ),
}
UNFOLLOWED = ("ctypes structure", "BytesIO", "simple queue", "Decimal", "file in memory", "database")
"""Kinds that nobody can compare: a model that reads one is traced in every call."""
REFUSED_SETTINGS |= {
    "keyed by a parameter": "keys are parameters",
    "keyed by a parameter, outside": "keys are parameters",
    "a tensor's version": "_version",
    "torch.load": "cannot capture",
}
