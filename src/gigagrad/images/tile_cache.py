"""Decoded file tiles that neighbouring reads share.

A tile's halo reaches into the file tiles of its neighbours, and tile boundaries rarely fall on the file's own, so most
file tiles are wanted two to four times in short succession.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock

from gigagrad.images.image import Array

# Holds two rows of file tiles along the short side of the founding experiment's slides (2 x 16000 x 256 px x RGB is
# 24 MiB), which is what a walk in strips along that side needs in order to decode every file tile once.
DEFAULT_CACHE_BYTES = 32 * 2**20


class TileCache:
    """A least-recently-used cache bounded in bytes; safe to use from several threads.

    Two threads that miss the same tile at the same moment both decode it: cheaper than making one wait.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._tiles: OrderedDict[Hashable, Array] = OrderedDict()
        self._lock = Lock()

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def get(self, key: Hashable, decode: Callable[[], Array]) -> Array:
        """The tile under `key`, decoded now if it is not held. Treat it as read-only: other readers see it too."""
        with self._lock:
            tile = self._tiles.get(key)
            if tile is not None:
                self._tiles.move_to_end(key)
                return tile
        tile = decode()
        if tile.nbytes > self._limit_bytes:
            return tile
        with self._lock:
            if key not in self._tiles:
                self._tiles[key] = tile
                self._held_bytes += tile.nbytes
                while self._held_bytes > self._limit_bytes:
                    _, dropped = self._tiles.popitem(last=False)
                    self._held_bytes -= dropped.nbytes
        return tile

    def clear(self) -> None:
        with self._lock:
            self._tiles.clear()
            self._held_bytes = 0
