"""Peak bytes of one tile, by simulating which crops are alive while it runs forward and backward.

Forward, a crop lives until its last reader has run, or until the end of the backward pass if autograd saves it (each
row of the operator table says what its operator saves). Backward, a field's cotangent lives from its first reader's
backward to its own. Operators' own workspaces come on top. The counting is of what PyTorch allocates, not of what a
cleverer implementation would need.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from gigagrad.graphs import GATHER, MOMENTS, SCATTER, Call, Graph, Layout, Node, lookup
from gigagrad.plans.geometry import Grid, TileGeometry
from gigagrad.plans.stages import Stage


def crop_bytes(graph: Graph, tile: TileGeometry, node_id: int) -> int:
    box = tile.box(node_id)
    return box.area * graph[node_id].bytes_per_pixel if box is not None else 0


def tile_peak_bytes(graph: Graph, stage: Stage, tile: TileGeometry, *, backward: bool, rounds: bool = False) -> int:
    """Peak bytes of all crops, saved tensors, cotangents and workspaces of one tile; `rounds`: kept fields, on the way
    to their stores.
    """
    size = {i: crop_bytes(graph, tile, i) for i in (*stage.reads, *stage.fields)}
    run = [i for i in stage.fields if size[i]]
    pending = _reader_counts(graph, run)
    first_saver = _first_savers(graph, run) if backward else {}
    saved = set(first_saver)
    workspace = {i: workspace_bytes(graph, tile, i) for i in run}
    if rounds:  # beside the values, packed ones and what comes back of them
        workspace |= {i: max(workspace[i], 2 * size[i]) for i in run if i in stage.kept}

    live = sum(size[i] for i in stage.reads)
    peak = live
    for node_id in run:
        live += size[node_id]
        peak = max(peak, live + workspace[node_id])
        for operand in {i for i in graph[node_id].operands if graph[i].is_field}:
            pending[operand] -= 1
            if not pending[operand] and operand not in saved and operand not in stage.reads:
                live -= size[operand]
    if not backward:
        return peak

    cotangents: dict[int, int] = {i: size[i] for i in run if i not in pending and graph[i].differentiable}
    # A moment's gradient is made of a few passes over its field, before anything else is pulled back.
    moments = [graph[r].operands[0] for r in stage.reductions if graph[r].op == MOMENTS and graph[r].differentiable]
    passes = [3 * size.get(i, 0) * max(1, 4 // graph[i].dtype.itemsize) for i in moments]
    peak = max(peak, live + sum(cotangents.values()) + max(passes, default=0))
    released: set[int] = set()
    for node_id in reversed(run):
        if not graph[node_id].differentiable:
            continue
        flows = [i for i in set(graph[node_id].operands) if graph[i].is_field and graph[i].differentiable]
        # Where another reader has given its share already, the new contribution exists beside it for a moment.
        fresh = sum(size.get(i, 0) for i in flows if i in cotangents)
        cotangents.update({i: size.get(i, 0) for i in flows})
        peak = max(peak, live + sum(cotangents.values()) + fresh + workspace[node_id])
        cotangents.pop(node_id, None)
        for i in saved - released:
            if first_saver[i] == node_id:
                released.add(i)
                live -= size[i] if i not in stage.reads else 0
    return peak


def whole_field_bytes(graph: Graph, *, backward: bool) -> int:
    """Peak bytes of what whole-field operators make: every value until the run ends, for it stays on the tape, and
    with gradients the cotangents that are alive at the worst moment of pulling them back.

    A gathered field is counted among the kept ones, too; here it is counted because it outlives its stage.
    """
    whole = [node for node in graph.nodes if node.whole]
    values = sum(node.nbytes for node in whole if _makes_memory(graph, node))
    # What an operator copies or computes for itself: at most as much as it reads and makes.
    touched = {node.id: node.nbytes + sum(graph[i].nbytes for i in set(node.operands)) for node in whole}
    if not backward:
        return values + max(touched.values(), default=0)
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
        if node.op != GATHER:  # its cotangent waits for the sweep of the stage that made the field
            del live[node.id]
    # Handed over by the stages that read it tile by tile: a sum in float64 beside its rounded copy.
    handed = max((12 * prod(n.shape) for n in graph.nodes if n.op == SCATTER and n.differentiable), default=0)
    return values + max(peak, handed) + _cast_bytes(graph)


def _cast_bytes(graph: Graph) -> int:
    """The cotangents of what whole-field operators read of parameters in another precision.

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
    """Whether a value takes memory of its own. What reshapes a permuted value copies it."""
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
    """The tile with the largest crops: per axis, the index whose spans are longest in total."""
    chosen = []
    for axis in (0, 1):
        lengths = {
            i: sum(s.length for s in grid.axis_geometry(axis, i).spans.values()) for i in _sample(grid.shape[axis], 3)
        }
        chosen.append(max(lengths, key=lengths.__getitem__))
    return grid[chosen[0] * grid.shape[1] + chosen[1]]


def largest_block_bytes(grid: Grid) -> int:
    """Of the crops of the largest tile."""
    tile = worst_tile(grid)
    return max((crop_bytes(grid.graph, tile, i) for i in (*grid.stage.reads, *grid.stage.fields)), default=0)


def compiled_convolutions(grid: Grid, *, backward: bool) -> int:
    """How many kernels oneDNN's cache comes to hold of a stage: one for every convolution, forward and twice backward,
    in every shape that tiles ask of it.
    """
    axes = [[grid.axis_geometry(axis, i) for i in _sample(grid.shape[axis], 6)] for axis in (0, 1)]
    shapes = 0
    for node_id in grid.stage.fields:
        call = Call(grid.graph[node_id], grid.graph.operands(grid.graph[node_id]))
        row = lookup(call.node.op)
        asked: tuple[set[tuple[int, ...]], ...] = (set(), set())
        for axis, tiles in enumerate(axes):
            for tile in tiles:
                if node_id in tile.spans:
                    asked[axis].add(row.compiled_for(call, axis, tile.spans[node_id], tile.operand_spans[node_id]))
        shapes += prod(len(extents - {()}) for extents in asked)
    return shapes * (3 if backward else 1)


def whole_compiled_convolutions(graph: Graph, *, backward: bool) -> int:
    """The same of convolutions that run on whole fields."""
    count = sum(node.whole and lookup(node.op).compiled for node in graph.nodes)
    return count * (3 if backward else 1)


def gradient_sum_bytes(graph: Graph, stage: Stage, sum_dtype: torch.dtype) -> int:
    """The sums of the gradients of what a stage reads beside fields, while it is swept backward."""
    return sum(sum_dtype.itemsize * prod(graph[i].shape) for i in stage.globals if graph[i].differentiable)


def _sample(count: int, ends: int) -> Sequence[int]:
    """Indices along an axis of a grid: so many at both ends and two in the middle, or all where they are few."""
    middle = (count // 2, count // 2 + 1)
    return range(count) if count <= 4 * ends else sorted({*range(ends), *middle, *range(count - ends, count)})


def _reader_counts(graph: Graph, run: list[int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for node_id in run:
        for operand in {i for i in graph[node_id].operands if graph[i].is_field}:
            counts[operand] = counts.get(operand, 0) + 1
    return counts


def _savers(graph: Graph, node_id: int) -> set[int]:
    """The crops that autograd keeps for the backward of one operator."""
    node = graph[node_id]
    return lookup(node.op).saves(Call(node, graph.operands(node))) if node.differentiable else set()


def _first_savers(graph: Graph, run: list[int]) -> dict[int, int]:
    """For each crop that autograd keeps, the operator whose backward is the last to use it: the first one that ran."""
    return {crop: node_id for node_id in reversed(run) for crop in _savers(graph, node_id)}


def workspace_bytes(graph: Graph, tile: TileGeometry, node_id: int) -> int:
    """What an operator takes for itself on a tile while it runs, forward or backward."""
    node = graph[node_id]
    out, operands = tile.site(node_id)
    return lookup(node.op).workspace_bytes(Call(node, graph.operands(node)), out[0].length * out[1].length, operands)
