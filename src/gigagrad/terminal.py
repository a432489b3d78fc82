"""Show events in a terminal: bars with rate and time left, or plain lines where there is no terminal.

A listener like any other: `Terminal` is subscribed, the code that emits does not know it. Where nobody listens,
`while_it_lasts` does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from gigagrad.events import (
    Event,
    Events,
    JobAdvanced,
    JobFinished,
    JobStarted,
    MetricsLogged,
    Notice,
    Preparing,
    StepMeasured,
    TileDone,
)
from gigagrad.units import format_bytes, format_pixels, format_seconds

_TILES: Final = "tiles"
_LONG_SECONDS: Final = 2.0


@dataclass(slots=True)
class _Work:
    """The state of one running job; times are in seconds of the terminal's clock."""

    started: float
    total: int
    detail: str
    nested: bool
    bar: TaskID
    done: int = 0
    left: float | None = None
    """The seconds left, where who does the work says so."""
    printed: float = float("-inf")

    def seconds_left(self, now: float) -> float | None:
        if self.left is not None or not self.done:
            return self.left
        return (now - self.started) / self.done * (self.total - self.done)


class Terminal:
    """Show jobs as they run. Use as a context manager, so that the live display ends with the work.

    On a terminal, and in a notebook that has ipywidgets, each job is a bar, and the tiles of the current step are one
    more; with `transient`, they are gone at the end. Elsewhere (a pipe, a log file) each job prints one line at most
    every `interval_seconds`; tiles, and jobs that are part of another one (a validation between two epochs), print only
    where one of them outlasts that, and preparations are shown on terminals alone.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        interval_seconds: float = 5.0,
        transient: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console: Final = console or Console(stderr=True)
        self._interval: Final = interval_seconds
        self._clock: Final = clock
        self._work: dict[str, _Work] = {}
        self._preparing: dict[str, TaskID] = {}
        self._bars: Final = _bars(self.console, clock, transient)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if not self._bars.disable:
            self._bars.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case JobStarted(job, total, detail):
                self._begin(job, total, detail)
            case JobAdvanced(job, done, total, detail, left):
                self._advance(job, done, total, detail, left)
            case JobFinished(job, seconds, detail):
                nested = job in self._work and self._work[job].nested
                self._end(job)
                if not nested or seconds >= self._interval:
                    self._line(f"{job} finished in {format_seconds(seconds)}", detail)
            case Preparing():
                self._prepare(event)
            case TileDone(phase, done, total, left):
                if _TILES not in self._work or done < self._work[_TILES].done:
                    self._begin(_TILES, total, phase)
                self._advance(_TILES, done, total, phase, left)
            case StepMeasured():
                self._end(_TILES)
                self._measured(event)
            case MetricsLogged(split, epoch, _, values) if split != "train":
                numbers = ", ".join(f"{name} {value:.5g}" for name, value in values.items())
                self._line(f"{split}, epoch {epoch}: {numbers}")
            case Notice(text, warning):
                told = Text(f"warning: {text}" if warning else text, style="yellow" if warning else "")
                self.console.print(told, soft_wrap=True)

    def _begin(self, job: str, total: int, detail: str) -> None:
        self._end(job)
        nested = bool(self._work) or job == _TILES
        bar = self._bars.add_task(job, total=total, detail=detail, left=None)
        self._work[job] = _Work(self._clock(), total, detail, nested, bar)
        if self._bars.disable and not nested:
            self._line(f"{job}: {total} to do", detail)

    def _advance(self, job: str, done: int, total: int, detail: str, left: float | None = None) -> None:
        if job not in self._work:
            self._begin(job, total, "")
        work, now = self._work[job], self._clock()
        work.done, work.total, work.detail = done, total, detail or work.detail
        work.left = left
        left = work.seconds_left(now)
        self._bars.update(work.bar, completed=done, total=total, detail=work.detail, left=left)
        if not self._bars.disable or (now - work.printed < self._interval and done < total):
            return
        if work.nested and (done == total or now - work.started < self._interval):
            return
        work.printed = now
        time_left = f", {format_seconds(left)} left" if left and done < total else ""
        self._line(f"{job} {done}/{total} ({100 * done // max(total, 1)} %){time_left}", work.detail)

    def _prepare(self, event: Preparing) -> None:
        """Show a bar without an end, gone with what it stands for."""
        best = "" if event.best_seconds is None else f", fastest so far {format_seconds(event.best_seconds)} a step"
        detail = f"{event.tried} tried{best}" if event.tried else ""
        bar = self._preparing.get(event.doing)
        if bar is None:
            bar = self._preparing[event.doing] = self._bars.add_task(event.doing, total=None, detail="", left=None)
        self._bars.update(bar, detail=detail)
        if event.over:
            self._bars.remove_task(self._preparing.pop(event.doing))

    def _measured(self, step: StepMeasured) -> None:
        """Put the last step's cost on the innermost job's line rather than on one of its own."""
        of_budget = f" of {format_bytes(step.budget_bytes)}" if step.budget_bytes else ""
        seen = f"{step.patches:,} patches" if step.patches else format_pixels(step.pixels)
        speed = f"{seen} in {format_seconds(step.seconds)}"
        detail = f"{speed}, peak {format_bytes(step.peak_bytes)}{of_budget}"
        for work in list(self._work.values())[-1:]:
            work.detail = detail
            self._bars.update(work.bar, detail=detail)

    def _end(self, job: str) -> None:
        if job in self._work:
            self._bars.remove_task(self._work.pop(job).bar)

    def _line(self, text: str, detail: str = "") -> None:
        self.console.print(Text(f"{text}: {detail}" if detail else text), soft_wrap=True)


@contextmanager
def while_it_lasts(events: Events) -> Iterator[None]:
    """Show bars of what is prepared and of the tiles in the block, from the third second on and gone at its end."""
    shown = Terminal(transient=True)
    with ExitStack() as stack:
        begins = time.monotonic() + _LONG_SECONDS

        def show(event: Event) -> None:
            nonlocal begins
            if time.monotonic() >= begins:
                stack.enter_context(shown)
                begins = math.inf
            if isinstance(event, Preparing | TileDone):
                shown(event)

        stack.enter_context(events.listening(show))
        yield


class _Count(MofNCompleteColumn):
    """A column `3/40`, where the parts can be counted."""

    def render(self, task: Task) -> Text:
        return Text("") if task.total is None else super().render(task)


class _Pace(ProgressColumn):
    """A column `1.2 s each, 40 s left`; where the parts cannot be counted, how long it has taken."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text(format_seconds(task.elapsed or 0.0), style="cyan")
        if not task.completed or task.elapsed is None:
            return Text("")
        each = task.elapsed / task.completed
        pace = f"{format_seconds(each)} each" if each >= 0.1 else f"{1 / max(each, 1e-9):.0f}/s"
        left = task.fields["left"]
        return Text(f"{pace}, {format_seconds(left)} left" if left else pace, style="cyan")


def _bars(console: Console, clock: Callable[[], float], transient: bool) -> Progress:
    """Make a bar for each job; where there is no terminal, none is ever shown."""
    notebook = console.is_jupyter and find_spec("ipywidgets") is not None
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        _Count(),
        _Pace(),
        TextColumn("{task.fields[detail]}", style="dim", markup=False),
        console=console,
        get_time=clock,
        refresh_per_second=5,
        transient=transient,
        disable=not (console.is_terminal or notebook),
    )
