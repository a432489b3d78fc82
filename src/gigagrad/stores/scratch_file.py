"""Read and write a file of a run's scratch folder: bytes at offsets, through the page cache or past it.

Past the cache (`O_DIRECT`) go whole pages from page-aligned memory; everything else goes through it. The kernel keeps
the two in agreement.
"""

from __future__ import annotations

import errno
import io
import os
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from gigagrad.errors import StoreError
from gigagrad.files import read_at, reserve, write_at
from gigagrad.stores.bricks import PAGE_BYTES
from gigagrad.units import format_bytes

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
