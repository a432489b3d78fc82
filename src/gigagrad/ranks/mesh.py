"""Bring together processes that were started beside each other, by torchrun or whatever else sets its variables, and
arrange them as a mesh: the slides of a step go to groups of ranks, the tiles of a slide to the ranks of a group.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Self
from uuid import uuid4

from gigagrad.errors import ConfigError, RankError
from gigagrad.files import HOST
from gigagrad.ranks.ranks import Ranks, SingleRank, named

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store

    from gigagrad.ranks.process_group import WatchedStore

TIMEOUT_SECONDS = 600.0
_LONGEST_SECONDS = 1e6
NO_LIMIT = timedelta(days=20)
"""The timeout of PyTorch's groups: who is slow is waited for, and heartbeats find the silent."""
JOINING_SECONDS = 60.0
"""The least time that processes which start beside each other are given."""
_ANSWER_SECONDS = 5.0
"""The time that the first rank stays until the others know who is missing."""
_LOOK_SECONDS = 0.02
_VARIABLES = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
"""The variables that torchrun sets for the processes that it starts."""


def is_several() -> bool:
    """Return whether others were started beside this process. Raises ConfigError for half an environment."""
    if not {*_VARIABLES[:3]} <= os.environ.keys():
        return False
    for name in _VARIABLES:
        value = os.environ.get(name, "")
        if name != "MASTER_ADDR" and not value.isdecimal():
            raise ConfigError(f"{name} of the environment is to be a number, got {value!r}; start with torchrun")
    return int(os.environ["WORLD_SIZE"]) > 1


def launch() -> str:
    """Name the torchrun that has started this process, or will start another one in its place; "" without one."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")  # FOLDER/attempt_0/0/error.json, of a folder of its own
    return f"{HOST}:{Path(error_file).parents[2]}" if error_file.count("/") > 2 else ""


def join(timeout: float) -> int:
    """Make all that were started beside this process PyTorch's default group, over gloo. Returns how many of them this
    machine has. Raises RankError.
    """
    from torch.distributed import PrefixStore, TCPStore, init_process_group  # type: ignore[attr-defined]

    from gigagrad.ranks.process_group import (
        WatchedStore,
        first_rank_keeps_store,
        heartbeat_of,
        lost_error,
        start_call,
        store_keeper,
    )

    seconds = max(timeout, JOINING_SECONDS)
    limit, began = timedelta(seconds=seconds), time.monotonic()
    rank, world, host, port = (os.environ[name] for name in _VARIABLES)
    own, count = int(rank), int(world)
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
        members = find_members(WatchedStore(PrefixStore("gigagrad", store), timeout), own, count, seconds)
    except RuntimeError as error:
        raise lost_error(first, error) from error
    if members.missing:
        raise _not_joined(named(members.missing), f"within {seconds:g} s")
    apart = PrefixStore(f"gigagrad-{members.start}", store)
    group = start_call(lambda: init_process_group("gloo", store=apart, rank=own, world_size=count, timeout=NO_LIMIT))
    heartbeat_of(own, apart, timeout).wait_while_alive(group, range(count), timeout)
    return members.hosts.count(HOST)


def _not_joined(who: str, reason: str) -> RankError:
    return RankError(f"{who} did not join {reason}; look at what the others say, and at MASTER_ADDR and MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Members:
    """The members of a start: its number among those that had the store, and the hosts of all that are there."""

    start: int
    hosts: list[str]
    missing: list[int]


def find_members(store: WatchedStore, rank: int, count: int, seconds: float) -> Members:
    """Find all ranks in a store that may have been that of others, who failed: torchrun keeps it.

    The first one numbers its start, and answers with that number whoever greets it. Every process has a greeting of
    its own, so that nobody takes an answer for his that was one to somebody before him. A rank waits `seconds` for the
    others. Raises RuntimeError where whoever keeps the store is gone, or does not answer.
    """
    return _lead(store, count, seconds) if rank == 0 else _follow(store, rank, seconds)


def _lead(store: WatchedStore, count: int, seconds: float) -> Members:
    start = store.add("starts", 1)
    others = missing = list(range(1, count))
    end = time.monotonic() + seconds
    # Whoever was first before may be there for some moments yet, on another machine.
    while missing and time.monotonic() < end and store.add("starts", 0) == start:
        for rank in missing:
            if store.check([f"greeting-{rank}"]):
                store.set(f"answer-{store.get(f'greeting-{rank}').decode()}", str(start))
        time.sleep(_LOOK_SECONDS)
        missing = [rank for rank in missing if not store.check([f"{start}-{rank}"])]
    here = [rank for rank in others if rank not in missing]
    members = Members(start, [HOST, *(store.get(f"{start}-{rank}").decode() for rank in here)], missing)
    store.set(f"found-{start}", json.dumps(asdict(members)))
    if missing:  # until those that are here know it, as they may lose the store with this process
        end = time.monotonic() + _ANSWER_SECONDS
        while store.add(f"heard-{start}", 0) < len(here) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
    return members


def _follow(store: WatchedStore, rank: int, seconds: float) -> Members:
    while True:
        greeting = uuid4().hex
        store.set(f"greeting-{rank}", greeting)
        if (answer := _awaited(store, f"answer-{greeting}", seconds)) is None:
            return Members(0, [], [0])
        start, members = int(answer), Members(int(answer), [], [0])
        store.set(f"{start}-{rank}", HOST)
        if (told := _awaited(store, f"found-{start}", seconds)) is not None:
            store.add(f"heard-{start}", 1)
            members = Members(**json.loads(told))
        if not members.missing or store.add("starts", 0) == start:
            return members
        # Whoever was first before has answered, and given way: greet who is now.


def _awaited(store: WatchedStore, key: str, seconds: float) -> str | None:
    """Return what somebody writes, in as much time as the first one gives the others, and a little; None: nobody."""
    end = time.monotonic() + seconds + _ANSWER_SECONDS
    while not (there := store.check([key])) and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
    return store.get(key).decode() if there else None


def from_environment(timeout: float = TIMEOUT_SECONDS) -> Ranks:
    """Return all processes that torchrun, or whatever else sets RANK, WORLD_SIZE and MASTER_ADDR, has started together;
    this one alone where nothing has. `timeout` is that of `ProcessGroup`.

    Whoever asks first joins the others, over gloo. The threads of a machine are shared among its ranks unless
    OMP_NUM_THREADS says how many each has. Raises RankError where others do not come within the timeout, or a minute,
    and ConfigError for a timeout or variables that are none.
    """
    if not 1 <= timeout <= _LONGEST_SECONDS:
        raise ConfigError(f"a rank is given up after 1 to {_LONGEST_SECONDS:g} s of silence, got {timeout:g}")
    if not is_several():
        return SingleRank()
    import torch

    from gigagrad.ranks.process_group import ProcessGroup

    if not torch.distributed.is_initialized():
        neighbours = join(timeout)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // neighbours))
    return ProcessGroup(timeout=timeout)


@dataclass(frozen=True, slots=True)
class Mesh:
    """All ranks of a run, as a mesh: rank d * T + t is number t of the T ranks of group d."""

    world: Ranks
    data: Ranks
    """The ranks with this number, one of each group: they compute different slides."""
    tile: Ranks
    """The ranks of this group, which compute a slide's tiles together."""

    @classmethod
    def of(cls, world: Ranks, mesh: tuple[int, int] | None = None, timeout: float = TIMEOUT_SECONDS) -> Self:
        """Make a mesh of (D, T) ranks; None: one group. Raises ConfigError where there are more or fewer of them."""
        groups, size = mesh or (1, world.count)
        if groups * size != world.count:
            raise ConfigError(
                f"a mesh of {groups}x{size} takes {groups * size} ranks, got {world.count}; start as many with "
                "torchrun --nproc-per-node, or leave the mesh out"
            )
        if groups == 1:
            return cls(world, SingleRank(), world)
        if size == 1:
            return cls(world, world, SingleRank())
        rows = [range(group * size, (group + 1) * size) for group in range(groups)]
        columns = [range(number, world.count, size) for number in range(size)]
        return cls(world, _own(columns, world, timeout), _own(rows, world, timeout))

    @property
    def first(self) -> bool:
        """Return whether this is the rank that writes files and speaks."""
        return self.world.index == 0


def _own(partition: Sequence[range], world: Ranks, timeout: float) -> Ranks:
    """Make all of these groups, and return the one that this rank is in."""
    from torch.distributed import new_group

    from gigagrad.ranks.process_group import ProcessGroup

    assert isinstance(world, ProcessGroup)
    groups = world.collective(lambda: [new_group(list(ranks), timeout=NO_LIMIT) for ranks in partition])
    mine = next(group for group, ranks in zip(groups, partition, strict=True) if world.index in ranks)
    return ProcessGroup(mine, timeout)


def ranks_of(mesh: DeviceMesh | Ranks) -> Ranks:
    """Return the ranks of a mesh's only dimension, or of "tile". Raises ConfigError for a mesh with neither."""
    if isinstance(mesh, Ranks):
        return mesh
    from gigagrad.ranks.process_group import ProcessGroup

    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and "tile" not in names:
        raise ConfigError(f'a mesh of {mesh.ndim} dimensions needs one that is named "tile", got {names or "no names"}')
    group = mesh.get_group("tile" if "tile" in names else 0)
    return ProcessGroup(group) if group.size() > 1 else SingleRank()
