"""An output file that is either complete or not there: written under a hidden name, renamed when it is whole."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from gigagrad.errors import WriteError
from gigagrad.units import format_bytes

# EFBIG and EDQUOT are what a full disk looks like to somebody with a file size limit or a quota.
_DISK_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def check_destination(path: Path, overwrite: bool, expected_bytes: int) -> None:
    """Refuse early what would fail late. `expected_bytes` is a guess of the file's size, 0 if there is none.

    Raises `WriteError` if the path is a folder or exists (unless `overwrite`), or its folder is missing or too full.
    """
    if path.is_dir():
        raise WriteError(f"cannot write {path}: it is a folder; name a file, e.g. {path / 'image.tif'}")
    if path.exists() and not overwrite:
        raise WriteError(f"cannot write {path}: it exists already; choose another name or allow overwriting")
    if not path.parent.is_dir():
        raise WriteError(f"cannot write {path}: there is no folder {path.parent}; create it first")
    free = shutil.disk_usage(path.parent).free
    if free < expected_bytes:
        raise _disk_full(path, free, expected_bytes)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that becomes `path` when the block ends well and vanishes when it does not."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    file = temporary.open("x+b")
    try:
        yield file
        file.close()  # inside the try: the last buffered bytes can still meet a full disk
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            file.close()
        temporary.unlink(missing_ok=True)
        raise


def _disk_full(path: Path, free: int, needed: int) -> WriteError:
    return WriteError(
        f"the disk is too full for {path}: {format_bytes(free)} free, about {format_bytes(needed)} needed; "
        "free some space or write elsewhere"
    )


def write_error(path: Path, error: OSError, needed: int) -> WriteError:
    """The system's complaint about an output file in a user's words; `needed` is the whole job's bytes on disk."""
    if error.errno in _DISK_FULL:
        return _disk_full(path, shutil.disk_usage(path.parent).free, needed)
    return WriteError(f"cannot write {path}: {error.strerror or error}; nothing was left behind")
