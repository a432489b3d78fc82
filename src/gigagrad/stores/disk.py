"""A field in a file, brick by brick (bricks.py), each with a checksum.

A box touches the bricks around it, so reading costs little more than its own bytes, and a row of bricks is one call.
What is read is compared with what was written: a file that changed in between is an error, never a wrong gradient.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from typing import Any

import imagecodecs
import numpy as np
import torch

from gigagrad.boxes import Box
from gigagrad.bricks import Bricks
from gigagrad.errors import StoreError
from gigagrad.stores.codecs import Codec
from gigagrad.stores.scratch import Scratch
from gigagrad.stores.store import Store

_crc32: Any = imagecodecs.deflate_crc32  # takes any buffer; its type stubs name only three kinds

Rows = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
"""Bricks as they lie in the file: one a row, its slot's bytes along it."""


class DiskStore(Store):
    """One preallocated file in a run's scratch folder. Writing happens behind; read what another pass wrote, only.

    Every brick has room for all its bytes: a `codec` makes fewer of them travel, not the file smaller.

    Raises:
        StoreError: there is no space, the disk fails, or what is read is not what was written.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        axes: tuple[int, int],
        *,
        scratch: Scratch,
        name: str,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(shape, dtype, axes)
        self._height, self._width = (shape[axis] for axis in axes)
        self._others = [axis for axis in range(-len(shape), 0) if axis not in axes]
        self._rest = tuple(shape[axis] for axis in self._others)
        bricks = Bricks(self._height, self._width, prod(self._rest) * dtype.itemsize)
        self._side, self._slot_bytes, self._brick_bytes = bricks.side, bricks.slot_bytes, bricks.brick_bytes
        self._checksums = np.zeros(bricks.shape, np.uint32)
        self._lengths = np.zeros(bricks.shape, np.uint32)
        """Bytes of each brick in its slot; bricks that have not been written hold zeros and have none."""
        self._codec = codec
        self._scratch = scratch
        self._path = scratch.folder / name
        self._file = scratch.create(name, bricks.file_bytes)

    def read(self, box: Box) -> torch.Tensor:
        result = torch.empty((*box.shape, *self._rest), dtype=self.dtype)
        for row in self._rows(box):
            for inside, part in self._overlaps(row, box, self._load(row, box)):
                _crop(result, inside).copy_(part)
        return self._as_stored(result)

    def write(self, box: Box, crop: torch.Tensor) -> None:
        self._update_behind(box, crop, add=False)

    def add(self, box: Box, crop: torch.Tensor) -> None:
        self._update_behind(box, crop, add=True)

    def flush(self) -> None:
        self._scratch.flush()

    def close(self) -> None:
        self._scratch.flush()
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def _update_behind(self, box: Box, crop: torch.Tensor, *, add: bool) -> None:
        pixels = crop.detach().to("cpu", self.dtype)
        if pixels.untyped_storage().nbytes() > pixels.nbytes:
            pixels = pixels.clone()  # a view would keep all of a larger crop until it is written
        pixels = pixels.permute(*self.axes, *self._others)
        self._scratch.behind(lambda: self._update(box, pixels, add=add))

    def _update(self, box: Box, crop: torch.Tensor, *, add: bool) -> None:
        """Replace, or add to, the pixels of the box, brick row by brick row."""
        for row in self._rows(box):
            bricks = self._load(row, box) if add or not self._covers(box, row) else self._blank(box)
            for inside, part in self._overlaps(row, box, bricks):
                if add:
                    part.add_(_crop(crop, inside))
                else:
                    part.copy_(_crop(crop, inside))
            self._save(row, box, bricks)

    def _rows(self, box: Box) -> range:
        return range(box.y0 // self._side, -(-box.y1 // self._side))

    def _columns(self, box: Box) -> slice:
        return slice(box.x0 // self._side, -(-box.x1 // self._side))

    def _covers(self, box: Box, row: int) -> bool:
        """Whether the box holds every pixel of the bricks that it touches in this row of bricks."""
        side = self._side
        y_inside = box.y0 <= row * side and box.y1 >= min((row + 1) * side, self._height)
        return y_inside and box.x0 % side == 0 and (box.x1 % side == 0 or box.x1 == self._width)

    def _blank(self, box: Box) -> Rows:
        columns = self._columns(box)
        return np.zeros((columns.stop - columns.start, self._slot_bytes), np.uint8)

    def _overlaps(self, row: int, box: Box, bricks: Rows) -> Iterator[tuple[Box, torch.Tensor]]:
        """For each brick in a row of them: what it shares with the box, counted from the box's corner, as a view."""
        side, columns = self._side, self._columns(box)
        pixels = torch.from_numpy(bricks[:, : self._brick_bytes]).view(self.dtype)
        top = row * side
        each = pixels.reshape(-1, side, side, *self._rest)
        for brick, left in zip(each, range(columns.start * side, columns.stop * side, side), strict=True):
            shared = box.intersect(Box(top, left, top + side, left + side))
            yield shared.shift(-box.y0, -box.x0), _crop(brick, shared.shift(-top, -left))

    def _load(self, row: int, box: Box) -> Rows:
        """The bricks that the box touches in one row of bricks, checked and decoded."""
        columns = self._columns(box)
        bricks = self._blank(box)
        lengths = self._lengths[row, columns]
        if lengths.any() and self._codec is None:
            self._read_into(bricks, self._offset(row, columns.start))
        for i, (column, length) in enumerate(zip(range(columns.start, columns.stop), lengths.tolist(), strict=True)):
            if not length:
                bricks[i] = 0
                continue
            stored = bricks[i, :length]
            if self._codec is not None:
                stored = np.empty(length, np.uint8) if length < self._brick_bytes else stored
                self._read_into(stored, self._offset(row, column))
            if _crc32(stored) != self._checksums[row, column]:
                raise StoreError(
                    f"'{self._path}' does not hold what was written to it (checksum of block {row}, {column}); "
                    "the disk may be failing, or something else writes to the scratch folder"
                )
            if self._codec is not None and length < self._brick_bytes:
                self._codec.decode(stored.data, bricks[i, : self._brick_bytes])
        return bricks

    def _save(self, row: int, box: Box, bricks: Rows) -> None:
        columns = self._columns(box)
        for i, column in enumerate(range(columns.start, columns.stop)):
            stored: Rows | bytes = bricks[i, : self._brick_bytes]
            if self._codec is not None:
                encoded = self._codec.encode(bricks[i, : self._brick_bytes], self.dtype.itemsize)
                stored = encoded if len(encoded) < self._brick_bytes else stored
                self._write(memoryview(stored), self._offset(row, column))
            self._checksums[row, column] = _crc32(stored)
            self._lengths[row, column] = len(stored)
        if self._codec is None:
            self._write(memoryview(bricks).cast("B"), self._offset(row, columns.start))

    def _offset(self, row: int, column: int) -> int:
        return (row * self._lengths.shape[1] + column) * self._slot_bytes

    def _read_into(self, target: Rows, offset: int) -> None:
        try:
            count = os.preadv(self._file, [memoryview(target).cast("B")], offset)
        except OSError as error:
            raise StoreError(f"cannot read '{self._path}': {error.strerror or error}") from error
        if count != target.nbytes:
            raise StoreError(f"'{self._path}' ended early: it has been changed since it was written")

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            try:
                count = os.pwrite(self._file, data, offset)
            except OSError as error:
                raise StoreError(f"cannot write '{self._path}': {error.strerror or error}") from error
            data, offset = data[count:], offset + count

    def _as_stored(self, pixels: torch.Tensor) -> torch.Tensor:
        """From `(height, width, others...)` to the field's own order of axes: a view."""
        rank = len(self.shape)
        order = [0] * rank
        for position, axis in enumerate((*self.axes, *self._others)):
            order[axis + rank] = position
        return pixels.permute(order)


def _crop(pixels: torch.Tensor, box: Box) -> torch.Tensor:
    return pixels[box.y0 : box.y1, box.x0 : box.x1]
