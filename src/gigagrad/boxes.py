"""Compute with integer rectangles: the one piece of geometry that every room of the house shares.

A box is half-open, `[y0, y1) x [x0, x1)`, and y always comes before x. All arithmetic is on integers, so a tile
boundary is never a matter of rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload


class Span(NamedTuple):
    """A half-open integer interval `[start, stop)` along one axis. `start >= stop` means empty.

    A tuple, because planning makes millions of them.
    """

    start: int
    stop: int

    @property
    def length(self) -> int:
        return max(0, self.stop - self.start)

    @property
    def empty(self) -> bool:
        return self.stop <= self.start

    def meets(self, other: Span) -> bool:
        """Say whether they have anything in common."""
        return max(self.start, other.start) < min(self.stop, other.stop)

    def clamp(self, size: int) -> Span:
        """Return the part of this span inside `[0, size)`."""
        return Span(min(max(self.start, 0), size), max(min(self.stop, size), 0))

    def hull(self, other: Span | None) -> Span:
        """Return the smallest span that holds both; an empty or missing one adds nothing."""
        if other is None or other.empty:
            return self
        if self.empty:
            return other
        return Span(min(self.start, other.start), max(self.stop, other.stop))

    def shift(self, offset: int) -> Span:
        return Span(self.start + offset, self.stop + offset)

    def within(self, other: Span) -> bool:
        return self.empty or (other.start <= self.start and self.stop <= other.stop)


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A half-open integer rectangle `[y0, y1) x [x0, x1)` in pixels."""

    y0: int
    x0: int
    y1: int
    x1: int

    @classmethod
    def of(cls, y: Span, x: Span) -> Box:
        return cls(y.start, x.start, y.stop, x.stop)

    @classmethod
    def whole(cls, height: int, width: int) -> Box:
        return cls(0, 0, height, width)

    @property
    def y(self) -> Span:
        return Span(self.y0, self.y1)

    @property
    def x(self) -> Span:
        return Span(self.x0, self.x1)

    @property
    def height(self) -> int:
        return max(0, self.y1 - self.y0)

    @property
    def width(self) -> int:
        return max(0, self.x1 - self.x0)

    @property
    def shape(self) -> tuple[int, int]:
        """Return `(height, width)` in pixels."""
        return self.height, self.width

    @property
    def area(self) -> int:
        return self.height * self.width

    @property
    def empty(self) -> bool:
        return self.y1 <= self.y0 or self.x1 <= self.x0

    def clamp(self, height: int, width: int) -> Box:
        """Return the part of this box inside an image of `height x width` pixels (empty if they do not meet)."""
        return Box.of(self.y.clamp(height), self.x.clamp(width))

    def intersect(self, other: Box) -> Box:
        return Box(max(self.y0, other.y0), max(self.x0, other.x0), min(self.y1, other.y1), min(self.x1, other.x1))

    def hull(self, other: Box) -> Box:
        """Return the smallest box that holds both, of which none is empty."""
        return Box(min(self.y0, other.y0), min(self.x0, other.x0), max(self.y1, other.y1), max(self.x1, other.x1))

    def shift(self, dy: int, dx: int) -> Box:
        return Box(self.y0 + dy, self.x0 + dx, self.y1 + dy, self.x1 + dx)

    def within(self, other: Box) -> bool:
        return self.y.within(other.y) and self.x.within(other.x)

    def turned_back(self, transform: int, height: int, width: int) -> Box:
        """Return the box that lands on this one where an image is mirrored left to right if `transform >= 4`, then
        turned `transform % 4` quarters counter-clockwise, which makes it `height x width` pixels large.
        """
        box = self
        for _ in range(transform % 4):
            # One quarter back: row y of the turned image is column (height - 1 - y) of the image before.
            box = Box(box.x0, height - box.y1, box.x1, height - box.y0)
            height, width = width, height
        return Box(box.y0, width - box.x1, box.y1, width - box.x0) if transform >= 4 else box

    def resized(self, shape: tuple[int, int], to: tuple[int, int]) -> Box:
        """Return the smallest box that holds the same part of an image of `shape` at another size."""
        (height, width), (rows, columns) = shape, to
        y0, x0, y1, x1 = self.y0 * rows, self.x0 * columns, -(-self.y1 * rows // height), -(-self.x1 * columns // width)
        return Box(y0 // height, x0 // width, y1, x1)

    def __str__(self) -> str:
        return f"[{self.y0}, {self.y1}) x [{self.x0}, {self.x1})"


@dataclass(frozen=True, slots=True)
class Cuts(Sequence[Span]):
    """Disjoint spans of length `step` (the last may be shorter) that cover `[0, size)` in order.

    Made when asked for: a planner looks at a dozen of the million spans of a terapixel's axis.
    """

    size: int
    step: int

    def __len__(self) -> int:
        return -(-self.size // self.step)

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Span, ...]: ...
    def __getitem__(self, index: int | slice) -> Span | tuple[Span, ...]:
        starts = range(0, self.size, self.step)[index]
        if isinstance(starts, range):
            return tuple(Span(start, min(start + self.step, self.size)) for start in starts)
        return Span(starts, min(starts + self.step, self.size))


def split(size: int, step: int) -> Cuts:
    """Cut the axis `[0, size)` every `step` pixels."""
    if step < 1:
        raise ValueError(f"a tile must be at least 1 px long, got {step}")
    return Cuts(size, step)


def tiles(height: int, width: int, tile_height: int, tile_width: int) -> Iterator[Box]:
    """Yield the disjoint boxes of a `tile_height x tile_width` grid over an image, row by row."""
    for y in split(height, tile_height):
        for x in split(width, tile_width):
            yield Box.of(y, x)


def spread(height: int, width: int, per_side: int = 4, side: int = 256) -> Iterator[Box]:
    """Yield `per_side` squared boxes of up to `side` px a side, evenly spread over an image, to sample it."""
    for row in range(per_side):
        for column in range(per_side):
            y = (height * (2 * row + 1)) // (2 * per_side) - side // 2
            x = (width * (2 * column + 1)) // (2 * per_side) - side // 2
            box = Box(y, x, y + side, x + side).clamp(height, width)
            if not box.empty:
                yield box


def without(boxes: Iterable[Box], holes: Sequence[Box]) -> list[Box]:
    """Return the pixels of boxes that lie in none of the holes, in boxes."""
    left = [box for box in boxes if not box.empty]
    for hole in holes:
        cut = []
        for box in left:
            shared = box.intersect(hole)
            if shared.empty:
                cut.append(box)
                continue
            around = (
                Box(box.y0, box.x0, shared.y0, box.x1),
                Box(shared.y0, box.x0, shared.y1, shared.x0),
                Box(shared.y0, shared.x1, shared.y1, box.x1),
                Box(shared.y1, box.x0, box.y1, box.x1),
            )
            cut += [part for part in around if not part.empty]
        left = cut
    return left


def apart(boxes: Iterable[Box]) -> list[Box]:
    """Return the same pixels in boxes that do not overlap; the largest stay whole."""
    disjoint: list[Box] = []
    for box in sorted(boxes, key=lambda box: (-box.area, box)):
        disjoint += without([box], disjoint)
    return disjoint


def shared(boxes: Iterable[Box], others: Sequence[Box]) -> list[Box]:
    """Intersect each box with each of the others."""
    met = (box.intersect(other) for box in boxes for other in others)
    return [box for box in met if not box.empty]
