"""The slides of a cohort scored one by one; with a folder to keep it in, what was found of each is `scores/NAME.json`
there, so that shares and repetitions find it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from gigagrad.cohorts import Row
from gigagrad.events import Events, Notice
from gigagrad.files import read_json, size_of, write_json
from gigagrad.shares import Share, claimed

_Found = TypeVar("_Found")
_FOLDER: Final = "scores"


@dataclass(frozen=True, slots=True)
class Kind(Generic[_Found]):
    """What is found of a slide, how it is `told` in a few words, and as plain values of JSON and back."""

    told: Callable[[_Found], str]
    plain: Callable[[_Found], Mapping[str, Any]]
    of_plain: Callable[[Mapping[str, Any]], _Found]


class Kept(Generic[_Found]):
    """The scores of slides in a folder. Those that follow from something else than now are none.

    `basis` is what a slide's follow from: plain values, and paths of files, which stand for their sizes and times.
    """

    def __init__(self, out: Path, kind: Kind[_Found], basis: Callable[[Row], Sequence[Any]]) -> None:
        self.out, self._kind, self._basis = out, kind, basis

    def read(self, entry: Row) -> _Found | None:
        try:
            content = read_json(self._file(entry))
            return self._kind.of_plain(content["found"]) if content["basis"] == self._digest(entry) else None
        except (ValueError, KeyError, TypeError, AttributeError):  # not there, or of another version
            return None

    def write(self, entry: Row, found: _Found) -> None:
        """Raises `WriteError`."""
        write_json(self._file(entry), {"basis": self._digest(entry), "found": self._kind.plain(found)})

    def _file(self, entry: Row) -> Path:
        return self.out / _FOLDER / f"{entry.name}.json"

    def _digest(self, entry: Row) -> str:
        text = json.dumps(self._basis(entry), default=_stamp)
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _stamp(path: Path) -> tuple[object, ...]:
    if not path.exists():
        return (path.name,)
    state = path.stat()
    return path.name, state.st_size, state.st_mtime_ns


def score_slides(
    entries: Sequence[Row],
    score: Callable[[Row], _Found],
    kind: Kind[_Found],
    kept: Kept[_Found] | None,
    share: Share,
    events: Events,
) -> dict[str, _Found] | None:
    """What `score` finds of every slide, by name and in order; what is kept is not scored again.

    None where the share is done and others are not, which is told (`Notice`). Emits the job `evaluate`, counted in
    slides. Raises as `score` does, and as `claimed` and `Kept.write` do.
    """
    own = share.deal(entries, [size_of(entry.slide) for entry in entries])
    found = {entry.name: kept.read(entry) if kept is not None else None for entry in own}
    sizes = [0 if found[entry.name] is not None else size_of(entry.slide) for entry in own]
    names = [entry.name for entry in own]
    with (
        nullcontext() if kept is None else claimed(kept.out, share, names),
        events.job(share.named("evaluate"), len(own), sizes=sizes) as advance,
    ):
        for done, entry in enumerate(own, 1):
            known = found[entry.name]
            value = score(entry) if known is None else known
            if known is None and kept is not None:
                kept.write(entry, value)
            found[entry.name] = value
            advance(done, f"{entry.name}: {kind.told(value)}")
    every: dict[str, _Found] = {}
    for entry in entries:
        other = found[entry.name] if entry.name in found or kept is None else kept.read(entry)
        if other is not None:
            every[entry.name] = other
    if len(every) == len(entries):
        return every
    events.emit(
        Notice(
            f"{len(every)} of {len(entries)} slides are scored; the share that ends last tells the scores, "
            "or this command given again"
        )
    )
    return None
