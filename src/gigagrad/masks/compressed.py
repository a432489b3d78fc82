"""Annotation files as they are or compressed, `.geojson.gz` and `.zip`, read as a stream of bounded length."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePath
from typing import IO, Any, Final

from gigagrad.errors import ImageError
from gigagrad.files import size_of

SUFFIXES: Final = (".geojson", ".json", ".xml")
_MOST_TIMES: Final = 100
"""Times that a file may grow when it is unpacked; annotations become ten times as long, twenty at most."""
_LEAST_BYTES: Final = 1 << 26
"""That any compressed file may become, however small it is."""
_CHUNK: Final = 1 << 16


def is_annotation_name(name: str) -> bool:
    """Return whether a file of this name holds annotations, compressed or not; the name of a `.zip` says no more."""
    name = name.lower()
    return name.endswith(".zip") or PurePath(name.removesuffix(".gz")).suffix in SUFFIXES


def annotation_stem(path: Path) -> str:
    """Return the file's name without its suffix, of a compressed one without both."""
    inner = PurePath(path.name[:-3]) if path.suffix.lower() == ".gz" else path
    return inner.stem


@contextmanager
def open_annotations(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Open what the file holds: the suffix of its kind, and the bytes, to be read in pieces and from the start again.

    Raises `ImageError` for a file that is damaged, or longer than a compressed one may become, as it is read; `OSError`
    where it cannot be opened.
    """
    suffix = path.suffix.lower()
    most = max(_LEAST_BYTES, _MOST_TIMES * size_of(path))
    with ExitStack() as opened:
        file = opened.enter_context(path.open("rb"))
        if suffix == ".gz":
            unpacked: Any = gzip.GzipFile(fileobj=file)
            inner: Any = _Bounded(path, opened.enter_context(unpacked), most)
            yield PurePath(path.stem).suffix.lower(), inner
        elif suffix == ".zip":
            with _in_our_words(path):
                archive = opened.enter_context(zipfile.ZipFile(file))
                member = _member(path, archive)
                inner = _Bounded(path, opened.enter_context(archive.open(member)), most)
            yield PurePath(member.filename).suffix.lower(), inner
        else:
            yield suffix, file


def _member(path: Path, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    """Find the one annotation file inside; what macOS adds is none."""
    held = [entry for entry in archive.infolist() if not entry.is_dir() and not entry.filename.startswith("__MACOSX/")]
    if len(held) != 1 or PurePath(held[0].filename).suffix.lower() not in SUFFIXES:
        names = ", ".join(entry.filename[:80] for entry in held[:3]) or "nothing"
        raise ImageError(f"{path} holds {len(held)} files ({names}); expected one, GeoJSON or ASAP's XML; unpack it")
    if held[0].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or held[0].flag_bits & 1:
        raise ImageError(f"{path} is encrypted, or compressed in a way that is not read; unpack it")
    return held[0]


@contextmanager
def _in_our_words(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        if isinstance(error, ImageError):
            raise
        reason = " ".join(str(error).split())[:100]
        raise ImageError(f"{path} cannot be unpacked ({reason}); it is damaged, copy it again") from error


class _Bounded:
    """The bytes that come out of a compressed file, as far as an honest one goes."""

    def __init__(self, path: Path, file: IO[bytes], most: int) -> None:
        self._path, self._file, self._most = path, file, most

    def read(self, size: int = -1) -> bytes:
        with _in_our_words(self._path):
            data = self._file.read(size if 0 <= size < _CHUNK else _CHUNK)
            if self._file.tell() > self._most:
                raise ImageError(
                    f"{self._path} becomes more than {_MOST_TIMES} times as long, which annotations do not; unpack it "
                    "yourself if that is right"
                )
            return data

    def seek(self, place: int) -> None:
        with _in_our_words(self._path):
            self._file.seek(place)
