"""Predict the slides of a cohort, or a share of them, here or wherever an executor has workers.

A run can be stopped and started again: slides whose files are all there are left alone. A slide that fails does not
stop the others. Each has a record of its own; `predictions.json` and the tables of scores are made of the records.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Protocol

from gigagrad.cohorts import Row, find_slides
from gigagrad.cohorts.slides import rows_of, run_job
from gigagrad.config.predict import PredictConfig
from gigagrad.events import Events, Listener, Notice
from gigagrad.files import write_agreed
from gigagrad.prediction.predictor import Predictor
from gigagrad.prediction.records import FILE_NAME, MadeWith, SlideResult, read_records, summary
from gigagrad.prediction.slide_scores import score_tables
from gigagrad.shares import Share
from gigagrad.units import format_seconds

_ONE_AT_A_TIME: Final = threading.Lock()
"""In a worker: `memory` is that of its whole process."""


class Executor(Protocol):
    """Runs calls elsewhere: `concurrent.futures`' executors, Dask's `Client`, or anything that submits as they do."""

    def submit(self, fn: Any, /, *args: Any) -> Any:
        """Run a call elsewhere, and return what will have its `result()`."""


def predict(
    config: PredictConfig | Mapping[str, Any] | str | Path,
    listeners: Iterable[Listener] = (),
    executor: Executor | None = None,
    **settings: Any,
) -> tuple[SlideResult, ...]:
    """Predict every slide of `config`, or of its share; one result per slide, in order, the failed ones included.

    `predict("runs/a", slides=["x.svs"], out="predictions")` names the run and the other `settings` of a
    `PredictConfig`; of a `config` they take the place of its own.

    With an `executor` each slide is a task of it; its workers need the same paths. A worker predicts one slide at a
    time, with one engine for all of them; `memory` is that of each worker's process.

    Emits a `predict` job counted in slides, a `Notice` for each slide that fails and, where there is no executor, the
    engine's own events.

    Raises `ConfigError`, `ModelError` or `WriteError` for what concerns all slides; nothing has been predicted then.
    """
    config = _config(config, settings)
    if executor is not None:  # workers may run in another folder
        config = config.relative_to(Path.cwd())
    share, out, events = Share.parse(config.share), Path(config.out), Events(tuple(listeners))
    cohort = find_slides(config.slides, config.split, config.run_fold)
    slides = rows_of(share, cohort)
    predictor = Predictor(config, events)
    records = read_records(out, [entry.name for entry in slides])
    for entry in () if config.overwrite else slides:
        predictor.check(entry, records.get(entry.name))
    before = {entry: predictor.finished(entry, records.get(entry.name)) for entry in slides}
    made = _each([entry for entry in slides if before[entry] is None], predictor, executor)

    def work(entry: Row) -> tuple[SlideResult, str]:
        known = before[entry]
        result = known or next(made)
        if result.failed:
            events.emit(Notice(f"{result.name}: {result.error}", warning=True))
        return result, "done before" if known else _in_words(result)

    done = {entry for entry, known in before.items() if known}
    results = run_job("predict", slides, share, out, events, work, done, subject=predictor.made_with.model)
    write_agreed(lambda: _merged(config, predictor, cohort))
    return tuple(results)


def _config(given: PredictConfig | Mapping[str, Any] | str | Path, settings: Mapping[str, Any]) -> PredictConfig:
    if isinstance(given, PredictConfig):
        given = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    values = {"run": given} if isinstance(given, str | Path) else given
    return PredictConfig.from_dict({**values, **settings})


def _each(slides: Sequence[Row], predictor: Predictor, executor: Executor | None) -> Iterator[SlideResult]:
    """Predict slides one after the other; with an executor all are submitted when the first is asked for."""
    if executor is None:
        yield from map(predictor.attempt, slides)
        return
    # Of the sources a task needs those that its tables must not replace, not the paths of ten thousand slides.
    config = predictor.config
    sources = tuple(source for source in config.slides if Path(source).suffix == ".csv") or config.slides[:1]
    config = dataclasses.replace(config, slides=sources)
    futures = [executor.submit(_predict_there, config, predictor.made_with, entry) for entry in slides]
    yield from (future.result() for future in futures)


def _predict_there(config: PredictConfig, made_with: MadeWith, entry: Row) -> SlideResult:
    """Predict one slide, in a worker."""
    with _ONE_AT_A_TIME:
        return _predictor_there(config, made_with).attempt(entry)


@lru_cache(maxsize=1)
def _predictor_there(config: PredictConfig, made_with: MadeWith) -> Predictor:
    """Make the predictor of a worker; of a model that has been trained anew meanwhile, `made_with` is another."""
    return Predictor(config, Events())


def _merged(config: PredictConfig, predictor: Predictor, cohort: Sequence[Row]) -> dict[Path, str]:
    """Write the files that are made of all records: the cohort's in its order, then those of earlier runs by name."""
    records, out = read_records(Path(config.out)), Path(config.out)
    names = dict.fromkeys([*(entry.name for entry in cohort), *sorted(records)])
    found = [records[name] for name in names if name in records]
    tables = score_tables(found, predictor.table, config.threshold)
    return {out / name: text for name, text in {**tables, FILE_NAME: summary(found)}.items()}


def _in_words(result: SlideResult) -> str:
    if result.failed:
        return "failed"
    said = f", {result.predicted}" if result.predicted else ""
    dice = "" if result.dice is None else f", Dice {result.dice:.4f}"
    return f"{format_seconds(result.seconds)}{said}{dice}"
