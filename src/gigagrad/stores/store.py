"""Store a field of the whole image, or the part of it that one rank holds, and write, add to and read it box by box."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from gigagrad.boxes import Box
from gigagrad.graphs.crops import crop_view


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """A field to be stored; `axes` are the (negative) positions of y and x."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[int, int]
    layout: torch.memory_format = torch.contiguous_format
    """The layout of the tiles' crops."""
    coded: bool = False
    """True where the values are codes, which take fewer bytes behind a codec."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def crop_shape(shape: tuple[int, ...], axes: tuple[int, int], box: Box) -> tuple[int, ...]:
    """Return the shape of a field's crop on a box."""
    crop = list(shape)
    crop[axes[0]], crop[axes[1]] = box.shape
    return tuple(crop)


class Store(ABC):
    """A field of the given shape; `axes` are the (negative) positions of y and x. All boxes lie inside the field.

    What is read holds all that was written or added before, by whatever thread; where that is still on its way, reading
    waits. Several threads may use one store at a time, on boxes that do not overlap.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, axes: tuple[int, int]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.axes = axes

    def crop_shape(self, box: Box) -> tuple[int, ...]:
        """Return the shape of what is read on a box."""
        return crop_shape(self.shape, self.axes, box)

    @abstractmethod
    def read(self, box: Box) -> torch.Tensor:
        """Return a crop, not to be written to: it may share the store's memory. Raises what earlier writing raised."""

    @abstractmethod
    def write(self, box: Box, crop: torch.Tensor) -> None:
        """Replace what the box holds."""

    @abstractmethod
    def add(self, box: Box, crop: torch.Tensor) -> None:
        """Add to what the box holds; a new store holds zeros."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until everything that was written is in its place. Raises what the writing raised."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the store holds; it is not used again, but may be closed again."""

    def retire(self) -> None:
        """Close it, by whoever knows that no crop that was read is in use any more."""
        self.close()

    def whole(self) -> torch.Tensor:
        """Read the whole field."""
        return self.read(Box.whole(*(self.shape[axis] for axis in self.axes)))


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
        crops = [(share, store.read(own)) for share, own, store in self._met(box)]
        assert sum(share.area for share, _ in crops) == box.area, f"{box} is not all held here"
        if len(crops) == 1:
            return crops[0][1]
        (y, x), shape = self.axes, self.crop_shape(box)
        first = crops[0][1] if crops else torch.empty(0, dtype=self.dtype)
        whole = torch.empty(shape, dtype=first.dtype, device=first.device, memory_format=self._layout)
        for share, crop in crops:
            whole.narrow(y, share.y0 - box.y0, share.height).narrow(x, share.x0 - box.x0, share.width).copy_(crop)
        return whole

    def write(self, box: Box, crop: torch.Tensor) -> None:
        for share, own, store in self._met(box):
            store.write(own, crop_view(crop, self.axes, (share.y0 - box.y0, share.x0 - box.x0), share.shape))

    def add(self, box: Box, crop: torch.Tensor) -> None:
        for share, own, store in self._met(box):
            store.add(own, crop_view(crop, self.axes, (share.y0 - box.y0, share.x0 - box.x0), share.shape))

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
        """Yield the part that every window has of a box, in the whole field and in its store, and that store."""
        for window, store in self._windows:
            share = box.intersect(window)
            if not share.empty:
                yield share, share.shift(-window.y0, -window.x0), store


class Strips(Store):
    """The rows in use of a field: from the first that was not taken to the last that was touched. `whole`: all of them
    from the beginning, for whoever adds in any order before anything is taken. For one thread.
    """

    def __init__(self, field: FieldSpec, device: torch.device, *, whole: bool) -> None:
        super().__init__(field.shape, field.dtype, field.axes)
        self._device, self._first = device, 0
        self._rows = self._zeros(field.shape[field.axes[0]] if whole else 0)

    def read(self, box: Box) -> torch.Tensor:
        self._reach(box.y1)
        y, x = self.axes
        return self._rows.narrow(y, box.y0 - self._first, box.height).narrow(x, box.x0, box.width)

    def write(self, box: Box, crop: torch.Tensor) -> None:
        self.read(box).copy_(crop)

    def add(self, box: Box, crop: torch.Tensor) -> None:
        self.read(box).add_(crop.to(self._device))

    def take(self, y1: int) -> tuple[Box, torch.Tensor] | None:
        """Take the rows down to `y1` that were not taken before, not to be touched again; None where there are none."""
        box = Box(self._first, 0, y1, self.shape[self.axes[1]])
        if box.empty:
            return None
        strip, y = self.read(box), self.axes[0]
        self._rows, self._first = self._rows.narrow(y, box.height, self._rows.shape[y] - box.height), y1
        return box, strip

    def flush(self) -> None:
        """Do nothing: nothing waits."""

    def close(self) -> None:
        self._rows = self._zeros(0)

    def _reach(self, y1: int) -> None:
        """Have the rows down to `y1`, in memory of their own: what was taken belongs to whoever has it."""
        missing = y1 - self._first - self._rows.shape[self.axes[0]]
        if missing > 0:
            self._rows = torch.cat([self._rows, self._zeros(missing)], self.axes[0])

    def _zeros(self, rows: int) -> torch.Tensor:
        shape = list(self.shape)
        shape[self.axes[0]] = rows
        return torch.zeros(shape, dtype=self.dtype, device=self._device)
