"""Divide the tiles of a segment into chunks: runs of consecutive tiles, in the order of execution. Sums are made of
them, whoever computes them.

A sum is a chain over the tiles of a chunk, then a fixed binary tree over chunks; where the crops of two chunks overlap,
each adds up its cotangents by itself, and theirs are added in the order of chunks. So no bit depends on who computes
which chunks. EasyScale (Li et al., SC 2023) decouples work from workers likewise, for data-parallel training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from gigagrad.boxes import Box, Span
from gigagrad.graphs import Graph
from gigagrad.plans.geometry import Grid, TileGeometry
from gigagrad.plans.plan import SegmentPlan

MOST_PARTS = 64
_WAITING_BYTES = 64 * 2**20


def chunk_count(sum_bytes: int) -> int:
    """Return the number of chunks of a segment whose sums take so many bytes: a power of two, fewer where those that
    wait for others in the tree would take much memory.
    """
    count = MOST_PARTS
    while (count.bit_length() - 1) * sum_bytes > _WAITING_BYTES:
        count //= 2
    return count


def waiting_sums(chunks: int, tile_count: int) -> int:
    """Return how many finished sums wait at most until the tree joins them, beside that of the chunk being computed."""
    return (min(chunks, tile_count) - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Boundary:
    """The pixels of a field that the tiles before one of them have reached: whole lines of pixels, and a part of some
    more.

    Lines are rows where tiles go row by row, and columns where they go column by column.
    """

    by_rows: bool
    full: int
    """Lines from the border on."""
    partly: int
    """Lines of which the first `along` pixels are reached."""
    along: int

    def split(self, box: Box) -> Iterator[tuple[Box, int | None]]:
        """Cut a box at the boundary: yield what is not reached with None, the rest with 0 (lines) or 1 (partly)."""
        lines, along = (box.y, box.x) if self.by_rows else (box.x, box.y)
        partly = self.partly if self.along > along.start else self.full
        reached = Span(max(lines.start, self.full), min(lines.stop, partly))
        pieces = (
            (Span(lines.start, min(lines.stop, self.full)), along, 0),
            (reached, Span(along.start, min(along.stop, self.along)), 1),
            (reached, Span(max(along.start, self.along), along.stop), None),
            (Span(max(lines.start, partly, self.full), lines.stop), along, None),
        )
        for across, on, which in pieces:
            if not (across.empty or on.empty):
                yield (Box.of(across, on) if self.by_rows else Box.of(on, across)), which


class Chunks:
    """The chunks of a segment's tiles: up to `count`, each of whole lines of tiles or, where those are fewer, inside
    one.

    `by_rows`: tiles go row by row, not column by column.
    """

    def __init__(self, grid: Grid, count: int, *, by_rows: bool) -> None:
        self.grid, self.by_rows = grid, by_rows
        self._lines, self._along = grid.shape if by_rows else grid.shape[::-1]
        if self._lines > count:
            self._starts = [self._along * (self._lines * chunk // count) for chunk in range(count + 1)]
        else:
            of_line = count // self._lines
            cuts = [self._along * chunk // of_line for chunk in range(of_line)]
            starts = [line * self._along + cut for line in range(self._lines) for cut in cuts]
            self._starts = starts + [len(grid)] * (count + 1 - len(starts))
        self._line_axis, self._along_axis = (0, 1) if by_rows else (1, 0)
        self._spans = lru_cache(maxsize=None)(self._find_spans)
        self.filled = tuple(chunk for chunk in range(count) if self.tiles(chunk))
        """The chunks that have tiles."""

    def __len__(self) -> int:
        """Return how many there may be; some are empty where there are fewer tiles."""
        return len(self._starts) - 1

    def start(self, chunk: int) -> int:
        """Return the position of its first tile in the order of execution; of all tiles behind the last chunk."""
        return self._starts[chunk]

    def tiles(self, chunk: int) -> range:
        """Return the positions of its tiles in the order of execution."""
        return range(self._starts[chunk], self._starts[chunk + 1])

    def nearest(self, position: int) -> int:
        """Return the chunk that begins nearest to a tile, or as many as there are chunks."""
        return min(range(len(self._starts)), key=lambda chunk: abs(self._starts[chunk] - position))

    def tile(self, position: int) -> TileGeometry:
        line, along = divmod(position, self._along)
        row, column = (line, along) if self.by_rows else (along, line)
        return self.grid[row * self.grid.shape[1] + column]

    def boundary(self, field: int, chunk: int) -> Boundary:
        """Return the pixels of a field that all chunks before this one have reached."""
        line, along = divmod(self._starts[chunk], self._along)
        _, lines = self._spans(self._line_axis, field)
        _, columns = self._spans(self._along_axis, field)
        return Boundary(self.by_rows, lines[line], lines[line + 1] if along else lines[line], columns[along])

    def reached_before(self, field: int, chunk: int) -> list[Box]:
        """Return the pixels of a field that chunks before this one reach."""
        boundary = self.boundary(field, chunk)
        return [box for box, which in boundary.split(self.grid.graph[field].box) if which is not None]

    def overlaps(self, field: int, chunk: int) -> tuple[Box | None, Box | None]:
        """Return what a chunk's crops of a field share with whole lines and with the lines that chunks before it have
        reached: hulls.
        """
        boundary = self.boundary(field, chunk)
        found: list[Box | None] = [None, None]
        if not (boundary.full or boundary.partly):
            return None, None
        for box in self.read(field, self.tiles(chunk)):
            for piece, which in boundary.split(box):
                if which is not None:
                    known = found[which]
                    found[which] = piece if known is None else known.hull(piece)
        return found[0], found[1]

    def read(self, field: int, tiles: range) -> list[Box]:
        """Return what a run of tiles reads of a field: up to three boxes, which may overlap."""
        return self._boxes(tiles, lambda axis, index: self._spans(axis, field)[0][index])

    def written(self, field: int, tiles: range) -> list[Box]:
        """Return what a run of tiles has of a target of the segment: up to three boxes."""
        return self._boxes(tiles, lambda axis, index: self.grid.wanted(axis, index)[field])

    def _boxes(self, tiles: range, span: Callable[[int, int], Span | None]) -> list[Box]:
        """Return hulls of the tiles in the line where the run begins, in whole lines, and in the line where it ends."""
        line, along = divmod(tiles.start, self._along)
        last, end = divmod(tiles.stop, self._along)
        runs = [(range(line, last), range(self._along)), (range(last, last + 1), range(end))]
        if line == last:
            runs = [(range(line, line + 1), range(along, end))]
        elif along:
            runs = [(range(line, line + 1), range(along, self._along)), (range(line + 1, last), runs[0][1]), runs[1]]
        found = []
        for lines, columns in runs:
            if not (lines and columns):
                continue
            across, on = (
                _hull(span(axis, index) for index in indices)
                for axis, indices in ((self._line_axis, lines), (self._along_axis, columns))
            )
            if across is not None and on is not None:
                found.append(Box.of(across, on) if self.by_rows else Box.of(on, across))
        return found

    def _find_spans(self, axis: int, field: int) -> tuple[list[Span | None], list[int]]:
        """Return what each row or column of tiles reads of a field, and how far those before it reach."""
        spans = [self.grid.axis_geometry(axis, index).spans.get(field) for index in range(self.grid.shape[axis])]
        return spans, [*accumulate((0 if span is None else span.stop for span in spans), max, initial=0)]


def chunks_of(graph: Graph, planned: SegmentPlan) -> Chunks:
    """Return the chunks of a segment as it is planned."""
    grid = Grid(graph, planned.computes, planned.tile)
    return Chunks(grid, planned.chunks, by_rows=grid.by_rows)


def _hull(spans: Iterable[Span | None]) -> Span | None:
    there = [span for span in spans if span is not None and not span.empty]
    return Span(min(s.start for s in there), max(s.stop for s in there)) if there else None


class ReductionTree:
    """The order in which sums of chunks are added: in a binary tree over the numbers of chunks, of which some may be
    missing.

    Two of them meet as high as the first bit in which their numbers differ. `before`: the last chunk that somebody else
    has before these.
    """

    def __init__(self, before: int | None = None) -> None:
        self.chunks: list[int] = []
        """One chunk of each sum that is not joined further yet."""
        self._before = before

    def append(self, chunk: int) -> int:
        """Add a further sum, of a chunk behind all others; return how often the last two before it are to be joined
        first.
        """
        joins = self.join_before(chunk)
        self.chunks.append(chunk)
        return joins

    def join_before(self, following: int) -> int:
        """Return how often the last two are to be joined: as long as their node of the tree is below the one where they
        join the chunk that follows.
        """
        joins = 0
        while len(self.chunks) > 1:
            left, right = self.chunks[-2:]
            before = self.chunks[-3] if len(self.chunks) > 2 else self._before
            if left ^ right > right ^ following or (before is not None and left ^ right > before ^ left):
                break
            self.chunks.pop()
            joins += 1
        return joins


def before(chunks: Chunks, own: range) -> int | None:
    """Return the last chunk with tiles before a rank's own, if there is one."""
    return max((chunk for chunk in chunks.filled if chunk < own.start), default=None)


def behind(chunks: Chunks, own: range) -> int:
    """Return the first chunk with tiles behind a rank's own; where there is none, as many as there are chunks."""
    return min((chunk for chunk in chunks.filled if chunk >= own.stop), default=len(chunks))


def joined(chunks: Chunks, own: range) -> list[int]:
    """Return one chunk of each sum that a rank has of its own chunks, joined as far as the tree joins them alone."""
    order = ReductionTree(before(chunks, own))
    for chunk in chunks.filled:
        if chunk in own:
            order.append(chunk)
    order.join_before(behind(chunks, own))
    return order.chunks
