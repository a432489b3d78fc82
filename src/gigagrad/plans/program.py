"""Steps of a run as plain data: each holds all that running, counting or checking it takes.

A plan's program is a flat list of them. What it holds in memory, sends between ranks, computes when and has wrong are
each one walk over that list; `gigagrad.plans.emit` makes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any, get_args, get_type_hints

import numpy as np

from gigagrad.boxes import Box

Key = tuple[int, bool]
"""A node, and whether its cotangents are meant."""
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory for a field or for its cotangents, from an `Allocate` to a `Release` or to the end."""

    node: int
    cotangent: bool
    tier: str
    size_bytes: int
    """All of it takes so much in that tier; 0 where it leaves in strips."""
    held: tuple[tuple[Box, ...], ...]
    """The boxes that each rank holds."""
    held_bytes: tuple[int, ...]
    """Bytes that those take, by rank."""
    replicated: bool
    """True where every rank holds all of it."""

    @property
    def key(self) -> Key:
        return self.node, self.cotangent

    def most_bytes(self, share: float) -> int:
        """Return what one rank takes that holds at most this share of what is not replicated."""
        return self.size_bytes if self.replicated else ceil(share * self.size_bytes)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box of a field, or of cotangents, that one rank sends another one, or adds up for itself."""

    node: int
    box: Box
    sender: int
    receiver: int
    size_bytes: int
    chunk: int | None = None
    """The chunk whose tiles gave it, where cotangents are added. None: it is written as it is."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Nodes that a pass sums, by how their sums come to all ranks. `gigagrad.plans.partition` tells why."""

    whole: tuple[int, ...]
    """Each rank joins them by itself."""
    cut: tuple[int, ...]
    """Each rank joins a share, and a `Gather` puts the shares together at once."""
    late: tuple[int, ...]
    """So are these, when the step is over: gradients of parameters."""

    @property
    def shared(self) -> tuple[int, ...]:
        return self.cut + self.late

    @property
    def all(self) -> tuple[int, ...]:
        return self.whole + self.shared


@dataclass(frozen=True, slots=True)
class Allocate:
    """Take memory for buffers, which are filled with zeros where they are sums."""

    buffers: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Compute the tiles of a segment: `forward`, `backward` (computed again, and pulled back) or `one pass` (both)."""

    segment: int
    phase: str
    first_chunks: tuple[int, ...] = ()
    """The first chunk that each rank computes, and the number of chunks."""

    def own(self, rank: int) -> range:
        """Return the chunks that a rank computes."""
        return range(self.first_chunks[rank], self.first_chunks[rank + 1])


@dataclass(frozen=True, slots=True)
class Exchange:
    """End a pass: boxes and sums travel, and sums of all chunks are joined."""

    transfers: tuple[Transfer, ...]
    gradients: Sum
    """Nodes that are no fields, whose gradients are summed."""
    reductions: Sum
    """The reductions of the segment whose values are summed."""
    chunks: tuple[tuple[int, ...], ...]
    """One chunk of each sum that a rank sends, joined as far as its own chunks go, by rank."""
    sum_bytes: tuple[int, ...]
    """Bytes that one of these takes in a message to each rank."""

    def between(self, sender: int, receiver: int) -> list[Transfer]:
        """Return what one rank sends another one, or adds up for itself."""
        return [one for one in self.transfers if (one.sender, one.receiver) == (sender, receiver)]


@dataclass(frozen=True, slots=True)
class Gather:
    """Put together what each rank has a share of: sums that are needed at once, or gradients when the step is over."""

    nodes: tuple[int, ...]
    gradients: bool
    share_bytes: tuple[int, ...]
    """Bytes that the shares of each rank take in a message to another one."""


@dataclass(frozen=True, slots=True)
class Scalars:
    """Compute the numbers that the sums of a pass are for, or pull back what its gradients are of; None: what is left
    to pull back.
    """

    segment: int | None


@dataclass(frozen=True, slots=True)
class Release:
    """Give back the memory of buffers, by node and whether they hold cotangents."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """Run the model and the loss on the whole image as PyTorch does: `forward`, or `forward and backward`."""

    phase: str
    from_heap: bool = False
    """Large blocks come from the heap, which keeps what is freed, and not one by one from the system."""
    keeps: bool = False
    """Memory that it frees stays in the heap for the next step: all of it may (`allowances.most_kept`)."""


Step = Allocate | Tiles | Exchange | Gather | Scalars | Release | Whole


def live(steps: Iterable[Step]) -> Iterator[tuple[Tiles, tuple[Buffer, ...]]]:
    """Yield each pass over tiles with the buffers that are there, also of steps that release what isn't."""
    there: dict[Key, Buffer] = {}
    for step in steps:
        if isinstance(step, Allocate):
            there |= {buffer.key: buffer for buffer in step.buffers}
        elif isinstance(step, Release):
            for key in step.keys:
                there.pop(key, None)
        elif isinstance(step, Tiles):
            yield step, tuple(there.values())


def held_bytes(buffers: Iterable[Buffer], tier: str, share: float) -> tuple[int, int]:
    """Return what fields and what cotangents take in a tier, of the rank that holds most."""
    found = [0, 0]
    for buffer in buffers:
        if buffer.tier == tier:
            found[buffer.cotangent] += buffer.most_bytes(share)
    return found[0], found[1]


def messages(step: Step, ranks: int) -> tuple[Bytes, Bytes]:
    """Return the bytes that travel from each rank to each other one, `(ranks, ranks)`: of fields, and of sums."""
    fields, sums = np.zeros((ranks, ranks), np.int64), np.zeros((ranks, ranks), np.int64)
    if isinstance(step, Exchange):
        for transfer in step.transfers:
            fields[transfer.sender, transfer.receiver] += transfer.size_bytes
        if step.sum_bytes:
            sums += np.outer([len(chunks) for chunks in step.chunks], step.sum_bytes)
    elif isinstance(step, Gather):
        sums += np.array(step.share_bytes, np.int64)[:, None]
    for one in (fields, sums):
        np.fill_diagonal(one, 0)
    return fields, sums


def message_memory(step: Step, ranks: int) -> int:
    """Return what the messages of a step take in the rank for which that is most: those that come, and those that go
    with the crops that they are packed from.
    """
    fields, sums = messages(step, ranks)
    every = fields + sums
    return int((every.sum(0) + every.sum(1) + fields.sum(1)).max())


def to_plain(value: Any) -> Any:
    """Turn dataclasses into plain types for JSON, steps with their kind."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = {"step": type(value).__name__} if isinstance(value, Step) else {}
        return kind | {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_plain(one) for one in value]
    return value


def from_plain(kind: Any, value: Any) -> Any:
    """Make what `to_plain` made of a value into this type again, also after a trip through JSON.

    Raises TypeError, or ValueError, for what it did not make.
    """
    if kind in (int, str, bool, float):
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise TypeError(f"expected {kind.__name__}, got {value!r}")
        return value
    if isinstance(value, Mapping) and "step" in value:
        kind = next(one for one in get_args(Step) if one.__name__ == value["step"])
    inner = get_args(kind)
    if type(None) in inner:
        return None if value is None else from_plain(inner[0], value)
    if isinstance(value, Mapping):
        hints = _hints(kind)
        if unknown := set(value) - {*hints, "step"}:
            raise TypeError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
        return kind(**{name: from_plain(hints[name], one) for name, one in value.items() if name != "step"})
    if inner[-1] is Ellipsis:
        return tuple(from_plain(inner[0], one) for one in value)
    return tuple(from_plain(one, each) for one, each in zip(inner, value, strict=True))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
