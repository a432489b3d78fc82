"""The C library's allocator: which blocks it takes from the system one by one, and when it gives memory back.

Nothing here does anything where the library is not glibc.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gigagrad.execution.process import UNNOTICED_BYTES, resident_bytes
from gigagrad.plans.memory import MAPPED_BYTES

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
"""The numbers of these settings in glibc's malloc.h."""
_KEPT_BYTES = 64 * 2**20
"""What the top of the heap may keep of smaller ones."""
_MOST_MAPPED = 65536
"""Blocks that are mapped one by one may be so many, as the library has it."""
_NEVER = -1
"""A bound above which the top of the heap would be given back."""


def settle_allocator() -> None:
    """One arena for all threads, and large blocks mapped one by one (glibc), for the rest of the process.

    Arenas of their own hoard what their tiles freed, and give large blocks back only to fault them in again: with two
    workers that cost 80 MiB and a quarter of the time (docs/decisions/0005-tiles-side-by-side.md). What large blocks do
    to a heap is in docs/decisions/0013-whole-process-accounting.md.
    """
    # In the heap, a smaller block in the place of a larger one that was freed makes the next large one grow it.
    _set_options({_M_ARENA_MAX: 1, _M_MMAP_THRESHOLD: MAPPED_BYTES, _M_TRIM_THRESHOLD: _KEPT_BYTES})


def _set_options(options: dict[int, int]) -> None:
    if sys.platform.startswith("linux"):
        set_option = getattr(ctypes.CDLL(None), "mallopt", None)
        if set_option is not None:
            for option, value in options.items():
                set_option(option, value)


def return_freed_memory() -> None:
    """Ask the C library to give freed memory back to the system, where it can (glibc), and the system to leave it so.

    Where huge pages were asked for once, Linux makes whole ones again in the background (khugepaged), be the range all
    but empty: what was just given back would be resident again (docs/decisions/0015-huge-pages.md). New tensors ask for
    theirs anew.
    """
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        trim = getattr(libc, "malloc_trim", None)
        if trim is not None:
            trim(0)
        heap = _heap()
        if heap is not None:
            libc.madvise(ctypes.c_void_p(heap[0]), ctypes.c_size_t(heap[1] - heap[0]), mmap.MADV_NOHUGEPAGE)


def _heap() -> tuple[int, int] | None:
    """The addresses between which the C library's heap lies, the upper one excluded."""
    try:
        with open("/proc/self/maps") as maps:
            ranges = [line.split(maxsplit=1)[0].split("-") for line in maps if line.endswith("[heap]\n")]
    except OSError:
        return None
    return (int(ranges[0][0], 16), int(ranges[-1][1], 16)) if ranges else None


class Trimmer:
    """Keeps what the allocator hoards inside the plan's `peak_bytes`, for one run.

    Between tiles, freed memory is given back where the next ones would exceed the plan beside it. That costs page
    faults in the next tile, so it happens only there, and ever more rarely where it does not help.

    Tiles of large blocks take them from the heap, where the next ones find pages that are there already
    (docs/decisions/0018-large-blocks.md). Nothing bounds what a heap grows to, so there is a look before every large
    block: where it might exceed the plan, freed memory is given back and large blocks are mapped one by one until the
    tile is done; until more tiles are, each time that it happens again. Smaller blocks come from the heap anyway. What
    the first tiles of a pass free there can be several times what they hold, so these are looked at, too.
    """

    _LONGEST_PAUSE = 64

    def __init__(self, peak_bytes: int, budget_bytes: int | None) -> None:
        self._peak_bytes, self._budget_bytes = peak_bytes, budget_bytes
        self._lock = threading.Lock()
        self._in_heap = self._was_in_heap = self._at_work = False
        self.begin_pass(0, 0)

    def begin_pass(self, tile_bytes: int, beside_bytes: int, largest_bytes: int = 0) -> None:
        """The tiles computed at a time take `tile_bytes` from now on, in blocks of up to `largest_bytes`; beside them
        `beside_bytes` are mapped and freed.
        """
        for_tiles = self._peak_bytes - beside_bytes - UNNOTICED_BYTES
        self._limit_bytes = for_tiles - tile_bytes
        self._roof_bytes = for_tiles - largest_bytes  # one more may come that nobody announces
        self._pause = self._tiles_to_go = 1
        self._mapped_pause, self._mapped_tiles = 1, 0
        self._unseen_bytes = self._room_bytes = 0
        self._serve(in_heap=largest_bytes >= MAPPED_BYTES)

    @contextmanager
    def tiles_at_work(self) -> Iterator[None]:
        """What is taken at other times lives long, and stays out of the heap."""
        self._at_work = True
        self._serve(in_heap=self._in_heap)
        try:
            yield
        finally:
            self._at_work = False
            self._serve(in_heap=self._in_heap)

    def close(self) -> None:
        """The run is over: no more of what it freed stays than between two tiles of blocks that are mapped."""
        self._serve(in_heap=False)
        self.make_room(0)

    def make_room(self, nbytes: int) -> None:
        """Before so many bytes are taken from the system at once, and not from what tiles freed."""
        if resident_bytes() + nbytes > self._now_bytes:
            return_freed_memory()

    def block_coming(self, nbytes: int) -> None:
        """Before a tile takes a block, in whatever thread. A look before every large one, and of others before so many
        bytes of them that they might exceed the plan since the last look.
        """
        with self._lock:
            self._unseen_bytes += nbytes
            if nbytes < MAPPED_BYTES and self._unseen_bytes < self._room_bytes:
                return
            held = resident_bytes()
            if held + nbytes > self._roof_bytes:
                if self._in_heap:
                    self._serve(in_heap=False)
                    self._mapped_tiles = self._mapped_pause
                    self._mapped_pause = min(2 * self._mapped_pause, self._LONGEST_PAUSE)
                return_freed_memory()  # again and again: blocks that it holds from before are freed one by one
                held = resident_bytes()
            self._unseen_bytes, self._room_bytes = 0, max(self._roof_bytes - held - nbytes, MAPPED_BYTES)

    def tile_done(self) -> None:
        """After a tile is computed, in whatever thread: others go on meanwhile, and need not wait for its result."""
        with self._lock:
            if self._mapped_tiles:
                self._mapped_tiles -= 1
                self._serve(in_heap=not self._mapped_tiles)
            self._tiles_to_go -= 1
            if self._tiles_to_go:
                return
            self._room_bytes = 0
            if resident_bytes() > self._now_bytes:
                return_freed_memory()
                helped = resident_bytes() <= self._now_bytes
                self._pause = 1 if helped else min(2 * self._pause, self._LONGEST_PAUSE)
            self._tiles_to_go = self._pause

    def is_short(self, tile_bytes: int, at_a_time: int) -> bool:
        """Whether the budget has no room for another tile, with all given back that can be: the process holds more than
        the plan foresaw. Nothing is given back where there is room for all that may be computed at a time.
        """
        held = resident_bytes()
        if self._budget_bytes is None or held + at_a_time * tile_bytes <= self._budget_bytes:
            return False
        if self._in_heap and held <= self._roof_bytes:  # the next tile is computed in what is held
            return False
        return_freed_memory()
        return resident_bytes() + tile_bytes > self._budget_bytes

    @property
    def _now_bytes(self) -> int:
        """What may be held now: freed blocks in the heap serve the next tile, and before each one there is a look."""
        return self._roof_bytes if self._in_heap else self._limit_bytes

    def _serve(self, *, in_heap: bool) -> None:
        """Large blocks of tiles come from the heap, which keeps what is freed, or from the system."""
        self._in_heap = in_heap
        self._was_in_heap = self._was_in_heap or in_heap
        if self._was_in_heap:
            mapped = 0 if in_heap and self._at_work else _MOST_MAPPED
            _set_options({_M_MMAP_MAX: mapped, _M_TRIM_THRESHOLD: _NEVER if in_heap else _KEPT_BYTES})
