"""Define the interface of a tier, a place where fields are kept, and the registry in which kinds of them are found by
name.

Planning asks a tier how much room it has, what fields and tiles' crops of them come to, and how fast that moves; a run
opens it once and takes stores from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Protocol

from gigagrad.devices import Machine
from gigagrad.errors import ConfigError
from gigagrad.stores.store import FieldSpec, Store

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
