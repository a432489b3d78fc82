"""Predict the peak bytes of one tile, by simulating which crops are alive while it runs forward and backward.

Forward, a crop lives until its last reader has run, or until the end of the backward pass if autograd saves it (each
row of the operator table says what its operator saves). Backward, a field's cotangent lives from its first reader's
backward to its own. Operators' own workspaces come on top. The counting is of what PyTorch allocates, not of what a
cleverer implementation would need.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from math import inf, prod

import numpy as np
import torch
from numpy.typing import NDArray

from gigagrad.boxes import Span
from gigagrad.graphs import GATHER, MOMENTS, SCATTER, Call, Graph, Layout, Node, lookup
from gigagrad.graphs.graph import remembered
from gigagrad.graphs.op_rules import Saved, registered
from gigagrad.plans.geometry import AxisGeometry, Grid, TileGeometry
from gigagrad.plans.segments import Segment, summed_globals


@dataclass(frozen=True, slots=True)
class _Lives:
    """Tell what a tile allocates and releases, in order: entries of `fields`, then of `working`, with their factors."""

    fields: tuple[int, ...]
    """The crops that there are."""
    working: tuple[Call, ...]
    """The operators that take a workspace."""
    entries: NDArray[np.intp]
    factors: NDArray[np.int64]
    """Times its bytes that an entry takes; negative: gives back."""
    forward: int
    """The number of entries until the forward is through."""
    let_go: tuple[int, ...]
    """Places of the crops that are gone by then beside those."""


def crop_sizes(graph: Graph, segment: Segment, tile: TileGeometry) -> dict[int, int]:
    """Return the bytes of a tile's crops of all fields that a segment reads or computes."""
    nodes, xs, sizes = graph.nodes, tile.x.spans, dict.fromkeys((*segment.reads, *segment.fields), 0)
    for i, (start, stop) in tile.y.spans.items():
        x = xs.get(i)
        if x is not None:
            sizes[i] = (stop - start) * (x[1] - x[0]) * nodes[i].bytes_per_pixel
    return sizes


def tile_bytes(
    graph: Graph,
    segment: Segment,
    tile: TileGeometry,
    *,
    backward: bool,
    rounds: bool = False,
    size: dict[int, int] | None = None,
) -> tuple[int, int]:
    """Predict the peak bytes of all crops, saved tensors, cotangents and workspaces of one tile, and those of what is
    there between its forward and its backward; `rounds`: kept fields are rounded on the way to their stores. `size`:
    its `crop_sizes`, where they are known.
    """
    size = crop_sizes(graph, segment, tile) if size is None else size
    run = tuple([i for i in segment.fields if size[i]])
    lives = _lives(graph, run, segment.reads, segment.reductions, segment.kept, backward)
    crops = [size[i] for i in lives.fields]
    known, workspaces = _workspaces(graph), []
    for call in lives.working:
        i = call.node.id
        place = i, tile.y.spans[i], tile.x.spans[i]
        if place not in known:
            known[place] = workspace_bytes(call, tile)
        workspaces.append(known[place])
    if rounds:  # beside the values, packed ones and what comes back of them
        kept = [size[call.node.id] * (call.node.id in segment.kept) for call in lives.working]
        workspaces = [max(nbytes, 2 * own) for nbytes, own in zip(workspaces, kept, strict=True)]
    nbytes = np.array([*crops, *workspaces], np.int64)
    held = np.cumsum(nbytes[lives.entries] * lives.factors)
    peak = int(held.max(initial=0))
    between = int(held[lives.forward - 1]) - sum(crops[place] for place in lives.let_go) if backward else 0
    return peak, between


def whole_field_bytes(graph: Graph, *, backward: bool) -> int:
    """Predict the peak bytes of what whole-field operators make: with gradients, what autograd keeps of it until its
    backward, and the cotangents that are alive at the worst moment of that.

    A gathered field is counted among the kept ones, too; here it is counted because it outlives its segment.
    """
    whole = [node for node in graph.nodes if node.whole]
    passing = passing_values(graph)
    saved = _saved_whole(graph) if backward else set[int]()
    # What an operator copies or computes for itself: at most as much as it reads and makes.
    touched = {node.id: node.nbytes + sum(graph[i].nbytes for i in set(node.operands)) for node in whole}
    bases = {node.id: _base(graph, node) for node in whole}
    last = {bases[i]: node.id for node in whole for i in (node.id, *node.operands) if i in bases}
    stays = {bases[node.id] for node in whole if node.id not in passing} | {bases[i] for i in saved}
    ends = dict[int, list[int]]()
    for base, reader in last.items():
        if base not in stays:
            ends.setdefault(reader, []).append(base)
    values, most = 0, 0
    for node in whole:
        values += node.nbytes if bases[node.id] == node.id else 0
        most = max(most, values + touched[node.id])
        values -= sum(graph[base].nbytes for base in ends.get(node.id, ()))
    if not backward:
        return most
    live: dict[int, int] = {}
    peak = 0
    for node in reversed(whole):
        if not node.differentiable:
            continue
        live.setdefault(node.id, node.nbytes)
        for i in set(node.operands):
            if graph[i].whole and graph[i].differentiable:
                live[i] = graph[i].nbytes
        peak = max(peak, sum(live.values()) + touched[node.id])
        if node.op != GATHER:  # its cotangent waits for the pass of the segment that made the field
            del live[node.id]
    # Handed over by the segments that read it tile by tile: a sum in float64 beside its rounded copy.
    handed = max((12 * prod(n.shape) for n in graph.nodes if n.op == SCATTER and n.differentiable), default=0)
    return max(most, values + max(peak, handed) + _cast_bytes(graph))


def saved_by_convolutions(graph: Graph, pixels: int) -> int:
    """Count what autograd keeps at least where fields of at most so many pixels are whole: what convolutions read."""
    nodes, areas = graph.nodes, [n.size(0) * n.size(1) if n.is_field else inf for n in graph.nodes]
    made = [n for n in nodes if n.is_field and n.differentiable and areas[n.id] <= pixels and lookup(n.op).compiled]
    return sum(nodes[i].nbytes for i in {i for n in made for i in graph.reads[n.id]} if areas[i] <= pixels)


def passing_values(graph: Graph) -> frozenset[int]:
    """Return the whole values that only other whole-field operators read: behind the last of them they are gone, but
    for what autograd keeps.
    """
    read = {i for node in graph.nodes if node.is_field for i in node.operands}
    needed = {*read, *graph.outputs, *graph.updates.values()}
    readers = {i for node in graph.nodes if not node.is_field for i in node.operands}
    return frozenset(
        node.id
        for node in graph.nodes
        if node.whole and node.op != GATHER and node.id in readers and node.id not in needed
    )


def _saved_whole(graph: Graph) -> set[int]:
    """Return the whole values that autograd keeps for the backward of whole-field operators, as far as rows tell; of an
    operator without a row all that it reads and makes.
    """
    found = set[int]()
    for node in graph.nodes:
        if not (node.whole and node.differentiable) or node.op == GATHER or not _makes_memory(graph, node):
            continue
        row, known = lookup(node.op), node.op in registered()
        if row.saved is Saved.INPUTS or not known:
            found |= {i for i in node.operands if graph[i].whole}
        if row.saved is Saved.OUTPUT or not known:
            found.add(node.id)
    return found


def _base(graph: Graph, node: Node) -> int:
    """Return the value in whose memory another one lies. Of several outputs of an operator each has its own."""
    while not _makes_memory(graph, node) and node.arguments.get("index") in (None, 0):
        node = graph[node.operands[0]]
    return node.id


def _cast_bytes(graph: Graph) -> int:
    """Count the cotangents of what whole-field operators read of parameters in another precision.

    The casts were computed first, so autograd pulls them back last: their cotangents wait for one another.
    """
    casts = set[int]()
    for i in graph.read_late():
        node = graph[i]
        while not (node.is_source or _makes_memory(graph, node)):
            node = graph[node.operands[0]]
        if node.differentiable and not node.is_source:
            casts.add(node.id)
    return sum(graph[i].nbytes for i in casts)


def _makes_memory(graph: Graph, node: Node) -> bool:
    """Say whether a value takes memory of its own. What reshapes a permuted value copies it."""
    layout = _layout(graph, node)
    if layout is not Layout.PACKED:
        return layout is Layout.OWN
    while layout is not Layout.OWN:
        node = graph[node.operands[0]]
        layout = _layout(graph, node)
        if layout is Layout.TURNED:
            return True
    return False


def _layout(graph: Graph, node: Node) -> Layout:
    return Layout.OWN if node.is_source else lookup(node.op).layout(Call(node, graph.operands(node)))


def worst_tile(grid: Grid) -> TileGeometry:
    """Return the tile with the largest crops: per axis, the index whose spans are longest in total."""

    def length(axis: int, index: int) -> int:
        return sum(span.length for span in grid.axis_geometry(axis, index).spans.values())

    row, column = (max(grid.sample(axis, 3), key=partial(length, axis)) for axis in (0, 1))
    return grid[row * grid.shape[1] + column]


def compiled_convolutions(grid: Grid, *, backward: bool) -> int:
    """Count the kernels that oneDNN's cache comes to hold of a segment: one for every convolution, forward and twice
    backward, in every shape that tiles ask of it.
    """
    calls = _compiled_calls(grid)
    extents: list[list[set[tuple[int, ...]]]] = []
    for axis in (0, 1):
        kernels = partial(_kernels, calls, axis)
        by_tile = [kernels(grid.axis_geometry(axis, index)) for index in grid.sample(axis, 6, kernels)]
        extents.append([{*asked} - {()} for asked in zip(*by_tile, strict=True)])
    shapes = sum(len(y) * len(x) for y, x in zip(*extents, strict=True))
    return shapes * (3 if backward else 1)


def compiled_for_tiles(grid: Grid, tiles: Iterable[TileGeometry]) -> int:
    """Count the kernels that oneDNN's cache comes to hold of these tiles of a segment, or parts of tiles, forward."""
    calls, known = _compiled_calls(grid), dict[tuple[int, Span], list[tuple[int, ...]]]()

    def kernels(axis: int, geometry: AxisGeometry) -> list[tuple[int, ...]]:
        key = axis, geometry.wanted[grid.reference]
        return known.get(key) or known.setdefault(key, _kernels(calls, axis, geometry))

    asked = {each for tile in tiles for each in enumerate(zip(kernels(0, tile.y), kernels(1, tile.x), strict=True))}
    return sum(bool(y and x) for _, (y, x) in asked)


def _compiled_calls(grid: Grid) -> list[Call]:
    graph = grid.graph
    return [Call(graph[i], graph.operands(graph[i])) for i in grid.segment.fields if lookup(graph[i].op).compiled]


def _kernels(calls: list[Call], axis: int, tile: AxisGeometry) -> list[tuple[int, ...]]:
    """Return for every convolution what its kernel is compiled for along an axis of a tile; nothing where there is
    none.
    """
    return [
        lookup(call.node.op).compiled_for(call, axis, tile.spans[i], tile.needs(i)) if i in tile.spans else ()
        for call in calls
        for i in (call.node.id,)
    ]


def whole_compiled_convolutions(graph: Graph, *, backward: bool) -> int:
    """Count the kernels of convolutions that run on whole fields."""
    count = sum(node.whole and lookup(node.op).compiled for node in graph.nodes)
    return count * (3 if backward else 1)


def gradient_sum_bytes(graph: Graph, segment: Segment, sum_dtype: torch.dtype) -> int:
    """Count the sums of the gradients of what a segment reads beside fields, in its backward pass."""
    return sum(sum_dtype.itemsize * prod(graph[i].shape) for i in summed_globals(graph, segment))


def _reader_counts(graph: Graph, run: tuple[int, ...]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for node_id in run:
        for operand in graph.reads[node_id]:
            counts[operand] = counts.get(operand, 0) + 1
    return counts


@remembered
def _workspaces(graph: Graph) -> dict[tuple[int, Span, Span], int]:
    """Return workspaces by operator and the spans of its output, as far as they are known: segments have most of them
    in common.
    """
    return {}


@remembered
def _lives(
    graph: Graph,
    run: tuple[int, ...],
    read: tuple[int, ...],
    reductions: tuple[int, ...],
    kept: tuple[int, ...],
    backward: bool,
) -> _Lives:
    """Simulate one tile of a segment: what is allocated, before what is released at the same moment."""
    nodes, reads, fields = graph.nodes, graph.reads, (*read, *run)
    working = [i for i in run if lookup(nodes[i].op).takes_workspace or i in kept]
    crop = {i: place for place, i in enumerate(fields)}
    workspace = {i: [(len(fields) + place, 1)] for place, i in enumerate(working)}
    events = [(crop[i], 1) for i in read]

    def briefly(taken: list[tuple[int, int]]) -> None:
        events.extend([*taken, *((entry, -factor) for entry, factor in taken)])

    released = _released(graph, run)
    saved = {i for crops in released.values() for i in crops}
    pending, stays = _reader_counts(graph, run), {*read, *(saved if backward else ())}
    unread = [i for i in run if i not in pending]
    for node_id in run:
        events.append((crop[node_id], 1))
        briefly(workspace.get(node_id, []))
        for operand in reads[node_id]:
            pending[operand] -= 1
            if not pending[operand] and operand in crop and operand not in stays:
                events.append((crop[operand], -1))
    forward = len(events)
    # Images that no operator saves are gone by then.
    let_go = tuple(crop[i] for i in read if i not in saved and not nodes[i].differentiable)
    if backward:
        cotangents = {i for i in unread if nodes[i].differentiable}
        events += [(crop[i], 1) for i in cotangents]
        # A moment's gradient is made of a few passes over its field, before anything else is pulled back.
        for reduction in reductions:
            field = graph[reduction].operands[0]
            if graph[reduction].op == MOMENTS and graph[reduction].differentiable and field in crop:
                briefly([(crop[field], 3 * max(1, 4 // graph[field].dtype.itemsize))])
        for node_id in reversed(run):
            if not nodes[node_id].differentiable:
                continue
            flows = [i for i in reads[node_id] if nodes[i].differentiable and i in crop]
            first = [i for i in flows if i not in cotangents]
            events += [(crop[i], 1) for i in first]
            # Where another reader has given its share already, the new contribution exists beside it for a moment.
            fresh = [(crop[i], 1) for i in flows if i in cotangents]
            briefly([*fresh, *workspace.get(node_id, [])])
            cotangents.update(first)
            if node_id in cotangents:
                cotangents.discard(node_id)
                events.append((crop[node_id], -1))
            events += [(crop[i], -1) for i in released.get(node_id, ()) if i not in read]
    entries, factors = np.array(events, np.int64).reshape(-1, 2).T
    calls = tuple(Call(nodes[i], graph.operands(nodes[i])) for i in working)
    return _Lives(fields, calls, entries, factors, forward, let_go)


@remembered
def _saved(graph: Graph) -> list[set[int]]:
    """Return, by operator, the crops that autograd keeps for its backward."""
    nodes = graph.nodes
    return [
        lookup(node.op).saves(Call(node, graph.operands(node))) if node.is_field and node.differentiable else set()
        for node in nodes
    ]


def _released(graph: Graph, run: tuple[int, ...]) -> dict[int, list[int]]:
    """Return, by operator, the crops that autograd keeps until its backward: of those that keep a crop it ran first."""
    saved = _saved(graph)
    first = {crop: node_id for node_id in reversed(run) for crop in saved[node_id]}
    released: dict[int, list[int]] = {}
    for crop, node_id in first.items():
        released.setdefault(node_id, []).append(crop)
    return released


def workspace_bytes(call: Call, tile: TileGeometry) -> int:
    """Return the bytes that an operator takes for itself on a tile while it runs, forward or backward."""
    rule = lookup(call.node.op)
    if not rule.takes_workspace:
        return 0
    out, operands = tile.site(call.node.id)
    return rule.workspace_bytes(call, out[0].length * out[1].length, operands)
