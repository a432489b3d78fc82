"""Split the graph into segments, and order the passes over them.

A segment ends where a value must be known for the whole image before the next one can be computed: at the graph's
reductions, at the fields that whole-field operators read, and at every other field that a plan keeps. It computes the
fields that its targets need, tile by tile, from the images and from fields that earlier segments kept, with all earlier
reductions at hand as numbers. Whatever it needs and nobody kept, it computes again.

Backward, a segment needs the cotangents of its reductions, and those exist only once the loss is known. The last
segment is the exception when the loss depends on its reductions in a way that is known beforehand:

- *affine*: a mean, a sum, any weighted sum of them: the cotangents are constants;
- *scaled*: a single number leads to the loss (a class-weighted mean, the logarithm of a mean): run with cotangent 1 and
  multiply the finished sums by the true cotangent, which is exact because the backward pass is linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from gigagrad.graphs import GATHER, SCATTER, Affine, Graph, lookup
from gigagrad.graphs.graph import remembered
from gigagrad.plans.program import Tiles


@dataclass(frozen=True, slots=True)
class Segment:
    """One pass over tiles. All members are node ids, in topological order."""

    index: int
    reductions: tuple[int, ...]
    """The reductions whose partial results this segment merges."""
    kept: tuple[int, ...]
    """The fields that this segment computes and the plan keeps."""
    output: int | None
    """The field this segment delivers tile by tile, if it is the one with the graph's output."""
    fields: tuple[int, ...]
    """The fields computed, those read excluded."""
    reads: tuple[int, ...]
    """The fields read: images, fields kept by earlier segments, global values laid out like images."""
    globals: tuple[int, ...]
    """Parameters, constants and earlier results that the fields read."""

    def targets(self, graph: Graph) -> tuple[int, ...]:
        """Return the fields that tiles partition: what is kept, what the reductions reduce, and the output."""
        reduced = [graph[r].operands[0] for r in self.reductions]
        return tuple(dict.fromkeys([*self.kept, *reduced, *([self.output] if self.output is not None else [])]))


def levels(graph: Graph, kept: Iterable[int] = ()) -> list[int]:
    """Return for each node the number of passes that must have ended before its value can be computed."""
    stored = set(kept)
    level, behind = list[int](), list[int]()  # of each value, and of what is computed from it at once
    for node in graph.nodes:
        waits = node.is_reduction or node.op == GATHER
        ready = level if waits else behind
        own = 0
        for i in node.operands:
            if ready[i] + waits > own:
                own = ready[i] + waits
        level.append(own)
        behind.append(own + (node.id in stored))
    return level


def split_segments(graph: Graph, kept: Iterable[int] = ()) -> tuple[Segment, ...]:
    """Return the segments of a graph, in the order in which they run, if these fields are kept (gathered ones are,
    anyway).
    """
    stored = {*kept, *gathered(graph)}
    level = levels(graph, stored)
    targets: dict[int, tuple[list[int], list[int]]] = {}
    for node in graph.nodes:
        if node.is_reduction:
            targets.setdefault(level[node.operands[0]], ([], []))[0].append(node.id)
        if node.id in stored:
            targets.setdefault(level[node.id], ([], []))[1].append(node.id)
    output = graph.output if graph[graph.output].is_field else None
    if output is not None:
        targets.setdefault(level[output], ([], []))
    segments = []
    for index, segment_level in enumerate(sorted(targets)):
        reductions, keeps = targets[segment_level]
        delivers = output if output is not None and level[output] == segment_level else None
        segments.append(_segment(graph, index, reductions, keeps, delivers, stored))
    return tuple(segments)


def segment_for(graph: Graph, roots: Iterable[int], stored: Iterable[int], kept: Iterable[int]) -> Segment:
    """Return a segment by itself: it computes these fields with all their reductions, and keeps some, from what is
    stored.
    """
    wanted = set(roots)
    reductions = sorted(reduction for root in wanted for reduction in graph.reductions(root))
    delivers = graph.output if graph.output in wanted else None
    return _segment(graph, 0, reductions, sorted(kept), delivers, set(stored))


def _segment(
    graph: Graph, index: int, reductions: list[int], keeps: list[int], delivers: int | None, stored: set[int]
) -> Segment:
    roots = [*keeps, *(graph[r].operands[0] for r in reductions), *([delivers] if delivers is not None else [])]
    computed, reads = _fields_behind(graph, roots, stored)
    read_globals = {i for field in computed for i in graph.others[field]}
    return Segment(index, tuple(reductions), tuple(keeps), delivers, computed, reads, tuple(sorted(read_globals)))


@remembered
def gathered(graph: Graph) -> frozenset[int]:
    """Return the fields that whole-field operators read, but for the images themselves."""
    read = (i for node in graph.nodes if node.op == GATHER for i in node.operands)
    return frozenset(i for i in read if not is_read(graph, i))


def summed_globals(graph: Graph, segment: Segment) -> list[int]:
    """Return the nodes, beside fields, whose gradients a backward pass of a segment sums."""
    return [i for i in segment.globals if graph[i].differentiable]


def is_differentiated(graph: Graph, segment: Segment) -> bool:
    """Say whether a gradient goes through a segment."""
    return any(graph[i].differentiable for i in (*segment.reductions, *segment.kept))


def adding(segments: Sequence[Segment], passes: Iterable[Tiles], field: int) -> list[int]:
    """Return the segments whose passes add to a field's cotangents, in the order in which they run."""
    return [p.segment for p in passes if p.phase != "forward" and field in segments[p.segment].reads]


def moved_fields(graph: Graph, segment: Segment, *, backward: bool) -> tuple[list[int], list[int]]:
    """Return the fields whose values a pass reads or writes, and those whose cotangents: each as often as they move."""
    values = [*segment.reads, *segment.kept]
    if not backward:
        return values, []
    # What the reductions need of a share comes with its cotangent; a cotangent is added to what is there.
    added = [i for i in segment.reads if graph[i].differentiable]
    return values, [*segment.kept, *added, *added]


def is_read(graph: Graph, node_id: int) -> bool:
    """Say whether a field is there without being computed: an image, or a global value laid out like one."""
    node = graph.nodes[node_id]
    return node.is_source or node.op == SCATTER


def _fields_behind(graph: Graph, roots: list[int], stored: set[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the fields to compute for the roots, and the fields to read for that."""
    nodes, operands = graph.nodes, graph.reads
    reads = {root for root in roots if is_read(graph, root)}
    computed = set(roots) - reads
    stack = list(computed)
    while stack:
        for i in operands[stack.pop()]:
            if i in stored or nodes[i].is_source or nodes[i].op == SCATTER:  # `is_read`, without a call
                reads.add(i)
            elif i not in computed:
                computed.add(i)
                stack.append(i)
    return tuple(sorted(computed)), tuple(sorted(reads))


class Cotangents(Enum):
    """Ways in which the cotangents of the last segment's reductions become known."""

    AFFINE = "affine"
    SCALED = "scaled"
    AFTER_FORWARD = "after the forward pass"


def differentiable_reductions(graph: Graph, segment: Segment) -> tuple[int, ...]:
    return tuple(r for r in segment.reductions if graph[r].differentiable)


def last_cotangents(graph: Graph, segment: Segment) -> Cotangents:
    """Say how the cotangents of the reductions of the last segment become known."""
    varying = differentiable_reductions(graph, segment)
    if segment.kept:  # a field that is kept is written by a forward pass, and something global waits for it
        return Cotangents.AFTER_FORWARD
    if _affine(graph, set(varying), set(segment.reductions)):
        return Cotangents.AFFINE
    to_parameters_only = not any(graph[i].differentiable for i in segment.reads)
    if len(varying) == 1 and prod(graph[varying[0]].shape) == 1 and to_parameters_only:
        return Cotangents.SCALED
    return Cotangents.AFTER_FORWARD


def _affine(graph: Graph, varying: set[int], unknown: set[int]) -> bool:
    """Say whether every global computed from `varying` is an affine function of it, with coefficients known before."""
    varying, unknown = set(varying), set(unknown)
    for node in graph.nodes[min(unknown, default=0) :]:
        if node.is_field or node.id in unknown:
            continue
        operands = set(node.operands)
        if operands & unknown:
            unknown.add(node.id)
        if not operands & varying:
            continue
        varying.add(node.id)
        unknown.add(node.id)
        affine = lookup(node.op).affine
        if affine is Affine.JOINTLY:
            continue
        moving = [i for i in node.operands if i in varying]
        alone = affine is Affine.SEPARATELY or (affine is Affine.FIRST and node.operands[0] in varying)
        if not alone or len(moving) != 1 or any(i in unknown for i in node.operands if i not in varying):
            return False
    return True


def make_passes(graph: Graph, segments: tuple[Segment, ...], *, backward: bool) -> tuple[Tiles, ...]:
    """Return the passes of one forward, or of one forward and backward, in order."""
    forward = [Tiles(segment.index, "forward") for segment in segments]
    if not backward or not segments:
        return tuple(forward)
    needing = [segment for segment in segments if is_differentiated(graph, segment)]
    passes = forward
    last = segments[-1]
    if last in needing and last_cotangents(graph, last) is not Cotangents.AFTER_FORWARD:
        passes = [*forward[:-1], Tiles(last.index, "one pass")]
        needing = needing[:-1]
    return (*passes, *(Tiles(segment.index, "backward") for segment in reversed(needing)))
