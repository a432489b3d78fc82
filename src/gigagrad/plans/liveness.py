"""Compute when each kept field is in memory, and what that takes in every tier."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate
from math import ceil

from gigagrad.graphs import SCATTER, Graph
from gigagrad.plans.problem import Problem
from gigagrad.plans.program import Key, Tiles
from gigagrad.plans.segments import Segment, adding, is_read
from gigagrad.stores import Tier


def lifetimes(graph: Graph, segments: tuple[Segment, ...], passes: tuple[Tiles, ...]) -> dict[Key, range]:
    """Return in which passes, by index, every kept field and every field of cotangents is in memory."""
    producers = {field: segment for segment in segments for field in segment.kept}
    reading, of_segment = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for index, step in enumerate(passes):
        of_segment[step.segment].append(index)
        for field in segments[step.segment].reads:
            reading[field].append(index)
    found: dict[Key, range] = {}
    for field, producer in producers.items():
        own, read = of_segment[producer.index], reading[field]
        found[field, False] = range(own[0], max([*own, *read]) + 1)
        end = next((index for index in own if passes[index].phase != "forward"), None)
        if graph[field].differentiable and end is not None:
            # A whole-field operator hands its cotangent over just before; any other reader in its own backward pass.
            start = min((i for i in read if passes[i].phase != "forward"), default=end)
            found[field, True] = range(start, end + 1)
    for field in sorted(reading):
        if is_read(graph, field) and graph[field].differentiable:
            read = [i for i in reading[field] if passes[i].phase != "forward"]
            if read:
                # The image's own gradient stays until the end.
                found[field, True] = range(min(read), max(read) + 1 if graph[field].op == SCATTER else len(passes))
    return found


def holds_whole(key: Key, segments: tuple[Segment, ...], passes: tuple[Tiles, ...], handed: int | None) -> bool:
    """Say whether a buffer is there as a whole: of the gradient that is `handed` over only where several passes add to
    it.
    """
    if key != (handed, True):
        return True
    return len(adding(segments, passes, key[0])) > 1


def buffer_bytes(problem: Problem, key: Key, tier: Tier, size: tuple[int, int]) -> int:
    """Return the bytes that so many pixels, height and width, of a field or of its cotangents take in a tier."""
    field, cotangent = key
    exact = problem.graph[field].bytes_per_pixel
    return tier.field_bytes(size, exact if cotangent else problem.stored_bytes_per_pixel(field, tier))


def is_replicated(graph: Graph, key: Key) -> bool:
    """Say whether every rank holds all of it: what whole-field operators read, and results."""
    field, cotangent = key
    return is_read(graph, field) if cotangent else bool(graph.gathers(field))


def held_by_pass(
    problem: Problem,
    segments: tuple[Segment, ...],
    passes: tuple[Tiles, ...],
    kept: Mapping[int, str],
    tier: Tier,
    held_share: float = 1.0,
) -> list[tuple[int, int]]:
    """Return the bytes of kept fields and of cotangent fields in one tier during every pass, of a rank that holds at
    most this share of what is not replicated.
    """
    graph = problem.graph
    more = [[0, 0] for _ in range(len(passes) + 1)]  # than during the pass before
    for key, when in lifetimes(graph, segments, passes).items():
        field, cotangent = key
        whole = holds_whole(key, segments, passes, problem.handed)
        if whole and kept.get(field, problem.memory.name) == tier.name:
            size = buffer_bytes(problem, key, tier, graph[field].extent)
            if not is_replicated(graph, key):
                size = ceil(held_share * size)
            more[when.start][cotangent] += size
            more[when.stop][cotangent] -= size
    fields, cotangents = map(accumulate, zip(*more[:-1], strict=True)) if passes else ((), ())
    return list(zip(fields, cotangents, strict=True))


def kept_bytes(problem: Problem, node_id: int, tier: Tier) -> int:
    """Return the bytes of a kept field as it is stored, without what pads its file."""
    node = problem.graph[node_id]
    return node.nbytes // node.bytes_per_pixel * problem.stored_bytes_per_pixel(node_id, tier)
