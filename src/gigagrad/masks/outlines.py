"""Outlines with class names, in the order in which they were drawn, packed into a few arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from gigagrad.errors import ImageError

Points = NDArray[np.float64]

UNCLASSIFIED = "Unclassified"
"""The class of outlines that were given none."""


@dataclass(frozen=True, slots=True)
class Outlines:
    """Polygons in level-0 pixels, x to the right and y down, (0, 0) the upper left corner of the first pixel.

    Polygon `k` consists of the points `starts[k]` to `starts[k + 1]` of `points`, `(n, 2)` as (x, y): its rings one
    after the other, each closed; `closing` is true at the last point of every ring. A point lies inside where a ray
    from it crosses the rings an odd number of times, so that rings within rings are holes. `class_of[k]` is an index
    into `names`. `skipped` counts what has no area: points, lines and the like.

    As read from a file, coordinates may be others yet (`placed.in_pixels`). Where `crs` names a reference system, they
    are that's. Else `origin` says where their zero is: the "corner" of the slide, as ASAP has it, or that of what was
    scanned ("scan"), as QuPath has it; "unsaid" is GeoJSON of which nobody knows whether it is in pixels at all.
    """

    points: Points
    closing: NDArray[np.bool_]
    starts: NDArray[np.int64]
    class_of: NDArray[np.int64]
    names: tuple[str, ...]
    skipped: int = 0
    crs: str | None = None
    origin: Literal["corner", "scan", "unsaid"] = "corner"

    def __len__(self) -> int:
        return len(self.class_of)

    @classmethod
    def pack(cls, polygons: Iterable[tuple[str | None, Sequence[Any]]], where: str) -> Self:
        """Pack outlines `(class name, rings)`, in order; a ring is a sequence of (x, y), closed or not.

        None is a polygon without a class, and one without rings is counted as skipped. Raises `ImageError` for points
        that are no finite numbers.
        """
        points: list[Points] = []
        closing: list[NDArray[np.bool_]] = []
        starts, class_of, skipped = [0], [], 0
        names: dict[str, int] = {}
        for name, rings in polygons:
            held = [ring for ring in (_ring(ring, where) for ring in rings) if len(ring) > 3]
            if not held:
                skipped += 1
                continue
            points += held
            closing += [_last(len(ring)) for ring in held]
            starts.append(starts[-1] + sum(map(len, held)))
            class_of.append(names.setdefault((name or "").strip() or UNCLASSIFIED, len(names)))
        return cls(
            np.concatenate(points) if points else np.empty((0, 2)),
            np.concatenate(closing) if closing else np.empty(0, bool),
            np.array(starts, np.int64),
            np.array(class_of, np.int64),
            tuple(names),
            skipped,
        )

    def bounds(self) -> Points:
        """Return `(len, 4)`: smallest x and y, largest x and y of each polygon."""
        if not len(self):
            return np.empty((0, 4))
        first = self.starts[:-1]
        return np.concatenate(
            (np.minimum.reduceat(self.points, first), np.maximum.reduceat(self.points, first)), axis=1
        )


def _ring(ring: Sequence[Any], where: str) -> Points:
    try:
        points = np.array([(point[0], point[1]) for point in ring], np.float64).reshape(-1, 2)
    except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise ImageError(f"{where} has an outline whose points are not pairs of numbers; export it again") from error
    if not np.isfinite(points).all():
        raise ImageError(f"{where} has an outline with a point that is no finite number; export it again")
    closed = len(points) > 1 and bool((points[0] == points[-1]).all())
    return points if closed else np.concatenate((points, points[:1]))


def _last(count: int) -> NDArray[np.bool_]:
    last = np.zeros(count, bool)
    last[-1] = True
    return last
