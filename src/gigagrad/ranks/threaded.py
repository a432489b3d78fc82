"""Run ranks in threads of one process, to try out what many of them do without any network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar, cast

from gigagrad.errors import RankError
from gigagrad.ranks.ranks import Message, Ranks

Result = TypeVar("Result")


class ThreadedRank(Ranks):
    """A rank among several in threads of this process. Made by `run_threaded`."""

    def __init__(self, index: int, inboxes: Sequence[Sequence[SimpleQueue[object]]], timeout: float) -> None:
        self.index, self.count = index, len(inboxes)
        self._inboxes, self._timeout = inboxes, timeout

    def _exchange(self, sent: Mapping[int, Message], received: Mapping[int, int]) -> dict[int, Message]:
        for rank, message in sent.items():
            self._inboxes[rank][self.index].put(message.clone())
        messages = {}
        for rank, nbytes in received.items():
            came = cast(Message, self._from(rank))
            assert len(came) == nbytes, f"{len(came)} bytes came from rank {rank}, {nbytes} were expected"
            messages[rank] = came
        return messages

    def _gather(self, payload: bytes) -> Sequence[bytes]:
        for rank in range(self.count):
            self._inboxes[rank][self.index].put(payload)
        payloads = []
        for rank in range(self.count):
            theirs = self._from(rank)
            assert isinstance(theirs, bytes), "a rank sends a message where others meet"
            payloads.append(theirs)
        return payloads

    def _from(self, rank: int) -> object:
        try:
            item = self._inboxes[self.index][rank].get(timeout=self._timeout)
        except Empty:
            raise RankError(f"rank {rank} has been silent for {self._timeout:g} s") from None
        if isinstance(item, BaseException):
            raise RankError(f"rank {rank} failed: {item}", reported=True)
        return item


def run_threaded(count: int, work: Callable[[Ranks], Result], timeout: float = 600.0) -> list[Result]:
    """Call `work(ranks)` on so many ranks, each in a thread of its own, and return their results by rank.

    Raises the error of the first rank that failed by itself.
    """
    inboxes: list[list[SimpleQueue[object]]] = [[SimpleQueue() for _ in range(count)] for _ in range(count)]
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadedRank(rank, inboxes, timeout))
        except BaseException as error:
            errors[rank] = error
            for inbox in inboxes:
                inbox[rank].put(error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"gigagrad-rank-{rank}") for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors.items(), key=lambda item: (isinstance(item[1], RankError), item[0]))[1]
    return [results[rank] for rank in range(count)]
