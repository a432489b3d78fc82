"""Scores of whole slides by a model without an image output: its `(1, C)` numbers as probabilities, or as they are.

The loss it was trained with decides which. Scores have the names of columns, `probability_CLASS` or `output`, in the
records of a prediction and in the table `slides.csv`.

Against labels each measure has a 95 % interval, percentiles of a bootstrap (Efron, 1979): slides are drawn again with
replacement, from a fixed seed, and draws in which a measure has no value do not count. The area under the ROC curve is
that of each class against the rest; the Brier score (1950) is the mean squared distance of the probabilities from the
truth, of two classes that of the second alone; the calibration error (Guo et al., 2017) is expected over 15 bins. Cases
are drawn as a whole.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from gigagrad.cohorts import Row, cases_of, survival_of
from gigagrad.cohorts.records import SlideResult
from gigagrad.errors import ConfigError, ModelError, TargetError, extra
from gigagrad.execution.engine import Engine
from gigagrad.files import csv_text
from gigagrad.images import Image
from gigagrad.images.bag import Bag
from gigagrad.losses import kind_of
from gigagrad.masks import ClassTable

TABLE_NAME: Final = "slides.csv"
CASES_NAME: Final = "cases.csv"
RISK: Final = "risk"
"""The column of what `cox` gives: the logarithm of a risk; differences count."""
_PROBABILITY: Final = "probability_"


@dataclass(frozen=True, slots=True)
class Reading:
    """A reading of a model's outputs: the columns of its scores, and the names of the classes by their ids.

    Without `names` the scores are numbers. With one column and names, it is the probability of class 1, else there is a
    column for each class.
    """

    columns: tuple[str, ...]
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, outputs: int, loss: str, table: ClassTable | None) -> Self:
        """Read `outputs` numbers as training with `loss`, or a sum of losses, means them; "" where nobody knows which.

        `ce` makes classes of them, a binary loss one probability, `mse` numbers. After a function of the user's own
        they are numbers unless the labels were class names; these, and those of an unknown loss, are read as pixels
        are: one logit, or one for each class. Raises `ModelError` where the loss cannot be of so many outputs and
        `ConfigError` for classes beyond them.
        """
        kind = kind_of(loss) if loss else None
        if kind == "binary" and outputs != 1:
            raise ModelError(f"the model has {outputs} outputs and {loss} takes one of a slide; train it with ce")
        if kind == "survival":
            if outputs != 1:
                raise ModelError(f"the model has {outputs} outputs and {loss} takes one of a slide, a risk")
            return cls((RISK,))
        if kind == "numbers" or (kind is None and loss and table is None):
            return cls(("output",) if outputs == 1 else tuple(f"output_{number}" for number in range(outputs)))
        one = outputs == 1 and kind != "class ids"
        names = _class_names(2 if one else outputs, table)
        return cls(tuple(_PROBABILITY + name for name in (names[1:] if one else names)), names)

    @classmethod
    def of_columns(cls, columns: Iterable[str], table: ClassTable | None) -> Self:
        """Return the reading that gave these columns."""
        columns = tuple(columns)
        if not all(column.startswith(_PROBABILITY) for column in columns):
            return cls(columns)
        if len(columns) == 1:
            return cls(columns, _class_names(2, table))
        return cls(columns, tuple(column.removeprefix(_PROBABILITY) for column in columns))

    def scores(self, output_NC: torch.Tensor) -> dict[str, float]:
        """Return the scores of a `(1, C)` output by column, in float64. Raises `ModelError` where one is not finite."""
        values = output_NC[0].double().cpu()
        if not values.isfinite().all():
            raise ModelError(f"the model's output is {values.tolist()}; it cannot be read as scores of a slide")
        if self.names:
            values = values.sigmoid() if len(self.columns) == 1 else values.softmax(0)
        return dict(zip(self.columns, values.tolist(), strict=True))

    @property
    def survival(self) -> bool:
        return self.columns == (RISK,)

    def pooled(self, scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Score a case by the scores of its slides: of the mean of the model's outputs, as in training.

        Softmax and sigmoid forget nothing that counts: the mean of logarithms of probabilities, made to add up to 1, is
        the softmax of the mean output.
        """
        values_NC = torch.tensor([list(each.values()) for each in scores], dtype=torch.float64)
        if not self.names:
            found = values_NC.mean(0)
        elif len(self.columns) == 1:
            found = values_NC.logit(torch.finfo(torch.float64).eps).mean(0).sigmoid()
        else:
            found = values_NC.clamp(min=torch.finfo(torch.float64).tiny).log().mean(0).softmax(0)
        return dict(zip(self.columns, found.tolist(), strict=True))

    def outputs(self, scores: Mapping[str, float]) -> tuple[float, ...]:
        """Return the probabilities of all classes by their ids; numbers as they are."""
        found = tuple(scores.values())
        return (1 - found[0], found[0]) if self.names and len(self.columns) == 1 else found

    def predicted(self, scores: Mapping[str, float], threshold: float) -> str:
        """Return the name of the likeliest class, of a single probability class 1 where it is above the threshold; or
        the number; "" where there are several numbers.
        """
        found, single = tuple(scores.values()), len(self.columns) == 1
        if self.names:
            return self.names[int(found[0] > threshold) if single else found.index(max(found))]
        return f"{found[0]:g}" if single else ""


def _class_names(count: int, table: ClassTable | None) -> tuple[str, ...]:
    """Name the classes from id 0 on; by the id itself where the table has none."""
    if table is not None and table.count > count:
        raise ConfigError(
            f"there are {table.count} classes ({table}) and the model tells {count} apart; write NAME=ID, ids from 0 on"
        )
    names: dict[int, str] = {}
    for name, number in table.ids if table is not None else ():
        names.setdefault(number, name)
    return tuple(names.get(number, f"Class {number}" if names else str(number)) for number in range(count))


def output_of(engine: Engine, slide: Image | Bag) -> torch.Tensor:
    """Compute the `(1, C)` output of a model that gives no image. Raises `ModelError` for any other."""
    return checked_output(engine.forward(slide), slide)


def checked_output(output: object, slide: Image | Bag) -> torch.Tensor:
    """Return a model's output that scores a slide, `(1, C)`. Raises `ModelError` for any other."""
    if isinstance(output, torch.Tensor) and output.ndim == 2 and output.shape[0] == 1:
        return output
    got = tuple(output.shape) if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"
    if isinstance(slide, Bag):
        raise ModelError(f"the model's output is {got} for {len(slide)} patches, {ONE_ANSWER}")
    raise ModelError(f"the model's output is {got}, expected (1, classes, height, width) or (1, classes)")


ONE_ANSWER: Final = "expected one answer for all of them, (1, classes), as mil:encoder=timm:NAME&head=abmil gives"


def weighted_sum(output_NC: torch.Tensor, weights_C: torch.Tensor) -> torch.Tensor:
    """Make one number of the outputs, as a loss: its gradient is what the weights pull back."""
    return (output_NC * weights_C).sum()


def label_time(row: Row) -> tuple[float, bool]:
    """Read a slide's time, and whether the event came then. Raises `TargetError`."""
    found = survival_of(row.label or "")
    if found is None:
        raise TargetError(f"the label of {row.name} is {row.label!r}, expected a time and an event, or as in 12.5+")
    return found


def label_value(row: Row, reading: Reading, table: ClassTable | None) -> float:
    """Read a slide's label as a number: the id of its class where there are classes. Raises `TargetError`."""
    ids = dict(table.ids) if table is not None else {}
    text = row.label or ""
    try:
        value = float(ids.get(text, text))
    except ValueError:
        known = ", ".join(reading.names) or "a number"
        raise TargetError(
            f"the label of {row.name} is {text!r}, expected {known}; correct it or say --classes"
        ) from None
    if reading.names and not (value.is_integer() and 0 <= value < len(reading.names)):
        raise TargetError(f"the label of {row.name} is {text!r}; the model's classes are 0 to {len(reading.names) - 1}")
    return value


def check_table(out: Path, sources: Iterable[str | Path], *, own: bool) -> None:
    """Raise `ConfigError` where a table would replace a cohort, or, if it is not our `own`, somebody's file."""
    for path in (out / TABLE_NAME, out / CASES_NAME):
        if any(Path(source).resolve() == path.resolve() for source in sources):
            raise ConfigError(f"{path} is the cohort itself and would be replaced by its scores; choose another --out")
        if path.exists() and not own:
            raise ConfigError(f"{path} exists but was not predicted here; choose another --out or pass --overwrite")


def score_tables(results: Iterable[SlideResult], table: ClassTable | None, threshold: float) -> dict[str, str]:
    """Write tables as texts by file name: `slides.csv`, a line for each slide with scores, and `cases.csv`, one for
    each case, where slides are of cases; nothing where there are no scores.
    """
    scored = [result for result in results if result.scores and result.status == "done"]
    if not scored:
        return {}
    columns = list(dict.fromkeys(column for result in scored for column in result.scores))
    further = [name for name in ("case", "label") if any(getattr(result, name) for result in scored)]
    lines = [
        [r.name, r.slide, *(r.scores.get(c, "") for c in columns), r.predicted, *(getattr(r, name) for name in further)]
        for r in scored
    ]
    tables = {TABLE_NAME: csv_text([["name", "slide", *columns, "predicted", *further], *lines])}
    if "case" not in further:
        return tables
    reading = Reading.of_columns(columns, table)
    cases: dict[str, list[SlideResult]] = {}
    for result in scored:
        cases.setdefault(result.case or result.name, []).append(result)
    lines = []
    for name, slides in cases.items():
        scores = reading.pooled([slide.scores for slide in slides])
        said = reading.predicted(scores, threshold)
        lines.append([name, len(slides), *scores.values(), said, *([slides[0].label] if "label" in further else [])])
    return tables | {CASES_NAME: csv_text([["case", "slides", *columns, "predicted", *further[1:]], *lines])}


RESAMPLES: Final = 1000
_SEED: Final = 0
_BINS: Final = 15


@dataclass(frozen=True, slots=True)
class Measure:
    """A value with the ends of its 95 % interval; NaN where the slides give none."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float | None]:
        return {name: None if math.isnan(number) else number for name, number in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class SlideScore:
    """One slide: its scores by column, what they mean, and its label, as a text and as a number.

    `outputs` are the probabilities of all classes, or one number; of survival `truth` is the time, and `event` whether
    it ended with the event. Of a case, those of its slides together.
    """

    name: str
    scores: dict[str, float]
    outputs: tuple[float, ...]
    predicted: str
    label: str
    truth: float
    event: bool = True


@dataclass(frozen=True, slots=True)
class SlideEvaluation:
    """The scores of a set of slides against their labels.

    `classes` and `confusion` (slides by true class and predicted class) are empty where labels are numbers.
    """

    slides: tuple[SlideScore, ...]
    measures: dict[str, Measure]
    classes: tuple[str, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return what a summary file holds."""
        slides = {s.name: {"label": s.label, "predicted": s.predicted, "scores": s.scores} for s in self.slides}
        return {
            "slides": slides,
            **{name: measure.to_dict() for name, measure in self.measures.items()},
            **({"classes": list(self.classes), "confusion": list(map(list, self.confusion))} if self.classes else {}),
            "bootstrap": {"resamples": RESAMPLES, "seed": _SEED},
        }


def compare_labels(
    entries: Sequence[Row],
    found: Mapping[str, tuple[Reading, Mapping[str, float]]],
    table: ClassTable | None,
    threshold: float,
) -> SlideEvaluation:
    """Compare the scores of slides by name, or of cases of them, with their labels.

    Raises `ConfigError` for slides whose scores are not alike, and `TargetError` for labels that are not what the
    scores are of.
    """
    reading, _ = found[entries[0].name]
    for name, (other, _) in found.items():
        if other != reading:
            raise ConfigError(f"{name} has scores of {other.columns}, others of {reading.columns}; predict anew")
    of_cases = []
    for case in cases_of(entries):
        row, of_slides = case[0], [found[each.name][1] for each in case]
        scores = reading.pooled(of_slides) if len(case) > 1 else dict(of_slides[0])  # a single slide's are its own
        truth, event = label_time(row) if reading.survival else (label_value(row, reading, table), True)
        said = reading.predicted(scores, threshold)
        of_cases.append(
            SlideScore(row.case or row.name, scores, reading.outputs(scores), said, row.label or "", truth, event)
        )
    if reading.survival:
        return evaluate_survival(of_cases)
    return evaluate_classes(of_cases, reading.names) if reading.names else evaluate_numbers(of_cases)


def evaluate_classes(slides: Sequence[SlideScore], names: Sequence[str]) -> SlideEvaluation:
    """Measure probabilities of the classes `names`, and the class that was predicted of each slide."""
    truth_N = np.array([slide.truth for slide in slides]).astype(np.int64)
    predicted_N = np.array([names.index(slide.predicted) for slide in slides])
    p_NC = np.array([slide.outputs for slide in slides])
    measures: dict[str, Callable[[NDArray[np.int64]], float]] = {
        "accuracy": lambda at: float(np.mean(truth_N[at] == predicted_N[at])),
        "balanced_accuracy": lambda at: _balanced(truth_N[at], predicted_N[at]),
        "auc": lambda at: _auc(p_NC[at], truth_N[at]),
    }
    if len(names) > 2:
        for number, name in enumerate(names):
            measures[f"auc_{name}"] = partial(_auc_of, p_NC[:, number], truth_N == number)
    measures["brier"] = lambda at: _brier(p_NC[at], truth_N[at])
    measures["calibration_error"] = lambda at: _calibration_error(p_NC[at], truth_N[at])
    counts = np.zeros((len(names), len(names)), np.int64)
    np.add.at(counts, (truth_N, predicted_N), 1)
    confusion = tuple(tuple(row) for row in counts.tolist())
    return SlideEvaluation(tuple(slides), _measured(measures, len(slides)), tuple(names), confusion)


def evaluate_numbers(slides: Sequence[SlideScore]) -> SlideEvaluation:
    """Measure the errors of one number by slide, and the share of the labels' variance that it explains."""
    truth_N, found_N = np.array([slide.truth for slide in slides]), np.array([slide.outputs[0] for slide in slides])
    measures: dict[str, Callable[[NDArray[np.int64]], float]] = {
        "mse": lambda at: float(np.mean((found_N[at] - truth_N[at]) ** 2)),
        "mae": lambda at: float(np.mean(np.abs(found_N[at] - truth_N[at]))),
        "r2": lambda at: _explained(found_N[at], truth_N[at]),
    }
    return SlideEvaluation(tuple(slides), _measured(measures, len(slides)))


def evaluate_survival(slides: Sequence[SlideScore]) -> SlideEvaluation:
    """Measure how well risks foretell the order of events."""
    risk_N, time_N = np.array([slide.outputs[0] for slide in slides]), np.array([slide.truth for slide in slides])
    event_N = np.array([slide.event for slide in slides])
    measures: dict[str, Callable[[NDArray[np.int64]], float]] = {
        "c_index": lambda at: c_index(risk_N[at], time_N[at], event_N[at])
    }
    return SlideEvaluation(tuple(slides), _measured(measures, len(slides)))


def c_index(risk_N: NDArray[np.float64], time_N: NDArray[np.float64], event_N: NDArray[np.bool_]) -> float:
    """Return the share of pairs, one with the event before the other's time ends, in which that one has the higher
    risk, equal risks counted half (Harrell et al., 1982); NaN where there is no such pair.
    """
    earlier_NN = time_N[:, None] < time_N
    ended_NN = (time_N[:, None] == time_N) & ~event_N  # the other left at that very time
    pairs_NN = event_N[:, None] & (earlier_NN | ended_NN)
    right_NN = (risk_N[:, None] > risk_N) + 0.5 * (risk_N[:, None] == risk_N)
    count = int(pairs_NN.sum())
    return float(right_NN[pairs_NN].sum() / count) if count else math.nan


def _measured(measures: dict[str, Callable[[NDArray[np.int64]], float]], count: int) -> dict[str, Measure]:
    """Compute each measure of all slides, and its interval over the same draws of them; of one slide there is none."""
    draws = np.random.default_rng(_SEED).integers(count, size=(RESAMPLES if count > 1 else 0, count))
    found = {}
    for name, measure in measures.items():
        values = np.array([measure(draw) for draw in draws])
        values = values[~np.isnan(values)]
        low, high = np.percentile(values, (2.5, 97.5)).tolist() if values.size else (math.nan, math.nan)
        found[name] = Measure(measure(np.arange(count)), low, high)
    return found


def _balanced(truth_N: NDArray[np.int64], predicted_N: NDArray[np.int64]) -> float:
    """Return the mean share of right slides over the classes that occur."""
    return float(np.mean([np.mean(predicted_N[truth_N == c] == c) for c in np.unique(truth_N)]))


def _auc(p_NC: NDArray[np.float64], truth_N: NDArray[np.int64]) -> float:
    """Return the second of two classes' AUC; of several the mean of each against the rest, NaN where one is missing."""
    classes = range(1, 2) if p_NC.shape[1] == 2 else range(p_NC.shape[1])
    every = np.arange(len(truth_N))
    return float(np.mean([_auc_of(p_NC[:, c], truth_N == c, every) for c in classes]))


def _auc_of(p_N: NDArray[np.float64], true_N: NDArray[np.bool_], at: NDArray[np.int64]) -> float:
    """Return the AUC of the slides `at`."""
    if true_N[at].all() or not true_N[at].any():
        return math.nan
    given = torch.from_numpy(p_N[at]), torch.from_numpy(true_N[at]).long()
    return float(_torchmetrics().binary_auroc(*given, validate_args=False))


def _brier(p_NC: NDArray[np.float64], truth_N: NDArray[np.int64]) -> float:
    if p_NC.shape[1] == 2:
        return float(np.mean((p_NC[:, 1] - truth_N) ** 2))
    return float(np.mean(np.sum((p_NC - np.eye(p_NC.shape[1])[truth_N]) ** 2, axis=1)))


def _calibration_error(p_NC: NDArray[np.float64], truth_N: NDArray[np.int64]) -> float:
    metrics, truth, count = _torchmetrics(), torch.from_numpy(truth_N), p_NC.shape[1]
    if count == 2:
        second = torch.from_numpy(np.ascontiguousarray(p_NC[:, 1]))
        return float(metrics.binary_calibration_error(second, truth, n_bins=_BINS, validate_args=False))
    of_all = torch.from_numpy(p_NC)
    settings = {"num_classes": count, "n_bins": _BINS, "validate_args": False}
    return float(metrics.multiclass_calibration_error(of_all, truth, **settings))


def _explained(found_N: NDArray[np.float64], truth_N: NDArray[np.float64]) -> float:
    spread = float(np.sum((truth_N - truth_N.mean()) ** 2))
    return 1 - float(np.sum((found_N - truth_N) ** 2)) / spread if spread else math.nan


def _torchmetrics() -> Any:
    # It imports torchvision where that is installed.
    importlib.import_module("gigagrad.models.torchvision_operators")
    with extra("train"):
        return importlib.import_module("torchmetrics.functional.classification")
