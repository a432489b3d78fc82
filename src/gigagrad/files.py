"""Write files that are either whole or not there: under a hidden name, renamed once the disk has them.

Tensors are read back without running anything that a file holds. Bytes at positions are read and written by any number
of threads, also where a system has no call for that.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
import platform
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

from gigagrad.errors import ModelError, WriteError
from gigagrad.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

# EFBIG and EDQUOT are what a full disk looks like to somebody with a file size limit or a quota.
DISK_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_PERHAPS_FULL: Final = DISK_FULL | {errno.EIO, None}

HOST: Final = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
"""This machine, in names of files that it alone may judge: in a shared folder locks may not reach the others."""
_PARTIAL: Final = f".{HOST}.gigagrad-partial"
"""The end of the hidden name of a file that is being written; it is locked for as long. Nobody else names files so."""


class _RivalError(WriteError):
    """Another process of this machine writes the same file; what it writes will be there."""


_MOVING: Final = threading.Lock()
"""The lock of a file's position, where a system moves it to read or write there."""


def read_at(file: io.FileIO, target: memoryview, position: int) -> int:
    """Fill `target` with bytes from a position on, and return how many came, which may be fewer than are there, but 0
    only at the end of the file.
    """
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [target], position)
    with _MOVING:
        file.seek(position)
        return file.readinto(target)


def bytes_at(file: io.FileIO, count: int, position: int) -> bytes:
    """Read so many bytes from a position on; fewer only where the file ends."""
    data = os.pread(file.fileno(), count, position) if hasattr(os, "pread") else b""
    while len(data) < count:
        rest = memoryview(bytearray(count - len(data)))
        if not (more := read_at(file, rest, position + len(data))):
            break
        data += rest[:more]
    return data


def write_at(file: io.FileIO, data: memoryview, position: int) -> int:
    """Write `data` from a position on, and return how many bytes were taken, which may be fewer."""
    if hasattr(os, "pwrite"):
        return os.pwrite(file.fileno(), data, position)
    with _MOVING:
        file.seek(position)
        return file.write(data)


def reserve(file: io.FileIO, nbytes: int) -> None:
    """Make a new file so long; where the system can, with room on the disk for all of it."""
    if hasattr(os, "posix_fallocate") and nbytes:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    else:
        file.truncate(nbytes)


def check_destination(path: Path, *, overwrite: bool, expected_bytes: int, folder: bool = False) -> None:
    """Refuse early what would fail late. `expected_bytes` is a guess of the file's size, 0 if there is none.

    Raises `WriteError` if the path is a folder where a file is to be (`folder`: the other way round) or exists (unless
    `overwrite`), or its folder is missing or too full.
    """
    if folder and path.is_file():
        raise WriteError(f"cannot write {path}: it is a file, and would become a folder; choose another name")
    if not folder and path.is_dir():
        raise WriteError(f"cannot write {path}: it is a folder; name a file, e.g. {path / 'image.tif'}")
    if path.exists() and not overwrite:
        raise WriteError(f"cannot write {path}: it exists already; choose another name or allow overwriting")
    if not path.parent.is_dir():
        raise WriteError(f"cannot write {path}: there is no folder {path.parent}; create it first")
    free = shutil.disk_usage(path.parent).free
    if free < expected_bytes:
        raise _disk_full(path, free, expected_bytes)


@contextmanager
def replacing(path: Path, needed_bytes: Callable[[], int] | None = None) -> Iterator[IO[bytes]]:
    """Open a new file that becomes `path` when the block ends well; when it does not, `path` stays as it was.

    The folder is made if it is missing. `needed_bytes` tells a message about a full disk how much the whole job would
    have taken. What a killed process left behind goes when the next file is written in the same folder.

    Raises `WriteError` for every `OSError` of the block (the disk is full, the folder cannot be written), where `path`
    is a folder, and if another process began to write the same file in the meantime.
    """
    if path.is_dir():  # such as '.', which has no name to put another one beside
        raise WriteError(f"cannot write {path}: it is a folder; name a file in it")
    partial = path.with_name(f".{path.name}{_PARTIAL}")
    file: IO[bytes] | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        while file is None or file.closed:
            # Not the old one emptied: a process that still writes that one must not disturb us.
            partial.unlink(missing_ok=True)
            try:
                file = partial.open("x+b")
            except FileExistsError:  # two begin at once
                continue
            _lock(file, wait=True)
            if not _is_at(file, partial):  # somebody cleaned up before it had its lock
                file.close()
        yield file
        file.flush()  # the last buffered bytes can still meet a full disk
        os.fsync(file.fileno())
        if not _is_at(file, partial):
            raise _RivalError(f"cannot write {path}: another process is writing it too; let one of them finish")
        if os.name == "nt":  # which renames no open file; elsewhere it stays locked until it has its name
            file.close()
        os.replace(partial, path)
        file.close()
    except BaseException as error:
        if file is not None:
            _discard(file, partial)
        if isinstance(error, OSError):
            raise write_error(path, error, 0 if needed_bytes is None else needed_bytes()) from error
        raise


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Make an empty folder that takes the place of `path` when the block ends well."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{_PARTIAL}")
    old = partial.with_name(f"{partial.name}.old")
    held: int | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        held = _locked_folder(partial)
        yield partial
        if path.exists():  # no system replaces a folder that is not empty in one step
            path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not path.exists():
            old.rename(path)
        if isinstance(error, OSError):
            raise write_error(path, error) from error
        raise
    finally:
        if held is not None:
            os.close(held)


def _locked_folder(path: Path) -> int | None:
    """Make a folder, which nobody takes for abandoned while what is returned is open."""
    while True:
        path.mkdir()
        if os.name == "nt":  # which opens no folders: there, what a killed process left stays
            return None
        with suppress(FileNotFoundError):  # somebody cleaned up before it had its lock
            held = os.open(path, os.O_RDONLY)
            _lock(held, wait=True)
            if path.exists():
                return held
            os.close(held)


def _lock(file: IO[bytes] | int, *, wait: bool) -> bool:
    """Lock a file, and return whether it is ours now: not where somebody else holds it, or the system or file system
    has no such locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError):
        return False
    return True


def _remove_abandoned(folder: Path) -> None:
    """Remove files and folders in a folder whose writer is gone: nobody holds them."""
    for partial in folder.glob(f".*{_PARTIAL}"):
        if partial.is_dir():
            with suppress(OSError):
                held = os.open(partial, os.O_RDONLY)
                if _lock(held, wait=False):
                    shutil.rmtree(partial)
                os.close(held)
            continue
        with suppress(OSError), partial.open("r+b") as file:
            if _lock(file, wait=False) and _is_at(file, partial):
                partial.unlink()


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Return whether the name still belongs to the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _discard(file: IO[bytes], partial: Path) -> None:
    with suppress(OSError):
        ours = file.closed or _is_at(file, partial)
        with suppress(OSError):
            file.close()
        if ours:
            partial.unlink()


def write_error(path: Path, error: OSError, needed_bytes: int = 0) -> WriteError:
    """Put the system's complaint about an output file in a user's words; `needed_bytes` as far as they are known."""
    if error.errno in DISK_FULL and needed_bytes:
        return _disk_full(path, shutil.disk_usage(path.parent).free, needed_bytes)
    remedy = "free some space or choose another folder" if error.errno in _PERHAPS_FULL else "choose another folder"
    return WriteError(f"cannot write {path}: {error.strerror or error}; {remedy}")


def _disk_full(path: Path, free: int, needed: int) -> WriteError:
    return WriteError(
        f"the disk is too full for {path}: {format_bytes(free)} free, about {format_bytes(needed)} needed; "
        "free some space or write elsewhere"
    )


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, names of files that are none as they are, atomically. Raises `WriteError`."""
    with replacing(path) as file:
        file.write(text.encode(errors="surrogateescape"))


def write_agreed(made: Callable[[], Mapping[Path, str]]) -> None:
    """Write files that are made of others, until they are what `made` makes of these; those that are so stay.

    Any number of processes may do this at once while they add to the others: whoever wrote a file last has looked
    again, so that it is made of all. Raises `WriteError`.
    """

    def holds(path: Path, text: str) -> bool:
        return path.is_file() and path.read_bytes() == text.encode(errors="surrogateescape")

    while changed := {path: text for path, text in made().items() if not holds(path, text)}:
        for path, text in changed.items():
            with suppress(_RivalError):
                write_text(path, text)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as readable JSON, atomically. Raises `WriteError`."""
    text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    write_text(path, text.encode(errors="backslashreplace").decode())  # a name that is no UTF-8, in JSON's own way


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises `ValueError` with the reason for a missing or damaged file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def read_record(path: Path, form: str) -> dict[str, Any]:
    """Read a JSON object that says of itself that it is of the format `form`. Raises `ValueError` with the reason."""
    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error})") from error
    if not isinstance(content, dict) or content.get("format") != form:
        raise ValueError(f"{path} is not in the format of this version ({form!r})")
    return content


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue()


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Write a table, atomically. Raises `WriteError`."""
    write_text(path, csv_text(rows))


_WHOLE_BYTES: Final = 4 << 20
"""Files up to this size are read whole to tell whether they changed."""
_SAMPLES, _SAMPLE_BYTES = 64, 16 << 10
_MEMBERS: Final = 256
"""The most files of a folder that are looked at."""


def content_digest(path: Path, *, whole: bool = False) -> str:
    """Digest what a file, or the files of a folder, hold; `""` where there is nothing to read.

    Of large files (unless `whole`) the size and samples from end to end: compressed ones that differ anywhere differ
    in nearly all that follows (docs/decisions/0044-what-a-run-was-begun-with.md).
    """
    digest = hashlib.sha256()
    try:
        if not path.is_dir():
            _add_content(digest, path, _SAMPLES, whole=whole)
            return digest.hexdigest()[:16]
        members = sorted(Path(where) / name for where, _, names in os.walk(path) for name in names)
        digest.update(repr([member.relative_to(path).as_posix() for member in members]).encode())
        for at in range(0, len(members), -(-len(members) // _MEMBERS) or 1):
            _add_content(digest, members[at], 2, whole=whole)
    except OSError:
        return ""
    return digest.hexdigest()[:16]


def _add_content(digest: hashlib._Hash, path: Path, samples: int, *, whole: bool) -> None:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(f"{size};".encode())
        if whole or size <= _WHOLE_BYTES:
            while data := file.read(1 << 20):
                digest.update(data)
        else:
            for sample in range(samples):
                digest.update(bytes_at(file, _SAMPLE_BYTES, sample * (size - _SAMPLE_BYTES) // (samples - 1)))


def digest_of(path: Path) -> str:
    """Return the SHA-256 of all that a file holds. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_of(path: Path) -> int:
    """Return the size in bytes; 0 where nothing can be said."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


# PyTorch is imported where it is needed: commands that only read and write images start without it.


def write_tensors(path: Path, payload: dict[str, Any]) -> None:
    """Write tensors and plain Python values, atomically. Raises `WriteError`."""
    import torch

    with replacing(path) as file:
        recorder = _WriteRecorder(file)
        try:
            torch.save(payload, cast("IO[bytes]", recorder))
        except RuntimeError as error:  # how PyTorch's zip writer reports whatever ended a write
            raise recorder.error or OSError(str(error).splitlines()[0]) from error


class _WriteRecorder:
    """A file to write that remembers what ended a write."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: BaseException | None = None
        self.flush = file.flush

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except BaseException as error:
            self.error = error
            raise


def read_tensors(path: Path, kind: str) -> dict[str, Any]:
    """Read the payload of a file that `write_tensors` made for this `kind` of content, on the CPU.

    Nothing in the file is executed. Raises `ValueError` with the reason for a missing, damaged or foreign file.
    """
    payload = read_torch(path, kind)
    if not isinstance(payload, dict) or payload.get("format") != kind:
        raise ValueError(f"{path} holds no {kind}")
    return payload


def read_torch(path: Path, kind: str) -> Any:
    """Read what `torch.save` wrote, on the CPU: tensors and plain Python values. Nothing in the file is executed.

    Raises `ValueError` with the reason for a file that is missing, damaged, or holds anything else than a `kind` does.
    """
    import torch

    return _read(path, kind, lambda: torch.load(path, map_location="cpu", weights_only=True))


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a `.safetensors` file by name, on the CPU. Raises `ValueError` with the reason."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = _read(path, "safetensors file", lambda: load_file(path))
    return tensors


def _read(path: Path, kind: str, read: Callable[[], Any]) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    try:
        return read()
    except Exception as error:  # zip, pickle, end-of-file and runtime errors alike mean an unreadable file
        raise ValueError(f"{path} is damaged or no {kind} ({type(error).__name__})") from error


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors by name, atomically; those that share memory are written each.

    Raises `WriteError`, and `ModelError` for what the format cannot hold: sparse tensors, or what is no tensor.
    """
    from safetensors.torch import save

    apart: dict[str, Tensor] = {}
    seen: set[int] = set()
    try:
        for name, tensor in tensors.items():
            own = tensor.detach().cpu().contiguous()
            address = own.untyped_storage().data_ptr()
            apart[name] = own.clone() if address in seen else own
            seen.add(address)
        whole = save(apart, {"format": "pt"})
    except Exception as error:  # whatever a module puts among its tensors
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"safetensors cannot hold what the model does ({reason}); use best.pt") from error
    with replacing(path) as file:
        file.write(whole)
