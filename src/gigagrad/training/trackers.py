"""Listeners that keep a run's numbers: its own record, and experiment trackers, which get its settings, too.

The record `metrics.jsonl` has one JSON line for an event: `{"event": "metrics", "split", "epoch", "step", "values":
{name: number}}` or `{"event": "step", "phase", "pixels", "seconds", "peak_bytes", "predicted_peak_bytes",
"budget_bytes"}`, in the order in which things happened.

Where a tracker sends numbers is its own affair: `MLFLOW_TRACKING_URI`, `WANDB_MODE`, `TRACKIO_DIR` and whatever else it
reads mean what they always do. A tracker that fails while a run trains is told of, and the run goes on without it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final, Self

from gigagrad.errors import ConfigError, GigagradError, WriteError, extra
from gigagrad.events import Event, Events, MetricsLogged, Notice, StepMeasured
from gigagrad.files import write_error
from gigagrad.training.folder import RunFolder

Log = Callable[[dict[str, float], int], object]
"""Takes numbers by name, `val/loss`, and the step that they belong to."""

_PROJECT: Final = "gigagrad"
_TAG: Final = "gigagrad.run"


class Tracker:
    """A listener that hands metrics to the program `name`; a context manager from the run's beginning to its end."""

    def __init__(self, name: str, folder: RunFolder, step: int, settings: Mapping[str, Any], events: Events) -> None:
        """Track the run in `folder`, which goes on after `step`."""
        self._name, self._events = name, events
        self._program = TRACKERS[name](folder, step, settings)
        self._log: Log | None = None

    def __enter__(self) -> Self:
        """Raise `ConfigError` for a program that is not installed or does not begin."""
        try:
            self._log = self._program.__enter__()
        except GigagradError:
            raise
        except Exception as error:  # theirs are of any kind
            raise ConfigError(f"the tracker {self._name} does not begin: {_line(error)}") from error
        return self

    def __call__(self, event: Event) -> None:
        if self._log is not None and isinstance(event, MetricsLogged):
            with self._reported():
                self._log({f"{event.split}/{name}": value for name, value in event.values.items()}, event.step)

    def __exit__(self, *raised: Any) -> None:
        with self._reported():
            self._program.__exit__(*raised)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._log = None
            text = f"the tracker {self._name} failed, and the run goes on without it: {_line(error)}"
            self._events.emit(Notice(text, warning=True))


@contextmanager
def _tensorboard(folder: RunFolder, step: int, settings: Mapping[str, Any]) -> Iterator[Log]:
    with extra("train"):
        from torch.utils.tensorboard import SummaryWriter
    # What was written after the checkpoint is about to happen again.
    with SummaryWriter(str(folder.curves), purge_step=step + 1) as writer:

        def log(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        yield log


@contextmanager
def _mlflow(folder: RunFolder, step: int, settings: Mapping[str, Any]) -> Iterator[Log]:
    with extra("mlflow"):
        import mlflow
    key = folder.tracking_key()
    earlier = mlflow.search_runs(filter_string=f"tags.`{_TAG}` = '{key}'", output_format="list")
    begun = earlier[0].info.run_id if earlier else None
    around = mlflow.active_run() is not None
    with mlflow.start_run(begun, run_name=folder.path.name, tags={_TAG: key}, nested=around):
        if begun is None:
            mlflow.log_params(dict(settings))
        yield lambda values, step: mlflow.log_metrics(values, step)


@contextmanager
def _wandb(folder: RunFolder, step: int, settings: Mapping[str, Any]) -> Iterator[Log]:
    with extra("wandb"):
        import wandb
    with wandb.init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT),
        id=folder.tracking_key(),
        name=folder.path.name,
        resume="allow",
        config=dict(settings),
        allow_val_change=True,
    ) as begun:
        yield begun.log


@contextmanager
def _trackio(folder: RunFolder, step: int, settings: Mapping[str, Any]) -> Iterator[Log]:
    with extra("trackio"):
        import trackio
    name = f"{folder.path.name}-{folder.tracking_key()[:8]}"
    begun = trackio.init(_PROJECT, name, resume="allow", config=dict(settings), embed=False)
    try:
        yield begun.log
    finally:
        begun.finish()


TRACKERS: Final[dict[str, Callable[[RunFolder, int, Mapping[str, Any]], AbstractContextManager[Log]]]] = {
    "mlflow": _mlflow,
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


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
        with self._reported():
            self._lines.write(json.dumps(record).encode() + b"\n")

    def position(self) -> int:
        """Flush the metrics file and return its bytes so far. Raises `WriteError`."""
        with self._reported():
            self._lines.flush()
        return self._lines.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *raised: object) -> None:
        with self._reported() if kind is None else suppress(OSError):  # what ended the run is told
            self._lines.close()

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(self._path, error) from error
