"""What tiles move between their crops and fields that are kept elsewhere than in the device's memory, in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gigagrad.bricks import WRITES_BEHIND, Bricks
from gigagrad.graphs import Graph
from gigagrad.plans.plan import DISK, MEMORY
from gigagrad.plans.stages import Stage

Shapes = Mapping[int, tuple[int, int]]
"""Height and width in pixels of one tile's crop of each field that its stage reads or keeps."""


def traffic_bytes(graph: Graph, stage: Stage, crops: Shapes, kept: Mapping[int, str], phase: str, tier: str) -> float:
    """Bytes that one tile of a sweep reads from and writes to a tier."""

    def moved(fields: Iterable[int]) -> float:
        return sum(_touched(graph, i, crops, tier) for i in fields if kept.get(i) == tier)

    if phase == "forward":
        return moved(stage.reads) + moved(stage.kept)
    # What the reductions need of a share, and its cotangent; a cotangent is added to what is there.
    added = [i for i in stage.reads if graph[i].differentiable]
    return moved(stage.reads) + 2 * moved(stage.kept) + 2 * moved(added)


def waiting_bytes(graph: Graph, stage: Stage, crops: Shapes, kept: Mapping[int, str], *, backward: bool) -> int:
    """Bytes of results that wait to be written, at most."""

    def behind(fields: Iterable[int]) -> int:
        return sum(_crop_bytes(graph, i, crops) for i in fields if kept.get(i, MEMORY) != MEMORY)

    most = behind(stage.kept)
    if backward:
        most = max(most, behind(i for i in stage.reads if graph[i].differentiable))
    return (WRITES_BEHIND + 1) * most  # and the one on its way


def _crop_bytes(graph: Graph, node_id: int, crops: Shapes) -> int:
    height, width = crops.get(node_id, (0, 0))
    return height * width * graph[node_id].bytes_per_pixel


def _touched(graph: Graph, node_id: int, crops: Shapes, tier: str) -> float:
    """Bytes of a crop, in a file of the bricks that it touches."""
    node = graph[node_id]
    nbytes = _crop_bytes(graph, node_id, crops)
    if tier != DISK or not nbytes:
        return nbytes
    ratio = Bricks(node.size(0), node.size(1), node.bytes_per_pixel).read_ratio(*crops[node_id])
    return ratio * nbytes
