"""Stages: the graph split at its reductions.

A field that needs the value of a reduction cannot be computed in the same sweep over the tiles as the reduction itself.
Each stage therefore holds the fields that its own reductions (or the output field) need, computed from the images, with
all earlier reductions at hand as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from gigagrad.graphs import FIELD_SUM, Graph


@dataclass(frozen=True, slots=True)
class Stage:
    """One sweep over the image. All members are node ids, in topological order."""

    index: int
    reductions: tuple[int, ...]
    """The field sums whose partial sums this stage adds up."""
    output: int | None
    """The field this stage delivers tile by tile, if it is the one with the graph's output."""
    fields: tuple[int, ...]
    """The fields computed, sources excluded."""
    images: tuple[int, ...]
    """The image and target sources read."""
    globals: tuple[int, ...]
    """Parameters, constants and earlier results that the fields read."""

    def targets(self, graph: Graph) -> tuple[int, ...]:
        """The fields that tiles partition: what the reductions sum, and the output."""
        summed = [graph[r].operands[0] for r in self.reductions]
        return tuple(dict.fromkeys(summed + ([self.output] if self.output is not None else [])))


def levels(graph: Graph) -> list[int]:
    """For each node the number of sweeps that must have ended before its value can be computed."""
    level = [0] * len(graph.nodes)
    for node in graph.nodes:
        level[node.id] = max(
            (level[i] + (1 if graph[i].op == FIELD_SUM else 0) for i in node.operands),
            default=0,
        )
    return level


def split_stages(graph: Graph) -> tuple[Stage, ...]:
    """The stages of a graph in the order in which they run."""
    level = levels(graph)
    by_level: dict[int, list[int]] = {}
    for node in graph.nodes:
        if node.op == FIELD_SUM:
            by_level.setdefault(level[node.id], []).append(node.id)
    output = graph.output if graph[graph.output].is_field else None
    if output is not None:
        by_level.setdefault(level[output], [])
    stages = []
    for index, stage_level in enumerate(sorted(by_level)):
        reductions = tuple(by_level[stage_level])
        delivers = output if output is not None and level[output] == stage_level else None
        roots = [graph[r].operands[0] for r in reductions] + ([delivers] if delivers is not None else [])
        needed = sorted(_fields_behind(graph, roots))
        fields = tuple(i for i in needed if not graph[i].is_source)
        read = {i for field in fields for i in graph[field].operands if not graph[i].is_field}
        images = tuple(i for i in needed if graph[i].is_source)
        stages.append(Stage(index, reductions, delivers, fields, images, tuple(sorted(read))))
    return tuple(stages)


def _fields_behind(graph: Graph, roots: list[int]) -> set[int]:
    """The roots and every field they are computed from (reductions end the walk: their values are known)."""
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        node_id = stack.pop()
        if node_id not in seen:
            seen.add(node_id)
            stack.extend(i for i in graph[node_id].operands if graph[i].is_field)
    return seen
