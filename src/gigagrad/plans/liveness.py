"""Compute when each kept field is in memory, and what that takes in every tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from gigagrad.graphs import SCATTER, Graph
from gigagrad.plans.problem import Problem
from gigagrad.plans.program import Tiles
from gigagrad.plans.stages import Stage, is_read
from gigagrad.stores import Tier


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A kept field, or the field of its cotangents, in memory from the first to the last of these passes."""

    field: int
    cotangent: bool
    first: int
    last: int


def lifetimes(graph: Graph, stages: tuple[Stage, ...], passes: tuple[Tiles, ...]) -> tuple[Lifetime, ...]:
    """Return when every kept field and every field of cotangents is in memory, in passes (by index)."""
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


def holds_whole(life: Lifetime, stages: tuple[Stage, ...], passes: tuple[Tiles, ...], handed: int | None) -> bool:
    """Say whether a lifetime's field is there as a whole: of the gradient that is `handed` over only where several
    passes add to it.
    """
    if not life.cotangent or life.field != handed:
        return True
    return sum(p.phase != "forward" and life.field in stages[p.stage].reads for p in passes) > 1


def life_bytes(problem: Problem, life: Lifetime, tier: Tier, size: tuple[int, int]) -> int:
    """Return the bytes that so many pixels, height and width, of a field or of its cotangents take in a tier."""
    graph = problem.graph
    pixel = graph[life.field].bytes_per_pixel
    if not life.cotangent:
        pixel = problem.packing.bytes_per_pixel(graph, life.field, tier)
    return tier.field_bytes(size, pixel)


def is_replicated(graph: Graph, life: Lifetime) -> bool:
    """Say whether every rank holds all of it: what whole-field operators read, and results."""
    return is_read(graph, life.field) if life.cotangent else bool(graph.gathers(life.field))


def _backward_of(passes: tuple[Tiles, ...], stage: int) -> int | None:
    return next((i for i, p in enumerate(passes) if p.stage == stage and p.phase != "forward"), None)


def held_by_pass(
    problem: Problem,
    stages: tuple[Stage, ...],
    passes: tuple[Tiles, ...],
    kept: Mapping[int, str],
    tier: Tier,
    held_share: float = 1.0,
) -> list[tuple[int, int]]:
    """Return the bytes of kept fields and of cotangent fields in one tier during every pass, of a rank that holds at
    most this share of what is not replicated.
    """
    graph = problem.graph
    held = [[0, 0] for _ in passes]
    for life in lifetimes(graph, stages, passes):
        whole = holds_whole(life, stages, passes, problem.handed)
        if whole and kept.get(life.field, problem.memory.name) == tier.name:
            node = graph[life.field]
            size = life_bytes(problem, life, tier, (node.size(0), node.size(1)))
            if not is_replicated(graph, life):
                size = ceil(held_share * size)
            for index in range(life.first, life.last + 1):
                held[index][life.cotangent] += size
    return [(fields, cotangents) for fields, cotangents in held]


def kept_bytes(problem: Problem, node_id: int, tier: Tier) -> int:
    """Return the bytes of a kept field as it is stored, without what pads its file."""
    node = problem.graph[node_id]
    return node.nbytes // node.bytes_per_pixel * problem.packing.bytes_per_pixel(problem.graph, node_id, tier)
