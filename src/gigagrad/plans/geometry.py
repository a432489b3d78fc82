"""Compute which part of every field one tile needs: integer box arithmetic, one axis at a time.

Tiles are the boxes of a regular grid over the reference field (the segment's largest target). Targets of other sizes
are cut at the proportional places, so that the tiles partition every target whatever its size. From the spans a tile
wants of its targets, the spans of all other fields follow backwards through the operator table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from gigagrad.boxes import Box, Span, split
from gigagrad.graphs import Call, Graph, Node, lookup
from gigagrad.graphs.graph import fill
from gigagrad.plans.segments import Segment

_MOST_ANSWERS = 1024
"""Spans of one operator, and tiles of one axis, that are remembered."""


@dataclass(frozen=True, slots=True)
class AxisGeometry:
    """One tile's geometry along one axis, by node id."""

    spans: dict[int, Span]
    """The span of each field that is computed (or read); fields that this tile does not need are missing."""
    wanted: dict[int, Span]
    """The tile's own, disjoint share of each target."""
    _steps: Mapping[int, Step] = field(compare=False, repr=False)

    def needs(self, node_id: int) -> tuple[Span | None, ...]:
        """Return the span that a field which is computed reads of each operand."""
        return self._steps[node_id][1].of(self.spans[node_id])

    def is_inside(self, graph: Graph, axis: int) -> bool:
        """Say whether nothing that the tile computes or reads is at a border of its field."""
        return all(start > 0 and stop < graph[i].size(axis) for i, (start, stop) in self.spans.items())

    def is_shift_of(self, other: AxisGeometry, steps: int) -> bool:
        """Say whether it is the other one moved by whole pixels of every field at each of so many steps."""
        if [*self.spans] != [*other.spans]:
            return False
        own, its = ((*tile.wanted.values(), *tile.spans.values()) for tile in (self, other))
        moved = ((start - begin, stop - end) for (start, stop), (begin, end) in zip(own, its, strict=True))
        return all(first == last and first % steps == 0 for first, last in moved)


@dataclass(frozen=True, slots=True)
class TileGeometry:
    """One tile: its id in row-major order and its geometry along y and x."""

    id: int
    y: AxisGeometry
    x: AxisGeometry

    def box(self, node_id: int) -> Box | None:
        """Return the box of a field that this tile computes or reads; None if it needs nothing of it."""
        y, x = self.y.spans.get(node_id), self.x.spans.get(node_id)
        return None if y is None or x is None else Box.of(y, x)

    def wanted(self, node_id: int) -> Box:
        """Return the tile's share of a target (may be empty for targets coarser than the grid)."""
        return Box.of(self.y.wanted[node_id], self.x.wanted[node_id])

    def site(self, node_id: int) -> tuple[tuple[Span, Span], tuple[tuple[Span, Span] | None, ...]]:
        """Return the output spans of a field and those of its operands, as `(y, x)` pairs."""
        pairs = zip(self.y.needs(node_id), self.x.needs(node_id), strict=True)
        operands = tuple([None if y is None or x is None else (y, x) for y, x in pairs])
        return (self.y.spans[node_id], self.x.spans[node_id]), operands


class Needs:
    """Answers which spans one operator needs of its operands along one axis, and remembers its answers."""

    def __init__(self, call: Call, axis: int) -> None:
        rule = lookup(call.node.op)
        self._call, self._ask = call, rule.needing(call, axis)
        self._sizes = [operand.size(axis) if operand.is_field else 0 for operand in call.operands]
        self.known: dict[Span, tuple[Span | None, ...]] = {}
        """Answers that are remembered."""
        self.are_alike = rule.needs_alike(call, axis)
        """True where it needs just the span that it makes of every field."""

    def of(self, out: Span) -> tuple[Span | None, ...]:
        """Return what an output span needs: the operator's rule is asked once, and its answer checked."""
        known = self.known.get(out)
        if known is None:
            known = self._ask(out)
            for size, need in zip(self._sizes, known, strict=True):
                assert need is None or 0 <= need[0] < need[1] <= size, (self._call.node.op, out, need)
            if len(self.known) == _MOST_ANSWERS:
                self.known.clear()
            self.known[out] = known
        return known


Step = tuple[tuple[int, ...], Needs]
"""The operands of a field that is computed, only the fields among them where all of those are needed alike, and what
leads from its span to theirs."""


class Steps(dict[int, Step]):
    """The steps of a graph's fields along one axis, by node, made when they are asked for. They remember the spans that
    they lead to while segments and their tiles are compared: most of them are asked for the same spans again, and
    operators that differ in what they read alone need the same. These are so few that they take some megabytes for a
    graph.
    """

    def __init__(self, graph: Graph, axis: int) -> None:
        self._graph, self._axis = graph, axis
        self._answers: dict[tuple[object, ...], Needs] = {}

    @classmethod
    def of(cls, graph: Graph) -> tuple[Steps, Steps]:
        """Return those along y and along x."""
        return cls(graph, 0), cls(graph, 1)

    def __missing__(self, node_id: int) -> Step:
        node = self._graph[node_id]
        call = Call(node, self._graph.operands(node))
        form = tuple((one.shape, one.axes, one.patches, one.dtype) for one in (node, *call.operands))
        kind = node.op, form, repr([fill(value, repeat(None)) for value in node.arguments.values()])
        if kind not in self._answers:
            self._answers[kind] = Needs(call, self._axis)
        needs = self._answers[kind]
        found = self[node_id] = self._graph.reads[node_id] if needs.are_alike else node.operands, needs
        return found


class Grid:
    """The tiles of one segment. Geometry is computed when asked for; neighbouring tiles share rows and columns of it.
    `steps`: those of its graph, where others have asked them before.
    """

    def __init__(self, graph: Graph, segment: Segment, tile: tuple[int, int], steps: Sequence[Steps] = ()) -> None:
        self.graph = graph
        self.segment = segment
        self.tile = tile
        self.targets = segment.targets(graph)
        self.reference = reference(graph, segment)
        self._order, self._steps = segment.fields[::-1], steps or Steps.of(graph)
        self.axes = tuple(split(graph[self.reference].size(axis), tile[axis]) for axis in (0, 1))
        self._known: tuple[dict[Span, AxisGeometry], dict[Span, AxisGeometry]] = {}, {}

    @property
    def shape(self) -> tuple[int, int]:
        """Number of tiles along y and x."""
        return len(self.axes[0]), len(self.axes[1])

    def __len__(self) -> int:
        return self.shape[0] * self.shape[1]

    def __getitem__(self, tile_id: int) -> TileGeometry:
        row, column = divmod(tile_id, self.shape[1])
        return TileGeometry(tile_id, self.axis_geometry(0, row), self.axis_geometry(1, column))

    def cropped(self, tile_id: int, box: Box) -> TileGeometry:
        """Return a tile whose own share is only a box of it, which is not empty, in pixels of the reference field."""
        return TileGeometry(tile_id, self._of_cut(0, box.y), self._of_cut(1, box.x))

    def axis_geometry(self, axis: int, index: int) -> AxisGeometry:
        """Return the geometry along an axis of the tiles of one row or column of the grid."""
        return self._of_cut(axis, self.axes[axis][index])

    @property
    def middle(self) -> TileGeometry:
        rows, columns = self.shape
        return self[rows // 2 * columns + columns // 2]

    @property
    def by_rows(self) -> bool:
        """Say whether tiles come row by row, not column by column."""
        return runs_by_rows(self.segment, self.graph[self.reference])

    def finished_rows(self, field: int) -> list[int]:
        """Return how many of a field's rows, from the top, no tile reads any more, by the rows of tiles that are
        through.
        """
        finished = [self.graph[field].size(0)]
        for row in reversed(range(self.shape[0])):
            span = self.axis_geometry(0, row).spans.get(field)
            finished.append(finished[-1] if span is None else min(finished[-1], span.start))
        return finished[::-1]

    def wanted(self, axis: int, index: int) -> dict[int, Span]:
        """Return the share of every target that the tiles of one row or column of the grid have."""
        return self._shares(axis, self.axes[axis][index])

    def _shares(self, axis: int, cut: Span) -> dict[int, Span]:
        total = self.graph[self.reference].size(axis)
        wanted = {}
        for target in self.targets:
            size = self.graph[target].size(axis)
            wanted[target] = Span(cut.start * size // total, cut.stop * size // total)
        return wanted

    def sample(self, axis: int, ends: int, kind: Callable[[AxisGeometry], object] = lambda tile: None) -> list[int]:
        """Return tiles along an axis, of every size that crops have, by index: from either end on, at most so many
        (all, where there are few), up to the first that is like the one in the middle, also by its `kind`.

        Between two tiles that are alike and inside the image all are like them, so that the largest is looked at. Off
        the border a row maps the ends of a span by rounded linear functions. Where a field's ends move by as many
        pixels from each tile to the next, an end of what is read for it lies at floor(a j + b) in tile j. That less j
        times a whole number grows or falls steadily: equal at two tiles, it is constant between them. So field by
        field, from the targets on; of several readers' spans the outermost is as constant as they are.
        """
        count = self.shape[axis]
        middle, most = count // 2, count if count <= 4 * ends else ends
        inner = self.axis_geometry(axis, middle)
        is_inside = inner.is_inside(self.graph, axis)
        found = {middle}
        for inwards in (range(middle), range(count - 1, middle, -1)):
            for index in inwards[:most]:
                found.add(index)
                tile = self.axis_geometry(axis, index)
                inside = is_inside and tile.is_inside(self.graph, axis)
                if inside and tile.is_shift_of(inner, middle - index) and kind(tile) == kind(inner):
                    break
            else:
                found.add(min(middle + 1, count - 1))
        return sorted(found)

    def _of_cut(self, axis: int, cut: Span) -> AxisGeometry:
        known = self._known[axis]
        found = known.get(cut)
        if found is None:
            if len(known) == _MOST_ANSWERS:  # another thread may clear them as well
                known.clear()
            found = known[cut] = axis_geometry(self._order, self._steps[axis], self._shares(axis, cut))
        return found


def axis_geometry(order: Iterable[int], steps: Mapping[int, Step], wanted: dict[int, Span]) -> AxisGeometry:
    """Walk fields backwards (in reverse topological order), widening each to what its readers need."""
    spans = {target: span for target, span in wanted.items() if not span.empty}
    for node_id in order:
        out = spans.get(node_id)
        if out is None:
            continue
        operands, needs = steps[node_id]
        if needs.are_alike:
            for operand in operands:
                known = spans.setdefault(operand, out)
                if known is not out and (out[0] < known[0] or out[1] > known[1]):
                    spans[operand] = Span(min(known[0], out[0]), max(known[1], out[1]))
            continue
        for operand, need in zip(operands, needs.known.get(out) or needs.of(out)):  # noqa: B905
            if need is None:
                continue
            known = spans.setdefault(operand, need)  # neither is empty
            if known is not need and (need[0] < known[0] or need[1] > known[1]):
                # Most readers of one field want it around the same place, and one of them most of it.
                within = need[0] <= known[0] and need[1] >= known[1]
                spans[operand] = need if within else Span(min(known[0], need[0]), max(known[1], need[1]))
    return AxisGeometry(spans, wanted, steps)


def reference(graph: Graph, segment: Segment) -> int:
    """Return the largest target."""
    return max(segment.targets(graph), key=lambda i: graph[i].size(0) * graph[i].size(1))


def runs_by_rows(segment: Segment, reference: Node) -> bool:
    """Run along the shorter side first, so that few pixels are decoded twice; an output is delivered in rows."""
    return segment.output is not None or reference.size(0) >= reference.size(1)


def lattice(graph: Graph, segment: Segment) -> tuple[int, int]:
    """Return the pixels of the reference field per pixel of the coarsest field, per axis: tiles aligned to it waste
    least.
    """
    targets = segment.targets(graph)
    sizes = []
    for axis in (0, 1):
        finest = max(graph[i].size(axis) for i in targets)
        coarsest = min(graph[i].size(axis) for i in (*segment.fields, *segment.reads))
        sizes.append(max(1, round(finest / max(coarsest, 1))))
    return sizes[0], sizes[1]
