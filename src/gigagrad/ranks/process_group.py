"""Ranks that are processes, by `torch.distributed`: gloo between CPUs, and between GPUs by way of the host's memory."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist

from gigagrad.errors import RankError
from gigagrad.ranks.ranks import Message, Ranks, is_mendable, named

_BEAT_SECONDS = 1.0
_LAST_WORDS_SECONDS = 5.0
"""How long one that failed stays until the others know."""
_SLOW = timedelta(days=30)


def patient(group: dist.ProcessGroup | None = None) -> None:
    """From now on a group's collectives take as long as they will: who is slow is waited for, and `ProcessGroup` finds
    the silent. For groups made here, which have a timeout for coming together.
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
            raise self.lost(error) from None
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
        except RuntimeError as error:
            raise self.lost(error) from None
        self._pulse.waiting = work
        while work is not None:
            over = work.is_completed()  # before it is waited for: what it raises then is no lack of time
            try:
                work.wait(timedelta(seconds=_BEAT_SECONDS))
                break
            except RuntimeError as error:
                self._pulse.listen()
                silent = self._pulse.silent(self._peers, self._timeout.total_seconds())
                if over or silent:
                    raise self.lost(error, silent) from None
        return everybody

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """By way of the store, since they may wait for each other in any of their groups."""
        try:
            yield
            self.meet()
        except Exception as error:
            if isinstance(error, RankError) and error.told:
                raise
            first = self._pulse.fail(error, self.count)
            if first is not None:
                raise first from None
            raise

    def lost(self, error: RuntimeError, silent: Sequence[int] = ()) -> RankError:
        """Who it is, as far as anybody knows; to be raised. Raises what one that failed has said of itself."""
        missing = silent or self._pulse.missing(self._peers)
        self._pulse.listen()  # it may have said why it went
        if not missing:
            return RankError(f"the ranks lost each other: {error}")
        verb = "is" if len(missing) == 1 else "are"
        return RankError(f"{named(missing)} {verb} silent: stopped, killed, or out of reach")


class _Pulse:
    """This process's sign of life in the store that all ranks have, and everybody's; one for all groups."""

    def __init__(self, own: int) -> None:
        self._store = dist.distributed_c10d.PrefixStore("gigagrad-pulse", dist.distributed_c10d._get_default_store())
        self._own, self._over, self._failed = own, threading.Event(), False
        self._look, self._noticed = 0.0, dict[int, tuple[int, float]]()
        """When to look again, and by rank how many signs of life there were and since when."""
        self.waiting: dist.Work | None = None
        """The last collective that this process has waited for."""
        self._store.add(str(own), 1)
        self._thread = threading.Thread(target=self._beat, name="gigagrad-pulse", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def silent(self, peers: Sequence[int], seconds: float) -> list[int]:
        """Those of the ranks of which no sign of life was noticed here for so long, in which they are looked for ten
        times.
        """
        now = time.monotonic()
        if now < self._look:
            return []
        self._look = now + seconds / 10
        try:
            found = {peer: self._store.add(str(peer), 0) for peer in peers}
        except RuntimeError:  # whoever keeps the store is gone
            return [0] if self._own else []
        for peer, beats in found.items():
            if self._noticed.get(peer, (-1, now))[0] != beats:
                self._noticed[peer] = beats, now
        return [peer for peer in peers if now - self._noticed[peer][1] > seconds]

    def missing(self, peers: Sequence[int]) -> list[int]:
        """Those of the ranks without a sign of life for three seconds."""
        try:
            before = {peer: self._store.add(str(peer), 0) for peer in peers}
            time.sleep(3 * _BEAT_SECONDS)
            return [peer for peer, beats in before.items() if self._store.add(str(peer), 0) == beats]
        except RuntimeError:  # whoever keeps the store is gone
            return [0] if self._own else []

    def fail(self, error: Exception, count: int) -> RankError | None:
        """Tell all `count` processes of an error, and wait a little until they know. Returns what to raise instead
        where another one was first.
        """
        if self._failed:
            return None
        self._failed = True
        own = json.dumps([self._own, is_mendable(error), str(error) or type(error).__name__])
        try:
            first = self._store.compare_set("failed", "", own).decode()
            if first != own:
                return self._heard(first)
            end = time.monotonic() + _LAST_WORDS_SECONDS
            while self._store.add("heard", 0) < count - 1 and time.monotonic() < end:
                time.sleep(0.01)
        except RuntimeError:  # whoever keeps the store is gone
            pass
        return None

    def listen(self) -> None:
        """Raises RankError where a process has failed."""
        try:
            if self._store.check(["failed"]):
                raise self._heard(self._store.get("failed").decode())
        except RuntimeError:
            return

    def _heard(self, told: str) -> RankError:
        self._store.add("heard", 1)
        rank, mendable, text = json.loads(told)
        return RankError(f"rank {rank} failed: {text}", told=True, mendable=mendable)

    def _end(self) -> None:
        """A call of the store must not outlive it. Neither can gloo give up a collective: with one that never ends the
        process would not, either.
        """
        self._over.set()
        self._thread.join(_BEAT_SECONDS)
        end = time.monotonic() + _LAST_WORDS_SECONDS
        while self.waiting is not None and not self.waiting.is_completed():
            if time.monotonic() > end:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(2)
            time.sleep(0.01)

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_SECONDS):
            try:
                self._store.add(str(self._own), 1)
            except RuntimeError:
                return


_pulse_of = lru_cache(maxsize=None)(_Pulse)
