"""Tell whoever listens what a long job does: frozen records, passed to plain callables. Nobody has to listen.

Execution, training and prediction emit; reports (and a user's own code) subscribe. An emitter never knows its
listeners, so a progress bar, a metrics file and a test are the same thing to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gigagrad.boxes import Box


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, slots=True)
class JobStarted(Event):
    """A named piece of work with `total` countable parts began, e.g. `("train", 40)`."""

    job: str
    total: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class JobAdvanced(Event):
    """`done` of `total` parts of `job` are finished; `detail` is one short phrase for a person.

    `seconds_left` is 0 where nothing is known of it yet, None where parts are alike and their number says it.
    """

    job: str
    done: int
    total: int
    detail: str = ""
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class JobFinished(Event):
    """The named piece of work ended normally after `seconds`."""

    job: str
    seconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Preparing(Event):
    """The work that has to be done before a step of this size can run, once: its parts are not known beforehand.

    `doing` is one short phrase for a person, the same until it is `over`, be it by an error. Of plans, `tried` counts
    those looked at, and the fastest that fits takes `best_seconds` a step, None while there is none.
    """

    doing: str
    tried: int = 0
    best_seconds: float | None = None
    over: bool = False


@dataclass(frozen=True, slots=True)
class SlideBegun(Event):
    """A job went on to a slide, which no link leads to: the tiles that come next are of it.

    `shape` is the `(height, width)` of its level 0, and `seen` that of the level that the network sees, mirrored and
    turned by `transform` (`Box.turned_back`). None where it sees patches, which a bag takes from anywhere.
    """

    slide: Path
    shape: tuple[int, int] | None = None
    seen: tuple[int, int] | None = None
    transform: int = 0


@dataclass(frozen=True, slots=True)
class TilePlace:
    """Boxes of a tile in pixels of the image that the network sees; of a bag in patches, one in each row.

    `box` is what is computed, `crop` what it is computed from, and `tile` the height and width of its segment's tiles.
    """

    box: Box
    crop: Box
    tile: tuple[float, float]


@dataclass(frozen=True, slots=True)
class TileBegun(Event):
    """One tile of one segment is computed from now on, or as soon as a thread is free; `done` of the step's `total` are
    finished. `place`, which takes a while, tells where it is.
    """

    phase: str
    segment: int
    segments: int
    done: int
    total: int
    place: Callable[[], TilePlace] = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class TileDone(Event):
    """One tile of one segment ran; `phase` is `"forward"` or `"backward"`, counts are over the whole step.

    `seconds_left` of the step: the plan says how passes differ, and the tiles so far how fast they are computed.
    """

    phase: str
    done: int
    total: int
    seconds_left: float


@dataclass(frozen=True, slots=True)
class StepMeasured(Event):
    """One whole forward or backward ended: its cost beside what the plan said; `budget_bytes` is 0 without a budget.

    `gradient_error` is what quantised storage is expected to have added to the gradients of convolutions, relative to
    them; 0 where nothing is quantised.
    """

    phase: str
    pixels: int
    seconds: float
    peak_bytes: int
    predicted_peak_bytes: int
    budget_bytes: int
    earlier_peak_bytes: int = 0
    """The bytes that the process had held at some time before: `peak_bytes` is the process's own, whoever set it."""
    gradient_error: float = 0.0
    patches: int = 0
    """The number of patches of a bag; 0 where there is none."""


@dataclass(frozen=True, slots=True)
class MetricsLogged(Event):
    """Named numbers in training, e.g. `split="val"`, `values={"loss": 0.1}`.

    `step` counts the slides (or patients) that were seen until then: steps, where a step sees one.
    """

    split: str
    epoch: int
    step: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Notice(Event):
    """One line a person should see (a warning, a path that was written)."""

    text: str
    warning: bool = False


Listener = Callable[[Event], None]


class Events:
    """A list of listeners; `emit` calls each in the order of subscription."""

    def __init__(self, listeners: tuple[Listener, ...] = ()) -> None:
        self._listeners = list(listeners)
        self._told: set[Notice] = set()

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    @property
    def has_listeners(self) -> bool:
        """Return whether anybody listens."""
        return bool(self._listeners)

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Add a listener in the block."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def emit(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)

    def emit_once(self, notice: Notice) -> None:
        """Emit a notice, unless the same was said before: what would be repeated in every step."""
        if notice not in self._told:
            self._told.add(notice)
            self.emit(notice)

    @contextmanager
    def job(
        self, name: str, total: int, detail: str = "", sizes: Sequence[int] | None = None
    ) -> Iterator[Callable[[int, str], None]]:
        """Tell of a job that is done in the block: call what this gives with how many parts are done, and a phrase.

        Of nothing to do, nothing is told. Where parts are not alike, `sizes` of all in their order say how long each
        takes beside the others; one of 0 takes no time.
        """
        if not total:
            yield lambda done, detail: None
            return

        def seconds_left(done: int) -> float | None:
            if sizes is None:
                return None
            past = sum(sizes[:done])
            return (time.monotonic() - start) * sum(sizes[done:]) / past if past else 0.0

        self.emit(JobStarted(name, total, detail))
        start = time.monotonic()
        yield lambda done, detail: self.emit(JobAdvanced(name, done, total, detail, seconds_left(done)))
        self.emit(JobFinished(name, time.monotonic() - start))

    @contextmanager
    def preparing(self, doing: str) -> Iterator[Callable[[float | None], None]]:
        """Tell of what is prepared in the block: call what this gives with the seconds that a step takes by each plan
        tried, None where it does not fit.
        """
        tried, best_seconds = 0, None

        def tell(seconds: float | None) -> None:
            nonlocal tried, best_seconds
            tried += 1
            if seconds is not None:
                best_seconds = seconds if best_seconds is None else min(best_seconds, seconds)
            self.emit(Preparing(doing, tried, best_seconds))

        self.emit(Preparing(doing))
        try:
            yield tell
        finally:
            self.emit(Preparing(doing, tried, best_seconds, over=True))
