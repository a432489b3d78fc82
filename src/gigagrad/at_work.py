"""Tell what is being computed while it is computed: the slide, the segment and phase, and where its tiles lie.

A job writes it as a small hidden file into the folder that it fills, for whoever looks at that in another process. A
thread that has nothing else to do replaces the file a few times a second, and it is gone when the job is over. One that
a killed process has left is told by that process, or on another machine by its age: a job that lives writes again and
again.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

from gigagrad.boxes import Box
from gigagrad.events import (
    Event,
    JobAdvanced,
    JobFinished,
    JobStarted,
    SlideBegun,
    StepMeasured,
    TileBegun,
    TileDone,
    TilePlace,
)
from gigagrad.files import HOST, read_record
from gigagrad.shares import is_alive, this_process

_FORM: Final = "gigagrad at work 1"
_EVERY_SECONDS: Final = 0.3
_SHARE: Final = 3000
"""The time for each part of it that the thread computes."""
_BEAT_SECONDS: Final = 5.0
_STALE_SECONDS: Final = 60.0
"""A file that is older was left behind, whatever its machine."""
_LONGEST_BYTES: Final = 2**16
_MOST_TILES: Final = 32


class Work:
    """A listener that knows what is being computed. May be asked by other threads."""

    def __init__(self) -> None:
        self._jobs: list[JobStarted | JobAdvanced] = []
        self._slide: SlideBegun | None = None
        self._tiles: deque[tuple[SlideBegun | None, TileBegun]] = deque(maxlen=_MOST_TILES)
        self._left = 0.0

    def __call__(self, event: Event) -> None:
        match event:
            case TileBegun():
                self._tiles.append((self._slide, event))
            case TileDone():
                self._left = event.seconds_left
                if self._tiles:
                    self._tiles.popleft()  # results come in order
            case SlideBegun():
                self._slide = event
                self._tiles.clear()
            case StepMeasured():
                self._tiles.clear()
            case JobStarted():
                self._jobs.append(event)
            case JobAdvanced():
                self._jobs = [event if each.job == event.job else each for each in self._jobs]
            case JobFinished():
                self._jobs = [each for each in self._jobs if each.job != event.job]

    @contextmanager
    def on(self, slide: SlideBegun) -> Iterator[None]:
        """Know the slide that is computed in the block, and behind it of none."""
        self(slide)
        try:
            yield
        finally:
            self._slide = None
            self._tiles.clear()

    def describe(self) -> dict[str, Any] | None:
        """Say what is computed now, in plain types, None where that is nothing of a slide."""
        begun, jobs = list(self._tiles), self._jobs
        slide = begun[0][0] if begun else self._slide
        if slide is None:
            return None
        found: dict[str, Any] = {"slide": str(slide.slide)}
        if jobs:
            job = jobs[-1]
            done = job.done if isinstance(job, JobAdvanced) else 0
            found |= {"job": job.job, "done": done, "jobs": job.total, "detail": job.detail}
        tiles = [tile for of, tile in begun if of is slide]
        if not tiles:
            return found
        first = tiles[0]
        found |= {"phase": first.phase, "segment": first.segment, "segments": first.segments}
        found |= {"tile": first.done, "tiles": first.total, "seconds_left": self._left}
        places = [each.place() for each in tiles if each.segment == first.segment and each.phase == first.phase]
        return found | _placed(slide, places)


def _placed(slide: SlideBegun, places: list[TilePlace]) -> dict[str, Any]:
    """Say where tiles lie on a slide, in pixels of its level 0, or which patches they are. `tile` is the height and
    width of all tiles of their segment, `far` whether the first one is at the bottom and at the right.
    """
    first = places[0]
    if slide.shape is None or slide.seen is None:
        return {"patches": [first.box.y0, places[-1].box.y1]}
    shape, seen, transform = slide.shape, slide.seen, slide.transform
    turned = seen[::-1] if transform % 2 else seen

    def on_slide(box: Box) -> list[int]:
        found = box.turned_back(transform, *turned).resized(seen, shape)
        return [found.y0, found.x0, found.y1, found.x1]

    corner = Box(0, 0, 1, 1).turned_back(transform, *turned)
    height, width = first.tile[::-1] if transform % 2 else first.tile
    return {
        "boxes": [on_slide(each.box) for each in places],
        "crop": on_slide(first.crop),
        "grid": [height * shape[0] / seen[0], width * shape[1] / seen[1]],
        "far": [corner.y0 > 0, corner.x0 > 0],
    }


class WorkFile(Work):
    """Writes it down in a folder, from the start of the block to its end. Where nothing can be written, nobody is told
    anything, and the job goes on.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._path = folder / f".now-{HOST}-{os.getpid()}.json"
        self._partial = self._path.with_suffix(".new")
        self._process, self._over = this_process(), threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="gigagrad-at-work", daemon=True)

    def __enter__(self) -> Self:
        for path in self._path.parent.glob(f".now-{HOST}-*"):
            with suppress(OSError):
                if _of_living(path) is None:
                    path.unlink()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _write_on(self) -> None:
        written, beat, wait = None, 0.0, _EVERY_SECONDS
        while not self._over.wait(wait):
            start, found = time.thread_time(), self.describe()
            if found == written and time.monotonic() - beat < _BEAT_SECONDS:
                continue
            self._replace({"format": _FORM, **self._process, **(found or {})})
            written, beat = found, time.monotonic()
            wait = max(_EVERY_SECONDS, _SHARE * (time.thread_time() - start))

    def _replace(self, content: dict[str, Any]) -> None:
        """Replace the file. It need not outlast a power failure, so nobody waits for the disk."""
        with suppress(OSError):
            with open(self._partial, "wb", buffering=0) as file:
                file.write(json.dumps(content).encode())
            os.replace(self._partial, self._path)


def works_in(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what living processes say of what they compute for a folder, as `Work.describe` does."""
    for path in sorted(folder.glob(".now-*.json")):
        found = _of_living(path)
        if found is not None and "slide" in found:
            yield found


def _of_living(path: Path) -> dict[str, Any] | None:
    """Read a file of ours, None where it is none, or its process is gone."""
    try:
        if path.is_symlink() or path.stat().st_size > _LONGEST_BYTES:
            return None
        found = read_record(path, _FORM)
        here = found["host"] == platform.node()
        lives = is_alive(found["pid"], found["started"]) if here else True
        return found if lives and time.time() - path.stat().st_mtime < _STALE_SECONDS else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
