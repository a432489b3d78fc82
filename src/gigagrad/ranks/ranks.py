"""The ranks of a run: processes, or what stands for them, that compute the parts of one image together.

They do the same things in the same order, and meet in `exchange`: bytes travel, and whoever gets them adds. Every
meeting begins with a word from each, so that an error of one of them ends all.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gigagrad.errors import GigagradError

Message = torch.Tensor
"""Bytes: a 1-d tensor of uint8 on the CPU."""


class RankError(GigagradError):
    """Another rank failed, or is silent."""


class Ranks(ABC):
    """All ranks as one of them sees them. Every method but `fail` is called by all of them, in the same order."""

    index: int
    """This one, from 0 on."""
    count: int
    sent_bytes: int = 0
    """By this rank so far, without the words that meetings begin with."""

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

    def meet(self) -> None:
        """Wait for all. Raises RankError if another one failed, or is silent."""
        self._hear(self._words(b""))

    def said(self, value: Any) -> list[Any]:
        """What each rank says, by rank: anything that JSON can hold. Raises RankError if one failed, or is silent."""
        words = self._words(b"\0" + json.dumps(value).encode())
        self._hear([b"" if said[:1] == b"\0" else said for said in words])
        return [json.loads(said[1:]) for said in words]

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
            self._words(str(error).encode() or type(error).__name__.encode())
        except RankError:
            return  # somebody else failed, too: one's own error is told

    def _hear(self, words: Sequence[bytes]) -> None:
        for rank, said in enumerate(words):
            if said and rank != self.index:
                raise RankError(f"rank {rank} failed: {said.decode(errors='replace')}")


class Alone(Ranks):
    """One process, and nobody to talk to."""

    index, count = 0, 1

    def _swap(self, sent: Mapping[int, Message], received: Mapping[int, int]) -> dict[int, Message]:
        assert not sent
        assert not received
        return {}

    def _words(self, word: bytes) -> Sequence[bytes]:
        return [word]
