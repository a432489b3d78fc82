"""Connect ranks that are processes by `torch.distributed`: gloo between CPUs, and between GPUs by way of the host's
memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from gigagrad.errors import RankError
from gigagrad.ranks.heartbeat import heartbeat_of, start_call
from gigagrad.ranks.ranks import Message, Ranks

Found = TypeVar("Found")

_SLOW = timedelta(days=30)


def wait_without_limit(group: dist.ProcessGroup | None = None) -> None:
    """Let a group's collectives take as long as they will from now on: who is slow is waited for, and `ProcessGroup`
    finds the silent. For groups made here, which have a timeout for coming together.
    """
    dist.distributed_c10d._set_pg_timeout(_SLOW, group)


class ProcessGroup(Ranks):
    """The ranks of a group of `torch.distributed` whose backend takes tensors of the CPU.

    A thread of each says every second that its process is there, so that one that is stopped, or gone, can be named.
    `timeout`: seconds after which the others give up waiting for one that is silent. One that is at work is waited for.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 600.0) -> None:
        self._group = group if group is not None else dist.group.WORLD
        self.index, self.count = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._peers = dist.get_process_group_ranks(self._group)
        self._timeout = timedelta(seconds=timeout)
        self._heartbeat = heartbeat_of(dist.get_rank(), dist.distributed_c10d._get_default_store(), timeout)

    def _exchange(self, sent: Mapping[int, Message], received: Mapping[int, int]) -> dict[int, Message]:
        found = {rank: torch.empty(nbytes, dtype=torch.uint8) for rank, nbytes in received.items()}
        try:
            works = [dist.irecv(found[rank], self._peers[rank], self._group) for rank in sorted(found)]
            works += [dist.isend(sent[rank], self._peers[rank], self._group) for rank in sorted(sent)]
        except RuntimeError as error:
            raise self._heartbeat.lost(error, self._peers) from None
        # Waiting for one for a while would close the connection behind it.
        self.all_at(lambda: [work.wait() for work in works if work is not None])
        return found

    def _gather(self, word: bytes) -> Sequence[bytes]:
        """Gather lengths first, then the bytes where there are any."""
        lengths = self._gathered(torch.tensor([len(word)]))
        if not any(lengths):
            return [b""] * self.count
        longest = int(max(lengths))
        padded = torch.frombuffer(bytearray(word.ljust(longest, b"\0")), dtype=torch.uint8)
        words = self._gathered(padded)
        return [bytes(said.tolist())[: int(length)] for said, length in zip(words, lengths, strict=True)]

    def _gathered(self, own: torch.Tensor) -> list[torch.Tensor]:
        everybody = [torch.empty_like(own) for _ in range(self.count)]
        try:
            work = dist.all_gather(everybody, own, self._group, async_op=True)
        except RuntimeError as error:
            raise self._heartbeat.lost(error, self._peers) from None
        if work is not None:
            self._heartbeat.collective = work
            self._wait(lambda seconds: work.wait(timedelta(seconds=seconds)), work.is_completed)
        return everybody

    def all_at(self, call: Callable[[], Found]) -> Found:
        """Return what a call returns that needs all ranks. Raises RankError where one failed, or is silent."""
        found = start_call(call)
        return self._wait(found.result, found.done)

    def _wait(self, wait: Callable[[float], Found], over: Callable[[], bool]) -> Found:
        return self._heartbeat.wait_while_alive(wait, over, self._peers, self._timeout.total_seconds())

    @contextmanager
    def job_error_scope(self) -> Iterator[None]:
        """Report errors by way of the store, since ranks may wait for each other in any of their groups."""
        self._heartbeat.check()
        try:
            yield
            self.barrier()
        except Exception as error:
            if isinstance(error, RankError) and error.reported:
                raise
            first = self._heartbeat.fail(error, self.count)
            if first is not None:
                raise first from None
            raise
