"""Processes that were started together, as torchrun does it, and how they share the work: the slides of a step go to
groups of ranks, the tiles of a slide to the ranks of a group.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from gigagrad.errors import ConfigError
from gigagrad.ranks.joining import JOINING_SECONDS, is_several, join
from gigagrad.ranks.ranks import Alone, Ranks

TIMEOUT_SECONDS = 600.0
_LONGEST_SECONDS = 1e6


def from_environment(timeout: float = TIMEOUT_SECONDS) -> Ranks:
    """All processes that torchrun, or whatever else sets RANK, WORLD_SIZE and MASTER_ADDR, has started together; this
    one alone where nothing has. `timeout` is that of `ProcessGroup`.

    Whoever asks first joins the others, over gloo. The threads of a machine are shared among its ranks unless
    OMP_NUM_THREADS says how many each has. Raises RankError where others do not come within the timeout, or a minute,
    and ConfigError for a timeout or variables that are none.
    """
    if not 1 <= timeout <= _LONGEST_SECONDS:
        raise ConfigError(f"a rank is given up after 1 to {_LONGEST_SECONDS:g} s of silence, got {timeout:g}")
    if not is_several():
        return Alone()
    import torch

    from gigagrad.ranks.process_group import ProcessGroup, patient

    if not torch.distributed.is_initialized():
        neighbours = join(timeout)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // neighbours))
        patient()
    return ProcessGroup(timeout=timeout)


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
    joining = timedelta(seconds=max(timeout, JOINING_SECONDS))
    made = everybody.all_at(lambda: [new_group(list(ranks), timeout=joining) for ranks in partition])
    mine = next(group for group, ranks in zip(made, partition, strict=True) if everybody.index in ranks)
    patient(mine)
    return ProcessGroup(mine, timeout)
