"""What tiles move between their crops and fields that are kept elsewhere than in the device's memory, in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gigagrad.bricks import ROWS_AT_ONCE, WRITES_BEHIND, Bricks
from gigagrad.graphs import Graph
from gigagrad.plans.packing import Packing
from gigagrad.plans.plan import DISK, MEMORY
from gigagrad.plans.stages import Stage

Shapes = Mapping[int, tuple[int, int]]
"""Height and width in pixels of one tile's crop of each field that its stage reads or keeps."""


def traffic_bytes(
    graph: Graph, stage: Stage, crops: Shapes, kept: Mapping[int, str], phase: str, tier: str, packing: Packing
) -> float:
    """Bytes that one tile of a sweep reads from and writes to a tier."""

    def moved(fields: Iterable[int], *, cotangents: bool = False) -> float:
        there = [i for i in fields if kept.get(i) == tier]
        sizes = [graph[i].bytes_per_pixel if cotangents else packing.bytes_per_pixel(graph, i, tier) for i in there]
        return sum(_touched(graph, i, crops, tier, size) for i, size in zip(there, sizes, strict=True))

    values = moved(stage.reads) + moved(stage.kept)
    if phase == "forward":
        return values
    # What the reductions need of a share comes with its cotangent; a cotangent is added to what is there.
    added = [i for i in stage.reads if graph[i].differentiable]
    return values + moved(stage.kept, cotangents=True) + 2 * moved(added, cotangents=True)


def waiting_bytes(graph: Graph, stage: Stage, crops: Shapes, kept: Mapping[int, str], *, backward: bool) -> int:
    """Bytes of results that wait to be written, and of bricks on their way to or from files, at most."""

    def behind(fields: Iterable[int]) -> int:
        return sum(_crop_bytes(graph, i, crops) for i in fields if kept.get(i, MEMORY) != MEMORY)

    most = behind(stage.kept)
    if backward:
        most = max(most, behind(i for i in stage.reads if graph[i].differentiable))
    in_files = [i for i in (*stage.reads, *stage.kept) if kept.get(i) == DISK]
    rows = (_bricks(graph, i, graph[i].bytes_per_pixel).row_bytes(crops.get(i, (0, 0))[1]) for i in in_files)
    # Those that wait, the one on its way, and what it goes through.
    return (WRITES_BEHIND + 1) * most + ROWS_AT_ONCE * max(rows, default=0)


def _crop_bytes(graph: Graph, node_id: int, crops: Shapes) -> int:
    height, width = crops.get(node_id, (0, 0))
    return height * width * graph[node_id].bytes_per_pixel


def _bricks(graph: Graph, node_id: int, pixel_bytes: int) -> Bricks:
    node = graph[node_id]
    return Bricks(node.size(0), node.size(1), pixel_bytes)


def _touched(graph: Graph, node_id: int, crops: Shapes, tier: str, pixel_bytes: int) -> float:
    """Bytes of a crop, in a file of the bricks that it touches."""
    height, width = crops.get(node_id, (0, 0))
    nbytes = height * width * pixel_bytes
    if tier != DISK or not nbytes:
        return nbytes
    return _bricks(graph, node_id, pixel_bytes).read_ratio(height, width) * nbytes
