"""Lay out an image in a file: tiles, levels, and whether its channels lie together or apart.

Three channels of integers without names are colours and lie together, as every program expects; all others are planes
of their own, so that a reader of one class decodes no other and a tile of hundreds of channels is never held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from gigagrad.errors import WriteError
from gigagrad.images.georeference import GDAL_NODATA
from gigagrad.images.pixels import Array, is_nodata, parse_nodata

TILE: Final = 512
ENCODERS: Final = 2  # threads; zlib, JPEG and Blosc release the GIL
IN_FLIGHT: Final = 8  # tiles; bounds the compressed bytes that wait for their turn


def plain_stem(name: str) -> str:
    """Return a file's stem without what would choose the format of a file that is called by it and a suffix."""
    return name.removesuffix(".ome").removesuffix(".cog") or name


@dataclass(frozen=True, slots=True)
class MaskClass:
    """A class of a mask, or a channel of probabilities: id (0: background), name, and 8-bit red, green and blue."""

    id: int
    name: str
    color: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout that `write_pyramid` was asked for. `levels` are `(height, width)` of each, level 0 first."""

    path: Path
    shape: tuple[int, int, int]
    """`(H, W, C)`."""
    dtype: np.dtype[Any]
    nearest: bool
    tile: int
    levels: tuple[tuple[int, int], ...]
    mpp: float | None
    description: str | None
    channels: Sequence[MaskClass]
    classes: Sequence[MaskClass]
    tags: Mapping[int, tuple[str, Any]]

    @property
    def colour(self) -> bool:
        return self.shape[2] == 3 and self.dtype.kind != "f" and not self.channels

    @property
    def planes(self) -> int:
        """Return how many planes there are, each of one channel or of three colours."""
        return 1 if self.colour else self.shape[2]

    @property
    def nodata(self) -> int | float | None:
        """Return the value of samples without data, as `tags` say it to GDAL."""
        _, text = self.tags.get(GDAL_NODATA, ("s", b""))
        return parse_nodata(bytes(text).decode("ascii", "replace"), self.dtype)

    def check(self) -> None:
        """Raise `WriteError` for what cannot be written."""
        if min(self.shape) < 1:
            raise WriteError(f"cannot write {self.path}: got shape (H, W, C) {self.shape}, expected each at least 1")
        if self.tile < 16 or self.tile % 16:
            raise WriteError(
                f"cannot write {self.path}: got tile {self.tile} px, expected a multiple of 16, e.g. 256 or 512"
            )
        if not self.nearest and self.dtype not in (np.uint8, np.uint16, np.float32, np.float64):
            raise WriteError(f"cannot write {self.path}: cannot average {self.dtype} pixels; use nearest lower levels")
        if self.channels and len(self.channels) != self.shape[2]:
            raise WriteError(f"cannot write {self.path}: {len(self.channels)} names for {self.shape[2]} channels")

    def bands(self, rows: Iterable[Array]) -> Iterator[tuple[int, Array]]:
        """Yield each level's bands of rows `(h, W, C)`, as high as a tile (the last may be lower), from strips of any
        height.

        A band is valid until the next one is asked for. Raises `WriteError` where the strips are not as promised;
        their producer's errors come as `SourceError`.
        """
        stacks = [_Stack(shape, self) for shape in self.levels]
        for strip in _guarded(rows):
            yield from self._bands(stacks, 0, self._checked(strip, stacks[0].missing_rows))
        if missing := stacks[0].missing_rows:
            raise WriteError(
                f"cannot write {self.path}: the rows ended at {self.shape[0] - missing} of {self.shape[0]}"
            )

    def _bands(self, stacks: list[_Stack], level: int, rows: Array) -> Iterator[tuple[int, Array]]:
        for band in stacks[level].push(rows):
            yield level, band
            if level + 1 < len(stacks):
                yield from self._bands(stacks, level + 1, self._halved(band))

    def _checked(self, strip: Array, missing_rows: int) -> Array:
        if strip.ndim == 2:
            strip = strip[..., None]
        if strip.dtype != self.dtype or strip.shape[1:] != self.shape[1:]:
            raise WriteError(
                f"cannot write {self.path}: got a strip (h, W, C) {strip.shape} of {strip.dtype}, "
                f"expected (h, {self.shape[1]}, {self.shape[2]}) of {self.dtype}"
            )
        if len(strip) > missing_rows:
            raise WriteError(f"cannot write {self.path}: got more than the promised {self.shape[0]} rows")
        return np.ascontiguousarray(strip)

    def _halved(self, pixels: Array) -> Array:
        """Halve `(h, w, C)` pixels to the next lower level; an odd last row or column is left out."""
        height, width = pixels.shape[0] // 2, pixels.shape[1] // 2
        pixels = pixels[: 2 * height, : 2 * width]
        if self.nearest or not pixels.size:
            return pixels[::2, ::2]
        wide = np.dtype(np.uint32) if self.dtype.kind == "u" else self.dtype
        means = np.empty((height, width, self.shape[2]), self.dtype)
        if (nodata := self.nodata) is not None:
            for channel in range(self.shape[2]):
                means[..., channel] = _means_of_data(pixels[..., channel], nodata, wide)
            return means
        rows = np.add(pixels[::2], pixels[1::2], dtype=wide)
        for channel in range(self.shape[2]):  # one at a time: an inner loop over three numbers takes twice as long
            total = rows[:, ::2, channel] + rows[:, 1::2, channel]
            means[..., channel] = (total + 2) // 4 if wide.kind == "u" else total / 4
        return means


def _means_of_data(pixels: Array, nodata: int | float, wide: np.dtype[Any]) -> Array:
    """Average, of each 2 x 2 of `(2h, 2w)` pixels, those that hold data, `nodata` where none does, as GDAL has it."""
    total = np.zeros((len(pixels) // 2, pixels.shape[1] // 2), wide)
    count = np.zeros(total.shape, np.uint8)
    for quarter in (pixels[y::2, x::2] for y in (0, 1) for x in (0, 1)):
        there = ~is_nodata(quarter, nodata)
        np.add(total, quarter, out=total, where=there, casting="unsafe")
        count += there
    some = np.maximum(count, 1)
    means: Array = (total + some // 2) // some if wide.kind == "u" else total / some
    return np.where(count > 0, means, nodata)


class SourceError(Exception):
    """Carry an error of the strips' producer past the handler for errors of the output file."""

    def __init__(self, original: Exception) -> None:
        self.original = original


class _Stack:
    """Collect strips of any height into bands of exactly one tile's height (the last may be lower)."""

    def __init__(self, shape: tuple[int, int], layout: Layout) -> None:
        self.missing_rows = shape[0]
        self._width, self._layout = shape[1], layout
        self._held: Array | None = None
        self._held_rows = 0

    def push(self, strip: Array) -> Iterator[Array]:
        """Yield the bands that `strip` `(h, W, C)` completes; valid only until the next push."""
        while len(strip):
            wanted = min(self._layout.tile - self._held_rows, self.missing_rows)
            part, strip = strip[:wanted], strip[wanted:]
            self.missing_rows -= len(part)
            complete = len(part) == wanted
            if complete and not self._held_rows:
                yield part  # no copy for strips that are cut at tile borders already
                continue
            if self._held is None:
                self._held = np.empty((self._layout.tile, self._width, self._layout.shape[2]), self._layout.dtype)
            self._held[self._held_rows : self._held_rows + len(part)] = part
            self._held_rows += len(part)
            if complete:
                rows, self._held_rows = self._held_rows, 0
                yield self._held[:rows]


def level_shapes(height: int, width: int, tile: int, levels: int | Literal["auto"]) -> tuple[tuple[int, int], ...]:
    if levels != "auto" and levels < 1:
        raise WriteError(f"got {levels} levels, expected 1 or more, or 'auto'")
    shapes = [(height, width)]
    while min(shapes[-1]) > 1 and (max(shapes[-1]) > tile if levels == "auto" else len(shapes) < levels):
        shapes.append((shapes[-1][0] // 2, shapes[-1][1] // 2))
    return tuple(shapes)


def _guarded(rows: Iterable[Array]) -> Iterator[Array]:
    try:
        yield from rows
    except Exception as error:
        raise SourceError(error) from error
