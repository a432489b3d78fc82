"""Count and bound the memory of the host's processor: what is resident of the whole process."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import psutil
import torch

from gigagrad.allowances import (
    AMX_KERNEL_BYTES,
    FREE_SHARE,
    KERNEL_BYTES,
    LATER_RUNTIME_BYTES,
    MAPPED_BYTES,
    MOST_COMPILED,
    RUNTIME_BYTES,
    UNNOTICED_BYTES,
    most_kept,
)
from gigagrad.devices.buffer_pool import BufferPool
from gigagrad.devices.device import Device, MemoryGuard, Say, register_device
from gigagrad.devices.heap import (
    LargeBlocks,
    peak_resident_bytes,
    resident_bytes,
    return_freed_memory,
    return_largest_freed,
    settle_allocator,
    unused_bytes,
    used_bytes,
)
from gigagrad.devices.machine import Machine
from gigagrad.threads import call_beside, uninterrupted

_MATRIX_TILES = {torch.bfloat16: "amx_bf16", torch.float16: "amx_fp16"}
"""The capability that a processor needs for its matrix tiles to take numbers of a dtype; their kernels are larger."""


@dataclass(slots=True)
class Residue:
    """Memory that runs leave in the process beside tensors: a later run does not add it again."""

    warm: bool = False
    """True once the code of kernels and the stacks of threads are there."""
    compiled: int = 0
    """Convolutions in oneDNN's cache."""
    tried_bytes: int = 0
    """Bytes that trials of memory layouts have grown it by: kernels that the first run will not add again."""


@register_device
class Cpu(Device):
    kind = "cpu"
    is_host = True
    residue: ClassVar[Residue] = Residue()

    def __init__(self, name: str) -> None:
        super().__init__(name)
        settle_allocator()

    def held_bytes(self) -> int:
        return resident_bytes()

    def used_bytes(self, enough: int = 0) -> int | None:
        spare = BufferPool.held_bytes()
        used = used_bytes(enough + spare)
        return None if used is None else used - spare

    def peak_bytes(self) -> int:
        return peak_resident_bytes()

    def free_bytes(self, enough: int = sys.maxsize) -> int | None:
        unused = int(unused_bytes() * FREE_SHARE)
        return unused if unused >= enough else int(psutil.virtual_memory().available * FREE_SHARE)

    def trim(self) -> None:
        BufferPool.give_back()
        LargeBlocks.let_go()
        return_freed_memory()

    def give_back(self, nbytes: int) -> None:
        uninterrupted(partial(return_largest_freed, nbytes))

    def let_go(self) -> None:
        if LargeBlocks.are_kept():
            self.trim()

    def buffer_pool(self) -> BufferPool:
        return BufferPool()

    def step_bytes(self) -> int:
        fresh = max(LATER_RUNTIME_BYTES, RUNTIME_BYTES - self.residue.tried_bytes)
        return UNNOTICED_BYTES + (LATER_RUNTIME_BYTES if self.residue.warm else fresh)

    def compiled_bytes(self, count: int, dtypes: Collection[torch.dtype]) -> int:
        # PyTorch 2.9 does not tell; kernels on matrix tiles are the larger ones.
        with_tiles = dict.fromkeys(_MATRIX_TILES.values(), True)
        processor = getattr(torch.cpu, "get_capabilities", lambda: with_tiles)()
        on_tiles = any(processor.get(_MATRIX_TILES.get(dtype, ""), False) for dtype in dtypes)
        return min(count, MOST_COMPILED - self.residue.compiled) * (AMX_KERNEL_BYTES if on_tiles else KERNEL_BYTES)

    def note_compiled(self, compiled: int) -> None:
        self.residue.warm = True
        self.residue.compiled = min(self.residue.compiled + compiled, MOST_COMPILED)

    def tried(self, nbytes: int) -> None:
        self.residue.tried_bytes += nbytes

    def memory_guard(self, peak_bytes: int, budget_bytes: int | None) -> MemoryGuard:
        return HeapGuard(self, peak_bytes, budget_bytes)

    def machine(self, say: Say = lambda text: None) -> Machine:
        return Machine.detect(torch.get_num_threads(), say)


class HeapGuard(MemoryGuard):
    """Keep the allocator's cache inside the plan's `peak_bytes`, for one run.

    Between tiles, freed memory is given back where the next ones would exceed the plan beside it. That costs page
    faults in the next tile, so it happens only there, and ever more rarely where it does not help.

    Tiles of large blocks take them from the heap, where the next ones find pages that are there already
    (docs/decisions/0018-large-blocks.md). Nothing bounds what a heap grows to, so there is a look before every large
    block: where it might exceed the plan, freed memory is given back and large blocks are mapped one by one until the
    tile is done; until more tiles are, each time that it happens again. Smaller blocks come from the heap anyway. What
    the first tiles of a pass free there can be several times what they hold, so these are looked at, too.
    """

    _LONGEST_PAUSE = 64
    _LOOK_SECONDS = 0.005
    _LONGER_LOOK_SECONDS = 0.04
    """Between looks where nothing could be given back."""
    _AT_ONCE_BYTES = 32 * 2**20
    """Bytes given back beyond what is too much, so that not every look finds some."""

    def __init__(self, device: Device, peak_bytes: int, budget_bytes: int | None) -> None:
        self._device = device
        self._peak_bytes, self._budget_bytes = peak_bytes, budget_bytes
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        """Held while another thread looks."""
        self._watched = False
        self._in_heap = self._at_work = False
        self._blocks = LargeBlocks()
        self.begin_pass(0, 0)

    def begin_pass(self, tile_bytes: int, beside_bytes: int, largest_bytes: int = 0) -> None:
        """Expect the tiles computed at a time to take `tile_bytes` from now on, in blocks of up to `largest_bytes`;
        beside them `beside_bytes` are mapped and freed.
        """
        for_tiles = self._peak_bytes - beside_bytes - UNNOTICED_BYTES
        self._limit_bytes = for_tiles - tile_bytes
        self._roof_bytes = for_tiles - largest_bytes  # one more may come that nobody announces
        self._pause = self._tiles_to_go = 1
        self._mapped_pause, self._mapped_tiles = 1, 0
        self._unseen_bytes = self._room_bytes = 0
        self._large = largest_bytes >= MAPPED_BYTES
        self._serve(in_heap=bool(largest_bytes))

    @contextmanager
    def computing_tiles(self) -> Iterator[None]:
        """Let tiles take large blocks from the heap; what is taken at other times lives long, and stays out of it."""
        self._at_work = True
        self._serve(in_heap=self._in_heap)
        try:
            yield
        finally:
            self._at_work = False
            self._serve(in_heap=self._in_heap)

    @contextmanager
    def computing_whole(self) -> Iterator[None]:
        """Let a whole network take large blocks from the heap. A thread looks every few milliseconds, and gives back
        as much of what was freed as the next block might exceed the plan by: between two looks no more than one is
        filled.
        """
        bell = _thread.allocate_lock()
        bell.acquire()
        try:
            self._watched = self._in_heap
            if self._watched:
                call_beside(partial(self._look_until, bell), "gigagrad-memory")
            with self.computing_tiles():
                yield
        finally:
            with self._looking:
                self._watched = False
            bell.release()

    def _look_until(self, bell: _thread.LockType) -> None:
        pause = self._LOOK_SECONDS
        while not bell.acquire(timeout=pause):
            with self._looking:
                within = not self._watched or self._hold_within(self._roof_bytes)
            pause = self._LOOK_SECONDS if within else self._LONGER_LOOK_SECONDS

    def close(self, *, keeps: bool = False) -> None:
        """End the run: where it `keeps` what it freed, as much stays as leaves the same room beside it; else no more
        than between two tiles of blocks that are mapped.
        """
        self._in_heap = keeps
        self._blocks.close(keeps=keeps)
        if keeps:
            self._hold_within(self._most_kept())
        else:
            self.reserve(0)

    def _most_kept(self) -> int:
        """Return what may be held until the next run, by the budget, or by what is free without one."""
        room = self._budget_bytes
        if room is None:
            held = self._device.held_bytes()
            free = self._device.free_bytes(2 * self._roof_bytes - held)
            room = None if free is None else held + free
        if room is None or room >= 2 * self._roof_bytes or (used := self._device.used_bytes()) is None:
            return self._roof_bytes
        return most_kept(self._roof_bytes, used, room)

    def _hold_within(self, most: int) -> bool:
        """Return whether no more is held, with little more given back than that takes."""
        over = self._without_spare(most) - most
        if over <= 0:
            return True
        self._device.give_back(over + self._AT_ONCE_BYTES)
        return self._device.held_bytes() <= most or self._held_within(most)

    def reserve(self, nbytes: int, *, for_tile: bool = False) -> None:
        """Give back memory before so many bytes are taken: at once from the system, or as a block of a tile. There is a
        look before every large block, and of others before so many bytes of them that they might exceed the plan since
        the last look.
        """
        if not for_tile:
            self._held_within(self._now_bytes - nbytes)
            return
        with self._lock:
            self._unseen_bytes += nbytes
            if nbytes < MAPPED_BYTES and self._unseen_bytes < self._room_bytes:
                return
            held = self._without_spare(self._roof_bytes - nbytes)
            if held + nbytes > self._roof_bytes:
                if self._in_heap:
                    self._serve(in_heap=False)
                    self._mapped_tiles = self._mapped_pause
                    self._mapped_pause = min(2 * self._mapped_pause, self._LONGEST_PAUSE)
                self._device.trim()  # again and again: blocks that it holds from before are freed one by one
                held = self._device.held_bytes()
            self._unseen_bytes, self._room_bytes = 0, max(self._roof_bytes - held - nbytes, MAPPED_BYTES)

    def tile_done(self) -> None:
        """Note that a tile is computed, in whatever thread; others go on meanwhile."""
        with self._lock:
            if self._mapped_tiles:
                self._mapped_tiles -= 1
                self._serve(in_heap=not self._mapped_tiles)
            self._tiles_to_go -= 1
            if self._tiles_to_go:
                return
            self._room_bytes = 0
            helped = self._held_within(self._now_bytes)
            self._pause = 1 if helped else min(2 * self._pause, self._LONGEST_PAUSE)
            self._tiles_to_go = self._pause

    def is_short(self, tile_bytes: int, at_a_time: int) -> bool:
        """Return whether the budget has no room for another tile, with all given back that can be: the process holds
        more than the plan foresaw. Nothing is given back where there is room for all that may be computed at a time.
        """
        held = self._device.held_bytes()
        if self._budget_bytes is None or held + at_a_time * tile_bytes <= self._budget_bytes:
            return False
        if self._in_heap and held <= self._roof_bytes:  # the next tile is computed in what is held
            return False
        self._device.trim()
        return self._device.held_bytes() + tile_bytes > self._budget_bytes

    def _held_within(self, most: int) -> bool:
        """Return whether no more is held, with as little given back as that takes."""
        if self._without_spare(most) <= most:
            return True
        self._device.trim()
        return self._device.held_bytes() <= most

    def _without_spare(self, most: int) -> int:
        """Return what is held once the buffer pool has given back what is more."""
        held = self._device.held_bytes()
        return self._device.held_bytes() if held > most and BufferPool.give_back(held - most) else held

    @property
    def _now_bytes(self) -> int:
        """Return what may be held now: freed blocks in the heap serve the next tile."""
        return self._roof_bytes if self._in_heap else self._limit_bytes

    def _serve(self, *, in_heap: bool) -> None:
        """Let large blocks of tiles come from the heap, which holds on to what is freed, or from the system."""
        self._in_heap = in_heap
        self._blocks.choose(in_heap=in_heap and self._at_work and self._large, holding=in_heap)
