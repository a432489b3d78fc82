"""Sums over the tiles of a stage: a chain in the order of tiles inside a part, then a fixed binary tree over parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from gigagrad.execution.tape import Values, add

Joined = tuple[int, Values]
"""Sums of neighbouring parts that the tree joins, and one of these parts."""


class PartSums:
    """Of one sweep. Values by node id; those of `largest` are maxima instead. A part without a value of some node is
    skipped, as if the tree had no leaf there. `before`: the last part that somebody else computes before these.
    """

    def __init__(self, dtype: torch.dtype, largest: Collection[int] = (), before: int | None = None) -> None:
        self._dtype, self._largest, self._before = dtype, largest, before
        self._part = -1
        self._chain: Values = {}
        self._joined: list[Joined] = []

    def add(self, part: int, values: Values) -> None:
        """What a tile of this part gives; parts come in their order."""
        if part != self._part:
            self._end()
            self._part = part
        for key, value in values.items():
            self._into(self._chain, key, value)

    def append(self, others: Iterable[Joined]) -> None:
        """What somebody else has of the parts that follow."""
        self._end()
        for part, values in others:
            self._join_before(part)
            self._joined.append((part, values))

    def joined(self, following: int) -> list[Joined]:
        """All that was added, joined as far as the tree joins it before the part that follows."""
        self._end()
        self._join_before(following)
        return self._joined

    def total(self) -> Values:
        """Of all parts; nothing is added any more."""
        self._end()
        while len(self._joined) > 1:
            self._join()
        return self._joined.pop()[1] if self._joined else {}

    def _end(self) -> None:
        """The chain becomes a leaf."""
        if self._part >= 0:
            self._join_before(self._part)
            self._joined.append((self._part, self._chain))
            self._part, self._chain = -1, {}

    def _join_before(self, following: int) -> None:
        """Join what meets in the tree below where it meets the part that follows, and what came before.

        Two leaves meet as high as the first bit in which their numbers differ.
        """
        while len(self._joined) > 1:
            left, right = self._joined[-2][0], self._joined[-1][0]
            before = self._joined[-3][0] if len(self._joined) > 2 else self._before
            if left ^ right > right ^ following or (before is not None and left ^ right > before ^ left):
                return
            self._join()

    def _join(self) -> None:
        _, right = self._joined.pop()
        for key in tuple(right):
            value, left = right.pop(key), self._joined[-1][1]
            if key in left:
                self._into(left, key, value)
            else:
                left[key] = value

    def _into(self, sums: Values, key: int, value: torch.Tensor) -> None:
        if key in self._largest:
            known = sums.get(key)
            sums[key] = value if known is None else torch.maximum(known, value)
        else:
            add(sums, key, value, self._dtype)
