"""Arrange processes that were started together as a mesh: the slides of a step go to groups of ranks, the tiles of a
slide to the ranks of a group.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gigagrad.errors import ConfigError
from gigagrad.ranks.ranks import Ranks, SingleRank
from gigagrad.ranks.rendezvous import NO_LIMIT, is_several, join

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT_SECONDS = 600.0
_LONGEST_SECONDS = 1e6


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
