"""Store fields in memory: the device's own, which the budget bounds, and the host's beside a device with another."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise, starmap
from math import prod

import psutil
import torch

from gigagrad.allowances import FREE_SHARE, whole_pages
from gigagrad.boxes import Box, Span
from gigagrad.devices import Machine
from gigagrad.devices.buffer_pool import BufferPool
from gigagrad.files import HOST
from gigagrad.graphs.crops import box_view, strides
from gigagrad.stores.store import FieldSpec, OpenTier, Size, Store, Tier


class HostStore(Store):
    """A field in one tensor. `memory_format` is that of the tiles, so that crops of it are read without reordering.

    Tiles come row by row from the top, so what has been reached is a staircase: in each column the pixels above some
    height. Zeros are written below it only where nothing else is; most pixels are written once by the first crop.
    The memory is one of the `spare` blocks, and that again when the store retires, unless the whole field was read.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        axes: tuple[int, int],
        *,
        device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
        spare: BufferPool | None = None,
    ) -> None:
        super().__init__(shape, dtype, axes)
        layout = memory_format if len(shape) == 4 else torch.contiguous_format
        self._spare, self._block = spare, None
        if spare is None:
            self._tensor = torch.empty(shape, dtype=dtype, device=device, memory_format=layout)
        else:
            self._block = spare.take(prod(shape) * dtype.itemsize)
            self._tensor = self._block.view(dtype).as_strided(shape, strides(shape, layout))
        self._edges, self._reached = [0, shape[axes[1]]], [0]
        """Columns between two edges have the same pixels, from the top, that hold what they should."""
        self._reaching = threading.Lock()
        self._whole = Box.whole(shape[axes[0]], shape[axes[1]])

    def _view(self, box: Box) -> torch.Tensor:
        if box == self._whole:
            return self._tensor
        return box_view(self._tensor, self.axes, box, self._whole)

    def read(self, box: Box) -> torch.Tensor:
        with self._reaching:
            self._clear(box.x, box.y1)
        return self._view(box)

    def write(self, box: Box, crop: torch.Tensor) -> None:
        with self._reaching:
            self._clear(box.x, box.y0)
            self._raise(box.x, box.y1)
        self._view(box).copy_(crop)

    def add(self, box: Box, crop: torch.Tensor) -> None:
        with self._reaching:
            self._clear(box.x, box.y0)
            steps = self._steps(box.x)
            self._raise(box.x, box.y1)
        for x, height in steps:
            known = min(max(height, box.y0), box.y1)
            for y, adds in ((Span(box.y0, known), True), (Span(known, box.y1), False)):
                if y.empty:
                    continue
                share = Box.of(y, x)
                own = box_view(crop, self.axes, share, box)
                if adds:
                    self._view(share).add_(own.to(self._tensor.device))
                else:
                    self._view(share).copy_(own)

    def flush(self) -> None:
        """Do nothing: nothing waits."""

    def close(self) -> None:
        self.__dict__.pop("_tensor", None)
        self._block = None

    def retire(self) -> None:
        if self._spare is not None and self._block is not None:
            self._spare.give(self._block)
        self.close()

    def whole(self) -> torch.Tensor:
        self._block = None  # who has the whole field may hold it longer
        return super().whole()

    def _steps(self, x: Span) -> list[tuple[Span, int]]:
        """Return the staircase over some columns: spans of one height each."""
        if x.empty:
            return []
        first, last = bisect_right(self._edges, x.start) - 1, bisect_left(self._edges, x.stop)
        edges = [x.start, *self._edges[first + 1 : last], x.stop]
        return list(zip(starmap(Span, pairwise(edges)), self._reached[first:last], strict=True))

    def _clear(self, x: Span, height: int) -> None:
        """Write zeros above `height`, where nothing has been reached."""
        if min(self._reached) >= height:
            return
        for columns, reached in self._steps(x):
            if reached < height:
                self._view(Box.of(Span(reached, height), columns)).zero_()
                self._raise(columns, height)

    def _raise(self, x: Span, height: int) -> None:
        """Note that these columns hold what they should down to `height` at least."""
        first, last = self._edge(x.start), self._edge(x.stop)
        self._reached[first:last] = [max(own, height) for own in self._reached[first:last]]
        for i in range(min(last, len(self._reached) - 1), max(first, 1) - 1, -1):
            if self._reached[i] == self._reached[i - 1]:
                del self._edges[i], self._reached[i]

    def _edge(self, column: int) -> int:
        """Return the number of an edge there; a new one, if need be."""
        i = bisect_left(self._edges, column)
        if self._edges[i] != column:
            self._edges.insert(i, column)
            self._reached.insert(i, self._reached[i - 1])
        return i


class MemoryTier(Tier):
    """The memory in which tiles are computed. It is open at any time, and its stores are closed one by one."""

    name = "memory"
    place = "memory"
    in_budget = True

    def __init__(self, device: torch.device | None = None, spare: BufferPool | None = None) -> None:
        """Keep fields on `device`: the host, unless named."""
        self._device, self._spare = device or torch.device("cpu"), spare

    def room_bytes(self) -> int | None:
        return None

    def field_bytes(self, size: Size, pixel_bytes: int) -> int:
        return whole_pages(super().field_bytes(size, pixel_bytes))

    def open(self, needed_bytes: int, machine: Machine) -> OpenTier:
        return self

    def open_store(self, field: FieldSpec) -> Store:
        return HostStore(
            field.shape, field.dtype, field.axes, device=self._device, memory_format=field.layout, spare=self._spare
        )

    def fresh_bytes(self, fields: Iterable[FieldSpec]) -> int:
        sizes = [field.nbytes for field in fields]
        return sum(sizes) if self._spare is None else self._spare.fresh_bytes(sizes)

    def close(self) -> None:
        """Do nothing: nothing is open."""


class HostTier(MemoryTier):
    """The host's memory beside a GPU. Memory of fields serves again, from step to step: the system clears what it hands
    out, which takes longer than copies to the GPU and back. It is no more than the plan that ran last keeps here.
    """

    name = "host"
    place = "host memory"
    in_budget = False
    remedy = "close other programs, or raise host_memory"

    def __init__(self, room_bytes: int | None = None) -> None:
        self._pool = BufferPool()
        super().__init__(spare=self._pool)
        self._room_bytes = room_bytes

    def open(self, needed_bytes: int, machine: Machine) -> OpenTier:
        self._pool.most_bytes = needed_bytes
        return self

    def room_bytes(self) -> int:
        free = int(psutil.virtual_memory().available * FREE_SHARE) + self._pool.own_bytes
        return free if self._room_bytes is None else self._room_bytes

    def shared_room(self) -> tuple[str, int] | None:
        """Return the machine's memory, unless somebody has said how much each rank may take."""
        return (HOST, self.room_bytes()) if self._room_bytes is None else None

    def link_seconds(self, nbytes: float, machine: Machine) -> float:
        return nbytes / machine.copy_bytes_per_second
