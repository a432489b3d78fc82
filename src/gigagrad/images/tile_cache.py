"""Cache decoded file tiles that neighbouring reads share.

A tile's halo reaches into the file tiles of its neighbours, and tile boundaries rarely fall on the file's own, so most
file tiles are wanted two to four times in short succession.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from threading import Lock, current_thread, main_thread
from typing import TypeVar

from gigagrad.boxes import Box
from gigagrad.images.pixels import Array
from gigagrad.threads import Task

Key = TypeVar("Key", bound=Hashable)

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

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._tiles: OrderedDict[Hashable, Array] = OrderedDict()
        self._settled: dict[Hashable, None] = {}
        """The tiles that are not wanted again."""
        self._coming: dict[Hashable, Task[Array]] = {}
        self._lock = Lock()

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

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
                    oldest = next(iter(self._settled or self._tiles))
                    self._settled.pop(oldest, None)
                    self._held_bytes -= self._tiles.pop(oldest).nbytes
        return tile

    def settle(self, key: Hashable) -> None:
        """Note that this tile is not wanted again, as far as can be told."""
        with self._lock:
            if key in self._tiles:
                self._settled[key] = None

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
        common = box.intersect(last)
        if box != last and box.x == last.x and common.height >= 0:
            self._overlap = common.height
        elif box != last and box.y == last.y and common.width >= 0:
            self._overlap = common.width
        overlap = self._overlap
        if overlap is None:
            return 0, 0
        ends = zip((box.y1, box.x1), self._size, strict=True)
        down, right = (end - overlap if end < size else _NEVER for end, size in ends)
        return down, right
