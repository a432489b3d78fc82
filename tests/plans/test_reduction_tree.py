"""Sums of parts are joined in one tree, whoever has which of them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gigagrad.plans.parts import MOST_PARTS, waiting_sums
from gigagrad.plans.reduction_tree import ReductionTree


def joined(parts: list[int], low: int = 0, high: int = MOST_PARTS) -> object:
    """The tree, from its definition."""
    here = [part for part in parts if low <= part < high]
    if len(here) < 2:
        return here[0] if here else None
    middle = (low + high) // 2
    left, right = joined(parts, low, middle), joined(parts, middle, high)
    return right if left is None else left if right is None else (left, right)


class Spelled:
    """Joins what it is told to, and remembers how."""

    def __init__(self, before: int | None = None) -> None:
        self.order, self.sums = ReductionTree(before), list[object]()

    def append(self, part: int, value: object) -> None:
        self.join(self.order.append(part))
        self.sums.append(value)

    def join(self, times: int) -> None:
        for _ in range(times):
            right = self.sums.pop()
            self.sums.append((self.sums.pop(), right))


@given(st.sets(st.integers(0, MOST_PARTS - 1), min_size=1), st.lists(st.integers(0, MOST_PARTS), max_size=6))
def test_sums_are_joined_in_one_tree_whoever_has_which_parts(present, cuts):
    parts, edges = sorted(present), [0, *sorted(cuts), MOST_PARTS]
    whole = Spelled()
    for low, high in pairwise(edges):
        before = max((p for p in parts if p < low), default=None)
        following = min((p for p in parts if p >= high), default=MOST_PARTS)
        own = Spelled(before)
        for part in parts:
            if low <= part < high:
                own.append(part, part)
        own.join(own.order.join_before(following))
        for part, value in zip(own.order.parts, own.sums, strict=True):
            whole.append(part, value)
    whole.join(len(whole.sums) - 1)
    assert whole.sums == [joined(parts)]


@given(st.sets(st.integers(0, MOST_PARTS - 1), min_size=1))
def test_no_more_sums_wait_than_are_counted(present):
    order, most = ReductionTree(), 0
    for part in sorted(present):
        most = max(most, len(order.parts))
        order.append(part)
    assert most <= waiting_sums(MOST_PARTS, MOST_PARTS)
