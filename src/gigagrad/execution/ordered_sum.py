"""Sums over the tiles of a segment: a chain in the order of tiles inside a chunk, then a fixed binary tree over chunks.

What has no sum (a maximum, moments) is merged two by two in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch

from gigagrad.execution.scalars import Values, add
from gigagrad.graphs import Merge
from gigagrad.plans.chunks import ReductionTree

Joined = tuple[int, Values]
"""Sums of neighbouring chunks that the tree joins, and one of these chunks."""


class OrderedSum:
    """The sums of one pass. Values by node id; those of `merges` are merged as those say. A chunk without a value of
    some node is skipped, as if the tree had no leaf there. `before`: the last chunk that somebody else computes before
    these.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        merges: Mapping[int, Merge] = MappingProxyType({}),
        before: int | None = None,
    ) -> None:
        self._dtype, self._merges = dtype, merges
        self._chunk: int | None = None
        self._chain: Values = {}
        self._tree, self._sums = ReductionTree(before), list[Values]()

    @property
    def chain(self) -> Values:
        """The values of the chunk being computed so far, in whatever dtype."""
        return self._chain

    def add(self, chunk: int, values: Values) -> None:
        """Add what a tile of this chunk gives; chunks come in their order."""
        if chunk != self._chunk:
            self._end()
            self._chunk = chunk
        for key, value in values.items():
            self._into(self._chain, key, value)

    def append(self, others: Iterable[Joined]) -> None:
        """Append what somebody else has of the chunks that follow."""
        self._end()
        for chunk, values in others:
            self._join(self._tree.append(chunk))
            self._sums.append(values)

    def joined(self, following: int) -> list[Joined]:
        """Return all that was added, joined as far as the tree joins it before the chunk that follows; nothing
        stays.
        """
        self._end()
        self._join(self._tree.join_before(following))
        found, self._sums = list(zip(self._tree.chunks, self._sums, strict=True)), []
        for _, values in found:
            for key, value in values.items():
                if key not in self._merges:
                    values[key] = value.to(self._dtype)
        return found

    def total(self) -> Values:
        """Return the sums of all chunks, those of one value as it is; nothing is added any more."""
        self._end()
        self._join(len(self._sums) - 1)
        return self._sums.pop() if self._sums else {}

    def _end(self) -> None:
        """Make a leaf of the chain."""
        if self._chunk is not None:
            self._join(self._tree.append(self._chunk))
            self._sums.append(self._chain)
            self._chunk, self._chain = None, {}

    def _join(self, times: int) -> None:
        """Join the last two, so many times."""
        for _ in range(times):
            right = self._sums.pop()
            left = self._sums[-1]
            for key in tuple(right):
                value = right.pop(key)
                if key in left:
                    self._into(left, key, value)
                else:
                    left[key] = value

    def _into(self, sums: Values, key: int, value: torch.Tensor) -> None:
        known = sums.get(key)
        if key in self._merges:
            sums[key] = value if known is None else self._merges[key](known, value)
        elif known is None and value.dtype != self._dtype:
            sums[key] = value.detach()  # as it is: only what something is added to needs the sum's dtype
        else:
            if known is not None and known.dtype != self._dtype:
                sums[key] = known.to(self._dtype)
            add(sums, key, value, self._dtype)
