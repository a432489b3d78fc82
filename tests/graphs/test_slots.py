"""Every kind of place tells what it holds, notices a change, and can be put back as it was."""

from __future__ import annotations

import collections
import itertools
import random
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.graphs.capture.slots import (
    CELL,
    FUNCTION,
    BytesSlot,
    ClassSlot,
    DescriptorSlot,
    DictSlot,
    ItemsSlot,
    IteratorSlot,
    NamesSlot,
    OrderedSlot,
    RandomSlot,
    Unchanged,
    is_plain,
    same,
)


class Slotted:
    __slots__ = ("a", "b")


def slotted(**more):
    made = Slotted()
    for name, value in {"a": 1, **more}.items():
        setattr(made, name, value)
    return DescriptorSlot(made, "", [("a", Slotted.a), ("b", Slotted.b)])  # type: ignore[attr-defined]


def cell(*value):
    return DescriptorSlot(types.CellType(*value), "", CELL, attributes=False)


def function():
    def made(x=1, *, y=2):
        return x + y

    return DescriptorSlot(made, "", FUNCTION, attributes=False)


def drawing(place):
    state = place.holder
    state.random() if hasattr(state, "random") else state.rand()


CASES = {
    "dict": (lambda: DictSlot({"a": 1, "b": 2}, ""), lambda p: p.holder.update(a=3, c=4)),
    "dict, gone": (lambda: DictSlot({"a": 1, "b": 2}, ""), lambda p: p.holder.pop("a")),
    "dict, another key": (lambda: DictSlot({"a": 1}, ""), lambda p: p.holder.update(b=p.holder.pop("a"))),
    "dict, from empty": (lambda: DictSlot({}, ""), lambda p: p.holder.update(a=1)),
    "ordered": (lambda: OrderedSlot(collections.OrderedDict(a=1, b=2), ""), lambda p: p.holder.update(a=3)),
    "ordered, moved": (lambda: OrderedSlot(collections.OrderedDict(a=1, b=1), ""), lambda p: p.holder.move_to_end("a")),
    "ordered, from empty": (lambda: OrderedSlot(collections.OrderedDict(), ""), lambda p: p.holder.update(a=1)),
    "list": (lambda: ItemsSlot([1, 2], ""), lambda p: p.holder.append(3)),
    "deque": (lambda: ItemsSlot(collections.deque([1, 2]), ""), lambda p: p.holder.rotate(1)),
    "bytearray": (lambda: ItemsSlot(bytearray(b"ab"), ""), lambda p: p.holder.extend(b"c")),
    "set": (lambda: ItemsSlot({1, 2}, ""), lambda p: p.holder.add(3)),
    "cell": (lambda: cell(1), lambda p: setattr(p.holder, "cell_contents", 5)),
    "cell, emptied": (lambda: cell(1), lambda p: delattr(p.holder, "cell_contents")),
    "empty cell": (cell, lambda p: setattr(p.holder, "cell_contents", 5)),
    "names": (lambda: NamesSlot({"a": 1, "z": 0}, "", ["a", "b"]), lambda p: p.holder.update(a=2, b=3)),
    "class": (lambda: ClassSlot(type("C", (), {"a": 1}), ""), lambda p: setattr(p.holder, "b", 2)),
    "class, changed": (lambda: ClassSlot(type("C", (), {"a": 1}), ""), lambda p: setattr(p.holder, "a", 2)),
    "slots": (slotted, lambda p: (setattr(p.holder, "b", 2), delattr(p.holder, "a"))),  # type: ignore[func-returns-value]
    "slots, gone": (lambda: slotted(b=2), lambda p: delattr(p.holder, "a")),
    "function": (function, lambda p: setattr(p.holder, "__kwdefaults__", {"y": 5})),
    "array": (lambda: BytesSlot(np.arange(6).reshape(2, 3), ""), lambda p: p.holder.__setitem__((0, 1), 9)),
    "random": (lambda: RandomSlot(random.Random(1), ""), drawing),
    "NumPy's generator": (lambda: RandomSlot(np.random.default_rng(1), ""), drawing),
    "NumPy's old generator": (lambda: RandomSlot(np.random.RandomState(1), ""), drawing),
}


def holds_the_same(one, other):
    return same(one[0], other[0]) and len(one[1]) == len(other[1]) and all(map(same, one[1], other[1]))


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen_and_undone(name):
    make, change = CASES[name]
    place = make()
    before = place.read()
    assert holds_the_same(place.read(), before)
    change(place)
    assert not holds_the_same(place.read(), before)
    place.put(before)
    assert holds_the_same(place.read(), before)


@pytest.mark.parametrize("name", CASES)
def test_a_change_of_one_among_many_is_seen(name):
    make, change = CASES[name]
    places = [DictSlot({"a": 0}, ""), OrderedSlot(collections.OrderedDict(), ""), make(), ItemsSlot([[], {}], "")]
    seen = [(place, place.read()) for place in places]
    unchanged = Unchanged(seen)
    by_value = not all(place.holds(then) for place, then in seen)  # what is made anew by each reading is never the same
    assert unchanged.holds() is not by_value
    change(places[2])
    assert not unchanged.holds()
    places[2].put(seen[2][1])
    assert unchanged.holds() is not by_value


@pytest.mark.parametrize("now", [([1], [2, 3]), ([1, 2], []), ([1, 2, 3], []), ([1, 2], [3, 4])])
def test_what_moves_from_one_to_the_next_is_seen(now):
    places = [ItemsSlot([1, 2], ""), ItemsSlot([3], "")]
    unchanged = Unchanged([(place, place.read()) for place in places])
    assert unchanged.holds()
    for place, items in zip(places, now, strict=True):
        place.holder[:] = items
    assert not unchanged.holds()


def generator():
    yield from range(5)


@pytest.mark.parametrize(
    "made",
    [itertools.count(), iter([1, 2]), generator(), iter(range(3))],
    ids=["count", "list", "generator", "range"],
)
def test_an_iterator_that_moves_on_is_seen(made):
    place = IteratorSlot(made, "")
    assert not place.restorable
    before = place.read()
    next(made)
    assert not same(place.read()[1], before[1])


def test_large_arrays_are_told_by_a_digest():
    place = BytesSlot(np.zeros(2**18), "")
    before = place.read()
    assert not place.restorable
    assert len(before[1][0][2]) == 16
    place.holder[-1] = -0.0
    assert not same(place.read()[1], before[1])


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=True) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)


@given(PLAIN, PLAIN)
def test_values_are_the_same_where_they_read_the_same(one, other):
    assert is_plain(one)
    assert same(one, other) == (repr(one) == repr(other))


class Loud:
    def __eq__(self, other):
        raise AssertionError("user code ran")

    __hash__ = object.__hash__


def test_comparing_runs_no_code_of_the_users():
    assert not same(Loud(), Loud())
    assert not same((1, Loud()), (1, Loud()))


def test_reading_runs_no_code_of_the_users():
    def raising(name):
        def method(*_):
            raise AssertionError(f"{name} ran")

        return method

    names = ("__iter__", "__len__", "__getitem__", "__contains__", "__eq__", "keys", "values", "items", "get", "copy")
    own = {name: raising(name) for name in names}
    loud = [type("Loud", (kind,), own)() for kind in (dict, collections.OrderedDict, list, set, collections.deque)]
    places = [
        DictSlot(loud[0], ""),
        OrderedSlot(loud[1], ""),
        *(ItemsSlot(items, "") for items in loud[2:]),
        ClassSlot(type(loud[0]), ""),
    ]
    seen = [(place, place.read()) for place in places]
    assert Unchanged(seen).holds()
    dict.__setitem__(loud[0], Loud(), Loud())
    collections.OrderedDict.__setitem__(loud[1], Loud(), Loud())
    assert not Unchanged(seen).holds()
    seen = [(place, place.read()) for place in places]
    assert Unchanged(seen).holds()
    for holder in loud[:2]:
        dict.update(holder, dict.fromkeys(dict.keys(holder), Loud()))
    assert not Unchanged(seen).holds()
