"""Find connected regions of a mask of any size, and fill its holes, a band of rows at a time.

Runs of equal pixels in a row are the nodes of a graph; runs that meet in the next row are linked. Each band numbers its
own regions; pairs of numbers that meet at the rows between two bands make them one. Only a band is held, and some 100
bytes for each region of each band. `components` is a list of work that shrinks: the links whose ends are still
apart. A product with the sparse matrix of links visits all of them each time (docs/decisions/0078-regions.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box, tiles
from gigagrad.errors import ImageError
from gigagrad.images.image import Image, View
from gigagrad.images.pixels import Array, is_floating

Ints = NDArray[np.int64]

_BAND_PX: Final = 1 << 24
"""Pixels of a band, about: 5 bytes each are held while its runs are found."""
_BAND_ROWS: Final = 256
"""Bands have a multiple of so many rows, where these are no more pixels than that: those of tiles of files."""
_READ_WIDTH: Final = 4096
_MOST: Final = 1 << 22
"""Regions of bands that are held at most; noise has more."""


def components(count: int, one: Ints, other: Ints) -> Ints:
    """Return for each of `count` nodes the smallest one that the pairs `one[i]`, `other[i]` lead to."""
    root = np.arange(count)
    while len(one):
        np.minimum.at(root, np.maximum(one, other), np.minimum(one, other))
        while not np.array_equal(above := root[root], root):
            root = above
        one, other = root[one], root[other]
        apart = one != other
        one, other = one[apart], other[apart]
    return root


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of equal pixels in rows. A pixel's place is `y * (W + 1) + x`: no run reaches the next row."""

    first: Ints
    stop: Ints
    values: Ints

    def __getitem__(self, chosen: Any) -> Runs:
        return Runs(self.first[chosen], self.stop[chosen], self.values[chosen])

    def links(self, below: Runs, row: int, corners: bool) -> tuple[Ints, Ints, Ints]:
        """Return which run meets which of those `below`, a place of `row` further on, and along how many pixels."""
        first, stop = self.first + row, self.stop + row
        begin = np.searchsorted(below.stop, first - corners, "right")
        count = np.searchsorted(below.first, stop + corners, "left") - begin
        mine = np.repeat(np.arange(len(first)), count)
        theirs = np.arange(len(mine)) + np.repeat(begin - np.cumsum(count) + count, count)
        width = np.minimum(stop[mine], below.stop[theirs]) - np.maximum(first[mine], below.first[theirs])
        return mine, theirs, width.clip(0)


class Regions(Image):
    """Connected regions of equal class ids: an image `(1, H, W)` int32 of their numbers, and a table.

    Numbers count from 1 in the order of the regions' first pixels, as `scipy.ndimage.label` has them; 0 is background.
    A box is read by numbering all of its rows again. Closing it leaves the mask open.

    Attributes:
        values: `(N,)` class id of each region.
        areas: `(N,)` in pixels of the mask.
        perimeters: `(N,)` pixel edges between a region and anything else.
        centroids: `(N, 2)` means of y and x over a region's pixels, of which each counts from its middle.
        bounds_of: `(N, 4)` half-open boxes y0, x0, y1, x1.
        firsts: `(N, 2)` y and x of the first pixel of each in reading order.
        means: `(N, C)` means of the channels of the image `seen` over a region; `C` is 0 without one.
        pairs: `(E, 2)` regions, counted from 0, the smaller one first, that share a pixel edge. Their class ids differ.
        borders: `(E,)` pixel edges that they share.
    """

    def __init__(
        self,
        mask: Image,
        classes: Sequence[int] | None,
        *,
        corners: bool,
        min_area_px: int,
        seen: Image | None = None,
        holes: bool = False,
    ) -> None:
        if mask.channels != 1 or is_floating(mask.dtype):
            raise ImageError(
                f"{mask.name} is no mask of class ids: {mask.channels} channels of {mask.dtype}; choose one "
                "with bands()"
            )
        if seen is not None and seen.shape[1:] != mask.shape[1:]:
            raise ImageError(
                f"{seen.name} is {seen.height} x {seen.width} px and the mask {mask.name} {mask.height} x {mask.width} "
                "px; give both at the level of one resolution"
            )
        super().__init__(shape=mask.shape, dtype=np.dtype(np.int32), name=mask.name, mpp=mask.mpp)
        self._mask, self._classes, self._corners, self._holes = mask, classes, corners, holes
        self._row = mask.width + 1
        rows = max(1, _BAND_PX // (self._row * (1 if seen is None else seen.channels)))
        self._rows = rows // _BAND_ROWS * _BAND_ROWS or rows
        self.mask_dtype, self._starts = np.asarray(mask.read(Box.whole(1, 1))).dtype, list[int]()
        self._last: tuple[int, Runs, Ints] | None = None
        self._measure(seen, min_area_px)

    def __len__(self) -> int:
        return len(self.areas)

    def _measure(self, seen: Image | None, min_area_px: int) -> None:
        """Number and measure the regions of each band, and then make one of those that meet."""
        sums, spans, values, meeting = list[Any](), list[Any](), list[Ints](), list[Any]()
        total, carried, carried_of = 0, _NO_RUNS, _NO_RUNS.first
        for band in self._bands():
            runs = self._runs(band)
            of, first = self._numbered(runs)
            length, (y, x) = runs.stop - runs.first, np.divmod(runs.first, self._row)
            means = () if seen is None else self._sums(seen, band, runs)
            centres = length * (y + 0.5), length * (x + length / 2)
            sums.append(_added(of, len(first), length, *centres, length + 1, *means))
            spans.append(_smallest(of, len(first), y, x, -y - 1, -x - length, runs.first))
            values.append(runs.values[first])
            of = of + total
            for upper, of_upper in ((runs, of), (carried, carried_of)):
                one, other, width = upper.links(runs, self._row, self._corners)
                same = self._holes | (upper.values[one] == runs.values[other])
                meeting.append(_unique(of_upper[one], of[other], same, width))
            beside = np.flatnonzero(runs.stop[:-1] == runs.first[1:])
            meeting.append(_unique(of[beside], of[beside + 1], beside < 0, beside >= 0))
            self._starts.append(total)
            last, total = y == band.y1 - 1, total + len(first)
            carried, carried_of = runs[last], of[last]
            if total > _MOST:
                raise ImageError(
                    f"{self.name} has more than {_MOST} regions down to row {band.y1}: it is noise; read the mask at a "
                    "smaller level"
                )
        one, other, same, width = np.concatenate(meeting, axis=1)
        joins = same > 0
        of, first = _numbers(components(total, one[joins], other[joins]))
        found = _added(of, len(first), *np.concatenate(sums, axis=1))
        low = _smallest(of, len(first), *np.concatenate(spans, axis=1))
        # Of the edges along its runs a region shares with itself those where it goes on in the next row.
        found[3] -= _added(of[one[joins]], len(first), width[joins])[0]
        bounds = np.stack((low[0], low[1], -low[2], -low[3]), axis=1)
        kept = found[0] >= min_area_px
        if self._holes:
            kept &= (bounds[:, :2] > 0).all(axis=1) & (bounds[:, 2:] < self.shape[1:]).all(axis=1)
        chosen = np.flatnonzero(kept)[np.argsort(low[4][kept])]
        number = np.zeros(len(first), np.int64)
        number[chosen] = np.arange(1, len(chosen) + 1)
        self._numbers = number[of].astype(np.int32)
        self.values = np.concatenate(values)[first[chosen]]
        self.areas, self.perimeters = found[0, chosen].astype(np.int64), 2 * found[3, chosen].astype(np.int64)
        self.centroids, self.means = (found[1:3, chosen] / found[0, chosen]).T, (found[4:, chosen] / found[0, chosen]).T
        self.bounds_of, self.firsts = bounds[chosen], np.stack(np.divmod(low[4][chosen], self._row), axis=1)
        one, other = np.sort(number[of[np.stack((one, other))]] - 1, axis=0)
        there = ~joins & (one >= 0)
        one, other, _, width = _unique(one[there], other[there], joins[there], width[there])
        self.pairs, self.borders = np.stack((one, other), axis=1)[width > 0], width[width > 0]

    def _bands(self) -> Iterator[Box]:
        return tiles(self.height, self.width, self._rows, self.width)

    def _runs(self, band: Box) -> Runs:
        """Find the runs of a band; of holes those of 0, whose value is that of the pixel before them."""
        rows = np.zeros((band.height, self._row), self.mask_dtype)
        rows[:, -1] = self._holes  # which ends the runs of each row
        for part in tiles(band.height, band.width, band.height, _READ_WIDTH):
            rows[:, part.x0 : part.x1] = np.asarray(self._mask.read(part.shift(band.y0, 0)))[0]
        flat = rows.ravel()
        first = np.append(0, np.flatnonzero(flat[1:] != flat[:-1]) + 1)
        stop, values = np.append(first[1:], flat.size), flat[first].astype(np.int64)
        inside = (values == 0) == self._holes
        if self._holes:
            values = flat[first - 1].astype(np.int64)
        elif self._classes is not None:
            inside &= np.isin(values, self._classes)
        offset = band.y0 * self._row
        return Runs(first[inside] + offset, stop[inside] + offset, values[inside])

    def _numbered(self, runs: Runs) -> tuple[Ints, Ints]:
        """Return the number of each run's region within its band, from 0, and the first run of each region."""
        one, other, _ = runs.links(runs, self._row, self._corners)
        same = self._holes | (runs.values[one] == runs.values[other])
        return _numbers(components(len(runs.first), one[same], other[same]))

    def _sums(self, seen: Image, band: Box, runs: Runs) -> NDArray[np.float64]:
        """Add up each channel of `seen` along each run: `(C, runs)`."""
        if not len(runs.first):
            return np.zeros((seen.channels, 0))
        places = np.stack((runs.first, runs.stop), axis=1).ravel() - band.y0 * self._row
        rows = np.zeros((seen.channels, band.height, self._row), np.asarray(seen.read(Box.whole(1, 1))).dtype)
        for part in tiles(band.height, band.width, band.height, _READ_WIDTH):
            rows[..., part.x0 : part.x1] = np.asarray(seen.read(part.shift(band.y0, 0)))
        return np.array([np.add.reduceat(plane.ravel(), places, dtype=np.float64)[::2] for plane in rows])

    def _read_inside(self, box: Box) -> Array:
        result = np.zeros((box.height, self._row), np.int32)
        begin = box.y0 * self._row
        for index in range(box.y0 // self._rows, (box.y1 - 1) // self._rows + 1):
            last = self._last
            if last is None or last[0] != index:
                band = Box(index * self._rows, 0, min((index + 1) * self._rows, self.height), self.width)
                runs = self._runs(band)
                last = self._last = index, runs, self._numbered(runs)[0]
            _, runs, of = last
            of_box = (runs.first >= begin) & (runs.first < begin + result.size)
            number = self._numbers[of[of_box] + self._starts[index]]
            # Numbers are added where runs begin, and taken away where they end.
            steps = np.zeros(result.size + 1, np.int32)
            steps[runs.first[of_box] - begin] += number
            steps[runs.stop[of_box] - begin] -= number
            result += np.cumsum(steps[:-1], dtype=np.int32).reshape(result.shape)
        return np.array(result[None, :, box.x0 : box.x1])


_NO_RUNS: Final = Runs(*(np.zeros(0, np.int64) for _ in range(3)))


def _numbers(root: Ints) -> tuple[Ints, Ints]:
    """Return a number from 0 for each node, those of one root having the same, and the roots."""
    roots = np.flatnonzero(root == np.arange(len(root)))
    return np.searchsorted(roots, root), roots


def _added(of: Ints, count: int, *rows: NDArray[Any]) -> NDArray[np.float64]:
    return np.array([np.bincount(of, row, count) for row in rows]).reshape(len(rows), count)


def _smallest(of: Ints, count: int, *rows: Ints) -> Ints:
    found = np.full((len(rows), count), np.iinfo(np.int64).max)
    for low, row in zip(found, rows, strict=True):
        np.minimum.at(low, of, row)
    return found


def _unique(one: Ints, other: Ints, same: NDArray[np.bool_], width: NDArray[Any]) -> Ints:
    """Return each pair of numbers once, `(4, pairs)`: both, whether they are one region, and the sum of widths."""
    if not len(one):
        return np.zeros((4, 0), np.int64)
    key = (one * (int(other.max()) + 1) + other) * 2 + same
    _, first, of = np.unique(key, return_index=True, return_inverse=True)
    return np.stack((one[first], other[first], same[first], np.bincount(of, width).astype(np.int64)))


def find_regions(
    mask: Image,
    classes: Sequence[int] | None = None,
    *,
    corners: bool = False,
    min_area_px: int = 1,
    seen: Image | None = None,
) -> Regions:
    """Find the connected regions of equal class ids in a mask `(1, H, W)`, a band of rows at a time.

    Args:
        mask: class ids; 0 is background. A label of several is `mask.bands([number])`.
        classes: ids of which regions are found; None takes all but 0.
        corners: whether pixels that touch at a corner are connected.
        min_area_px: regions of fewer pixels count as background.
        seen: an image of the mask's size whose channels are averaged over each region.

    Raises `ImageError` where the mask has several channels or floats, `seen` another size, or regions are so many that
    the mask is noise.
    """
    return Regions(mask, classes, corners=corners, min_area_px=min_area_px, seen=seen)


class FilledHoles(View):
    """A mask without holes. Use `fill_holes`."""

    def __init__(self, mask: Image, max_area_px: int | None) -> None:
        self._holes = Regions(mask, None, corners=False, min_area_px=1, holes=True)
        small = self._holes.areas <= (self._holes.areas if max_area_px is None else max_area_px)
        self._values = np.concatenate(([0], np.where(small, self._holes.values, 0)))
        super().__init__(mask, dtype=self._holes.mask_dtype)

    def _read_inside(self, box: Box) -> Array:
        pixels = np.asarray(self._image.read(box))
        filled: Array = pixels + self._values[self._holes.read(box)].astype(pixels.dtype)
        return filled


def fill_holes(mask: Image, max_area_px: int | None = None) -> Image:
    """Return `mask` with its holes filled as it is read: background that no steps up, down, left or right lead out of.

    A hole gets the class id beside its first pixel. `max_area_px`: larger holes stay. Raises `ImageError` as
    `find_regions` does.
    """
    return FilledHoles(mask, max_area_px)
