"""Measure the memory of this process as the operating system counts it, and set what holds for all of it: the C
library's allocator and the environment that PyTorch reads when it is loaded. Nothing of it is set anywhere else.

Without glibc nothing is set, and freed memory is given back when the C library likes.
"""

from __future__ import annotations

import ctypes
import getpass
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import dropwhile, takewhile
from typing import ClassVar
from weakref import WeakValueDictionary

from gigagrad.allowances import ANNOUNCED_BYTES, HEAP_TOP_BYTES, MAPPED_BYTES
from gigagrad.threads import living

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
"""The numbers of these settings in glibc's malloc.h."""
_MOST_MAPPED = 65536
"""The most blocks that are mapped one by one, as the library has it."""
_NEVER = -1
"""A bound above which the top of the heap would be given back."""


def before_pytorch(*, own_process: bool = False) -> None:
    """Set what PyTorch reads from the environment once, when it is loaded; what the user has set stays.

    Large blocks in huge pages (docs/decisions/0015-huge-pages.md). All threads share one arena before any of them has
    its own: what is freed in another one no tile finds, nor who gives it back. In a process of our own (the command
    line) its threads also wait without spinning: beside another busy process, spinning made steps 3 to 20 times slower;
    that a rank was lost is said in one line, without the stack of every connection to it; and a user who has a number
    and no name (clusters, containers) gets one, as PyTorch and others name folders by it.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    _set_options({_M_ARENA_MAX: 1})
    if own_process:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        try:
            getpass.getuser()
        except (KeyError, OSError):
            os.environ["USER"] = f"user-{os.getuid()}"


class LargeBlocks:
    """The source of the large blocks of one run: the heap, which holds on to what is freed, or the system.

    The setting is the whole process's. Of several runs at once, one that wants blocks from the system is heeded.
    """

    _wanting: ClassVar[WeakValueDictionary[int, LargeBlocks]] = WeakValueDictionary()
    _now: ClassVar[tuple[bool, bool]] = False, False
    _setting: ClassVar[threading.Lock] = threading.Lock()
    _changed: ClassVar[bool] = False
    _kept: ClassVar[bool] = False
    """True where the last run left what it freed in the heap, until somebody trims it."""
    _wanted: tuple[bool, bool] | None = None

    def choose(self, *, in_heap: bool, holding: bool) -> None:
        """Choose the source; `holding`: what is freed in the heap stays, whether large blocks come from it or not."""
        if self._wanted == (in_heap, holding):  # asked several times a pass
            return
        self._wanted = in_heap, holding
        self._wanting[id(self)] = self
        self._set()

    def close(self, *, keeps: bool = False) -> None:
        """End the choice; `keeps`: what is freed in the heap stays until `let_go`."""
        self._wanting.pop(id(self), None)
        self._wanted = None
        LargeBlocks._kept = keeps
        self._set()

    @classmethod
    def are_kept(cls) -> bool:
        return cls._kept

    @classmethod
    def let_go(cls) -> None:
        """Have the heap give back from now on what no run wants to keep."""
        if cls._kept:
            cls._kept = False
            cls._set()

    @classmethod
    @contextmanager
    def mapped(cls) -> Iterator[None]:
        """Map blocks for which the heap would have to grow, in the block."""
        own = cls()
        own.choose(in_heap=False, holding=cls._now[1])
        try:
            yield
        finally:
            own._wanting.pop(id(own), None)
            cls._set()

    @classmethod
    def _set(cls) -> None:
        """Heed what is wanted. Nobody waits: a run may be closed as garbage in the middle of this, so whoever comes
        meanwhile only says so to whoever is at it.
        """
        cls._changed = True
        while cls._changed and cls._setting.acquire(blocking=False):
            try:
                cls._changed = False
                wanted = [one._wanted for one in living(cls._wanting) if one._wanted is not None]
                now = tuple(all(one[i] for one in wanted) if wanted else i == 1 and cls._kept for i in (0, 1))
                if now != cls._now:
                    cls._now = in_heap, holding = now[0], now[1]
                    mapped, top = 0 if in_heap else _MOST_MAPPED, _NEVER if holding else HEAP_TOP_BYTES
                    _set_options({_M_MMAP_MAX: mapped, _M_TRIM_THRESHOLD: top})
            finally:
                cls._setting.release()


def settle_allocator() -> None:
    """Use one arena for all threads, and map large blocks one by one (glibc), for the rest of the process.

    Arenas of their own hoard what their tiles freed, and give large blocks back only to fault them in again: with two
    workers that cost 80 MiB and a quarter of the time (docs/decisions/0005-tiles-side-by-side.md). What large blocks do
    to a heap is in docs/decisions/0013-whole-process-accounting.md.
    """
    # In the heap, a smaller block in the place of a larger one that was freed makes the next large one grow it.
    _set_options({_M_ARENA_MAX: 1, _M_MMAP_THRESHOLD: MAPPED_BYTES, _M_TRIM_THRESHOLD: HEAP_TOP_BYTES})


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _set_options(options: dict[int, int]) -> None:
    if sys.platform.startswith("linux"):
        set_option = getattr(_libc(), "mallopt", None)
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
        libc = _libc()
        trim = getattr(libc, "malloc_trim", None)
        if trim is not None:
            trim(0)
        heap = _heap()
        if heap is not None:
            libc.madvise(ctypes.c_void_p(heap[0]), ctypes.c_size_t(heap[1] - heap[0]), mmap.MADV_NOHUGEPAGE)


def return_largest_freed(nbytes: int) -> None:
    """Give the pages of the largest freed blocks in the heap back to the system, until these were so many bytes; the
    rest serves the next blocks. To reach them they are taken from the C library, and freed again.
    """
    heap = _heap()
    if heap is None or not sys.platform.startswith("linux"):
        return
    libc, (start, end) = _libc(), heap
    libc.malloc.restype = ctypes.c_void_p
    enough, size, taken = resident_bytes() - nbytes, 1 << (end - start).bit_length(), []
    try:
        with LargeBlocks.mapped():  # the heap does not grow where no freed block is as large
            while resident_bytes() > enough and size >= ANNOUNCED_BYTES:
                block = libc.malloc(ctypes.c_size_t(size))
                if block is None or not start <= block <= end - size:
                    libc.free(ctypes.c_void_p(block))
                    size //= 2
                    continue
                taken.append(block)
                first = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
                inside = (block + size - first) // mmap.PAGESIZE * mmap.PAGESIZE
                for advice in (mmap.MADV_DONTNEED, mmap.MADV_NOHUGEPAGE):
                    libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(inside), advice)
    finally:
        for block in taken:
            libc.free(ctypes.c_void_p(block))


def _heap() -> tuple[int, int] | None:
    """Find the addresses between which the C library's heap lies, the upper one excluded."""
    try:
        with open("/proc/self/maps") as maps:
            # Its parts lie side by side, near the top of a long list that takes a millisecond to read.
            from_heap = dropwhile(lambda line: not line.endswith("[heap]\n"), maps)
            heap = takewhile(lambda line: line.endswith("[heap]\n"), from_heap)
            ranges = [line.split(maxsplit=1)[0].split("-") for line in heap]
    except OSError:
        return None
    return (int(ranges[0][0], 16), int(ranges[-1][1], 16)) if ranges else None


def resident_bytes() -> int:
    """Return the resident memory of this process now. Asked several hundred times in a step, so of an open file."""
    try:
        return int(os.pread(_own("statm"), 256, 0).split()[1]) * mmap.PAGESIZE
    except (OSError, AttributeError):  # the system has no such file, or no such call
        import psutil

        return int(psutil.Process().memory_info().rss)


@cache
def _own(name: str) -> int:
    """Open what Linux tells of this process, once."""
    return os.open(f"/proc/self/{name}", os.O_RDONLY)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_own.cache_clear)  # what it inherits tells of its parent


def unused_bytes() -> int:
    """Return the bytes of the machine's memory that hold nothing, not even a file's: no more than is free. A hundredth
    of the time that it takes to count what may be taken from files. 0 where the system does not tell.
    """
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
    except (AttributeError, ValueError, OSError):
        return 0


def peak_resident_bytes() -> int:
    """Return the highest resident memory of this process since it started.

    On Linux from `VmHWM`: `getrusage` would count the parent's memory too, in which a new process begins its life.
    """
    try:
        told = os.pread(_own("status"), 8192, 0)
        return int(told[told.index(b"VmHWM:") + 6 :].split(maxsplit=1)[0]) * 1024
    except (OSError, AttributeError, ValueError):
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
    """Return the resident memory less the freed blocks that the C library keeps in its heap; None where that is not
    told. Where not even what is resident is more than `enough`, that: to look through a heap takes milliseconds.
    """
    if not sys.platform.startswith("linux"):
        return None
    ask = getattr(_libc(), "mallinfo2", None)
    if ask is None:
        return None
    if (resident := resident_bytes()) <= enough:
        return resident
    ask.restype = _MallocInfo
    allocated = int(ask().uordblks)
    return resident - max(0, _resident_heap_bytes() - allocated)


def _resident_heap_bytes() -> int:
    """Count the resident bytes of the C library's heap. `smaps` tells them, too, but adds up much else of every page:
    16 ms where a gigabyte stays in the heap from step to step, 1 ms this way.
    """
    heap = _heap()
    if heap is None:
        return 0
    start, nbytes = heap[0], heap[1] - heap[0]
    pages = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
    failed = _libc().mincore(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), pages)
    return 0 if failed else pages.raw.count(b"\x01") * mmap.PAGESIZE
