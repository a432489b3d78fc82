"""Sums over the tiles of a segment: a chain in the order of tiles inside a chunk, then a fixed binary tree over chunks.

What has no sum (a maximum, moments) is merged two by two in the same order. Where the crops of several chunks overlap,
cotangents of fields are added up for each chunk first, then in order (`Overlap`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch

from gigagrad.boxes import Box, without
from gigagrad.execution.scalars import Values, add
from gigagrad.graphs import Merge
from gigagrad.graphs.crops import box_view
from gigagrad.plans.chunks import Boundary, Chunks, ReductionTree
from gigagrad.stores import Store

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


BoxSum = tuple[Box, torch.Tensor]
"""Sums on a box of a field."""


class Overlap:
    """Adds the cotangents of one pass and one field to a store, chunks in their order.

    What overlaps with chunks before waits in sums of its own until this chunk is past it; everything else is added at
    once. The boxes `elsewhere` are added up by other ranks, and their sums are kept for them.
    """

    def __init__(
        self,
        store: Store,
        chunks: Chunks,
        field: int,
        elsewhere: list[Box],
        device: torch.device,
        layout: torch.memory_format,
    ) -> None:
        """Set the store; sums lie as crops do, on their device and in their layout."""
        self._store, self._chunks, self._field, self._elsewhere = store, chunks, field, elsewhere
        self._device = device
        self._layout = layout if len(store.shape) == 4 else torch.contiguous_format
        self._boundary: Boundary
        self._chunk, self._is_first = -1, False
        self._sums: dict[int, BoxSum] = {}
        self._kept: list[tuple[int, BoxSum]] = []
        self.given: dict[int, torch.Tensor] = {}
        """The sums of the chunk that came last, by which lines they are on, once they are complete."""

    def begin(self, chunk: int) -> None:
        """Begin the next chunk, before its first tile."""
        self.given = {}
        self._chunk, self._boundary = chunk, self._chunks.boundary(self._field, chunk)
        self._is_first = not (self._boundary.full or self._boundary.partly)
        for which, box in enumerate(self._chunks.overlaps(self._field, chunk)):
            if box is not None:
                self._sums[which] = box, self._zeros(box)

    def add(self, box: Box, crop: torch.Tensor) -> None:
        """Add what a tile of the chunk gives, on `box` of the field."""
        if self._is_first:
            self._store.add(box, crop)
            return
        axes = self._store.axes
        for waiting in tuple(self._sums):
            if self._is_past(waiting, box):
                self._give(waiting)
        for piece, which in self._boundary.split(box):
            share = box_view(crop, axes, piece, box)
            if which is None:
                self._store.add(piece, share)
            else:
                _view(self._sums[which], piece, axes).add_(share)

    @property
    def waiting(self) -> dict[int, torch.Tensor]:
        """The sums that are not complete, by which lines they are on."""
        return {which: sums for which, (_, sums) in self._sums.items()}

    def end(self) -> None:
        """End the chunk, after its last tile."""
        for which in tuple(self._sums):
            self._give(which)

    def kept_sum(self, chunk: int, box: Box) -> torch.Tensor:
        """Return what a chunk has added up for another rank, on a box of one of its overlaps."""
        found = next(kept for of, kept in self._kept if of == chunk and box.within(kept[0]))
        return _view(found, box, self._store.axes)

    @property
    def waits_from(self) -> int | None:
        """The first row of what waits, None if nothing does."""
        return min((box.y0 for box, _ in self._sums.values()), default=None)

    def _is_past(self, which: int, box: Box) -> bool:
        """Say whether a crop begins behind the lines of an overlap, and with it all that follow."""
        overlap, _ = self._sums[which]
        return box.y0 >= overlap.y1 if self._chunks.by_rows else box.x0 >= overlap.x1

    def _zeros(self, box: Box) -> torch.Tensor:
        shape, dtype = self._store.crop_shape(box), self._store.dtype
        return torch.empty(shape, dtype=dtype, device=self._device, memory_format=self._layout).zero_()

    def _give(self, which: int) -> None:
        done = self._sums.pop(which)
        self.given[which] = done[1]
        here = without([done[0]], self._elsewhere)
        for piece in here:
            self._store.add(piece, _view(done, piece, self._store.axes))
        if here != [done[0]]:
            self._kept.append((self._chunk, done))


def _view(summed: BoxSum, box: Box, axes: tuple[int, int]) -> torch.Tensor:
    whole, sums = summed
    return box_view(sums, axes, box, whole)
