"""What a sweep of one stage has to do, counted by kind of work: what a machine's rates are multiplied by.

Everything is counted for the mean tile: lengths add up along y and x independently, so the sum over the grid of an
area is the product of two sums, and a few rows and columns stand for all of them. Amounts are linear in pixels but for
one choice: traffic that stays inside the cache ("hot") and traffic that does not ("cold") are counted apart.

Names read `kind.direction.quantity`. Directions: `f` forward, `b` backward, and for layers with weights `x` and `w`,
the gradients of the input and of the weights. Quantities: `calls`, `flops`, `hot`, `cold` (bytes in and out).
`fresh.bytes` are those of large fields that are kept, whose memory is new in every step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from gigagrad.graphs import GATHER, SCATTER, Call, Graph, Node, lookup
from gigagrad.graphs.rows.transposed import TransposedConvolution
from gigagrad.graphs.rows.windows import LANES
from gigagrad.plans.geometry import Grid
from gigagrad.plans.memory import MAPPED_BYTES
from gigagrad.plans.stages import Stage

Work = dict[str, float]
"""Amounts by name."""

_SAMPLED = 6
"""Rows and columns at either border that are looked at one by one; halos are cut there."""

_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "permute.default transpose.int unsqueeze.default squeeze.dim squeeze.dims view.default _unsafe_view.default "
        "expand.default alias.default slice.Tensor select.int detach.default"
    ).split()
)
_COSTLY = (
    "gelu silu sigmoid tanh exp log softplus elu mish softmax binary_cross_entropy cross_entropy nll_loss logit erf "
    "pow sqrt sin cos uniform positions"
).split()
"""Elementwise operators that compute rather than move; by a part of their names."""


@dataclass(frozen=True, slots=True)
class MeanTile:
    """A tile of mean size; pixels by node."""

    count: int
    """Tiles of the grid."""
    areas: dict[int, float]
    """Of every field computed or read."""
    shares: dict[int, float]
    """Of the targets."""


def mean_tile(grid: Grid) -> MeanTile:
    """The mean over all tiles; of a large grid, from the rows and columns at its borders and two in the middle."""
    lengths: list[dict[int, float]] = []
    shares: list[dict[int, float]] = []
    for axis in (0, 1):
        count = grid.shape[axis]
        if count <= 4 * _SAMPLED:
            weights = dict.fromkeys(range(count), 1.0)
        else:
            border = [*range(_SAMPLED), *range(count - _SAMPLED, count)]
            weights = dict.fromkeys(border, 1.0)
            weights |= dict.fromkeys((count // 2, count // 2 + 1), (count - len(border)) / 2)
        length: Counter[int] = Counter()
        share: Counter[int] = Counter()
        for index, weight in weights.items():
            geometry = grid.axis_geometry(axis, index)
            for field, span in geometry.spans.items():
                length[field] += weight * span.length  # type: ignore[assignment]
            for field, span in geometry.wanted.items():
                share[field] += weight * span.length  # type: ignore[assignment]
        lengths.append({field: total / count for field, total in length.items()})
        shares.append({field: total / count for field, total in share.items()})
    areas = {field: lengths[0][field] * lengths[1].get(field, 0.0) for field in lengths[0]}
    return MeanTile(len(grid), areas, {field: shares[0][field] * shares[1][field] for field in shares[0]})


def sweep_work(graph: Graph, stage: Stage, tile: MeanTile, cache_bytes: int, *, gradient: bool) -> Work:
    """The work of one sweep over all tiles of a stage: forward only, or (`gradient`) recomputed and pulled back."""
    areas, shares = tile.areas, tile.shares
    counter = _Counter(graph, areas, cache_bytes)
    for i in stage.fields:
        if not areas.get(i):
            continue
        node = graph[i]
        row = lookup(node.op)
        assert row is not None, node.op
        # Of a kept field whose operator needs no output for its gradient, the values are not computed again.
        silent = gradient and i in stage.kept and node.differentiable and row.backward_without_output
        counter.node(node, forward=not silent, backward=gradient and node.differentiable)
    for r in stage.reductions:
        field = graph[r].operands[0]
        kind = "moments" if graph[r].op.endswith("moments") else "sum"
        size = shares[field] * graph[field].bytes_per_pixel
        counter.traffic(f"{kind}.f", size)
        if gradient and graph[r].differentiable:
            counter.traffic(f"{kind}.b", 2 * size)
    for i in stage.reads:
        size = areas.get(i, 0.0) * graph[i].bytes_per_pixel
        image = graph[i].is_source or graph[i].op == SCATTER
        counter.add("image.read" if image else "store.read", size)
        if gradient and graph[i].differentiable:
            counter.add("store.add", size)
    for i in stage.kept:
        size = shares[i] * graph[i].bytes_per_pixel
        if not gradient:
            counter.add("store.write", size)
        elif graph[i].differentiable:
            counter.add("store.read", 2 * size)
        if graph[i].nbytes >= MAPPED_BYTES and (not gradient or graph[i].differentiable):
            counter.add("fresh.bytes", size)  # of the field, then of its cotangents
    counter.add("tile.calls", 1)
    leaves = [graph[i] for i in stage.globals if graph[i].differentiable] if gradient else []
    counter.add("leaf.calls", len(leaves))
    counter.add("leaf.bytes", sum(leaf.nbytes for leaf in leaves))
    work = {name: amount * tile.count for name, amount in counter.work.items()}
    # Between the sweeps the numbers that this one reads are computed, or their gradients pulled back.
    direction = "b" if gradient else "f"
    work[f"pass.{direction}.calls"] = 1.0
    work[f"global.{direction}.calls"] = float(sum(not graph[i].is_source for i in stage.globals))
    return work


def whole_work(graph: Graph, cache_bytes: int, *, backward: bool) -> Work:
    """The work of the operators that run once on whole fields, between the sweeps."""
    counter = _Counter(graph, {}, cache_bytes)
    for node in graph.nodes:
        if not node.whole or node.op in (GATHER, "gigagrad.item"):
            continue
        pulled = backward and node.differentiable
        moved = node.nbytes + sum(graph[i].nbytes for i in set(node.operands))
        flops = _product_flops(graph, node)
        kind = "linear" if flops else kind_of(node)
        if kind == "view":
            counter.add("view.f.calls", 1)
            counter.add("view.b.calls", float(pulled))
            continue
        directions = ("f", *(("x", "w") if flops else ("b",))) if pulled else ("f",)
        for direction in directions:
            counter.traffic(f"{kind}.{direction}", moved)
            counter.add(f"{kind}.{direction}.flops", flops)
    return counter.work


def _product_flops(graph: Graph, node: Node) -> float:
    """Multiplications and additions of an operator on whole tensors that is a matrix product of some kind, else 0."""
    name = node.op.split(".")[1]
    if name.startswith(("conv", "linear")):
        return 2.0 * prod(node.shape) * prod(graph[node.operands[1]].shape[1:])
    if name in ("matmul", "mm", "bmm", "addmm", "baddbmm"):
        first = graph[node.operands[-2]].shape
        return 2.0 * prod(node.shape) * first[-1]
    if name == "scaled_dot_product_attention":
        query, key = (graph[i].shape for i in node.operands[:2])
        return 4.0 * prod(query) * key[-2]
    return 0.0


class _Counter:
    """Adds up the work of one tile."""

    def __init__(self, graph: Graph, areas: dict[int, float], cache_bytes: int) -> None:
        self._graph = graph
        self._areas = areas
        self._cache_bytes = cache_bytes
        self.work: Work = {}

    def add(self, name: str, amount: float) -> None:
        if amount:
            self.work[name] = self.work.get(name, 0.0) + amount

    def traffic(self, name: str, moved: float) -> None:
        """One call that moves so many bytes in and out."""
        self.add(f"{name}.calls", 1)
        self.add(f"{name}.{'hot' if moved <= self._cache_bytes // 2 else 'cold'}", moved)

    def node(self, node: Node, *, forward: bool, backward: bool) -> None:
        """One operator on the mean tile."""
        own = self._areas[node.id] * node.bytes_per_pixel
        fields = {i for i in node.operands if self._graph[i].is_field}
        read = {i: self._areas.get(i, 0.0) * self._graph[i].bytes_per_pixel for i in fields}
        moved = own + sum(read.values())
        if node.op.startswith(("aten.conv", "aten.linear")):
            self._layer(node, own, sum(read.values()), forward=forward, backward=backward)
            return
        kind = kind_of(node)
        if kind == "view":
            self.add("view.f.calls", float(forward))
            self.add("view.b.calls", float(backward))
            return
        if forward:
            self.traffic(f"{kind}.f", moved)
            if kind == "pool":
                self.add("pool.f.taps", self._areas[node.id] * _channels(node) * _taps(node))
        if backward:
            self.traffic(f"{kind}.b", moved)

    def _layer(self, node: Node, own: float, read: float, *, forward: bool, backward: bool) -> None:
        field, weight = (self._graph[i] for i in node.operands[:2])
        kind, flops_per_pixel = layer_kind(self._graph, node)
        area = self._areas[field.id] if "transpose" in node.op else self._areas[node.id]
        flops = flops_per_pixel * area
        gradients = {"x": field.differentiable, "w": weight.differentiable}
        directions = ["f"] if forward else []
        directions += [name for name, wanted in gradients.items() if wanted and backward]
        for direction in directions:
            self.traffic(f"{kind}.{direction}", own + read)
            self.add(f"{kind}.{direction}.flops", flops)
        self.add("weights.bytes", len(directions) * weight.nbytes)


def kind_of(node: Node) -> str:
    """The kind of work of an operator without weights."""
    op = node.op
    if op in _VIEWS:
        return "view"
    name = op.split(".")[1]
    if "norm" in name or name == "normalise":
        return "layernorm" if "layer_norm" in name else "norm"
    if "pool" in name:
        return "pool"
    if "upsample" in name:
        return "nearest" if "nearest" in name else "resize"
    if name in ("cat", "pad", "pixel_shuffle", "pixel_unshuffle", "clone", "reshape", "flip", "roll"):
        return "copy"
    return "costly" if any(part in name for part in _COSTLY) else "simple"


def layer_kind(graph: Graph, node: Node) -> tuple[str, float]:
    """The kind of a convolution or linear layer, and the multiplications and additions per pixel its kernel does.

    Per pixel of the output, or of the input of a transposed convolution; channels count as the vectors they fill.
    """
    weight = graph[node.operands[1]].shape
    if node.op.startswith("aten.linear"):
        return "linear", 2.0 * _filled(weight[0]) * weight[1] * _rest(node)
    groups = node.arguments.get("groups", 1)
    taps = prod(weight[2:])
    if "transpose" in node.op:
        into, out = weight[0] // groups, weight[1]
        if TransposedConvolution.suits_blocks(Call(node, graph.operands(node))):
            return "transposed.blocks", 2.0 * taps * into * out
        thin = max(into, out) < LANES
        return "transposed.thin" if thin else "transposed", 2.0 * groups * taps * into * _filled(out)
    into, out = weight[1], weight[0] // groups
    if groups > 1:
        if into == 1:
            return "depthwise", 2.0 * taps * _filled(groups * out)
        return "grouped", 2.0 * groups * taps * into * _filled(out)
    if taps == 1 and into >= LANES:
        return "pointwise", 2.0 * _filled(into) * _filled(out)
    if into < LANES:
        return ("thin" if out < LANES else "thin_in"), 2.0 * taps * into * _filled(out)
    return ("thin_out" if out < LANES else "dense"), 2.0 * taps * _filled(into) * _filled(out)


def _filled(channels: int) -> int:
    return -(-channels // LANES) * LANES


def _channels(node: Node) -> int:
    return node.bytes_per_pixel // node.dtype.itemsize


def _rest(node: Node) -> int:
    """Positions per pixel that a linear layer works on (batch and window axes)."""
    return _channels(node) // node.shape[-1]


def _taps(node: Node) -> int:
    kernel = node.arguments["kernel_size"]
    sides = [kernel] if isinstance(kernel, int) else list(kernel)
    return int(sides[0] * sides[-1])
