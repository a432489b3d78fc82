"""What this process holds in memory, as the operating system counts it."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
from dataclasses import dataclass

import torch

from gigagrad.plans.memory import MAPPED_BYTES

UNNOTICED_BYTES = 16 * 2**20
"""Allowed for in every plan: what a process may grow by before the planner looks at it again, and what other threads
allocate while the trimmer looks."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""The numbers of these settings in glibc's malloc.h."""
_KEPT_BYTES = 64 * 2**20
"""What the top of the heap may keep of smaller ones."""


def resident_bytes() -> int:
    """Resident memory of this process now."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import psutil

        return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The highest resident memory of this process since it started.

    On Linux from `VmHWM`: `getrusage` would count the parent's memory too, in which a new process begins its life.
    """
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def used_bytes() -> int | None:
    """Resident memory less the freed blocks that the C library keeps in its heap; None where that is not told."""
    if not sys.platform.startswith("linux"):
        return None
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = _MallocInfo
    allocated = int(ask().uordblks)
    return resident_bytes() - max(0, _resident_heap_bytes() - allocated)


def _resident_heap_bytes() -> int:
    """Of the C library's heap, which may be several mappings in a row."""
    found, inside = 0, False
    try:
        with open("/proc/self/smaps") as smaps:
            for line in smaps:
                if line[0] in "0123456789abcdef":  # the head of a mapping; what follows begins with capitals
                    if inside and not line.endswith("[heap]\n"):
                        break
                    inside = line.endswith("[heap]\n")
                elif inside and line.startswith("Rss:"):
                    found += int(line.split()[1]) * 1024
    except OSError:
        return 0
    return found


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


@dataclass(slots=True)
class Residue:
    """What runs leave in the process beside tensors: a later run does not add it again."""

    warm: bool = False
    """The code of kernels and the stacks of threads are there."""
    compiled_bytes: int = 0
    """Of convolutions in oneDNN's cache."""
    tried_bytes: int = 0
    """What trials of memory layouts have grown it by: kernels that the first run will not add again."""


RESIDUE = Residue()


def settle_allocator() -> None:
    """One arena for all threads, and large blocks mapped one by one (glibc), for the rest of the process.

    Arenas of their own hoard what their tiles freed, and give large blocks back only to fault them in again: with two
    workers that cost 80 MiB and a quarter of the time (docs/decisions/0005-tiles-side-by-side.md). What large blocks do
    to a heap is in docs/decisions/0013-whole-process-accounting.md.
    """
    if sys.platform.startswith("linux"):
        set_option = getattr(ctypes.CDLL(None), "mallopt", None)
        if set_option is not None:
            set_option(_M_ARENA_MAX, 1)
            # In the heap, a smaller block in the place of a larger one that was freed makes the next large one grow it.
            set_option(_M_MMAP_THRESHOLD, MAPPED_BYTES)
            set_option(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def held_bytes(device: torch.device) -> int:
    """Memory held now on the tier that `memory` bounds: the process on the CPU, the allocator's pool on a GPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else resident_bytes()


def peak_bytes(device: torch.device) -> int:
    """The highest `held_bytes` has been."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_resident_bytes()


class Trimmer:
    """Keeps the allocator's hoard inside the plan: between tiles, gives freed memory back where the next ones would
    exceed the plan's `peak_bytes` beside it.

    Giving back costs page faults in the next tile, so it happens only there, and ever more rarely where it does not
    help.
    """

    _LONGEST_PAUSE = 64

    def __init__(self, peak_bytes: int, budget_bytes: int | None) -> None:
        self._peak_bytes, self._budget_bytes = peak_bytes, budget_bytes
        self.begin_pass(0)

    def begin_pass(self, tile_bytes: int) -> None:
        """The tiles computed at a time take so much from now on, with what is mapped and freed beside them."""
        self._limit_bytes = self._peak_bytes - tile_bytes - UNNOTICED_BYTES
        self._pause = 1
        self._tiles_to_go = 1

    def make_room(self, nbytes: int) -> None:
        """Before so many bytes are taken from the system at once, and not from what tiles freed."""
        if resident_bytes() + nbytes > self._limit_bytes:
            return_freed_memory()

    def tile_done(self) -> None:
        self._tiles_to_go -= 1
        if self._tiles_to_go:
            return
        if resident_bytes() > self._limit_bytes:
            return_freed_memory()
            helped = resident_bytes() <= self._limit_bytes
            self._pause = 1 if helped else min(2 * self._pause, self._LONGEST_PAUSE)
        self._tiles_to_go = self._pause

    def is_short(self, tile_bytes: int, at_a_time: int) -> bool:
        """Whether the budget has no room for another tile, with all given back that can be: the process holds more than
        the plan foresaw. Nothing is given back where there is room for all that may be computed at a time.
        """
        if self._budget_bytes is None or resident_bytes() + at_a_time * tile_bytes <= self._budget_bytes:
            return False
        return_freed_memory()
        return resident_bytes() + tile_bytes > self._budget_bytes
