"""When each kept field is there, and what that takes in every tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gigagrad.bricks import Bricks
from gigagrad.graphs import SCATTER, Graph
from gigagrad.plans.memory import whole_pages
from gigagrad.plans.packing import AS_THEY_ARE, Packing
from gigagrad.plans.plan import DISK, MEMORY, Pass
from gigagrad.plans.stages import Stage, is_read


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A kept field, or the field of its cotangents, in memory from the first to the last of these passes."""

    field: int
    cotangent: bool
    first: int
    last: int


def lifetimes(graph: Graph, stages: tuple[Stage, ...], passes: tuple[Pass, ...]) -> tuple[Lifetime, ...]:
    """When every kept field and every field of cotangents is in memory, in passes (by index)."""
    producers = {field: stage for stage in stages for field in stage.kept}
    result = []
    for field, producer in producers.items():
        own = [index for index, p in enumerate(passes) if p.stage == producer.index]
        read = [index for index, p in enumerate(passes) if field in stages[p.stage].reads]
        result.append(Lifetime(field, False, own[0], max([*own, *read])))
        end = _backward_of(passes, producer.index)
        if graph[field].differentiable and end is not None:
            # A whole-field operator hands its cotangent over just before; any other reader in its own backward pass.
            start = min((i for i in read if passes[i].phase != "forward"), default=end)
            result.append(Lifetime(field, True, start, end))
    for node in graph.nodes:
        if node.is_field and is_read(graph, node.id) and node.differentiable:
            read = [i for i, p in enumerate(passes) if node.id in stages[p.stage].reads and p.phase != "forward"]
            if read:
                # The image's own gradient stays until the end.
                last = max(read) if node.op == SCATTER else len(passes) - 1
                result.append(Lifetime(node.id, True, min(read), last))
    return tuple(result)


def _backward_of(passes: tuple[Pass, ...], stage: int) -> int | None:
    return next((i for i, p in enumerate(passes) if p.stage == stage and p.phase != "forward"), None)


def bytes_by_pass(
    graph: Graph,
    stages: tuple[Stage, ...],
    passes: tuple[Pass, ...],
    kept: Mapping[int, str],
    tier: str,
    packing: Packing = AS_THEY_ARE,
) -> list[int]:
    """Bytes of kept fields and cotangent fields in one tier during every pass."""
    held = [0] * len(passes)
    for life in lifetimes(graph, stages, passes):
        if kept.get(life.field, MEMORY) == tier:
            node = graph[life.field]
            pixel = node.bytes_per_pixel if life.cotangent else packing.bytes_per_pixel(graph, life.field, tier)
            pixels = node.nbytes // node.bytes_per_pixel
            on_disk = tier == DISK
            size = Bricks(node.size(0), node.size(1), pixel).file_bytes if on_disk else whole_pages(pixels * pixel)
            for index in range(life.first, life.last + 1):
                held[index] += size
    return held


def kept_bytes(graph: Graph, node_id: int, tier: str, packing: Packing) -> int:
    """Bytes of a kept field as it is stored, without what pads its file."""
    return graph[node_id].nbytes // graph[node_id].bytes_per_pixel * packing.bytes_per_pixel(graph, node_id, tier)
