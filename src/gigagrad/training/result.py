"""What a finished run found, as a record and as `summary.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gigagrad.errors import ConfigError
from gigagrad.files import read_json, write_json
from gigagrad.prediction.scores import mean_sd
from gigagrad.training.folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """A finished run in folder `out`.

    `scores` are the test slides' (or bags') by name, Dice (`metric == "dice"`), loss, or of survival the predicted
    risk; `epochs` and `steps` (of the optimizer) are what was trained in all; `best_loss` is the lowest validation
    loss, reached in `best_epoch`, None without validation slides. `evaluation` is what `SlideEvaluation.to_dict` says
    of the test slides where these have labels; of masks, `classes` and `confusion` of `Evaluation.to_dict`; else empty.
    """

    out: Path
    metric: str
    scores: dict[str, float]
    epochs: int
    steps: int
    best_epoch: int
    best_loss: float | None
    evaluation: dict[str, Any] = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """The share of test slides whose class is right, None where there are no classes of slides."""
        return self._measure("accuracy")

    @property
    def c_index(self) -> float | None:
        """Of predicted risks, None where there are none, or no two that can be compared."""
        return self._measure("c_index")

    def _measure(self, name: str) -> float | None:
        value = self.evaluation.get(name, {}).get("value")
        return None if value is None else float(value)

    @property
    def best(self) -> Path:
        """The saved model with the weights of `best_epoch`."""
        return RunFolder(self.out).best

    @property
    def mean(self) -> float:
        """Of the scores; NaN without test slides."""
        return mean_sd(self.scores.values())[0]

    @property
    def sd(self) -> float:
        """Sample standard deviation of the scores; NaN without test slides."""
        return mean_sd(self.scores.values())[1]

    def save(self, *, model: str, parameters: int) -> None:
        """Write `summary.json`. Raises `WriteError`."""
        summary = {
            "model": model,
            "parameters": parameters,
            "epochs": self.epochs,
            "steps": self.steps,
            "best_epoch": self.best_epoch,
            "best_loss": self.best_loss,
            "metric": self.metric,
            self.metric: self.scores,
            **({"evaluation": self.evaluation} if self.evaluation else {}),
            "mean": None if math.isnan(self.mean) else self.mean,
            "sd": None if math.isnan(self.sd) else self.sd,
        }
        write_json(RunFolder(self.out).summary, summary)

    @classmethod
    def load(cls, out: Path) -> FitResult:
        """Read `summary.json` of a run folder. Raises `ConfigError` when it is not one of `save`'s."""
        path = RunFolder(out).summary
        try:
            summary = read_json(path)
            metric = summary["metric"]
            rest = {key: summary[key] for key in ("epochs", "steps", "best_epoch", "best_loss")}
            scores = {str(name): float(score) for name, score in summary[metric].items()}
            evaluation = dict(summary.get("evaluation", {}))
            return cls(out=out, metric=str(metric), scores=scores, evaluation=evaluation, **rest)
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ConfigError(f"cannot read {path}; remove it to test the run again") from error
