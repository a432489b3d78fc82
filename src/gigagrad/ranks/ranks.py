"""The ranks of a run: processes, or what stands for them, that compute the parts of one image together.

They do the same things in the same order, and meet in `exchange`: bytes travel, and whoever gets them adds. Every
meeting begins with a word from each, so that an error of one of them ends all.
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


Item = TypeVar("Item")


def is_mendable(error: Exception) -> bool:
    """Whether it is no fault of gigagrad's own."""
    return isinstance(error, (GigagradError, OSError, MemoryError))


def named(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 0, 3`."""
    return f"rank{'s'[: len(ranks) - 1]} {', '.join(map(str, ranks))}"


class Ranks(ABC):
    """All ranks as one of them sees them. Every method but `fail` is called by all of them, in the same order."""

    index: int
    """This one, from 0 on."""
    count: int
    sent_bytes: int = 0
    """By this rank so far, without the words that meetings begin with."""

    @property
    def others(self) -> list[int]:
        """All but this one."""
        return [rank for rank in range(self.count) if rank != self.index]

    @abstractmethod
    def _swap(self, sent: Mapping[int, Message], received: Mapping[int, int]) -> dict[int, Message]:
        """Give these messages to other ranks and get theirs, of so many bytes. Raises RankError."""

    @abstractmethod
    def _words(self, word: bytes) -> Sequence[bytes]:
        """Every rank's short word. Raises RankError where one is silent."""

    def exchange(self, sent: Mapping[int, Message], received: Mapping[int, int]) -> dict[int, Message]:
        """What other ranks send to this one, by rank, for what it sends them; messages of nothing don't travel.

        Raises RankError if another one failed, or is silent.
        """
        self.meet()
        sent = {rank: message for rank, message in sent.items() if len(message)}
        self.sent_bytes += sum(map(len, sent.values()))
        return self._swap(sent, {rank: nbytes for rank, nbytes in received.items() if nbytes})

    def deliver(self, sent: Mapping[int, Message]) -> dict[int, Message]:
        """As `exchange`, where receivers do not know what comes."""
        lengths = self.said([len(sent.get(rank, ())) for rank in range(self.count)])
        return self.exchange(sent, {rank: told[self.index] for rank, told in enumerate(lengths) if told[self.index]})

    def meet(self) -> None:
        """Wait for all. Raises RankError if another one failed, or is silent."""
        self._hear(self._words(b""))

    def said(self, value: Any) -> list[Any]:
        """What each rank says, by rank: anything that JSON can hold. Raises RankError if one failed, or is silent."""
        words = self._words(b"\0" + json.dumps(value).encode())
        self._hear([b"" if said[:1] == b"\0" else said for said in words])
        return [json.loads(said[1:]) for said in words]

    def shared_out(
        self, items: Sequence[Item], work: Callable[[Item], Any], done: Callable[[int, Any], None] = lambda *_: None
    ) -> list[Any]:
        """What `work` finds of each item, in their order: anything that JSON can hold. Item i is that of rank i modulo
        their count; `done` is told how many are done, and the last of these answers. Raises as `said`.
        """
        found: list[Any] = []
        for start in range(0, len(items), self.count):
            mine = start + self.index
            answers = self.said(work(items[mine]) if mine < len(items) else None)
            for answer in answers[: len(items) - start]:
                found.append(answer)
                done(len(found), answer)
        return found

    def as_one(self) -> AbstractContextManager[None]:
        """A whole program of theirs: an error of one of them ends all, wherever they wait for whom."""
        return self.together()

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is done within is done by all or by none: an error of one of them is told to the others at their next
        meeting, which is at the end at the latest.
        """
        try:
            yield
            self.meet()
        except RankError:
            raise
        except Exception as error:
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        try:
            self._words(bytes([1 + is_mendable(error)]) + (str(error) or type(error).__name__).encode(errors="replace"))
        except RankError:
            return  # somebody else failed, too: one's own error is told

    def _hear(self, words: Sequence[bytes]) -> None:
        for rank, said in enumerate(words):
            if said and rank != self.index:
                text = said[1:].decode(errors="replace")
                raise RankError(f"rank {rank} failed: {text}", told=True, mendable=said[0] > 1)


class Alone(Ranks):
    """One process, and nobody to talk to."""

    index, count = 0, 1

    def _swap(self, sent: Mapping[int, Message], received: Mapping[int, int]) -> dict[int, Message]:
        assert not sent
        assert not received
        return {}

    def _words(self, word: bytes) -> Sequence[bytes]:
        return [word]
