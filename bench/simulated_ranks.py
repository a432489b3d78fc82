"""Simulate ranks that keep the time of machines of their own: so that eight processes on two cores tell what eight
machines would take.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from gigagrad.ranks.ranks import Message, Ranks

_STAMP = struct.Struct("<d")


class Lock(Protocol):
    """The lock that one rank at a time holds while it computes: beside others its processor would be slower than
    alone."""

    def acquire(self) -> object: ...

    def release(self) -> object:
        """Release it, also where it was not acquired."""


class SimulatedRanks(Ranks):
    """Ranks with a virtual clock each, which stands still while they wait and while others compute.

    It goes with the processor time of this process, of all its threads, between meetings; at a meeting it is set by
    those of the others: everybody hears everybody around a ring, and a message comes when all that its sender sends
    before it, and itself, have gone over the sender's link (`gigagrad.scaling` counts alike). `seconds`: what a
    message of so many bytes takes, such as `Link.seconds`. `processor_seconds`: the time that is counted. `turn`: from
    its first meeting on, a rank has it but when it meets.
    """

    def __init__(
        self,
        ranks: Ranks,
        seconds: Callable[[float], float],
        processor_seconds: Callable[[], float] = time.process_time,
        turn: Lock | None = None,
    ) -> None:
        self.index, self.count = ranks.index, ranks.count
        self._ranks, self._seconds, self._processor_seconds = ranks, seconds, processor_seconds
        self._turn = turn
        self._clock, self._since = 0.0, processor_seconds()

    @property
    def clock(self) -> float:
        """Return the seconds since it was made, on this rank's own machine."""
        return self._clock + self._processor_seconds() - self._since

    def _exchange(self, sent: Mapping[int, Message], received: Mapping[int, int]) -> dict[int, Message]:
        start, gone, stamps = self.clock, 0, {}
        latest = start
        for rank, message in sorted(sent.items()):
            gone += len(message)
            latest = start + self._seconds(gone)
            stamps[rank] = _stamp(latest)
        self._yield()
        came = self._ranks._exchange(stamps, dict.fromkeys(received, _STAMP.size))
        found = self._ranks._exchange(sent, received)
        self._set(max([latest, *(_time(stamp.numpy().tobytes()) for stamp in came.values())]))
        return found

    def _gather(self, word: bytes) -> Sequence[bytes]:
        stamped = _STAMP.pack(self.clock) + word
        self._yield()
        words = self._ranks._gather(stamped)
        heard = [said[_STAMP.size :] for said in words]
        rounds = 1 + any(heard)  # lengths, and words where there are any
        self._set(max(map(_time, words)) + rounds * (self.count - 1) * self._seconds(0))
        return heard

    def _yield(self) -> None:
        if self._turn is not None:
            self._turn.release()

    def _set(self, clock: float) -> None:
        if self._turn is not None:
            self._turn.acquire()
        self._clock, self._since = clock, self._processor_seconds()


def _stamp(clock: float) -> Message:
    return torch.frombuffer(bytearray(_STAMP.pack(clock)), dtype=torch.uint8)


def _time(stamped: bytes) -> float:
    found: float = _STAMP.unpack_from(stamped)[0]
    return found
