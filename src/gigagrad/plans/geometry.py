"""Which part of every field one tile computes: integer box arithmetic, one axis at a time.

Tiles are the boxes of a regular grid over the reference field (the stage's largest target). Targets of other sizes are
cut at the proportional places, so that the tiles partition every target whatever its size. From the spans a tile wants
of its targets, the spans of all other fields follow backwards through the operator table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from gigagrad.boxes import Box, Span, split
from gigagrad.graphs import Call, Graph, lookup
from gigagrad.plans.stages import Stage


@dataclass(frozen=True, slots=True)
class AxisGeometry:
    """One tile's geometry along one axis, by node id."""

    spans: dict[int, Span]
    """What is computed (or read) of each field; fields that this tile does not need are missing."""
    operand_spans: dict[int, tuple[Span | None, ...]]
    """For each computed field the span it reads of each operand."""
    wanted: dict[int, Span]
    """The tile's own, disjoint share of each target."""


@dataclass(frozen=True, slots=True)
class TileGeometry:
    """One tile: its id in row-major order and its geometry along y and x."""

    id: int
    y: AxisGeometry
    x: AxisGeometry

    def box(self, node_id: int) -> Box | None:
        """The box of a field that this tile computes or reads; None if it needs nothing of it."""
        y, x = self.y.spans.get(node_id), self.x.spans.get(node_id)
        return None if y is None or x is None else Box.of(y, x)

    def wanted(self, node_id: int) -> Box:
        """The tile's share of a target (may be empty for targets coarser than the grid)."""
        return Box.of(self.y.wanted[node_id], self.x.wanted[node_id])

    def site(self, node_id: int) -> tuple[tuple[Span, Span], tuple[tuple[Span, Span] | None, ...]]:
        """The output spans of a field and those of its operands, as `(y, x)` pairs."""
        pairs = zip(self.y.operand_spans[node_id], self.x.operand_spans[node_id], strict=True)
        operands = tuple(None if y is None or x is None else (y, x) for y, x in pairs)
        return (self.y.spans[node_id], self.x.spans[node_id]), operands


class Grid:
    """The tiles of one stage. Geometry is computed when asked for; neighbouring tiles share rows and columns of it."""

    def __init__(self, graph: Graph, stage: Stage, tile: tuple[int, int]) -> None:
        self.graph = graph
        self.stage = stage
        self.tile = tile
        self.targets = stage.targets(graph)
        self.reference = max(self.targets, key=lambda i: graph[i].size(0) * graph[i].size(1))
        self._calls = [Call(graph[i], graph.operands(graph[i])) for i in reversed(stage.fields)]
        self.axes = tuple(split(graph[self.reference].size(axis), tile[axis]) for axis in (0, 1))
        self.axis_geometry = lru_cache(maxsize=512)(self._axis_geometry)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of tiles along y and x."""
        return len(self.axes[0]), len(self.axes[1])

    def __len__(self) -> int:
        return self.shape[0] * self.shape[1]

    def __getitem__(self, tile_id: int) -> TileGeometry:
        row, column = divmod(tile_id, self.shape[1])
        return TileGeometry(tile_id, self.axis_geometry(0, row), self.axis_geometry(1, column))

    def order(self) -> Iterator[int]:
        """Tile ids in the order of execution: along the shorter side first, so that few pixels are decoded twice."""
        rows, columns = self.shape
        height, width = (self.graph[self.reference].size(axis) for axis in (0, 1))
        if self.stage.output is not None or height >= width:
            return iter(range(rows * columns))
        return (row * columns + column for column in range(columns) for row in range(rows))

    def wanted(self, axis: int, index: int) -> dict[int, Span]:
        """The share of every target that the tiles of one row or column of the grid have."""
        cut = self.axes[axis][index]
        total = self.graph[self.reference].size(axis)
        wanted = {}
        for target in self.targets:
            size = self.graph[target].size(axis)
            wanted[target] = Span(cut.start * size // total, cut.stop * size // total)
        return wanted

    def _axis_geometry(self, axis: int, index: int) -> AxisGeometry:
        return axis_geometry(self._calls, axis, self.wanted(axis, index))


def axis_geometry(calls: list[Call], axis: int, wanted: dict[int, Span]) -> AxisGeometry:
    """Walk the fields backwards (`calls` in reverse topological order), widening each to what its readers need."""
    spans = {target: span for target, span in wanted.items() if not span.empty}
    operand_spans: dict[int, tuple[Span | None, ...]] = {}
    for call in calls:
        out = spans.get(call.node.id)
        if out is None:
            continue
        row = lookup(call.node.op)
        needs = row.needs(call, axis, out)
        operand_spans[call.node.id] = needs
        for operand, need in zip(call.operands, needs, strict=True):
            if need is None:
                continue
            start, stop = need.start, need.stop
            assert 0 <= start < stop <= operand.size(axis), (call.node.op, out, need)
            known = spans.get(operand.id)
            # Most operands have one reader, and most readers of one field want the same of it.
            if known is None:
                spans[operand.id] = need
            elif start < known.start or stop > known.stop:
                spans[operand.id] = known.hull(need)
    return AxisGeometry(spans, operand_spans, wanted)


def lattice(graph: Graph, stage: Stage) -> tuple[int, int]:
    """Pixels of the reference field per pixel of the coarsest field, per axis: tiles aligned to it waste least."""
    targets = stage.targets(graph)
    sizes = []
    for axis in (0, 1):
        finest = max(graph[i].size(axis) for i in targets)
        coarsest = min(graph[i].size(axis) for i in (*stage.fields, *stage.reads))
        sizes.append(max(1, round(finest / max(coarsest, 1))))
    return sizes[0], sizes[1]
