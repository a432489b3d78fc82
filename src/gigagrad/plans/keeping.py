"""Which fields a plan keeps, when each of them is in memory, and what that costs.

A field that a later stage reads, after a reduction has been finished, is either kept or computed again. By default the
plan keeps what costs a convolution (or anything else that looks beyond its pixel) and computes pixelwise work again;
of a long chain of sums, as residual networks have them, every few links are kept, or else each stage would read all
earlier ones. What to give up when a budget asks for more is decided in choose.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from gigagrad.graphs import GATHER, SCATTER, Graph, lookup
from gigagrad.plans.plan import Pass
from gigagrad.plans.stages import Stage, gathered, is_read, levels

_LONGEST_CHAIN = 4
"""Kept fields that a field may be computed from pixelwise before it is kept itself."""


def fields_to_keep(graph: Graph) -> frozenset[int]:
    """The fields a plan keeps where memory is no matter; those of whole-field operators are among them."""
    required = gathered(graph)
    level = levels(graph, required)
    late = set(required)
    for node in graph.nodes:
        if node.is_field or node.op == GATHER:
            late |= {i for i in node.operands if graph[i].is_field and level[i] < level[node.id]}
    kept = set(required)
    sources: dict[int, frozenset[int] | None] = {}
    for node in graph.nodes:
        if not node.is_field:
            continue
        if is_read(graph, node.id):
            sources[node.id] = frozenset({node.id})
            continue
        behind = _pixelwise_sources(graph, node.id, sources)
        if node.id in late and (behind is None or len(behind) > _LONGEST_CHAIN):
            kept.add(node.id)
        sources[node.id] = frozenset({node.id}) if node.id in kept else behind
    return frozenset(kept)


def _pixelwise_sources(graph: Graph, node_id: int, sources: dict[int, frozenset[int] | None]) -> frozenset[int] | None:
    """The kept fields (and images) a field is computed from pixel by pixel; None if it looks beyond its pixel."""
    if not _is_pixelwise(graph, node_id):
        return None
    found: frozenset[int] = frozenset()
    for i in graph[node_id].operands:
        if graph[i].is_field:
            behind = sources[i]
            if behind is None:
                return None
            found |= behind
    return found


def _is_pixelwise(graph: Graph, node_id: int) -> bool:
    row = lookup(graph[node_id].op)
    return row is not None and row.pixelwise


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A kept field, or the field of its cotangents, in memory from the first to the last of these passes."""

    field: int
    cotangent: bool
    first: int
    last: int

    def nbytes(self, graph: Graph) -> int:
        return graph[self.field].nbytes


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


def bytes_by_pass(graph: Graph, stages: tuple[Stage, ...], passes: tuple[Pass, ...]) -> list[int]:
    """Bytes of kept fields and cotangent fields in memory during every pass."""
    held = [0] * len(passes)
    for life in lifetimes(graph, stages, passes):
        for index in range(life.first, life.last + 1):
            held[index] += life.nbytes(graph)
    return held


def convolution_flops(graph: Graph, node_id: int) -> float:
    """Multiplications and additions of a convolution or a linear layer over its whole field; 0 for anything else."""
    node = graph[node_id]
    if not node.op.startswith(("aten.conv", "aten.linear")):
        return 0.0
    field, weight = graph[node.operands[0]], graph[node.operands[1]]
    return 2.0 * prod(field.shape if "transpose" in node.op else node.shape) * prod(weight.shape[1:])
