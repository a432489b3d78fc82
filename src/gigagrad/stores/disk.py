"""Store a field in a file, brick by brick, each with a checksum.

A box touches the bricks around it, so reading costs little more than its own bytes, and a row of bricks is one call.
The checksum of what is read is compared with that of what was written before anything is decoded: a file that changed
in between, be it to an older brick, is an error, never a wrong gradient. The tier of such files stands below.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import numpy.typing as npt
import torch

from gigagrad.allowances import FREE_SHARE, ROWS_AT_ONCE
from gigagrad.boxes import Box
from gigagrad.devices import Machine
from gigagrad.errors import StoreError
from gigagrad.files import HOST
from gigagrad.stores.scratch import PAGE_BYTES, Rows, Scratch, page_aligned
from gigagrad.stores.store import FieldSpec, OpenTier, Size, Store, Tier
from gigagrad.threads import Task, wait_for

MOST_BYTES = 64 * 2**10
"""The most bytes of a brick, unless eight pixels a side are more."""
_SIDES_PX = (8, 16, 32, 64)


@dataclass(frozen=True)
class Bricks:
    """A field of `height x width` pixels, of so many bytes each, in small square blocks: any box is a few long runs.

    A brick holds all channels of its pixels, pixel by pixel; bricks lie in the file row by row, each in a slot of whole
    pages.
    """

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


Bytes = npt.NDArray[np.uint8]

_imagecodecs: Any = imagecodecs  # takes any buffer; its type stubs name only three kinds


@lru_cache(maxsize=1024)
def _bricks(size: Size, pixel_bytes: int) -> Bricks:
    """Return the bricks of a field; plans ask for the same ones a million times."""
    return Bricks(*size, pixel_bytes)


@dataclass(frozen=True)
class Blosc:
    """Blosc2: the bits of like significance side by side (bitshuffle), then Zstandard at its fastest level; lossless.

    Signs, exponents and runs of zeros shrink; mantissas of raw floats do not. Each call runs on the calling thread
    alone and without the interpreter's lock, so that the caller decides how many run at once. A store compares
    checksums before this parser sees a byte.
    """

    def encode(self, data: Bytes, itemsize: int) -> bytes:
        """Encode `data` (uint8, C-contiguous); `itemsize`, the bytes of one number, tells which bytes are alike."""
        encoded: bytes = _imagecodecs.blosc2_encode(
            data, level=1, compressor="zstd", shuffle="bitshuffle", typesize=itemsize, numthreads=1
        )
        return encoded

    def decode(self, encoded: Bytes | bytes, out: Bytes) -> None:
        """Fill `out` (uint8, C-contiguous) with what was encoded. Raises `StoreError` for what was not."""
        try:
            _imagecodecs.blosc2_decode(encoded, numthreads=1, out=out)
        except (_imagecodecs.Blosc2Error, ValueError) as error:
            raise StoreError(
                f"a kept field is damaged: Blosc refuses {len(encoded)} bytes that should decode to {out.nbytes} "
                f"({error}); check the scratch disk, and run again with another `scratch` folder"
            ) from error


def faster_codec(link_bytes_per_second: float, codec_bytes_per_second: float, ratio: float) -> Blosc | None:
    """Return `Blosc` where it moves a field sooner than the bare link does.

    `codec_bytes_per_second` counts decoded bytes, the slower of both directions, 0 where it is not known; `ratio` is
    decoded over encoded bytes. The two times are added: while it encodes, the processor is not computing tiles, so
    nothing hides that time.
    """
    if not codec_bytes_per_second:
        return None
    seconds_per_byte = 1 / codec_bytes_per_second + 1 / (ratio * link_bytes_per_second)
    return Blosc() if seconds_per_byte < 1 / link_bytes_per_second else None


class DiskStore(Store):
    """A preallocated file in a run's scratch folder. Writing happens behind, reading waits for it.

    Every brick has room for all its bytes: a `codec` makes fewer of them travel, not the file smaller.

    Raises:
        StoreError: there is no space, the disk fails, or what is read is not what was written.
    """

    def __init__(self, field: FieldSpec, scratch: Scratch, codec: Blosc | None = None) -> None:
        super().__init__(field.shape, field.dtype, field.axes)
        self._rest = tuple(self.shape[axis] for axis in range(-len(self.shape), 0) if axis not in self.axes)
        height, width = (self.shape[axis] for axis in self.axes)
        self._layout = Bricks(height, width, prod(self._rest) * self.dtype.itemsize)
        self._checksums = np.zeros(self._layout.shape, np.uint32)
        self._lengths = np.zeros(self._layout.shape, np.uint32)
        """Bytes of each brick in its slot; bricks that have not been written hold zeros and have none."""
        self._codec = codec
        self._scratch = scratch
        self._path = scratch.folder / field.name
        self._file = scratch.create(field.name, self._layout.file_bytes)
        self._newest: Task[None] | None = None
        self._handing_over = threading.Lock()
        self._in_the_file = threading.Lock()
        """The lock of the file: boxes that do not overlap share bricks."""

    def read(self, box: Box) -> torch.Tensor:
        self.flush()
        result = torch.empty((*box.shape, *self._rest), dtype=self.dtype)

        def fill(row: int) -> None:
            for part, stored in self._matching(row, box, self._load(row, box), result):
                part.copy_(stored)

        with self._in_the_file:
            self._scratch.each(fill, self._layout.rows(box))
        return result.movedim((0, 1), self.axes)

    def write(self, box: Box, crop: torch.Tensor) -> None:
        self._update_behind(box, crop, add=False)

    def add(self, box: Box, crop: torch.Tensor) -> None:
        self._update_behind(box, crop, add=True)

    def flush(self) -> None:
        newest = self._newest
        if newest is not None:
            newest.result()

    def close(self) -> None:
        if self._newest is not None:
            wait_for([self._newest])
        self._file.close()

    def _update_behind(self, box: Box, crop: torch.Tensor, *, add: bool) -> None:
        pixels = crop.detach().to("cpu", self.dtype)
        if pixels.untyped_storage().nbytes() > pixels.nbytes:
            pixels = pixels.clone()  # a view would keep all of a larger crop until it is written
        pixels = pixels.movedim(self.axes, (0, 1))

        def change(row: int) -> None:
            bricks = self._load(row, box, ~self._layout.covered(row, box) if not add else None)
            for part, stored in self._matching(row, box, bricks, pixels):
                if add:
                    stored.add_(part)
                else:
                    stored.copy_(part)
            self._save(row, box, bricks)

        with self._handing_over:
            earlier = self._newest
            if earlier is not None and earlier.done():
                earlier.result()

            def update() -> None:
                if earlier is not None:
                    earlier.result()  # it is over; where it failed, nothing of this store can be read any more
                with self._in_the_file:
                    self._scratch.each(change, self._layout.rows(box))

            self._newest = self._scratch.behind(update)

    def _matching(
        self, row: int, box: Box, bricks: Rows, pixels: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield views of the same pixels in a crop on `box` and in the bricks of one row; whole bricks at once."""
        side, columns = self._layout.side, self._layout.columns(box)
        top, left = row * side, columns.start * side
        y0, y1 = max(box.y0, top), min(box.y1, top + side)
        strip = pixels[y0 - box.y0 : y1 - box.y0]
        each = torch.from_numpy(bricks[:, : self._layout.brick_bytes]).view(self.dtype)
        each = each.reshape(-1, side, side, *self._rest)[:, y0 - top : y1 - top]
        first, last = -(-box.x0 // side), box.x1 // side  # columns of whole bricks
        if first > last:
            yield strip, each[0, :, box.x0 - left : box.x1 - left]
            return
        if first < last:
            part = strip[:, first * side - box.x0 : last * side - box.x0]
            whole = each[first - columns.start : last - columns.start].transpose(0, 1)
            yield part.view(y1 - y0, last - first, side, *self._rest), whole
        if box.x0 < first * side:
            yield strip[:, : first * side - box.x0], each[0, :, box.x0 - left :]
        if last * side < box.x1:
            yield strip[:, last * side - box.x0 :], each[-1, :, : box.x1 - last * side]

    def _load(self, row: int, box: Box, wanted: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None) -> Rows:
        """Load the bricks that the box touches in one row of bricks, checked and decoded; with `wanted`, only those of
        them, and the others hold anything.
        """
        columns, brick_bytes = self._layout.columns(box), self._layout.brick_bytes
        lengths = self._lengths[row, columns]
        bricks = page_aligned(len(lengths), self._layout.slot_bytes)
        bricks[:, brick_bytes:] = 0
        there = lengths > 0
        wanted = np.ones_like(there) if wanted is None else wanted
        bricks[wanted & ~there] = 0
        stored_at = np.flatnonzero(wanted & there)
        if self._codec is None and len(stored_at):
            for run in np.split(stored_at, np.flatnonzero(np.diff(stored_at) > 1) + 1):
                first, last = int(run[0]), int(run[-1])
                self._file.read_into(bricks[first : last + 1], self._layout.offset(row, columns.start + first))
        for i in stored_at.tolist():
            column, length = columns.start + i, int(lengths[i])
            stored = bricks[i, :length]
            if self._codec is not None:
                stored = np.empty(length, np.uint8) if length < brick_bytes else stored
                self._file.read_into(stored, self._layout.offset(row, column))
            if _imagecodecs.deflate_crc32(stored) != self._checksums[row, column]:
                raise StoreError(
                    f"'{self._path}' does not hold what was written to it (checksum of block {row}, {column}); "
                    "the disk may be failing, or something else writes to the scratch folder"
                )
            if self._codec is not None and length < brick_bytes:
                self._codec.decode(stored, bricks[i, :brick_bytes])
        return bricks

    def _save(self, row: int, box: Box, bricks: Rows) -> None:
        columns, brick_bytes = self._layout.columns(box), self._layout.brick_bytes
        for i, column in enumerate(range(columns.start, columns.stop)):
            stored: Bytes | bytes = bricks[i, :brick_bytes]
            if self._codec is not None:
                encoded = self._codec.encode(bricks[i, :brick_bytes], self.dtype.itemsize)
                stored = encoded if len(encoded) < brick_bytes else stored
                self._file.write(memoryview(stored), self._layout.offset(row, column))
            self._checksums[row, column] = _imagecodecs.deflate_crc32(stored)
            self._lengths[row, column] = len(stored)
        if self._codec is None:
            self._file.write(memoryview(bricks).cast("B"), self._layout.offset(row, columns.start))


class DiskTier(Tier):
    """Files in `folder`, of at most `room_bytes` in all; without that, of what is free there."""

    name = "disk"
    place = "scratch files"
    encodes = True
    remedy = "make room in the scratch folder, name another one, or raise scratch_bytes"

    def __init__(self, folder: Path, room_bytes: int | None = None) -> None:
        self._folder, self._room_bytes = folder, room_bytes

    def room_bytes(self) -> int:
        _, free = self._disk()
        return free if self._room_bytes is None else min(free, self._room_bytes)

    def shared_room(self) -> tuple[str, int] | None:
        return self._disk()

    def _disk(self) -> tuple[str, int]:
        """Return the disk's name, by this machine's number, and the bytes free there. Raises StoreError."""
        try:
            free = int(shutil.disk_usage(self._folder).free * FREE_SHARE)
            disk = self._folder.stat().st_dev
        except OSError as error:
            reason = error.strerror or error
            raise StoreError(f"cannot use scratch folder '{self._folder}': {reason}; name one that is there") from error
        return f"{HOST} {disk}", free

    def open(self, needed_bytes: int, machine: Machine) -> OpenTier:
        codec = faster_codec(machine.disk_bytes_per_second, machine.codec_bytes_per_second, machine.codec_ratio)
        return _OpenFolder(Scratch(self._folder, needed_bytes), codec)

    def field_bytes(self, size: Size, pixel_bytes: int) -> int:
        return _bricks(size, pixel_bytes).file_bytes

    def crop_bytes(self, size: Size, crop: Size, pixel_bytes: int) -> float:
        """Return the bytes of the bricks that it touches, on average over where it may lie."""
        height, width, side = *crop, _bricks(size, pixel_bytes).side
        nbytes = height * width * pixel_bytes
        return (height + side - 1) * (width + side - 1) / (height * width) * nbytes if nbytes else 0.0

    def buffer_bytes(self, size: Size, crop: Size, pixel_bytes: int) -> int:
        return ROWS_AT_ONCE * _bricks(size, pixel_bytes).row_bytes(crop[1])

    def link_seconds(self, nbytes: float, machine: Machine) -> float:
        return nbytes / machine.disk_bytes_per_second

    def processor_seconds(self, nbytes: float, machine: Machine) -> float:
        return machine.file_seconds(nbytes)


class PlannedDiskTier(DiskTier):
    """Files of at most `room_bytes` on a disk that need not be here: to plan with, not to run."""

    def __init__(self, room_bytes: int) -> None:
        super().__init__(Path(), room_bytes)

    def room_bytes(self) -> int:
        return self._room_bytes or 0

    def shared_room(self) -> tuple[str, int] | None:
        return None

    def open(self, needed_bytes: int, machine: Machine) -> OpenTier:
        raise StoreError("scratch files were planned for without a folder to put them in; name one with scratch=")


class _OpenFolder:
    def __init__(self, scratch: Scratch, codec: Blosc | None) -> None:
        self._scratch, self._codec = scratch, codec

    def open_store(self, field: FieldSpec) -> Store:
        return DiskStore(field, self._scratch, Blosc() if field.coded else self._codec)

    def close(self) -> None:
        self._scratch.close()
