"""Store a field of the whole image, or the part of it that one rank holds, and define tiers, in which fields are kept.

A store is written, added to and read box by box. A tier is a place for stores: planning asks it how much room it has,
what fields and tiles' crops of them come to, and how fast that moves; a run opens it once and takes stores from it.
Kinds of tiers are found by name in a registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Protocol

import torch

from gigagrad.boxes import Box
from gigagrad.devices import Machine
from gigagrad.errors import ConfigError
from gigagrad.graphs.crops import box_view


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
        first = crops[0][1] if crops else torch.empty(0, dtype=self.dtype)
        shape = self.crop_shape(box)
        whole = torch.empty(shape, dtype=first.dtype, device=first.device, memory_format=self._layout)
        for share, crop in crops:
            box_view(whole, self.axes, share, box).copy_(crop)
        return whole

    def write(self, box: Box, crop: torch.Tensor) -> None:
        for share, own, store in self._met(box):
            store.write(own, box_view(crop, self.axes, share, box))

    def add(self, box: Box, crop: torch.Tensor) -> None:
        for share, own, store in self._met(box):
            store.add(own, box_view(crop, self.axes, share, box))

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


Size = tuple[int, int]
"""Height and width in pixels."""


class OpenTier(Protocol):
    """A tier during one run."""

    def open_store(self, field: FieldSpec) -> Store:
        """Open a new field of zeros. Raises StoreError."""

    def close(self) -> None:
        """Give back what is not in memory. May be called again, by any thread."""


class Tier(ABC):
    """A place for fields that a plan keeps.

    A kind of tier is a subclass, given to `compile(..., scratch=MyTier(...))`, or found by name with a line in the
    registry (`register_tier`): `scratch="name:where"`.
    """

    name: ClassVar[str]
    """The name in plans."""
    place: ClassVar[str]
    """The place in "fields that this plan keeps in ...", "kept in ...: 2 GiB at most"."""
    in_budget: ClassVar[bool] = False
    """True where it is the memory that the budget bounds."""
    encodes: ClassVar[bool] = False
    """True where its bytes go through a codec, so that codes take fewer of them."""
    remedy: ClassVar[str] = "make room there"
    """The remedy where it has too little room."""

    @abstractmethod
    def room_bytes(self) -> int | None:
        """Return the bytes that fields may take; None: only the budget bounds it. Raises StoreError where it is not
        there."""

    def shared_room(self) -> tuple[str, int] | None:
        """Return what the room is part of, where ranks may share that: a name for it, the same on all that do, and the
        bytes that are free there. None: the room is for each rank. Raises StoreError where it is not there.
        """
        return None

    @abstractmethod
    def open(self, needed_bytes: int, machine: Machine) -> OpenTier:
        """Open the tier for one run, whose fields take up to so many bytes. Raises StoreError."""

    def field_bytes(self, size: Size, pixel_bytes: int) -> int:
        """Return the bytes that a field of so many pixels takes."""
        return size[0] * size[1] * pixel_bytes

    def fresh_bytes(self, fields: Iterable[FieldSpec]) -> int:
        """Return the bytes that stores of these fields would add to what the tier holds already."""
        return sum(field.nbytes for field in fields)

    def crop_bytes(self, size: Size, crop: Size, pixel_bytes: int) -> float:
        """Estimate the bytes that move when a crop of a field is read or written, on average over where it may lie."""
        return crop[0] * crop[1] * pixel_bytes

    def buffer_bytes(self, size: Size, crop: Size, pixel_bytes: int) -> int:
        """Return the bytes that crops take in memory on their way, beside themselves."""
        return 0

    def link_seconds(self, nbytes: float, machine: Machine) -> float:
        """Estimate the time that moving so many bytes takes, beside the computation."""
        return 0.0

    def processor_seconds(self, nbytes: float, machine: Machine) -> float:
        """Estimate, by the clock, what moving them keeps the processor from computing."""
        return 0.0


def least_room(rooms: Sequence[tuple[int, tuple[str, int] | None]]) -> int:
    """Return the bytes that each rank may take in a tier, by its `room_bytes` and `shared_room` on all."""
    takers = Counter(shared[0] for _, shared in rooms if shared is not None)

    def own(room: int, shared: tuple[str, int] | None) -> int:
        if shared is None or takers[shared[0]] == 1:
            return room
        return min(room, shared[1] // takers[shared[0]])

    return min(own(room, shared) for room, shared in rooms)


_KINDS: dict[str, Callable[[str, int | None], Tier]] = {}


def register_tier(name: str, make: Callable[[str, int | None], Tier]) -> None:
    """Make `scratch="name:where"` mean `make(where, scratch_bytes)`."""
    if len(name) < 2:  # of one letter are Windows' drives
        raise ConfigError(f"a tier's name has two letters or more, got {name!r}")
    _KINDS[name] = make


def registered_tier(scratch: str, room_bytes: int | None) -> Tier | None:
    """Return the tier that `scratch="name:where"` means; None where no tier has that name, so that it is a folder."""
    name, colon, where = scratch.partition(":")
    return _KINDS[name](where, room_bytes) if colon and name in _KINDS else None
