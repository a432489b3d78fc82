"""Connect processes by `torch.distributed`: gloo between CPUs, and between GPUs by way of the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from gigagrad.errors import RankError
from gigagrad.ranks.heartbeat import heartbeat_of, start_call
from gigagrad.ranks.ranks import Message, Ranks

Found = TypeVar("Found")


class _Collective(Future[None]):
    """A collective under way as a future, without a thread, which would take longer than it."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def done(self) -> bool:
        return self._work.is_completed()

    def result(self, timeout: float | None = None) -> None:
        self._work.wait(timedelta(seconds=timeout or 0))


class ProcessGroup(Ranks):
    """The ranks of a group of `torch.distributed` whose backend takes tensors of the CPU.

    A thread of each says every second that its process is there, so that one that is stopped, or gone, can be named.
    `timeout`: seconds after which the others give up waiting for one that is silent. One that is at work is waited for.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 600.0) -> None:
        self._group = group if group is not None else dist.group.WORLD
        self.index, self.count = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._peers, self._timeout = dist.get_process_group_ranks(self._group), timeout
        self._heartbeat = heartbeat_of(dist.get_rank(), dist.distributed_c10d._get_default_store(), timeout)

    def _exchange(self, sent: Mapping[int, Message], received: Mapping[int, int]) -> dict[int, Message]:
        buffers = {rank: torch.empty(nbytes, dtype=torch.uint8) for rank, nbytes in received.items()}

        def travel() -> None:
            works = [dist.irecv(buffers[rank], self._peers[rank], self._group) for rank in sorted(buffers)]
            works += [dist.isend(sent[rank], self._peers[rank], self._group) for rank in sorted(sent)]
            for work in works:
                if work is not None:
                    work.wait()  # without a time: one that is over would close the connection behind it

        self.collective(travel)
        return buffers

    def _gather(self, payload: bytes) -> Sequence[bytes]:
        """Gather lengths first, then the bytes where there are any."""
        lengths = self._all_gather(torch.tensor([len(payload)]))
        if not any(lengths):
            return [b""] * self.count
        padded = torch.frombuffer(bytearray(payload.ljust(int(max(lengths)), b"\0")), dtype=torch.uint8)
        gathered = zip(self._all_gather(padded), lengths, strict=True)
        return [theirs.numpy().tobytes()[: int(length)] for theirs, length in gathered]

    def _all_gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        everybody = [torch.empty_like(own) for _ in range(self.count)]
        try:
            work = dist.all_gather(everybody, own, self._group, async_op=True)
        except RuntimeError as error:
            raise self._heartbeat.lost(error, self._peers) from None
        if work is not None:
            pending = self._heartbeat.collective = _Collective(work)
            self._heartbeat.wait_while_alive(pending, self._peers, self._timeout)
        return everybody

    def collective(self, call: Callable[[], Found]) -> Found:
        """Return what a call returns that needs all ranks. Raises RankError where one failed, or is silent."""
        return self._heartbeat.wait_while_alive(start_call(call), self._peers, self._timeout)

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
