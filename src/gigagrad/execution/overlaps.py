"""Add cotangents of fields where the crops of several chunks overlap: each chunk's own sum first, then in order."""

from __future__ import annotations

import torch

from gigagrad.boxes import Box, without
from gigagrad.graphs.crops import crop_view
from gigagrad.plans.chunks import Boundary, Chunks
from gigagrad.stores import Store

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
        like: tuple[torch.device, torch.memory_format],
    ) -> None:
        """Set the store; sums lie `like` crops: on their device, and in their layout."""
        self._store, self._chunks, self._field, self._elsewhere = store, chunks, field, elsewhere
        self._device, layout = like
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
            share = crop_view(crop, axes, (piece.y0 - box.y0, piece.x0 - box.x0), piece.shape)
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
    (y, x), (whole, sums) = axes, summed
    return sums.narrow(y, box.y0 - whole.y0, box.height).narrow(x, box.x0 - whole.x0, box.width)
