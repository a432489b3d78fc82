"""Define what ranks are to each other: processes, or threads, that compute the parts of one image together.

They do the same things in the same order, and meet in `exchange`: bytes travel, and whoever gets them adds. Every
collective begins with a few bytes from each, none where all is well, so that an error of one of them ends all.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from gigagrad.errors import GigagradError, RankError

if TYPE_CHECKING:
    import torch

Message: TypeAlias = "torch.Tensor"
"""Bytes: a 1-d tensor of uint8 on the CPU."""
_OBJECT, _ERROR, _MENDABLE = b"\0", b"\1", b"\2"
"""The first byte of what is gathered: the rest is an object, or the text of an error, gigagrad's own or not."""

Item = TypeVar("Item")


def is_mendable(error: Exception) -> bool:
    """Return whether an error is no fault of gigagrad's own."""
    return isinstance(error, (GigagradError, OSError, MemoryError))


def named(ranks: Sequence[int]) -> str:
    """Write `rank 1`, or `ranks 0, 3`."""
    return f"rank{'s'[: len(ranks) - 1]} {', '.join(map(str, ranks))}"


class Ranks(ABC):
    """All ranks as one of them sees them. Every method is called by all of them, in the same order."""

    index: int
    """The number of this rank, from 0 on."""
    count: int
    sent_bytes: int = 0
    """Bytes that this rank has sent so far, without what collectives begin with."""

    @property
    def others(self) -> list[int]:
        """Return all ranks but this one."""
        return [rank for rank in range(self.count) if rank != self.index]

    @abstractmethod
    def _exchange(self, sent: Mapping[int, Message], received: Mapping[int, int]) -> dict[int, Message]:
        """Give these messages to other ranks and get theirs, of so many bytes. Raises RankError."""

    @abstractmethod
    def _gather(self, payload: bytes) -> Sequence[bytes]:
        """Gather short bytes from every rank. Raises RankError where one is silent."""

    def exchange(self, sent: Mapping[int, Message], received: Mapping[int, int]) -> dict[int, Message]:
        """Send messages to other ranks, and return what they send to this one, by rank; empty ones don't travel.

        Raises RankError if another one failed, or is silent.
        """
        self.barrier()
        sent = {rank: message for rank, message in sent.items() if len(message)}
        self.sent_bytes += sum(map(len, sent.values()))
        return self._exchange(sent, {rank: nbytes for rank, nbytes in received.items() if nbytes})

    def all_to_all(self, sent: Mapping[int, Message]) -> dict[int, Message]:
        """Exchange messages where receivers do not know what comes."""
        lengths = self.all_gather_object([len(sent.get(rank, ())) for rank in range(self.count)])
        return self.exchange(
            sent, {rank: theirs[self.index] for rank, theirs in enumerate(lengths) if theirs[self.index]}
        )

    def barrier(self) -> None:
        """Wait for all. Raises RankError if another one failed, or is silent."""
        self._raise_reported(self._gather(b""))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather an object of JSON from each rank, by rank. Raises RankError if one failed, or is silent."""
        payloads = self._gather(_OBJECT + json.dumps(value).encode())
        self._raise_reported([b"" if payload.startswith(_OBJECT) else payload for payload in payloads])
        return [json.loads(payload[1:]) for payload in payloads]

    def map(
        self, items: Sequence[Item], work: Callable[[Item], Any], done: Callable[[int, Any], None] = lambda *_: None
    ) -> list[Any]:
        """Map `work` over items, shared among ranks, and return its results in their order: anything that JSON can
        hold. Item i is that of rank i modulo their count; `done` is told how many are done, and the last of these
        answers. Raises as `all_gather_object`.
        """
        results: list[Any] = []
        for start in range(0, len(items), self.count):
            mine = start + self.index
            answers = self.all_gather_object(work(items[mine]) if mine < len(items) else None)
            for answer in answers[: len(items) - start]:
                results.append(answer)
                done(len(results), answer)
        return results

    def job_error_scope(self) -> AbstractContextManager[None]:
        """Report an error of a whole program to all ranks, wherever they wait for whom."""
        return self.error_scope()

    @contextmanager
    def error_scope(self) -> Iterator[None]:
        """Report an error in the block to the other ranks at their next collective, which is at the end at the latest:
        it is done by all or by none.
        """
        try:
            yield
            self.barrier()
        except RankError:
            raise
        except Exception as error:
            self._report(error)
            raise

    def _report(self, error: Exception) -> None:
        kind, text = _MENDABLE if is_mendable(error) else _ERROR, str(error) or type(error).__name__
        try:
            self._gather(kind + text.encode(errors="replace"))
        except RankError:
            return  # somebody else failed, too: one's own error is raised

    def _raise_reported(self, payloads: Sequence[bytes]) -> None:
        for rank, payload in enumerate(payloads):
            if payload and rank != self.index:
                text, mendable = payload[1:].decode(errors="replace"), payload.startswith(_MENDABLE)
                raise RankError(f"rank {rank} failed: {text}", reported=True, mendable=mendable)


class SingleRank(Ranks):
    """A single process, and nobody to talk to."""

    index, count = 0, 1

    def _exchange(self, sent: Mapping[int, Message], received: Mapping[int, int]) -> dict[int, Message]:
        assert not sent
        assert not received
        return {}

    def _gather(self, payload: bytes) -> Sequence[bytes]:
        return [payload]
