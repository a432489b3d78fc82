"""A folder for one run's files, and the thread that writes them while tiles are being computed.

Every run has a folder of its own, held by a lock for as long as its process lives. A run that ends, however it ends,
removes its folder; what a killed process left behind is removed by the next run that uses the same scratch folder.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from gigagrad.bricks import ROWS_AT_ONCE, WRITES_BEHIND
from gigagrad.errors import StoreError
from gigagrad.stores.scratch_file import ScratchFile
from gigagrad.threads import SideThreads
from gigagrad.units import format_bytes

_PREFIX = "gigagrad-"


class Scratch:
    """The files of one run under `folder`, at most `needed_bytes` in all.

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
        name = f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.folder = folder / name
        self._lock = _lock_of(self.folder)
        try:
            self._lock.acquire(blocking=False)
            self.folder.mkdir()
        except OSError as error:
            self._lock.release()
            raise StoreError(f"cannot write to scratch folder '{folder}': {error.strerror or error}") from error
        self._writer = SideThreads(1, "gigagrad-scratch")
        self._pending: deque[Future[None]] = deque()
        self._beside = SideThreads(ROWS_AT_ONCE, "gigagrad-disk") if needed_bytes > cacheable_bytes() else None

    def create(self, name: str, nbytes: int) -> ScratchFile:
        """A new file of this size, all of it reserved. Raises StoreError if there is no room."""
        return ScratchFile(self.folder / name, nbytes, past_cache=self._beside is not None)

    def each(self, work: Callable[[int], None], rows: Iterable[int]) -> None:
        """`work` for each of these: several at a time where every one of them waits for the disk."""
        for _ in map(work, rows) if self._beside is None else self._beside.map(work, rows):
            pass

    def behind(self, work: Callable[[], None]) -> None:
        """Run `work` after everything given earlier. Raises what earlier work raised."""
        while len(self._pending) >= WRITES_BEHIND:
            self._pending.popleft().result()
        self._pending.append(self._writer.submit(work))

    def flush(self) -> None:
        """Wait until everything has been written. Raises what the writing raised."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Remove the files. What is still to be written is not."""
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()
        if self._beside is not None:
            self._beside.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        _give_up(self._lock)


def cacheable_bytes() -> int:
    """What the system could keep of files in memory now. More than that goes past its page cache, which would only pass
    it on (docs/decisions/0014-tiers.md).
    """
    return int(psutil.virtual_memory().available)


def _lock_of(folder: Path) -> FileLock:
    return FileLock(folder.with_name(f"{folder.name}.lock"))


def _give_up(lock: FileLock) -> None:
    lock.release()
    Path(lock.lock_file).unlink(missing_ok=True)


def _remove_abandoned(scratch: Path) -> None:
    """Folders of runs whose process is gone: their locks are free.

    A lock file without a folder is left alone: its owner may be about to make the folder.
    """
    for folder in scratch.glob(f"{_PREFIX}*"):
        if not folder.is_dir():
            continue
        lock = _lock_of(folder)
        try:
            lock.acquire(blocking=False)
        except (Timeout, OSError):
            continue  # alive, or somebody else's
        shutil.rmtree(folder, ignore_errors=True)
        _give_up(lock)
