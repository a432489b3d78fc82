"""A finished run as a folder to pass on: the best weights, what the network takes, and a page on how it was made.

The page is a model card as the Hugging Face Hub has it. It names no slide, folder or machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from gigagrad.cohorts import Cohort
from gigagrad.cohorts.rows import Split
from gigagrad.models.registry import asks_for_weights
from gigagrad.models.saved import save_folder
from gigagrad.prediction.scores import spread
from gigagrad.training.config import FitConfig
from gigagrad.training.folder import RunFolder, environment
from gigagrad.training.result import FitResult


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
    """The page, in Markdown."""
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
        ("colours", str(config.look)),
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
