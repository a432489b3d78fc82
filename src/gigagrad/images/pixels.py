"""Know pixels as arrays: their types, what lies outside of an image, which hold no data; and cache the tiles of a grid.

A crop's halo reaches into the file tiles of its neighbours, and crops' borders rarely fall on the file's own, so most
file tiles are wanted two to four times in short succession.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from threading import Lock, current_thread, main_thread
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box, Span
from gigagrad.errors import ImageError
from gigagrad.threads import Task

if TYPE_CHECKING:
    import torch

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Pixels: TypeAlias = "Array | torch.Tensor"

Key = TypeVar("Key", bound=Hashable)

LUMA_BT601 = (0.299, 0.587, 0.114)
"""The weights of red, green and blue in grey: ITU-R BT.601, which JPEG's luma follows, too."""
ROWS_AT_ONCE: Final = 64
"""Rows that are converted at a time, so that next to nothing is held beside the pixels."""
ZARR_NODATA: Final = "_FillValue"
"""The attribute of a Zarr array that names the value, as NetCDF calls it. What the array fills chunks with that are not
there says nothing: every array has that."""
_LONGEST_AXIS = 2**31 - 1
_LONGEST_QUOTATION = 300
_MOST_CHANNELS = 2**16 - 1


@dataclass(frozen=True, slots=True)
class Level:
    """A resolution of an image: `shape` is `(height, width)` in pixels, `downsample` is relative to level 0."""

    shape: tuple[int, int]
    downsample: float


def is_floating(dtype: np.dtype[Any] | torch.dtype) -> bool:
    """Return whether an image of this dtype holds floats."""
    return dtype.kind == "f" if isinstance(dtype, np.dtype) else dtype.is_floating_point


def as_slice(numbers: Sequence[int]) -> slice | list[int]:
    """Return numbers at equal distances as a slice, by which NumPy copies at once; others as they are."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if not step or any(after - before != step for before, after in pairwise(numbers)):
        return list(numbers)
    stop = numbers[-1] + step
    return slice(numbers[0], stop if stop >= 0 else None, step)


def check_size(shape: Sequence[int], name: str) -> None:
    """Raise `ImageError` for a `(C, H, W)` that no file holds; what a file declares has not been paid for."""
    if min(shape) < 1 or shape[0] > _MOST_CHANNELS or max(shape) > _LONGEST_AXIS:
        raise ImageError(
            f"{name} declares {' x '.join(map(str, shape))} (C x H x W); expected 1 to {_MOST_CHANNELS} channels and "
            f"1 to {_LONGEST_AXIS} px along each axis; the file is corrupt"
        )


def fill_of(dtype: np.dtype[Any], channels: int, *, says_colour: bool = False) -> int:
    """Return what lies outside: white (the dtype's largest value) for a colour slide, 0 for a mask or anything else.

    A colour slide has unsigned integers and either three channels of uint8 or a file that calls itself colour.
    """
    colour = says_colour or (channels == 3 and dtype == np.uint8)
    return int(np.iinfo(dtype).max) if colour and dtype.kind == "u" else 0


@contextmanager
def in_our_words(problem: str, remedy: str = "the file is truncated or corrupt") -> Iterator[None]:
    """Raise what a library raises at a damaged file, whatever its class, as an `ImageError` of one line."""
    try:
        yield
    except ImageError:
        raise
    except Exception as error:
        complaint = " ".join(str(error).split())[:_LONGEST_QUOTATION] or type(error).__name__
        raise ImageError(f"{problem}: {complaint}; {remedy}") from error


def choose_level(levels: tuple[Level, ...], level: int, name: str) -> Level:
    """Return the level that a caller asked for. Raises `ImageError` with the list of levels there are."""
    if 0 <= level < len(levels):
        return levels[level]
    have = ", ".join(f"{index} ({entry.shape[0]} x {entry.shape[1]})" for index, entry in enumerate(levels))
    raise ImageError(f"{name} has no level {level}; choose one of: {have}")


def levels_of(shapes: list[tuple[int, int]]) -> tuple[Level, ...]:
    """Make levels from their `(height, width)`, level 0 first; downsample is the mean of both axes, as in OpenSlide."""
    height, width = shapes[0]
    return tuple(Level((h, w), (height / h + width / w) / 2) for h, w in shapes)


def grid_parts(box: Box, height: int, width: int) -> Iterator[tuple[Box, Box, Box]]:
    """Yield the tiles of a grid that meet `box`, each with the common part as seen from `box` and from it."""
    columns = [*span_parts(box.x, width)]
    for y, to_y, of_y in span_parts(box.y, height):
        for x, to_x, of_x in columns:
            yield Box(y, x, y + height, x + width), Box.of(to_y, to_x), Box.of(of_y, of_x)


def span_parts(span: Span, size: int) -> Iterator[tuple[int, Span, Span]]:
    """Yield where those of equal spans begin that meet `span`, each with the common part as seen from `span` and from
    it.
    """
    for begin in range(span.start // size * size, span.stop, size):
        start, stop = max(span.start, begin), min(span.stop, begin + size)
        yield begin, Span(start - span.start, stop - span.start), Span(start - begin, stop - begin)


def parse_nodata(text: str | None, dtype: np.dtype[Any]) -> int | float | None:
    """Read the value that GDAL's tag names, as samples of `dtype` hold it; None where none of them can."""
    text = (text or "").strip()
    try:
        value = float(text)
    except ValueError:
        return None
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return float(dtype.type(value))
    if dtype.kind not in "iub" or not value.is_integer():
        return None
    # Not by way of a float, which could round it.
    number = int(text) if re.fullmatch(r"[-+]?\d+", text) else int(value)
    least, most = _range(dtype)
    return number if least <= number <= most else None


def value_of_gaps(text: str | None, dtype: np.dtype[Any]) -> int | float:
    """Return what GDAL reads in blocks that a file leaves out: no data, as near as samples come to it, or 0."""
    if (exact := parse_nodata(text, dtype)) is not None:
        return exact
    try:
        value = float((text or "").strip())
    except ValueError:
        return 0
    if dtype.kind not in "iub" or math.isnan(value):
        return 0
    least, most = _range(dtype)
    return most if value >= most else least if value <= least else math.trunc(value + math.copysign(0.5, value))


def _range(dtype: np.dtype[Any]) -> tuple[int, int]:
    return (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))


def is_nodata(pixels: Array, nodata: int | float) -> NDArray[np.bool_]:
    """Tell which samples hold no data; NaN does in no case."""
    empty: NDArray[np.bool_] = pixels == nodata
    return empty | np.isnan(pixels) if pixels.dtype.kind == "f" else empty


# Of tiles that one image keeps: two rows of file tiles along the short side of the founding experiment's slides (2 x
# 16000 x 256 px x RGB is 24 MiB), which a walk in strips along that side needs to decode every file tile once.
CACHE_BYTES = 32 * 2**20
_NEVER = 2**63


class TileCache:
    """A cache bounded in bytes; safe to use from several threads.

    Tiles that are not wanted again go first, then those that nobody has wanted for longest. What one thread decodes,
    another one that wants it meanwhile waits for. But for the main thread's: Ctrl-C may end that one's decoding
    anywhere, and leaves nobody waiting.
    """

    def __init__(self, limit_bytes: int, settled_bytes: int | None = None) -> None:
        """`settled_bytes` bounds those that are not wanted again: fewer bytes are sooner found in the processor's own
        caches. None: they stay while there is room."""
        self._limit_bytes, self._most_settled_bytes = limit_bytes, settled_bytes
        self._held_bytes = 0
        self._tiles: OrderedDict[Hashable, Array] = OrderedDict()
        self._settled: dict[Hashable, None] = {}
        """The tiles that are not wanted again."""
        self._coming: dict[Hashable, Task[Array]] = {}
        self._lock = Lock()

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def in_turn(self, keys: Iterable[Key]) -> Iterator[Key]:
        """Yield keys, those of tiles that another thread is decoding last: by then nobody may have to wait for them."""
        later = list[Key]()
        for key in keys:
            if key in self._coming:
                later.append(key)
            else:
                yield key
        yield from later

    def get(self, key: Key, decode: Callable[[Key], Array]) -> Array:
        """Return the tile under `key`, decoded now if it is not held. It is read-only: other readers see it too."""
        with self._lock:
            tile = self._tiles.get(key)
            if tile is not None:
                self._tiles.move_to_end(key)
                self._settled.pop(key, None)
                return tile
            coming = self._coming.get(key)
            own = coming is None and current_thread() is not main_thread()
            if own:
                coming = self._coming[key] = Task(partial(decode, key))
        if coming is None:
            return self._keep(key, decode(key))
        if not own:
            with suppress(Exception):  # whoever decodes it tells; here it is tried again
                return coming.result()
            return self._keep(key, decode(key))
        try:
            coming.run()
            return self._keep(key, coming.result())
        finally:
            with self._lock:
                del self._coming[key]

    def _keep(self, key: Hashable, tile: Array) -> Array:
        with self._lock:
            if tile.nbytes <= self._limit_bytes and key not in self._tiles:
                self._tiles[key] = tile
                self._held_bytes += tile.nbytes
                while self._held_bytes > self._limit_bytes:
                    self._drop()
        return tile

    def _drop(self) -> None:
        oldest = next(iter(self._settled or self._tiles))
        self._settled.pop(oldest, None)
        self._held_bytes -= self._tiles.pop(oldest).nbytes

    def settle(self, key: Hashable) -> None:
        """Note that this tile is not wanted again, as far as can be told."""
        with self._lock:
            if (tile := self._tiles.get(key)) is None:
                return
            self._settled[key] = None
            # Tiles of one cache are about of one size.
            if self._most_settled_bytes is not None and len(self._settled) * tile.nbytes > self._most_settled_bytes:
                self._drop()

    def clear(self) -> None:
        with self._lock:
            self._tiles.clear()
            self._settled.clear()
            self._held_bytes = 0


class ReadOrder:
    """A tracker of which pixels no later box wants, in an image that is read box by box from the top left."""

    def __init__(self, height: int, width: int) -> None:
        self._size = height, width
        self._last = Box(0, 0, 0, 0)
        self._overlap: int | None = None
        """Pixels that neighbouring boxes have in common, once there were two."""

    def settled(self, box: Box) -> tuple[int, int]:
        """Return how far down and to the right nothing behind this box begins, as far as can be told."""
        last, self._last = self._last, box
        # Compared by numbers, as this is asked for every patch of a bag.
        if box.x0 == last.x0 and box.x1 == last.x1:
            if box.y0 != last.y0 or box.y1 != last.y1:
                self._overlap = max(0, min(box.y1, last.y1) - max(box.y0, last.y0))
        elif box.y0 == last.y0 and box.y1 == last.y1:
            self._overlap = max(0, min(box.x1, last.x1) - max(box.x0, last.x0))
        overlap = self._overlap
        if overlap is None:
            return 0, 0
        height, width = self._size
        return box.y1 - overlap if box.y1 < height else _NEVER, box.x1 - overlap if box.x1 < width else _NEVER
