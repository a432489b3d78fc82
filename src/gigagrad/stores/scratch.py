"""Keep one run's files in a folder, and write them in a thread while tiles are being computed.

Every run has a folder of its own, held by a lock for as long as its process lives. A run that ends, however it ends,
removes its folder; what a killed process left behind is removed by the next run of the same machine in the same
scratch folder: on a disk that several share, the others may not see that a folder is locked.
Files keep their names while they are open, so that `du` shows who takes the space, on any file system.

Their bytes go through the page cache or past it. Past the cache (`O_DIRECT`) go whole pages from page-aligned memory;
everything else goes through it. The kernel keeps the two in agreement.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import numpy as np
import psutil
from filelock import FileLock, Timeout

from gigagrad.allowances import ROWS_AT_ONCE, WRITES_BEHIND
from gigagrad.errors import StoreError
from gigagrad.files import HOST, read_at, reserve, write_at
from gigagrad.threads import SideThreads, Task, uninterrupted, wait_for
from gigagrad.units import format_bytes

_OURS = re.compile(rf"(gigagrad-{HOST}-\d+-[0-9a-f]{{8}})(\.lock)?")
"""Folders of this machine's runs, by process and number, and locks beside them; nothing else is ever removed."""


class Scratch:
    """The files of one run under `folder`, at most `needed_bytes` in all. `close` may be called again, by any thread.

    Raises:
        StoreError: `folder` is missing, cannot be written to, or has less space than needed.
    """

    def __init__(self, folder: Path, needed_bytes: int) -> None:
        if not folder.is_dir():
            raise StoreError(f"scratch folder '{folder}' does not exist; make it, or name another")
        _remove_abandoned(folder)
        free = shutil.disk_usage(folder).free
        if free < needed_bytes:
            raise StoreError(
                f"scratch folder '{folder}' has {format_bytes(free)} free, the plan needs "
                f"{format_bytes(needed_bytes)}; make room, name another folder, or give more memory"
            )
        self._writer = SideThreads(1, "gigagrad-scratch")
        self._beside = SideThreads(ROWS_AT_ONCE, "gigagrad-disk") if needed_bytes > cacheable_bytes() else None
        self._pending: deque[Task[None]] = deque()
        self._order = threading.Lock()
        self._place = _Place(folder)
        self._end = partial(_end, self._place, [pool for pool in (self._writer, self._beside) if pool is not None])
        # For whoever never closes it: a scratch that is dropped, or still there when the interpreter ends.
        self._dropped = weakref.finalize(self, uninterrupted, self._end)
        try:
            uninterrupted(self._place.open)
        except BaseException:
            self.close()
            raise

    @property
    def folder(self) -> Path:
        """Return the run's own folder."""
        return self._place.folder

    def create(self, name: str, nbytes: int) -> ScratchFile:
        """Create a file of this size, all of it reserved. Raises StoreError if there is no room."""
        created: list[ScratchFile] = []
        uninterrupted(lambda: created.append(self._place.create(name, nbytes, past_cache=self._beside is not None)))
        return created[0]

    def each(self, work: Callable[[int], None], rows: Iterable[int]) -> None:
        """Do `work` for each of these: several at a time where every one of them waits for the disk."""
        if self._beside is None:
            for row in rows:
                work(row)
            return
        tasks = [self._beside.submit(work, row) for row in rows]
        wait_for(tasks)  # for all: after an error too, whoever asked may close the file
        for task in tasks:
            task.result()

    def behind(self, work: Callable[[], None]) -> Task[None]:
        """Run `work` after everything given earlier."""
        with self._order:
            while len(self._pending) >= WRITES_BEHIND:
                wait_for([self._pending.popleft()])
            task = self._writer.submit(work)
            self._pending.append(task)
        return task

    def close(self) -> None:
        """Close and remove the files, open or not, and end the threads. What is still to be written is not."""
        uninterrupted(self._end)
        self._dropped.detach()


def _end(place: _Place, pools: list[SideThreads]) -> None:
    with ExitStack() as stack:  # goes on past errors; no file closes under a thread that uses it
        stack.callback(place.close)
        for pool in pools:
            stack.callback(pool.shutdown, cancel=True)


class _Place:
    """The run's own folder, its lock and its files: whatever is there when it closes goes, and nothing comes after."""

    def __init__(self, scratch: Path) -> None:
        self.folder = self._scratch = scratch
        self._guard = threading.Lock()
        self._held = ExitStack()
        self._closed = False

    def open(self) -> None:
        """Make the folder. Raises StoreError if the scratch folder cannot be written to."""
        with self._guard:
            while not (self._closed or self._claimed()):
                pass

    def _claimed(self) -> bool:
        """Return whether a folder of a new name is ours. A lock without a folder looks like one that a killed process
        left, so a run that cleans up may have it at this moment, or have removed it.
        """
        folder = self._scratch / f"gigagrad-{HOST}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        lock = _lock_of(folder)
        try:
            lock.acquire(blocking=False)
            self._held.callback(_give_up, lock)
            if not Path(lock.lock_file).exists():
                return False
            folder.mkdir()
        except Timeout:
            return False
        except OSError as error:
            raise StoreError(f"cannot write to scratch folder '{self._scratch}': {error.strerror or error}") from error
        self._held.callback(shutil.rmtree, folder, ignore_errors=True)
        self.folder = folder
        return True

    def create(self, name: str, nbytes: int, *, past_cache: bool) -> ScratchFile:
        with self._guard:
            file = ScratchFile(self.folder / name, nbytes, past_cache=past_cache)
            self._held.callback(file.close)
            return file

    def close(self) -> None:
        with self._guard:
            self._closed = True
            self._held.close()


def cacheable_bytes() -> int:
    """Return the bytes of files that the system could keep in memory now. More than that goes past its page cache,
    which would only pass it on (docs/decisions/0014-tiers.md).
    """
    return int(psutil.virtual_memory().available)


def _lock_of(folder: Path) -> FileLock:
    return FileLock(folder.with_name(f"{folder.name}.lock"), thread_local=False)


def _give_up(lock: FileLock) -> None:
    with suppress(PermissionError):  # Windows removes no open file, and this one when it is released
        Path(lock.lock_file).unlink(missing_ok=True)  # first, so that nobody ever holds a lock of this name unseen
    lock.release()


def _remove_abandoned(scratch: Path) -> None:
    """Remove what runs of this machine left whose process is gone: folders and locks that nobody holds."""
    matches = [match for path in scratch.iterdir() if (match := _OURS.fullmatch(path.name))]
    for name in dict.fromkeys(match[1] for match in matches):
        folder = scratch / name
        lock = _lock_of(folder)
        try:
            lock.acquire(blocking=False)
        except (Timeout, OSError):
            continue  # alive, or somebody else's
        shutil.rmtree(folder, ignore_errors=True)
        _give_up(lock)


PAGE_BYTES = 4096
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Rows = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
"""Bricks as they lie in the file: one a row, its slot's bytes along it."""


def page_aligned(count: int, nbytes: int) -> Rows:
    """Allocate uninitialised memory for so many bricks, as direct access wants it."""
    memory = np.empty(count * nbytes + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    return memory[start : start + count * nbytes].reshape(count, nbytes)


class ScratchFile:
    """A new file of `nbytes`, all of it reserved. Several threads may read and write different parts of it.

    Raises:
        StoreError: there is no room, the disk fails, or the file is shorter than it was.
    """

    def __init__(self, path: Path, nbytes: int, *, past_cache: bool) -> None:
        self._path = path
        self._direct: io.FileIO | None = None
        try:
            # Not a bare descriptor: this one closes when nobody holds it, and its number is never used after that.
            self._cached = io.FileIO(path, "x+b", opener=partial(os.open, mode=0o600))
        except OSError as error:
            raise _no_room(path, nbytes, error) from error
        try:
            reserve(self._cached, nbytes)
            self._direct = _open_direct(path) if past_cache else None
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _no_room(path, nbytes, error) from error
            raise

    @property
    def past_cache(self) -> bool:
        """Return whether the file system has a way past the cache, and it was asked for."""
        return self._direct is not None

    def read_into(self, target: Rows | Bytes, offset: int) -> None:
        data = memoryview(target).cast("B")
        while data:
            try:
                count = read_at(self._way(data, offset), data, offset)
            except OSError as error:
                raise StoreError(f"cannot read '{self._path}': {error.strerror or error}") from error
            if not count:
                raise StoreError(f"'{self._path}' ended early: it has been changed since it was written")
            data, offset = data[count:], offset + count

    def write(self, data: memoryview, offset: int) -> None:
        while data:
            try:
                count = write_at(self._way(data, offset), data, offset)
            except OSError as error:
                raise StoreError(f"cannot write '{self._path}': {error.strerror or error}") from error
            data, offset = data[count:], offset + count

    def sync(self) -> None:
        """Wait until the disk has everything; the page cache need not keep it."""
        os.fsync(self._cached.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._cached.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close and remove the file."""
        for file in (self._cached, self._direct):
            if file is not None:
                with suppress(OSError):  # a late error of writing: nothing reads it again
                    file.close()
        self._path.unlink(missing_ok=True)

    def _way(self, data: memoryview, offset: int) -> io.FileIO:
        """Go past the cache or through it, as these bytes allow."""
        if self._direct is None or (np.frombuffer(data, np.uint8).ctypes.data | data.nbytes | offset) % PAGE_BYTES:
            return self._cached
        return self._direct


def _open_direct(path: Path) -> io.FileIO | None:
    """Open a file past the cache; None where the file system, or its disk's block size, does not allow it."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return None
    try:
        file = io.FileIO(path, "r+b", opener=lambda name, flags: os.open(name, flags | flag))
    except OSError:
        return None
    try:
        read_at(file, memoryview(page_aligned(1, PAGE_BYTES)).cast("B"), 0)
    except OSError:
        file.close()
        return None
    return file


def _no_room(path: Path, nbytes: int, error: OSError) -> StoreError:
    if error.errno == errno.ENOSPC:
        return StoreError(
            f"no space left for '{path}', which takes {format_bytes(nbytes)}; make room or name another scratch folder"
        )
    return StoreError(f"cannot write '{path}': {error.strerror or error}")
