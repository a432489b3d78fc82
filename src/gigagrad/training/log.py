"""The run's own record: a listener that turns events into one JSON line each.

Lines are `{"event": "metrics", "split", "epoch", "step", "values": {name: number}}` and `{"event": "step", "phase",
"pixels", "seconds", "peak_bytes", "predicted_peak_bytes", "budget_bytes"}`, in the order in which things happened.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

from gigagrad.errors import WriteError
from gigagrad.events import Event, MetricsLogged, StepMeasured
from gigagrad.files import write_error
from gigagrad.training.folder import RunFolder


class RunLog:
    """Appends to a run's metrics (JSON lines); a context manager and a listener.

    A run that continues gives the `metrics_bytes` of its checkpoint: what was written after it is about to happen
    again, so the record is cut back to that point and no step appears twice.
    """

    def __init__(self, folder: RunFolder, *, metrics_bytes: int = 0) -> None:
        metrics = self._path = folder.metrics
        try:
            metrics.parent.mkdir(parents=True, exist_ok=True)
            metrics.touch()
            self._lines = metrics.open("r+b")
            self._lines.truncate(min(metrics_bytes, metrics.stat().st_size))
            self._lines.seek(0, 2)
        except OSError as error:
            reason = f"{error.strerror}; choose another --out"
            raise WriteError(f"cannot write the run's record {metrics}: {reason}") from error

    def __call__(self, event: Event) -> None:
        if isinstance(event, MetricsLogged):
            record: dict[str, object] = {"event": "metrics", **dataclasses.asdict(event)}
        elif isinstance(event, StepMeasured):
            record = {"event": "step", **dataclasses.asdict(event)}
        else:
            return
        with self._told():
            self._lines.write(json.dumps(record).encode() + b"\n")

    def position(self) -> int:
        """Bytes of the metrics file so far, all of them handed to the operating system. Raises `WriteError`."""
        with self._told():
            self._lines.flush()
        return self._lines.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *raised: object) -> None:
        with self._told() if kind is None else suppress(OSError):  # what ended the run is told
            self._lines.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(self._path, error) from error
