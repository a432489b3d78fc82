"""What this process holds in memory, as the operating system counts it."""

from __future__ import annotations

import ctypes
import io
import mmap
import sys
from dataclasses import dataclass

import torch

UNNOTICED_BYTES = 16 * 2**20
"""Allowed for in every plan: what a process may grow by before the planner looks at it again, and what other threads
allocate while the trimmer looks."""


def resident_bytes() -> int:
    """Resident memory of this process now. Asked several hundred times in a step, so without buffers.

    A file object, not a descriptor: Ctrl-C just after it was opened would leave that behind.
    """
    try:
        with io.FileIO("/proc/self/statm") as statm:
            return int(statm.read(256).split()[1]) * mmap.PAGESIZE
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
        pass
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        memory = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def used_bytes(enough: int = 0) -> int | None:
    """Resident memory less the freed blocks that the C library keeps in its heap; None where that is not told. Where
    not even what is resident is more than `enough`, that: to look through a heap takes milliseconds.
    """
    if not sys.platform.startswith("linux"):
        return None
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    if (resident := resident_bytes()) <= enough:
        return resident
    ask.restype = _MallocInfo
    allocated = int(ask().uordblks)
    return resident - max(0, _resident_heap_bytes() - allocated)


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


@dataclass(slots=True)
class Residue:
    """What runs leave in the process beside tensors: a later run does not add it again."""

    warm: bool = False
    """The code of kernels and the stacks of threads are there."""
    compiled: int = 0
    """Convolutions in oneDNN's cache."""
    tried_bytes: int = 0
    """What trials of memory layouts have grown it by: kernels that the first run will not add again."""


RESIDUE = Residue()


def held_bytes(device: torch.device) -> int:
    """Memory held now on the tier that `memory` bounds: the process on the CPU, the allocator's pool on a GPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else resident_bytes()


def peak_bytes(device: torch.device) -> int:
    """The highest `held_bytes` has been."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_resident_bytes()
