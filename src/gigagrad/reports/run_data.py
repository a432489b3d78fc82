"""The content of a run folder and a prediction folder, read as they are: what is missing or damaged is simply absent.

A run writes its events line by line, and they come back here as the same records.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, get_type_hints

import yaml

from gigagrad.config.fit import FitConfig
from gigagrad.events import MetricsLogged, StepMeasured
from gigagrad.prediction.outputs import FILE_NAME, FOLDER
from gigagrad.training.folder import RunFolder

_Record = TypeVar("_Record")
_PLAIN = str, int, float, type(None)


@dataclass(frozen=True, slots=True)
class Predicted:
    """One slide of a prediction folder. `overlay` is None where there is no picture."""

    name: str
    status: str
    error: str
    dice: float | None
    height: int
    width: int
    seconds: float
    """0 where nobody knows."""
    regions: int
    overlay: Path | None


@dataclass(frozen=True, slots=True)
class RunData:
    """All a report can draw on; empty containers stand for files that are not there."""

    name: str
    metrics: tuple[MetricsLogged, ...]
    steps: tuple[StepMeasured, ...]
    dice: Mapping[str, float]
    evaluation: Mapping[str, Any]
    """Scores of test slides with labels, as `SlideEvaluation.to_dict` has them."""
    plan: Mapping[str, Any]
    plan_text: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    predictions: tuple[Predicted, ...]

    def series(self, split: str, name: str) -> list[tuple[int, float]]:
        """Return `(step, value)` of one number of one split, in the order it was logged; NaN included."""
        return [(m.step, m.values[name]) for m in self.metrics if m.split == split and name in m.values]

    @property
    def accumulated(self) -> int:
        """Return how many slides (or patients) make a step; metrics are counted in them."""
        return max(1, int(number(self.config, "accumulate")))

    @property
    def training_steps(self) -> int:
        """Count the steps of training: each epoch ends with what is left of its slides."""
        last: dict[int, int] = {}
        for metric in self.metrics:
            if metric.split == "train":
                last[metric.epoch] = max(metric.step, last.get(metric.epoch, 0))
        ends = sorted(last.values())
        return sum(-(-(end - begin) // self.accumulated) for begin, end in pairwise([0, *ends]))


def own_peaks(steps: Sequence[StepMeasured]) -> list[int | None]:
    """Return the peak of each step. A process tells the highest that it has been at: a step that stayed below one
    before it has a peak that nobody knows, here None.
    """
    found: list[int | None] = []
    most = 0
    for step in steps:
        found.append(step.peak_bytes if step.peak_bytes > (step.earlier_peak_bytes or most) else None)
        most = max(most, step.peak_bytes)
    return found


def read_run(run_dir: Path, predictions_dir: Path | None = None) -> RunData:
    """Read both folders. Raises nothing for missing or damaged files."""
    folder = RunFolder(run_dir)
    # The last line may have been cut off by whatever stopped the run.
    records = [mapping(_parsed(line)) for line in _text(folder.metrics).splitlines()]
    summary = mapping(_json(folder.summary))
    return RunData(
        name=run_dir.resolve().name,
        metrics=tuple(_metric(record) for record in records if record.get("event") == "metrics"),
        steps=tuple(_filled(StepMeasured, record) for record in records if record.get("event") == "step"),
        dice={str(name): value for name, value in mapping(summary.get("dice")).items() if _is_number(value)},
        evaluation=mapping(summary.get("evaluation")),
        plan=mapping(_json(folder.plan_data)),
        plan_text=_text(folder.plan_text),
        config=_settings(folder.config),
        environment=mapping(_json(folder.environment)),
        predictions=() if predictions_dir is None else tuple(_predictions(predictions_dir)),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _json(path: Path) -> Any:
    return _parsed(_text(path))


def _parsed(text: str) -> Any:
    """Read JSON, None where it is none; integers that no machine number holds become floats."""
    try:
        found = json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits))
        # Half a character, as in a file name of another encoding, can stand on no page.
        return json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return None


def _settings(path: Path) -> Mapping[str, Any]:
    """Return the settings of a run's configuration: each is a word or a number, or a list of these. A list of aliases
    of lists of aliases would be short in the file and endless on the page, and so would a long one under many names.
    """
    known = {field.name for field in dataclasses.fields(FitConfig)}
    try:
        found = mapping(yaml.safe_load(_text(path))).items()
        lists = {str(key): value for key, value in found if key in known and isinstance(value, list)}
        listed = {key: value for key, value in lists.items() if all(isinstance(item, _PLAIN) for item in value)}
        plain = {str(key): value for key, value in found if isinstance(value, _PLAIN)} | listed
        return mapping(_parsed(json.dumps(plain)))
    except (ValueError, OverflowError, RecursionError, yaml.YAMLError):
        return {}


def mapping(value: Any) -> Mapping[str, Any]:
    """Return `value` if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def number(record: Mapping[str, Any], name: str) -> float:
    """Return the finite number of that name, 0 if there is none."""
    value = record.get(name)
    return float(value) if _is_number(value) and math.isfinite(value) else 0.0


def _metric(record: Mapping[str, Any]) -> MetricsLogged:
    """Read a logged number; one that is not finite is JSON `null` or NaN, by whoever wrote it, and NaN here."""
    logged = mapping(record.get("values"))
    values = {str(name): float(value) if _is_number(value) else math.nan for name, value in logged.items()}
    return _filled(MetricsLogged, record, values=values)


def _filled(cls: type[_Record], record: Mapping[str, Any], **known: Any) -> _Record:
    """Make a record of the texts and numbers of a JSON object, empty and 0 where they are missing, and of `known`."""
    values = {
        name: str(record.get(name, "")) if kind is str else kind(number(record, name))
        for name, kind in get_type_hints(cls).items()
        if name not in known
    }
    return cls(**values, **known)


def _predictions(folder: Path) -> Iterator[Predicted]:
    entries = mapping(_json(folder / FILE_NAME)).get("slides")
    for record in map(mapping, entries if isinstance(entries, list) else []):
        files = mapping(record.get("files", record))  # earlier records have them on the outside
        overlay = _inside(folder, str(files.get("overlay") or "overlays/none"))
        dice = number(record, "dice") if _is_number(record.get("dice")) else None
        own = _inside(folder, f"{FOLDER}/{record.get('name')}.json")
        seconds = number(record if own is None else mapping(_json(own)), "seconds")
        yield _filled(Predicted, record, dice=dice, overlay=overlay, seconds=seconds)


def _inside(folder: Path, name: str) -> Path | None:
    """Return the file of that name, None if there is none or it is not in the folder."""
    path = folder / name
    try:
        return path if path.is_file() and path.resolve().is_relative_to(folder.resolve()) else None
    except (OSError, RuntimeError):  # a name that is too long, links in a circle
        return None
