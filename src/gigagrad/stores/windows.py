"""Store the part of a field that one rank holds, in disjoint windows with a store for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gigagrad.boxes import Box
from gigagrad.graphs.crops import part
from gigagrad.stores.store import Store
from gigagrad.stores.tier import FieldSpec

Window = tuple[Box, Store]


class Windows(Store):
    """A field of which some windows are held; boxes are those of the whole field. What is written or added outside of
    all windows is somebody else's."""

    def __init__(self, field: FieldSpec, windows: Sequence[Window]) -> None:
        super().__init__(field.shape, field.dtype, field.axes)
        self._windows = tuple(windows)
        self._layout = field.layout if len(field.shape) == 4 else torch.contiguous_format

    def read(self, box: Box) -> torch.Tensor:
        """Read a box that the windows hold all of. Raises as `Store.read`."""
        found = [(share, store.read(own)) for share, own, store in self._met(box)]
        assert sum(share.area for share, _ in found) == box.area, f"{box} is not all held here"
        if len(found) == 1:
            return found[0][1]
        (y, x), shape = self.axes, self.crop_shape(box)
        first = found[0][1] if found else torch.empty(0, dtype=self.dtype)
        whole = torch.empty(shape, dtype=first.dtype, device=first.device, memory_format=self._layout)
        for share, crop in found:
            whole.narrow(y, share.y0 - box.y0, share.height).narrow(x, share.x0 - box.x0, share.width).copy_(crop)
        return whole

    def write(self, box: Box, crop: torch.Tensor) -> None:
        for share, own, store in self._met(box):
            store.write(own, part(crop, self.axes, (share.y0 - box.y0, share.x0 - box.x0), share.shape))

    def add(self, box: Box, crop: torch.Tensor) -> None:
        for share, own, store in self._met(box):
            store.add(own, part(crop, self.axes, (share.y0 - box.y0, share.x0 - box.x0), share.shape))

    def flush(self) -> None:
        for _, store in self._windows:
            store.flush()

    def close(self) -> None:
        for _, store in self._windows:
            store.close()

    def retire(self) -> None:
        for _, store in self._windows:
            store.retire()

    def whole(self) -> torch.Tensor:
        if len(self._windows) == 1 and self._windows[0][1].shape == self.shape:
            return self._windows[0][1].whole()
        return super().whole()

    def _met(self, box: Box) -> Iterator[tuple[Box, Box, Store]]:
        """Yield the part that every window has of a box: as the whole field has it, as its store has it, and that
        store."""
        for window, store in self._windows:
            share = box.intersect(window)
            if not share.empty:
                yield share, share.shift(-window.y0, -window.x0), store
