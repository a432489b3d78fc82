"""What tiles move between their crops and fields that are kept elsewhere than in the device's memory, in bytes."""

from __future__ import annotations

from collections.abc import Mapping

from gigagrad.bricks import Bricks
from gigagrad.graphs import Graph
from gigagrad.plans.plan import MEMORY
from gigagrad.plans.stages import Stage

Shapes = Mapping[int, tuple[int, int]]
"""Height and width in pixels of one tile's crop of each field that its stage reads or keeps."""

_RESULTS_AT_WORK = 3
"""Of a tile's results in memory until they are written: two wait, one is on its way (stores/scratch.py)."""


def traffic_bytes(graph: Graph, stage: Stage, crops: Shapes, kept: Mapping[int, str], phase: str) -> float:
    """Bytes that one tile of a sweep reads from and writes to other tiers."""
    reads, keeps = _elsewhere(stage.reads, kept), _elsewhere(stage.kept, kept)
    total = sum(_touched(graph, i, crops) for i in reads)
    if phase == "forward":
        return total + sum(_touched(graph, i, crops) for i in keeps)
    # What the reductions need of a share, and its cotangent; a cotangent is added to what is there.
    total += sum(2 * _touched(graph, i, crops) for i in keeps)
    return total + sum(2 * _touched(graph, i, crops) for i in reads if graph[i].differentiable)


def waiting_bytes(graph: Graph, stage: Stage, crops: Shapes, kept: Mapping[int, str], *, backward: bool) -> int:
    """Bytes of results that wait to be written, at most."""
    written = sum(_crop_bytes(graph, i, crops) for i in _elsewhere(stage.kept, kept))
    if backward:
        added = [i for i in _elsewhere(stage.reads, kept) if graph[i].differentiable]
        written = max(written, sum(_crop_bytes(graph, i, crops) for i in added))
    return _RESULTS_AT_WORK * written


def _elsewhere(fields: tuple[int, ...], kept: Mapping[int, str]) -> list[int]:
    return [i for i in fields if kept.get(i, MEMORY) != MEMORY]


def _crop_bytes(graph: Graph, node_id: int, crops: Shapes) -> int:
    height, width = crops.get(node_id, (0, 0))
    return height * width * graph[node_id].bytes_per_pixel


def _touched(graph: Graph, node_id: int, crops: Shapes) -> float:
    """Bytes of the bricks that a crop touches."""
    node = graph[node_id]
    if not _crop_bytes(graph, node_id, crops):
        return 0.0
    ratio = Bricks(node.size(0), node.size(1), node.bytes_per_pixel).read_ratio(*crops[node_id])
    return ratio * _crop_bytes(graph, node_id, crops)
