"""Lay out a field in a file as small square blocks of pixels ("bricks"), so that any box is read in few long runs.

Planning counts their bytes and stores write them. A brick holds all channels of its pixels, pixel by pixel; bricks lie
in the file row by row, each in a slot of whole pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gigagrad.boxes import Box

MOST_BYTES = 64 * 2**10
"""The most bytes of a brick, unless eight pixels a side are more."""
_SIDES_PX = (8, 16, 32, 64)
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Bricks:
    """The bricks of a field of `height x width` pixels of so many bytes each."""

    height: int
    width: int
    bytes_per_pixel: int

    @cached_property
    def side(self) -> int:
        """Return the pixels along a brick's side: as many as keep it within 64 KiB, but between 8 and 64."""
        fitting = [side for side in _SIDES_PX if side * side * self.bytes_per_pixel <= MOST_BYTES]
        return max(fitting, default=_SIDES_PX[0])

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Return the rows and columns of bricks."""
        return -(-self.height // self.side), -(-self.width // self.side)

    @cached_property
    def brick_bytes(self) -> int:
        return self.side**2 * self.bytes_per_pixel

    @cached_property
    def slot_bytes(self) -> int:
        """Return the size of a brick's place in the file."""
        return -(-self.brick_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def file_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.slot_bytes

    def offset(self, row: int, column: int) -> int:
        """Return where a brick's place in the file begins."""
        return (row * self.shape[1] + column) * self.slot_bytes

    def rows(self, box: Box) -> range:
        """Return the rows of bricks that the box touches."""
        return range(box.y0 // self.side, -(-box.y1 // self.side))

    def columns(self, box: Box) -> slice:
        """Return the columns of bricks that the box touches."""
        return slice(box.x0 // self.side, -(-box.x1 // self.side))

    def covered(self, row: int, box: Box) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return, for each brick that the box touches in one row of bricks, whether the box holds every pixel of it."""
        side, columns = self.side, self.columns(box)
        covered = np.zeros(columns.stop - columns.start, bool)
        if box.y0 <= row * side and box.y1 >= min((row + 1) * side, self.height):
            last = columns.stop if box.x1 == self.width else box.x1 // side
            covered[-(-box.x0 // side) - columns.start : max(0, last - columns.start)] = True
        return covered

    def row_bytes(self, width: int) -> int:
        """Return the most bytes of the bricks in one row that a box of this width touches."""
        columns = min((width + self.side - 2) // self.side + 1, self.shape[1])
        return columns * self.slot_bytes

    def read_ratio(self, height: int, width: int) -> float:
        """Return the pixels of bricks touched per pixel of a box of this size, on average over where it may lie."""
        return (height + self.side - 1) * (width + self.side - 1) / (height * width)
