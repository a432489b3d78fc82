"""Add cotangents of fields where the crops of several parts overlap: each part's own sum first, then in order."""

from __future__ import annotations

import torch

from gigagrad.boxes import Box, without
from gigagrad.graphs.crops import crop_view as part_of
from gigagrad.plans.parts import Front, Parts
from gigagrad.stores import Store

Strip = tuple[Box, torch.Tensor]
"""Sums on a box of a field."""


class Seam:
    """Adds one sweep's cotangents of one field to its store, parts in their order.

    What parts before have reached waits in strips until this part is past them; everything else is added at once. On
    the boxes `elsewhere` other ranks add up, and strips are kept for them.
    """

    def __init__(
        self,
        store: Store,
        parts: Parts,
        field: int,
        elsewhere: list[Box],
        like: tuple[torch.device, torch.memory_format],
    ) -> None:
        """Set the stores; overlaps lie `like` crops: where, and in which layout."""
        self._store, self._parts, self._field, self._elsewhere = store, parts, field, elsewhere
        self._device, layout = like
        self._layout = layout if len(store.shape) == 4 else torch.contiguous_format
        self._front: Front
        self._part, self._is_first = -1, False
        self._strips: dict[int, Strip] = {}
        self._kept: list[tuple[int, Strip]] = []
        self.given: dict[int, torch.Tensor] = {}
        """The strips of the part that came last, by which lines they are on, once they are complete."""

    def begin(self, part: int) -> None:
        """Begin the next part, before its first tile."""
        self.given = {}
        self._part, self._front = part, self._parts.front(self._field, part)
        self._is_first = not (self._front.full or self._front.partly)
        for which, box in enumerate(self._parts.strips(self._field, part)):
            if box is not None:
                self._strips[which] = box, self._zeros(box)

    def add(self, box: Box, crop: torch.Tensor) -> None:
        """Add what a tile of the part gives, on `box` of the field."""
        if self._is_first:
            self._store.add(box, crop)
            return
        axes = self._store.axes
        for strip in tuple(self._strips):
            if self._is_past(strip, box):
                self._give(strip)
        for piece, which in self._front.split(box):
            share = part_of(crop, axes, (piece.y0 - box.y0, piece.x0 - box.x0), piece.shape)
            if which is None:
                self._store.add(piece, share)
            else:
                _view(self._strips[which], piece, axes).add_(share)

    @property
    def waiting(self) -> dict[int, torch.Tensor]:
        """The strips that are not complete, by which lines they are on."""
        return {which: sums for which, (_, sums) in self._strips.items()}

    def end(self) -> None:
        """End the part, after its last tile."""
        for which in tuple(self._strips):
            self._give(which)

    def strip(self, part: int, box: Box) -> torch.Tensor:
        """Return what a part has added up for another rank, on a box of one of its strips."""
        found = next(strip for of, strip in self._kept if of == part and box.within(strip[0]))
        return _view(found, box, self._store.axes)

    @property
    def waits_from(self) -> int | None:
        """The first row of what waits, None if nothing does."""
        return min((box.y0 for box, _ in self._strips.values()), default=None)

    def _is_past(self, which: int, box: Box) -> bool:
        """Say whether a crop begins behind the lines of a strip, and with it all that follow."""
        strip, _ = self._strips[which]
        return box.y0 >= strip.y1 if self._parts.by_rows else box.x0 >= strip.x1

    def _zeros(self, box: Box) -> torch.Tensor:
        shape, dtype = self._store.crop_shape(box), self._store.dtype
        return torch.empty(shape, dtype=dtype, device=self._device, memory_format=self._layout).zero_()

    def _give(self, which: int) -> None:
        strip = self._strips.pop(which)
        self.given[which] = strip[1]
        here = without([strip[0]], self._elsewhere)
        for piece in here:
            self._store.add(piece, _view(strip, piece, self._store.axes))
        if here != [strip[0]]:
            self._kept.append((self._part, strip))


def _view(strip: Strip, box: Box, axes: tuple[int, int]) -> torch.Tensor:
    (y, x), (whole, sums) = axes, strip
    return sums.narrow(y, box.y0 - whole.y0, box.height).narrow(x, box.x0 - whole.x0, box.width)
