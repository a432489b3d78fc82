"""Processes that were started together, as torchrun does it, and how they share the work: the slides of a step go to
groups of ranks, the tiles of a slide to the ranks of a group.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from gigagrad.errors import ConfigError, RankError
from gigagrad.ranks.ranks import Alone, Ranks, named

TIMEOUT_SECONDS = 600.0
_JOINING_SECONDS = 60.0
"""That processes which start beside each other are given at least."""
_ANSWER_SECONDS = 5.0
"""Until the process that keeps the store is taken for stopped, which PyTorch would wait for without end."""


def from_environment(timeout: float = TIMEOUT_SECONDS) -> Ranks:
    """All processes that torchrun, or whatever else sets RANK, WORLD_SIZE and MASTER_ADDR, has started together; this
    one alone where nothing has. `timeout` is that of `ProcessGroup`.

    Whoever asks first joins the others, over gloo. The threads of a machine are shared among its ranks unless
    OMP_NUM_THREADS says how many each has. Raises RankError where others do not come within the timeout, or a minute.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() or os.environ["WORLD_SIZE"] == "1":
        return Alone()
    import torch

    from gigagrad.ranks.process_group import ProcessGroup, patient

    if not torch.distributed.is_initialized():
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        _join(timeout)
        patient()
    return ProcessGroup(timeout=timeout)


def _join(timeout: float) -> None:
    """Come together with all that were started beside this process. Raises RankError."""
    from torch.distributed import init_process_group
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    from gigagrad.ranks.pulse import begun, pulse_of

    joining = max(timeout, _JOINING_SECONDS)
    limit, missing = timedelta(seconds=joining), ""
    try:
        store, rank, count = begun(lambda: next(rendezvous("env://", timeout=limit))).result(joining)
        # Of its own for every start: torchrun may keep the store of processes that are gone.
        store = PrefixStore(f"gigagrad-{_restarts()}", store)
        keys = [f"joined-{other}" for other in range(count)]
        begun(lambda: store.set(keys[rank], "")).result(joining)
        try:
            begun(lambda: store.wait(keys, limit)).result(joining + _ANSWER_SECONDS)
        except RuntimeError:
            absent = begun(lambda: [other for other, key in enumerate(keys) if not store.check([key])])
            missing = named(absent.result(_ANSWER_SECONDS))
            raise
    except (RuntimeError, TimeoutError) as error:
        who = missing or f"some of {os.environ['WORLD_SIZE']} ranks"
        hint = "look at what the others say, and at MASTER_ADDR and MASTER_PORT"
        raise RankError(f"{who} did not join within {joining:g} s; {hint}") from error
    group = begun(lambda: init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=limit))
    pulse_of(rank, store, timeout).watched(group.result, group.done, range(count), timeout)


def is_first() -> bool:
    """Whether this process speaks for those that were started together."""
    return os.environ.get("RANK", "0") == "0"


def is_restart() -> bool:
    """Whether torchrun started these processes again, after one of them had failed."""
    return _restarts() != "0"


def _restarts() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


@dataclass(frozen=True, slots=True)
class Fleet:
    """All ranks of a run, as a mesh: rank d * T + t is number t of the T ranks of group d."""

    everybody: Ranks
    data: Ranks
    """Those with this number, one of each group."""
    tile: Ranks
    """This group: who computes a slide's tiles together."""

    @classmethod
    def of(cls, everybody: Ranks, mesh: tuple[int, int] | None = None, timeout: float = TIMEOUT_SECONDS) -> Self:
        """A mesh of (D, T) ranks; None: one group. Raises ConfigError where there are more or fewer of them."""
        groups, size = mesh or (1, everybody.count)
        if groups * size != everybody.count:
            raise ConfigError(
                f"a mesh of {groups}x{size} takes {groups * size} ranks, got {everybody.count}; start as many with "
                "torchrun --nproc-per-node, or leave the mesh out"
            )
        if groups == 1:
            return cls(everybody, Alone(), everybody)
        if size == 1:
            return cls(everybody, everybody, Alone())
        rows = [range(group * size, (group + 1) * size) for group in range(groups)]
        columns = [range(number, everybody.count, size) for number in range(size)]
        return cls(everybody, _own(columns, everybody, timeout), _own(rows, everybody, timeout))

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and speaks."""
        return self.everybody.index == 0


def _own(partition: Sequence[range], everybody: Ranks, timeout: float) -> Ranks:
    """The one of these groups that this rank is in; each of them is made by all ranks."""
    from torch.distributed import new_group

    from gigagrad.ranks.process_group import ProcessGroup, patient

    assert isinstance(everybody, ProcessGroup)
    joining = timedelta(seconds=max(timeout, _JOINING_SECONDS))
    made = everybody.all_at(lambda: [new_group(list(ranks), timeout=joining) for ranks in partition])
    mine = next(group for group, ranks in zip(made, partition, strict=True) if everybody.index in ranks)
    patient(mine)
    return ProcessGroup(mine, timeout)
