"""Agreement of slides' scores with their labels: each measure with a 95 % interval over the slides.

Intervals are percentiles of a bootstrap (Efron, 1979): slides are drawn again with replacement, from a fixed seed, and
draws in which a measure has no value do not count. The area under the ROC curve is that of each class against the rest;
the Brier score (1950) is the mean squared distance of the probabilities from the truth, of two classes that of the
second alone; the calibration error (Guo et al., 2017) is expected over 15 bins. Bags are drawn as a whole.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from gigagrad.extras import extra

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
        ends = {"value": self.value, "low": self.low, "high": self.high}
        return {name: None if math.isnan(number) else number for name, number in ends.items()}


@dataclass(frozen=True, slots=True)
class SlideScore:
    """One slide: its scores by column, what they mean, and its label, as a text and as a number.

    `outputs` are the probabilities of all classes, or one number; of survival `truth` is the time, and `event` whether
    it ended with the event. Of a bag, those of its slides together.
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
    """Compute each measure of all slides, and its interval over draws of slides, the same draws for all; of one
    slide there is none.
    """
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
