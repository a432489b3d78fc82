"""Decoded file tiles: which of them a box needs, and those that neighbouring reads share.

A tile's halo reaches into the file tiles of its neighbours, and tile boundaries rarely fall on the file's own, so most
file tiles are wanted two to four times in short succession.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from threading import Lock
from typing import TypeVar

from gigagrad.boxes import Box
from gigagrad.images.image import Array

Key = TypeVar("Key", bound=Hashable)

# Of tiles that one image keeps: two rows of file tiles along the short side of the founding experiment's slides (2 x
# 16000 x 256 px x RGB is 24 MiB), which a walk in strips along that side needs to decode every file tile once.
CACHE_BYTES = 32 * 2**20


def grid_parts(box: Box, height: int, width: int) -> Iterator[tuple[Box, Box, Box]]:
    """Tiles of a `height x width` px grid that meet `box`, each with the common part as seen from `box` and from it."""
    for row in range(box.y0 // height, -(-box.y1 // height)):
        for column in range(box.x0 // width, -(-box.x1 // width)):
            tile = Box.whole(height, width).shift(row * height, column * width)
            part = box.intersect(tile)
            yield tile, part.shift(-box.y0, -box.x0), part.shift(-tile.y0, -tile.x0)


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

    def get(self, key: Key, decode: Callable[[Key], Array]) -> Array:
        """The tile under `key`, decoded now if it is not held. Treat it as read-only: other readers see it too."""
        with self._lock:
            tile = self._tiles.get(key)
            if tile is not None:
                self._tiles.move_to_end(key)
                return tile
        tile = decode(key)
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
