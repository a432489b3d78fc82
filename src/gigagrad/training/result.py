"""Results of a finished run, as `summary.json` and as a folder to pass on: the best weights, what the network takes,
and a page on how it was made.

The page is a model card as the Hugging Face Hub has it. It names no slide, folder or machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from gigagrad.cohorts import Cohort
from gigagrad.cohorts.rows import Split
from gigagrad.config.fit import FitConfig
from gigagrad.errors import ConfigError
from gigagrad.files import read_json, write_json
from gigagrad.models.registry import asks_for_weights
from gigagrad.models.saved import save_folder
from gigagrad.prediction.scores import mean_sd, spread
from gigagrad.training.folder import RunFolder, environment


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
        """Return the share of test slides whose class is right, None where there are no classes of slides."""
        return self._measure("accuracy")

    @property
    def c_index(self) -> float | None:
        """Return the C-index of predicted risks, None where there are none, or no two that can be compared."""
        return self._measure("c_index")

    def _measure(self, name: str) -> float | None:
        value = self.evaluation.get(name, {}).get("value")
        return None if value is None else float(value)

    @property
    def best(self) -> Path:
        """Return the saved model with the weights of `best_epoch`."""
        return RunFolder(self.out).best

    @property
    def mean(self) -> float:
        """Return the mean of the scores; NaN without test slides."""
        return mean_sd(self.scores.values())[0]

    @property
    def sd(self) -> float:
        """Return the sample standard deviation of the scores; NaN without test slides."""
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


def write_model(model: nn.Module, config: FitConfig, cohort: Cohort, result: FitResult, mpp: float | None) -> None:
    """Write `model/` into the run's folder, from which `gigagrad.models.load` makes the network again.

    `mpp` is the resolution that it was trained at, in micrometres per pixel, None where slides have none. Raises
    `WriteError`, and `ModelError` for a network that is more than tensors.
    """
    settings = {
        "classes": list(config.classes),
        "level": config.level,
        "grey": config.grey,
        "bands": list(config.bands),
        "mpp": mpp,
    }
    card = model_card(model, config, cohort, result, mpp)
    save_folder(RunFolder(result.out).model, config.model, model, settings, card)


def model_card(model: nn.Module, config: FitConfig, cohort: Cohort, result: FitResult, mpp: float | None) -> str:
    """Write the page, in Markdown."""
    splits: tuple[Split, ...] = ("train", "val", "test")
    counts = ", ".join(f"{len(cohort.of(split))} {split}" for split in splits)
    dense = result.metric == "dice"
    tested = f"{result.metric} {spread(result.scores.values())}"
    begun = "published with the network" if asks_for_weights(config.model) else "random"
    if config.weights is not None:
        begun = f"`{Path(config.weights).name}`"
    rows = [
        ("network", f"`{config.model}`, {sum(p.numel() for p in model.parameters()):,} parameters"),
        ("first weights", f"{begun}; seed {config.seed}"),
        ("slides", counts),
        ("resolution", f"level {config.level}" + (f", {mpp:.4g} micrometres per pixel" if mpp else "")),
        ("colours", str(config.input_view)),
        ("classes", ", ".join(f"`{entry}`" for entry in config.classes) or "not named"),
        ("loss", f"`{config.loss}`; `{config.optimizer}`, learning rate {config.learning_rate:g}"),
        ("memory", f"{config.memory or 'no budget'}, {config.device}"),
        ("steps", f"{result.steps} in {result.epochs} epochs; the weights are of epoch {result.best_epoch}"),
        ("best validation loss", "none measured" if result.best_loss is None else f"{result.best_loss:.6g}"),
        ("test", f"{tested} over {len(result.scores)} slides" if result.scores else "no test slides"),
    ]
    stored = (
        "Every step used the loss and the gradients of whole slides as plain PyTorch would give them: no patches, no "
        "approximation."
        if config.storage is None
        else "Every step used whole slides without patches; fields kept between passes were stored as "
        f"`{config.storage}`, a declared rounding."
    )
    versions = [f"{name} {version}" for name, version in environment()["packages"].items() if version]
    return _PAGE.format(
        task="image-segmentation" if dense else "image-classification",
        table=_table(rows),
        exact=stored,
        versions=", ".join(versions),
    )


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = [(what, said.replace("|", "\\|")) for what, said in rows]
    return "\n".join(["| | |", "|---|---|", *(f"| {what} | {said} |" for what, said in cells)])


_PAGE = """\
---
library_name: gigagrad
tags:
- gigagrad
- pytorch
- safetensors
- digital-pathology
- {task}
---

# A network trained on whole slides

{table}

{exact} Made with {versions}.

```python
import gigagrad as gg

model = gg.models.load("FOLDER")  # this folder: a plain torch.nn.Module in eval mode
```

It takes slides as they are stored (bytes, `(N, C, H, W)`) and returns logits. Whole slides from the command line:
`gigagrad predict --run FOLDER --slides DIR --out predictions`.
"""
