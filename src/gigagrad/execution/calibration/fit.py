"""Fits the model of time to measured passes, and says how well it does on networks it has not seen.

Least squares on relative errors with rates that cannot be negative (Lawson and Hanson, Solving least squares problems,
1974, by scikit-learn). Rates are fitted as multiples of typical ones, and each leans on its typical one a little: what
few networks contain stays sensible. Alternatives and their errors are in docs/decisions/0012-time-model.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from gigagrad.errors import ConfigError
from gigagrad.plans.machine import Sharing, TimeModel, typical_rate
from gigagrad.plans.work import Work

_LEANING = 0.03
"""Weight of a rate's distance from its typical one, in units of one pass's relative error."""
_STEP_WEIGHT = 3.0
"""Weight of a whole step's relative error beside that of each of its passes: steps are what people wait for, and the
many short passes of networks in training mode would otherwise outvote the few long ones of the others."""
_FOLDS = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """One pass of one step: what it had to do, and what it took."""

    network: int
    step: int
    """Passes of one step have the same number; predictions are judged by whole steps."""
    work: Work
    seconds: float


Predictor = Callable[[Work], float]
Vector = np.ndarray[tuple[int], np.dtype[np.float64]]


def fit(samples: Sequence[Sample]) -> TimeModel:
    """The model for all samples, with its error on networks held out. Raises `ConfigError` without scikit-learn."""
    return TimeModel(fit_rates(samples), held_out_error(samples, lambda seen: TimeModel(fit_rates(seen), 0.0).seconds))


def require_scikit_learn() -> None:
    """Raises `ConfigError` without it: better before minutes of measuring than after."""
    try:
        import sklearn.linear_model  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "calibration needs scikit-learn, which is not installed; run: pip install 'gigagrad[calibrate]'"
        ) from error


def fit_rates(samples: Sequence[Sample]) -> dict[str, float]:
    """Seconds per unit of every kind of work that the samples contain. Raises `ConfigError` without scikit-learn."""
    require_scikit_learn()
    from sklearn.linear_model import LinearRegression

    kinds = sorted({kind for sample in samples for kind in sample.work})
    typical = np.array([typical_rate(kind) for kind in kinds])
    seconds = np.array([sample.seconds for sample in samples])
    passes = np.array([[sample.work.get(kind, 0.0) for kind in kinds] for sample in samples]) * typical
    numbers, step_of = np.unique([sample.step for sample in samples], return_inverse=True)
    members = np.eye(len(numbers))[step_of].T
    steps = (members @ passes) / (members @ seconds)[:, None]
    rows = np.vstack([passes / seconds[:, None], _STEP_WEIGHT * steps, _LEANING * np.eye(len(kinds))])
    weights = (1.0, len(samples)), (_STEP_WEIGHT, len(numbers)), (_LEANING, len(kinds))
    wanted = np.concatenate([np.full(count, weight) for weight, count in weights])
    found = LinearRegression(positive=True, fit_intercept=False).fit(rows, wanted).coef_
    return {kind: float(rate) for kind, rate in zip(kinds, found * typical, strict=True)}


@dataclass(frozen=True, slots=True)
class Compared:
    """One step with several threads, by the clock."""

    passes: tuple[tuple[Work, int], ...]
    """What each pass has to do, and its number of tiles."""
    shared: float
    """Seconds, all threads sharing the operators of one tile."""
    side_by_side: float
    """Seconds, every thread computing tiles of its own."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Compared:
        passes = tuple((dict(work), int(count)) for work, count in data["passes"])
        return cls(passes, float(data["shared"]), float(data["side_by_side"]))


def fit_sharing(steps: Sequence[Compared], model: TimeModel, threads: int) -> Sharing:
    """Least squares on relative errors of whole steps, for the formulas of `Sharing.wall_seconds`."""
    one_thread = [[(model.split(work), count) for work, count in step.passes] for step in steps]
    kernels = [sum(seconds.kernels for seconds, _ in passes) for passes in one_thread]
    calls = [sum(seconds.calls for seconds, _ in passes) for passes in one_thread]
    totals = [sum(seconds.total for seconds, _ in passes) for passes in one_thread]
    tiles = [sum(seconds.total / count for seconds, count in passes) for passes in one_thread]
    shared, side_by_side = (np.array([getattr(step, way) for step in steps]) for way in ("shared", "side_by_side"))
    share = _slope(kernels / shared, 1 - calls / shared)
    both = np.stack([totals / side_by_side, tiles / side_by_side], 1)
    share_of_tiles = float(np.linalg.lstsq(both, np.ones(len(steps)))[0][0])
    fastest, slowest = 1 / threads, 1.0
    share, share_of_tiles = (min(max(found, fastest), slowest) for found in (share, share_of_tiles))
    waiting = max(0.0, _slope(both[:, 1], 1 - share_of_tiles * both[:, 0]))
    return Sharing((1 / share - 1) / (threads - 1), (1 / share_of_tiles - 1) / (threads - 1), waiting)


def _slope(given: Vector, wanted: Vector) -> float:
    """The factor that comes closest."""
    return float(given @ wanted / (given @ given))


def achieved(samples: Sequence[Sample], model: TimeModel) -> dict[str, float]:
    """Per kind of work and direction (`"dense.f"`) what networks got of it in a second: operations, or bytes moved.

    A kind's time is divided among its calls, bytes and operations as the fit sees fit; their sum is what can be known.
    """
    amounts, seconds = Counter[str](), Counter[str]()
    for sample in samples:
        for kind, amount in sample.work.items():
            name, _, quantity = kind.rpartition(".")
            seconds[name] += model.seconds({kind: amount})  # type: ignore[assignment]
            if quantity == "flops" or (quantity != "calls" and f"{name}.flops" not in sample.work):
                amounts[name] += amount  # type: ignore[assignment]
    return {name: amount / seconds[name] for name, amount in amounts.items() if seconds[name] > 0}


def held_out_error(samples: Sequence[Sample], train: Callable[[Sequence[Sample]], Predictor]) -> float:
    """Mean relative error of whole steps, each predicted by a fit that has not seen its network."""
    networks = sorted({sample.network for sample in samples})
    errors: list[float] = []
    for fold in range(min(_FOLDS, len(networks))):
        unseen = set(networks[fold::_FOLDS])
        predict = train([sample for sample in samples if sample.network not in unseen])
        steps: dict[int, list[float]] = {}
        for sample in samples:
            if sample.network in unseen:
                measured, predicted = steps.get(sample.step, (0.0, 0.0))
                steps[sample.step] = [measured + sample.seconds, predicted + predict(sample.work)]
        errors += [abs(predicted / measured - 1) for measured, predicted in steps.values()]
    return fmean(errors)
