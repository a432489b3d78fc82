"""Evaluation on slides that a network is not trained on: the loss of validation slides, scores of test slides; and the
results of a finished run, as `summary.json` and as a folder to pass on: the best weights, what the network takes, and a
page on how it was made.

Of several ranks, groups share out the slides of a validation, computing each as in a step, and single ranks those of a
test, since an image that a model returns comes from one process.

The page is a model card as the Hugging Face Hub has it. It names no slide, folder or machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gigagrad.cohorts import Cohort, Row, cases_of
from gigagrad.cohorts.patches import Patches
from gigagrad.cohorts.rows import Split
from gigagrad.config.fit import FitConfig
from gigagrad.errors import ConfigError
from gigagrad.events import Events
from gigagrad.execution.compiling import compile as compile_engine
from gigagrad.execution.engine import Engine
from gigagrad.files import read_json, write_json
from gigagrad.images import Image
from gigagrad.images.bag import Bag
from gigagrad.losses import Loss, kind_of
from gigagrad.masks import ClassTable
from gigagrad.models.registry import asks_for_weights
from gigagrad.models.saved import save_folder
from gigagrad.prediction.classes import Channels, image_shape
from gigagrad.prediction.scores import Confusion, Evaluation, mean_sd, score_logits, spread
from gigagrad.prediction.slide_scores import Reading, compare_labels, output_of
from gigagrad.ranks import Mesh, Ranks
from gigagrad.training.dataset import Dataset
from gigagrad.training.folder import RunFolder, environment
from gigagrad.training.learner import Learner
from gigagrad.training.sharing import plan_alike

_THRESHOLD = 0.5


def validate(learner: Learner, dataset: Dataset, rows: tuple[Row, ...], events: Events, mesh: Mesh) -> float:
    """Return the mean loss over `rows`, or of all cases, as they are and in eval mode. Emits the job `validate`."""
    learner.model.eval()
    with events.job("validate", len(rows)) as advance:
        if (group := learner.group) is not None:
            cases = cases_of(rows)
            opened = [[partial(dataset.open, row) for row in case] for case in cases]
            losses = [group.loss(opened, [dataset.label(case[0]) for case in cases])]
            advance(len(rows), "")
        else:
            engine = learner.engine
            with dataset.open(rows[0]) as (slide, target):
                plan_alike(engine, lambda: engine.plan(slide, target, backward=False), mesh.data)

            def loss(row: Row) -> float:
                with dataset.open(row) as (slide, target):
                    value = _loss(engine, slide, target)
                dataset.passed(row)
                return value

            losses = mesh.data.map(rows, loss, lambda done, _: advance(done, rows[done - 1].name))
    return math.fsum(losses) / len(losses)


def test(
    model: nn.Module,
    config: FitConfig,
    loss: Loss,
    dataset: Dataset,
    table: ClassTable | None,
    cohort: Cohort,
    events: Events,
    ranks: Ranks,
) -> tuple[str, dict[str, float], dict[str, Any]]:
    """Score test slides: masks by Dice, labels by `_of_labels`, anything else by the loss. Emits the job `test`.

    Returns what they are scored by, Dice, risk or loss; the scores by name; and what `evaluate` says of labels, or of
    the classes of masks.
    """
    rows, kind = cohort.of("test"), kind_of(config.loss)
    of_pixels = cohort.rows[0].label is None
    dense = of_pixels and kind != "numbers"
    # Scores of slides are read off the output, of which the loss is one more line; unless it is a user's own.
    rated = not of_pixels and kind is not None
    engine = compile_engine(
        model,
        None if dense or rated else loss.function,
        memory=config.memory,
        scratch=config.scratch,
        device=config.device,
        precision=config.precision,
    )
    engine.events.subscribe(events.emit)
    metric = "dice" if dense else "risk" if loss.survival else "loss"
    if not rows:
        return metric, {}, {}
    with dataset.open(rows[0]) as (slide, target):
        plan_alike(engine, lambda: engine.plan(slide, target if engine.loss else None, backward=False), ranks)

    def score(row: Row) -> tuple[float | None, Any]:
        """Return the loss or the Dice of a slide, and its output or the counts of its pixels; as JSON can hold them."""
        with dataset.open(row) as (slide, target):
            if rated:
                output_NC = output_of(engine, slide)
                return None, [str(output_NC.dtype).removeprefix("torch."), output_NC.tolist()]
            if not dense:
                return _loss(engine, slide, target), None
            assert isinstance(slide, Image)
            assert isinstance(target, Image)
            shape = image_shape(engine, slide)
            channels = Channels.of(1 if shape is None else shape[1], config.loss)
            counts = score_logits(engine.stream(slide), target, channels, table, slide)
            return counts.dice, counts.to_dict()

    with events.job("test", len(rows)) as advance:

        def tell(done: int, value: tuple[float | None, Any]) -> None:
            name = rows[done - 1].name
            advance(done, name if rated else f"{name}: {value[0]:.4f}")

        found = ranks.map(rows, score, tell)
    if rated:
        outputs = {
            row.name: torch.tensor(values, dtype=getattr(torch, dtype))
            for row, (_, (dtype, values)) in zip(rows, found, strict=True)
        }
        return metric, *_of_labels(rows, outputs, dataset, loss, config.loss, table)
    scores = {row.name: value for row, (value, _) in zip(rows, found, strict=True)}
    if not dense:
        return metric, scores, {}
    counts = {row.name: Confusion.from_dict(content) for row, (_, content) in zip(rows, found, strict=True)}
    said = Evaluation.of(counts, table).to_dict()
    return metric, scores, {name: said[name] for name in ("classes", "confusion")}


def _of_labels(
    rows: Sequence[Row],
    outputs: Mapping[str, torch.Tensor],
    dataset: Dataset,
    loss: Loss,
    name: str,
    table: ClassTable | None,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Score slides or cases by their loss, or by the risk; and by `SlideEvaluation.to_dict`, empty for several
    numbers of a slide. `name` is what the loss is called, `outputs` are by the slides' names.
    """
    reading = Reading.of(next(iter(outputs.values())).shape[1], name, table)
    scores = {}
    for case in cases_of(rows):
        output_NC = torch.cat([outputs[row.name] for row in case]).mean(0, keepdim=True)
        called = case[0].case or case[0].name
        target = dataset.label(case[0]).to(output_NC.device)
        scores[called] = float(output_NC if loss.survival else loss.function(output_NC, target))
    if not reading.names and len(reading.columns) > 1:
        return scores, {}
    read = {row.name: (reading, reading.scores(outputs[row.name])) for row in rows}
    return scores, compare_labels(rows, read, table, _THRESHOLD).to_dict()


def _loss(engine: Engine, slide: Image | Bag, target: Image | torch.Tensor) -> float:
    value = engine.forward(slide, target)
    assert isinstance(value, torch.Tensor)
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """A finished run in folder `out`.

    `scores` are the test slides' (or cases') by name, Dice (`metric == "dice"`), loss, or of survival the predicted
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
        "loss": config.loss,  # which says what the outputs are
        "classes": list(config.classes),
        "level": config.level,
        "grey": config.grey,
        "bands": list(config.bands),
        "mpp": mpp,
    }
    if config.patches is not None:
        names = "patch_size", "patch_mpp", "overlap", "tissue", "least_tissue"
        settings |= {name: getattr(config, name) for name in names}
        if config.coords is not None:  # which are of its own slides
            settings["corners_given"] = True
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
    patches = config.patches
    read = f"level {config.level}" if patches is None else f"patches of {_without_folder(patches)}"
    rows = [
        ("network", f"`{config.model}`, {sum(p.numel() for p in model.parameters()):,} parameters"),
        ("first weights", f"{begun}; seed {config.seed}"),
        ("slides", counts),
        ("resolution", f"{read}, {mpp:.4g} micrometres per pixel" if mpp else read),
        ("colours", str(config.input_view)),
        ("classes", ", ".join(f"`{entry}`" for entry in config.classes) or "not named"),
        ("loss", f"`{config.loss}`; `{config.optimizer}`, learning rate {config.learning_rate:g}"),
        ("memory", f"{config.memory or 'no budget'}, {config.device}"),
        ("steps", f"{result.steps} in {result.epochs} epochs; the weights are of epoch {result.best_epoch}"),
        ("best validation loss", "none measured" if result.best_loss is None else f"{result.best_loss:.6g}"),
        ("test", f"{tested} over {len(result.scores)} slides" if result.scores else "no test slides"),
    ]
    whole = "whole slides" if patches is None else "all patches of a slide at once"
    stored = (
        f"Every step used the loss and the gradients of {whole} as plain PyTorch would give them: no "
        f"{'patches' if patches is None else 'sampling'}, no approximation."
        if config.storage is None
        else f"Every step used {whole}; fields kept between passes were stored as `{config.storage}`, a declared "
        "rounding."
    )
    versions = [f"{name} {version}" for name, version in environment()["packages"].items() if version]
    cells = [(what, said.replace("|", "\\|")) for what, said in rows]
    return _PAGE.format(
        task="image-segmentation" if dense else "image-classification",
        table="\n".join(["| | |", "|---|---|", *(f"| {what} | {said} |" for what, said in cells)]),
        exact=stored,
        takes="slides as they are stored (bytes, `(N, C, H, W)`)"
        if patches is None
        else "all patches of a slide (bytes, `(N, C, h, w)`)",
        versions=", ".join(versions),
    )


def _without_folder(patches: Patches) -> str:
    return str(patches) if patches.coords is None else f"{patches.size} px with corners from files"


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

It takes {takes} and returns logits. Whole slides from the command line:
`gigagrad predict --run FOLDER --slides DIR --out predictions`.
"""
