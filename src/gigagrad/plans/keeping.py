"""When each kept field is there, and what that takes in every tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from gigagrad.bricks import Bricks
from gigagrad.graphs import SCATTER, Graph, lookup
from gigagrad.plans.plan import DISK, MEMORY, Pass
from gigagrad.plans.stages import Stage, is_read


def is_pixelwise(graph: Graph, node_id: int) -> bool:
    row = lookup(graph[node_id].op)
    return row is not None and row.pixelwise


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
    graph: Graph, stages: tuple[Stage, ...], passes: tuple[Pass, ...], kept: Mapping[int, str], tier: str
) -> list[int]:
    """Bytes of kept fields and cotangent fields in one tier during every pass."""
    held = [0] * len(passes)
    for life in lifetimes(graph, stages, passes):
        if kept.get(life.field, MEMORY) == tier:
            node = graph[life.field]
            on_disk = Bricks(node.size(0), node.size(1), node.bytes_per_pixel).file_bytes
            for index in range(life.first, life.last + 1):
                held[index] += on_disk if tier == DISK else node.nbytes
    return held


def convolution_flops(graph: Graph, node_id: int) -> float:
    """Multiplications and additions of a convolution or a linear layer over its whole field; 0 for anything else."""
    node = graph[node_id]
    if not node.op.startswith(("aten.conv", "aten.linear")):
        return 0.0
    field, weight = graph[node.operands[0]], graph[node.operands[1]]
    return 2.0 * prod(field.shape if "transpose" in node.op else node.shape) * prod(weight.shape[1:])
