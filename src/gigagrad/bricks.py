"""How a field lies in a file: small square blocks of pixels ("bricks"), so that any box is read in few long runs.

Planning counts their bytes and stores write them. A brick holds all channels of its pixels, pixel by pixel; bricks lie
in the file row by row, each in a slot of whole pages.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_BYTES = 64 * 2**10
"""Of a brick, unless eight pixels a side are more."""
_SIDES_PX = (8, 16, 32, 64)
PAGE_BYTES = 4096

WRITES_BEHIND = 2
"""Crops that wait to be written, at most, before the computation waits for the disk; plans count them."""
ROWS_AT_ONCE = 4
"""Rows of bricks on their way between crops and the disk at once, at most; plans count them."""


@dataclass(frozen=True, slots=True)
class Bricks:
    """The bricks of a field of `height x width` pixels of so many bytes each."""

    height: int
    width: int
    bytes_per_pixel: int

    @property
    def side(self) -> int:
        """Pixels along a brick's side: as many as keep it within 64 KiB, but between 8 and 64."""
        fitting = [side for side in _SIDES_PX if side * side * self.bytes_per_pixel <= MOST_BYTES]
        return max(fitting, default=_SIDES_PX[0])

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of bricks."""
        return -(-self.height // self.side), -(-self.width // self.side)

    @property
    def brick_bytes(self) -> int:
        return self.side**2 * self.bytes_per_pixel

    @property
    def slot_bytes(self) -> int:
        """A brick's place in the file."""
        return -(-self.brick_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def file_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.slot_bytes

    def row_bytes(self, width: int) -> int:
        """Of the bricks in one row that a box of this width touches, at most."""
        columns = min((width + self.side - 2) // self.side + 1, self.shape[1])
        return columns * self.slot_bytes

    def read_ratio(self, height: int, width: int) -> float:
        """Pixels of bricks touched per pixel of a box of this size, on average over where it may lie."""
        side = self.side
        touched = [(length + side - 1) for length in (height, width)]
        return touched[0] * touched[1] / (height * width)
