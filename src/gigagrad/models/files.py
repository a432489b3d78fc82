"""Tensors on disk that are either whole or not there, and that nobody's code runs from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from gigagrad.errors import WriteError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write to the path this yields; `path` becomes that file at the end of the block, or stays as it was.

    The name of the temporary file is fixed, so a process that is killed leaves at most one behind and the next
    one writes over it. Raises `WriteError` when the disk is full or the folder cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with partial.open("rb+") as written:
            os.fsync(written.fileno())
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        reason = error.strerror or error
        raise WriteError(f"cannot write {path}: {reason}; free some space or choose another folder") from error
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically. Raises `WriteError`."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_tensors(path: Path, payload: dict[str, Any]) -> None:
    """Write tensors and plain Python values, atomically. Raises `WriteError`."""
    with replacing(path) as partial, partial.open("wb") as stream:
        try:
            torch.save(payload, stream)
        except RuntimeError as error:  # how PyTorch's zip writer reports a failed write
            raise OSError(str(error).splitlines()[0]) from error


def read_tensors(path: Path, kind: str) -> dict[str, Any]:
    """The payload of a file that `write_tensors` made for this `kind` of content, on the CPU.

    Nothing in the file is executed. Raises `ValueError` with the reason for a missing, damaged or foreign file.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle, end-of-file and runtime errors alike mean an unreadable file
        raise ValueError(f"{path} is damaged or no {kind} ({type(error).__name__})") from error
    if not isinstance(payload, dict) or payload.get("format") != kind:
        raise ValueError(f"{path} holds no {kind}")
    return payload
