"""Ranks that are processes, by `torch.distributed`: gloo between CPUs, and between GPUs by way of the host's memory."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist

from gigagrad.ranks.ranks import Message, RankError, Ranks

_BEAT_SECONDS = 1.0


class ProcessGroup(Ranks):
    """The ranks of a group of `torch.distributed` whose backend takes tensors of the CPU.

    A thread of each says every second that its process is there, so that one that is stopped, or gone, can be named.
    `timeout`: seconds after which the others give up waiting.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 600.0) -> None:
        self._group = group if group is not None else dist.group.WORLD
        self.index, self.count = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._peers = dist.get_process_group_ranks(self._group)
        self._timeout = timedelta(seconds=timeout)
        self._pulse = _pulse_of(dist.get_rank())

    def _swap(self, sent: Mapping[int, Message], received: Mapping[int, int]) -> dict[int, Message]:
        found = {rank: torch.empty(nbytes, dtype=torch.uint8) for rank, nbytes in received.items()}
        try:
            works = [dist.irecv(found[rank], self._peers[rank], self._group) for rank in sorted(found)]
            works += [dist.isend(sent[rank], self._peers[rank], self._group) for rank in sorted(sent)]
            for work in works:
                if work is not None:
                    work.wait(self._timeout)
        except RuntimeError as error:
            raise self._silent(error) from None
        return found

    def _words(self, word: bytes) -> Sequence[bytes]:
        """Lengths first, then words where there are any."""
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
            if work is not None:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise self._silent(error) from None
        return everybody

    def _silent(self, error: RuntimeError) -> RankError:
        """Who it is, as far as anybody knows."""
        silent = [self._peers.index(peer) for peer in self._pulse.missing(self._peers)]
        if not silent:
            return RankError(f"the ranks lost each other: {error}")
        names = ", ".join(map(str, silent))
        return RankError(f"rank {names} is silent: stopped, killed, or out of reach")


class _Pulse:
    """This process's sign of life in the store that all ranks have, and everybody's; one for all groups."""

    def __init__(self, own: int) -> None:
        self._store = dist.distributed_c10d.PrefixStore("gigagrad-pulse", dist.distributed_c10d._get_default_store())
        self._own, self._over = own, threading.Event()
        self._store.add(str(own), 1)
        self._thread = threading.Thread(target=self._beat, name="gigagrad-pulse", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def missing(self, peers: Sequence[int]) -> list[int]:
        """Those of the ranks without a sign of life for three seconds."""
        try:
            before = {peer: self._store.add(str(peer), 0) for peer in peers}
            time.sleep(3 * _BEAT_SECONDS)
            return [peer for peer, beats in before.items() if self._store.add(str(peer), 0) == beats]
        except RuntimeError:  # whoever keeps the store is gone
            return [0] if self._own else []

    def _end(self) -> None:
        """A call of the store must not outlive it."""
        self._over.set()
        self._thread.join(_BEAT_SECONDS)

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_SECONDS):
            try:
                self._store.add(str(self._own), 1)
            except RuntimeError:
                return


_pulse_of = lru_cache(maxsize=None)(_Pulse)
