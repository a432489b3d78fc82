"""Find the ranks of a `DeviceMesh` that share an image."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gigagrad.errors import ConfigError
from gigagrad.ranks.ranks import Ranks, SingleRank

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def ranks_of(mesh: DeviceMesh | Ranks) -> Ranks:
    """Return the ranks of a mesh's only dimension, or of that named "tile". Raises ConfigError for a mesh with
    neither."""
    if isinstance(mesh, Ranks):
        return mesh
    from gigagrad.ranks.process_group import ProcessGroup

    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and "tile" not in names:
        raise ConfigError(f'a mesh of {mesh.ndim} dimensions needs one that is named "tile", got {names or "no names"}')
    group = mesh.get_group("tile" if "tile" in names else 0)
    return ProcessGroup(group) if group.size() > 1 else SingleRank()
