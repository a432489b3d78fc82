"""Connect processes by `torch.distributed`: gloo between CPUs, and between GPUs by way of the host's memory.

Every process keeps a heartbeat in a store that all of them have, and waits for others no longer than they have one.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from gigagrad.errors import RankError
from gigagrad.ranks.ranks import Message, Ranks, is_mendable, named

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Found = TypeVar("Found")

BEAT_SECONDS = 1.0
_LAST_WORDS_SECONDS = 5.0
"""The time that a process which failed stays until the others know."""

_CALLS: set[Future[Any]] = set()
"""The calls that `start_call` has begun and that are not over."""


def start_call(call: Callable[[], Found]) -> Future[Found]:
    """Make `call` in a thread that the process does not wait for at its end: PyTorch's store waits forever for the
    process that keeps it, where that one was stopped.
    """
    future: Future[Found] = Future()
    _CALLS.add(future)
    future.add_done_callback(_CALLS.discard)

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="gigagrad-call", daemon=True).start()
    return future


class WatchedStore:
    """A store whose methods raise RuntimeError where whoever keeps it is gone, or does not answer in so many `seconds`;
    it is not asked again then.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self.seconds, self._answers = store, seconds, True

    def ask(self, call: Callable[[Store], Found]) -> Found:
        """Return what a call of the store returns."""
        if not self._answers:
            raise RuntimeError("the store is out of reach")
        try:
            return start_call(lambda: call(self._store)).result(self.seconds)
        except (RuntimeError, TimeoutError) as error:
            self._answers = False
            raise RuntimeError(str(error) or "the store does not answer") from error

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given: self.ask(lambda store: getattr(store, name)(*given))


def lost_error(missing: Sequence[int], error: Exception) -> RankError:
    """Return the error to raise where these ranks are silent, or nobody knows who is."""
    if not missing:
        return RankError(f"the ranks lost each other: {error}")
    verb = "is" if len(missing) == 1 else "are"
    return RankError(f"{named(missing)} {verb} silent: stopped, killed, or out of reach")


def first_rank_keeps_store() -> bool:
    """Return whether the first rank keeps the store, as where no torchrun does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def store_keeper(own: int) -> list[int]:
    """Return the rank that is gone where this one, `own`, gets no answer of the store; none if unknown."""
    return [0] if own and first_rank_keeps_store() else []


class Heartbeat:
    """The heartbeat of this process in a store, every second, and those of all others; one for all groups of ranks.

    `seconds`: after which whoever keeps the store and does not answer is taken for silent. Raises RankError.
    """

    def __init__(self, own: int, store: Store, seconds: float) -> None:
        self._own, self._over, self._failed = own, threading.Event(), False
        self._next_look, self._noticed = 0.0, dict[int, tuple[int, float]]()
        """The time to look again, and by rank how many heartbeats there were and since when."""
        self.collective: Future[None] | None = None
        """The last collective that this process has waited for, where no call of `start_call` did."""
        try:  # a connection of its own: while a thread waits for a key, no other one gets through on the same
            clone: Store = WatchedStore(store, seconds).clone()
        except RuntimeError as error:
            raise lost_error(store_keeper(self._own), error) from None
        self._beating: Store = dist.PrefixStore("gigagrad-heartbeat", clone)  # type: ignore[attr-defined]
        self.store = WatchedStore(self._beating, seconds)
        self._thread = threading.Thread(target=self._beat, name="gigagrad-heartbeat", daemon=True)
        self._thread.start()

    def wait_while_alive(self, call: Future[Found], peers: Sequence[int], seconds: float) -> Found:
        """Return what a call returns, waiting for it while nobody failed and none of the ranks was silent for so many
        seconds. Raises RankError.
        """
        while True:
            ended = call.done()  # before it is waited for: what it raises then is no lack of time
            try:
                return call.result(BEAT_SECONDS)
            except (RuntimeError, TimeoutError) as error:
                self.listen()
                silent = self._silent(peers, seconds)
                if ended or silent:
                    raise self.lost(error, peers, silent) from None

    def lost(self, error: Exception, peers: Sequence[int], silent: Sequence[int] = ()) -> RankError:
        """Return the error that names who is lost, as far as anybody knows. Raises what one that failed said itself."""
        missing = silent or self._missing(peers)
        self.listen()  # it may have said why it went
        return lost_error(missing, error)

    def _silent(self, peers: Sequence[int], seconds: float) -> list[int]:
        """Return the ranks of which no heartbeat was noticed here for so long, in which ten looks are taken."""
        now = time.monotonic()
        if now < self._next_look:
            return []
        self._next_look = now + seconds / 10
        try:
            beats_of = self._beats(peers)
        except RuntimeError:
            return store_keeper(self._own)
        for peer, beats in beats_of.items():
            if self._noticed.get(peer, (-1, now))[0] != beats:
                self._noticed[peer] = beats, now
        return [peer for peer in peers if now - self._noticed[peer][1] > seconds]

    def _missing(self, peers: Sequence[int]) -> list[int]:
        """Return the ranks without a heartbeat for three seconds."""
        try:
            before = self._beats(peers)
            time.sleep(3 * BEAT_SECONDS)
            return [peer for peer, beats in self._beats(peers).items() if before[peer] == beats]
        except RuntimeError:
            return store_keeper(self._own)

    def _beats(self, peers: Sequence[int]) -> dict[int, int]:
        return self.store.ask(lambda store: {peer: store.add(str(peer), 0) for peer in peers})

    def fail(self, error: Exception, count: int) -> RankError | None:
        """Tell all `count` processes of an error, and wait a little until they know. Returns what to raise instead
        where another one was first.
        """
        if self._failed:
            return None
        self._failed = True
        own = json.dumps([self._own, is_mendable(error), str(error) or type(error).__name__])
        try:
            first = self.store.compare_set("failed", "", own).decode()
            if first != own:
                return self._reported_error(first)
            end = time.monotonic() + _LAST_WORDS_SECONDS
            while self.store.add("heard", 0) < count - 1 and time.monotonic() < end:
                time.sleep(0.01)
        except RuntimeError:
            pass
        return None

    def check(self) -> None:
        """Raise RankError where a process has failed before: ranks wait for different things of each other since."""
        try:
            self.listen()
        except RankError as error:
            raise RankError(f"the ranks are out of step: {error}; start them anew", reported=True) from error

    def listen(self) -> None:
        """Raise RankError where a process has failed."""
        try:
            if self.store.check(["failed"]):
                raise self._reported_error(self.store.get("failed").decode())
        except RuntimeError:
            return

    def _reported_error(self, report: str) -> RankError:
        self.store.add("heard", 1)
        rank, mendable, text = json.loads(report)
        return RankError(f"rank {rank} failed: {text}", reported=True, mendable=mendable)

    def end(self) -> None:
        """Stop the thread: a call of the store must not outlive it."""
        self._over.set()
        self._thread.join(BEAT_SECONDS)

    def _beat(self) -> None:
        while True:
            try:
                self._beating.add(str(self._own), 1)
            except RuntimeError:
                return
            if self._over.wait(BEAT_SECONDS):
                return


_HEARTBEATS: dict[int, Heartbeat] = {}


def heartbeat_of(own: int, store: Store, seconds: float) -> Heartbeat:
    """Return the heartbeat of this process, of rank `own`, begun by the first call; the last one's `seconds` count."""
    if own not in _HEARTBEATS:
        _HEARTBEATS[own] = Heartbeat(own, store, seconds)
    _HEARTBEATS[own].store.seconds = seconds
    return _HEARTBEATS[own]


@atexit.register
def _end() -> None:
    """End the process even where a call never comes back, as gloo cannot give up a collective."""
    end = time.monotonic() + _LAST_WORDS_SECONDS
    for heartbeat in _HEARTBEATS.values():
        heartbeat.end()
    collectives = [heartbeat.collective for heartbeat in _HEARTBEATS.values() if heartbeat.collective is not None]
    while _CALLS or not all(collective.done() for collective in collectives):
        if time.monotonic() > end:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(2)
        time.sleep(0.01)


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
