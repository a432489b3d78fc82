"""Store kept fields as they are, or in fewer bits, as the user declared."""

from __future__ import annotations

from dataclasses import dataclass

from gigagrad.graphs import Graph
from gigagrad.plans.plan import EXACT
from gigagrad.plans.stages import gathered
from gigagrad.stores import Tier

_SMALLEST_ITEMSIZE = 4
"""Values of fewer bytes gain nothing."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The type that kept fields are stored in. Cotangents are never packed, and neither are integers."""

    name: str = EXACT
    itemsize: int = 0
    """Bytes a value takes; 0 for as many as it has."""
    files_only: bool = False
    """Values take fewer bytes only behind a codec, so fields in memory stay as they are."""

    def applies(self, graph: Graph, node_id: int, tier: Tier) -> bool:
        """Say whether the field is rounded when it is kept in this tier. What whole-field operators read never is."""
        dtype = graph[node_id].dtype
        if self.name == EXACT or (self.files_only and not tier.encodes):
            return False
        return dtype.is_floating_point and dtype.itemsize >= _SMALLEST_ITEMSIZE and node_id not in gathered(graph)

    def bytes_per_pixel(self, graph: Graph, node_id: int, tier: Tier) -> int:
        """Return the bytes that a pixel of the field takes there at most."""
        node = graph[node_id]
        packed = self.itemsize and self.applies(graph, node_id, tier)
        return node.bytes_per_pixel // node.dtype.itemsize * self.itemsize if packed else node.bytes_per_pixel


AS_THEY_ARE = Packing()
