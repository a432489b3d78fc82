"""Ranks of `bench/scale.py` that compute one after the other, each with the whole machine to itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.simulated_ranks import SimulatedRanks
from gigagrad.ranks import Ranks
from gigagrad.ranks.ranks import Message, run_threaded

Met = tuple[float, bool | None, dict[int, int], dict[int, int]]
"""Processor seconds since the meeting before, whether anybody said anything, and bytes sent and received by rank; where
messages were swapped, no words were, None.
"""


class InTurn(Ranks):
    """A rank whose others are not there: nothing but zeros comes of them. All, this one too, say what the first one
    said when it was at turn, and left in the folder: so all have its plan. `met`: the meetings since it has begun.
    """

    def __init__(self, index: int, count: int, folder: Path) -> None:
        self.index, self.count = index, count
        self.met: list[Met] = []
        self._path = folder / f"words-{count}.json"
        self._first: list[str] = [] if index == 0 else json.loads(self._path.read_text())
        self._heard, self._since = 0, time.process_time()

    def begin(self) -> None:
        """From now on meetings count."""
        self.met.clear()
        self._since = time.process_time()

    def leave_words(self) -> None:
        """For those that follow."""
        if self.index == 0:
            self._path.write_text(json.dumps(self._first))

    def since_meeting(self) -> float:
        """Processor seconds."""
        return time.process_time() - self._since

    def _exchange(self, sent: Mapping[int, Message], received: Mapping[int, int]) -> dict[int, Message]:
        self.met.append((self.since_meeting(), None, {rank: len(gone) for rank, gone in sent.items()}, {**received}))
        found = {rank: torch.zeros(nbytes, dtype=torch.uint8) for rank, nbytes in received.items()}
        self._since = time.process_time()
        return found

    def _gather(self, word: bytes) -> Sequence[bytes]:
        if self.index == 0:
            self._first.append(word.hex())
        first = bytes.fromhex(self._first[self._heard])
        self._heard += 1
        self.met.append((self.since_meeting(), bool(first), {}, {}))
        self._since = time.process_time()
        return [first] * self.count


def clocks(found: Sequence[dict[str, Any]], seconds: Callable[[float], float]) -> list[float]:
    """When each rank would be through, had they met where each says in `met`; `rest`: the seconds behind."""

    def replayed(ranks: Ranks) -> float:
        computed = 0.0
        clocked = SimulatedRanks(ranks, seconds, lambda: computed)
        for taken, words, sent, received in found[ranks.index]["met"]:
            computed += taken
            if words is None:
                messages = {int(rank): torch.empty(nbytes, dtype=torch.uint8) for rank, nbytes in sent.items()}
                clocked._exchange(messages, {int(rank): nbytes for rank, nbytes in received.items()})
            else:
                clocked._gather(b"\0" if words else b"")
        computed += found[ranks.index]["rest"]
        return clocked.clock

    return run_threaded(len(found), replayed)
