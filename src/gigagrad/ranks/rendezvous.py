"""Bring together processes that were started beside each other, by torchrun or whatever else sets its variables."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

from gigagrad.errors import ConfigError, RankError
from gigagrad.files import HOST
from gigagrad.ranks.ranks import named

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Answer = TypeVar("Answer")
JOINING_SECONDS = 60.0
"""The least time that processes which start beside each other are given."""
_ANSWER_SECONDS = 5.0
"""The time that the first rank stays until the others know who is missing."""
_LOOK_SECONDS = 0.02
_VARIABLES = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
"""The variables that torchrun sets for the processes that it starts."""


def is_several() -> bool:
    """Return whether others were started beside this process. Raises ConfigError where the environment says half of
    it."""
    if not {*_VARIABLES[:3]} <= os.environ.keys():
        return False
    for name in _VARIABLES:
        value = os.environ.get(name, "")
        if name != "MASTER_ADDR" and not value.isdecimal():
            raise ConfigError(f"{name} of the environment is to be a number, got {value!r}; start with torchrun")
    return int(os.environ["WORLD_SIZE"]) > 1


def launch() -> str:
    """Name the torchrun that has started this process, or will start another one in its place; "" without one."""
    told = os.environ.get("TORCHELASTIC_ERROR_FILE", "")  # FOLDER/attempt_0/0/error.json, of a folder of its own
    return f"{HOST}:{Path(told).parents[2]}" if told.count("/") > 2 else ""


def join(timeout: float) -> int:
    """Make all that were started beside this process PyTorch's default group, over gloo. Returns how many of them this
    machine has. Raises RankError.
    """
    from torch.distributed import TCPStore, init_process_group  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import PrefixStore

    from gigagrad.ranks.heartbeat import first_rank_keeps_store, heartbeat_of, lost_error, start_call, store_keeper

    seconds = max(timeout, JOINING_SECONDS)
    limit, began = timedelta(seconds=seconds), time.monotonic()
    rank, count, host, port = (os.environ[name] for name in _VARIABLES)
    own = int(rank)
    keeps = own == 0 and first_rank_keeps_store()

    def connected() -> Store:
        return TCPStore(host, int(port), is_master=keeps, timeout=limit, wait_for_workers=False, multi_tenant=True)

    first = store_keeper(own)
    try:
        store = start_call(connected).result(seconds + _ANSWER_SECONDS)
    except (RuntimeError, TimeoutError) as error:
        within = f"within {seconds:g} s"
        reason = within if time.monotonic() - began > seconds / 2 else f"({str(error).splitlines()[0][:200]})"
        raise _not_joined(named(first) if first else f"some of {count} ranks", reason) from error
    try:
        found = _Rendezvous(PrefixStore("gigagrad", store), own, int(count), seconds, timeout).find()
    except RuntimeError as error:
        raise lost_error(first, error) from error
    if found.missing:
        raise _not_joined(named(found.missing), f"within {seconds:g} s")
    apart = PrefixStore(f"gigagrad-{found.start}", store)
    group = start_call(lambda: init_process_group("gloo", store=apart, rank=own, world_size=int(count), timeout=limit))
    heartbeat_of(own, apart, timeout).wait_while_alive(group.result, group.done, range(int(count)), timeout)
    return found.hosts.count(HOST)


def _not_joined(who: str, reason: str) -> RankError:
    return RankError(f"{who} did not join {reason}; look at what the others say, and at MASTER_ADDR and MASTER_PORT")


@dataclass(frozen=True, slots=True)
class _Members:
    """The members of a start: its number among those that had the store, and the hosts of all that are there."""

    start: int
    hosts: list[str]
    missing: list[int]


class _Rendezvous:
    """The rendezvous of ranks in a store that may have been that of others, who failed: torchrun keeps it.

    The first one numbers its start, and answers with that number whoever greets it. Every process has a greeting of
    its own, so that nobody takes an answer for his that was one to somebody before him. A rank waits `seconds` for the
    others, and `patience` for whoever keeps the store.
    """

    def __init__(self, store: Store, rank: int, count: int, seconds: float, patience: float) -> None:
        self._store, self._rank, self._count = store, rank, count
        self._seconds, self._patience = seconds, patience

    def find(self) -> _Members:
        """Find all ranks. Raises RuntimeError where whoever keeps the store is gone, or does not answer."""
        return self._lead() if self._rank == 0 else self._follow()

    def _lead(self) -> _Members:
        start = self._asked(lambda: self._store.add("starts", 1))
        others = range(1, self._count)
        missing: Sequence[int] = others
        end = time.monotonic() + self._seconds
        # Whoever was first before may be there for some moments yet, on another machine.
        while missing and time.monotonic() < end and self._asked(lambda: self._store.add("starts", 0)) == start:
            for rank in missing:
                self._asked(partial(self._answer, rank, start))
            time.sleep(_LOOK_SECONDS)
            missing = [rank for rank in missing if not self._is_there(_here(start, rank))]
        here = [rank for rank in others if rank not in missing]
        found = _Members(start, [HOST, *(self._read(_here(start, rank)) for rank in here)], list(missing))
        self._write(f"found-{start}", json.dumps(asdict(found)))
        if missing:  # until those that are here know it, as they may lose the store with this process
            end = time.monotonic() + _ANSWER_SECONDS
            heard = partial(self._store.add, f"heard-{start}", 0)
            while self._asked(heard) < len(here) and time.monotonic() < end:
                time.sleep(_LOOK_SECONDS)
        return found

    def _answer(self, rank: int, start: int) -> None:
        if self._store.check([f"greeting-{rank}"]):
            self._store.set(f"answer-{self._store.get(f'greeting-{rank}').decode()}", str(start))

    def _follow(self) -> _Members:
        greeting = uuid4().hex
        self._write(f"greeting-{self._rank}", greeting)
        if not self._comes(f"answer-{greeting}"):
            return _Members(0, [], [0])
        start = int(self._read(f"answer-{greeting}"))
        self._write(_here(start, self._rank), HOST)
        if not self._comes(f"found-{start}"):
            return _Members(start, [], [0])
        found = _Members(**json.loads(self._read(f"found-{start}")))
        self._asked(lambda: self._store.add(f"heard-{start}", 1))
        return found

    def _comes(self, key: str) -> bool:
        """Return whether somebody writes this, in as much time as the first one gives the others, and a little."""
        end = time.monotonic() + self._seconds + _ANSWER_SECONDS
        while not (there := self._is_there(key)) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        return there

    def _is_there(self, key: str) -> bool:
        return self._asked(lambda: self._store.check([key]))

    def _read(self, key: str) -> str:
        return self._asked(lambda: self._store.get(key)).decode()

    def _write(self, key: str, text: str) -> None:
        self._asked(lambda: self._store.set(key, text))

    def _asked(self, call: Callable[[], Answer]) -> Answer:
        from gigagrad.ranks.heartbeat import ask

        return ask(call, self._patience)


def _here(start: int, rank: int) -> str:
    return f"{start}-{rank}"
