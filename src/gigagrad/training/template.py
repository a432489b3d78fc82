"""A settings file to begin with: what a cohort calls for, and every other setting with its default and its meaning."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import Any

import psutil
import yaml

from gigagrad.cohorts import Cohort, class_table, read_cohort
from gigagrad.errors import WriteError
from gigagrad.files import write_text
from gigagrad.settings import described
from gigagrad.training.config import FitConfig

_WIDTH = 100


def write_template(path: Path, slides: Path, *, overwrite: bool = False) -> Path:
    """Write `path`, YAML that `fit` takes, for the cohort `slides`. The slides are not opened.

    Settings that the cohort calls for stand in it; the others are comments with their defaults. Raises `ConfigError`
    for the cohort and `WriteError` for a file that exists.
    """
    if path.exists() and not overwrite:
        raise WriteError(f"{path} exists; choose another --out or pass --overwrite")
    chosen = _chosen(read_cohort(slides), slides, path)
    lines = [
        "# Settings of gigagrad fit. Uncomment what you want to change; paths are taken from this file's folder.",
        "",
    ]
    meanings = described(FitConfig)
    for field in dataclasses.fields(FitConfig):
        lines += [f"# {line}" for line in textwrap.wrap(meanings[field.name], _WIDTH)]
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        given = field.name in chosen
        text = yaml.safe_dump({field.name: chosen[field.name] if given else default}, sort_keys=False).rstrip()
        lines += [line if given else f"# {line}" for line in text.splitlines()] + [""]
    write_text(path, "\n".join(lines))
    return path


def _chosen(cohort: Cohort, slides: Path, path: Path) -> dict[str, Any]:
    table = class_table(cohort)
    labels = [row.label for row in cohort.rows if row.label is not None]
    of_pixel = len(table.regions if table is not None else ()) or len(cohort.rows[0].masks)
    if labels:
        count = table.count if table is not None else max(2, len(set(labels)))
        model, loss = f"timm:resnet18?num_classes={count}", "ce"
    elif of_pixel > 1:
        model, loss = f"smp:Unet?encoder_name=resnet34&classes={of_pixel}", "bce_dice"
    elif table is not None and table.count > 2:
        model, loss = f"smp:Unet?encoder_name=resnet34&classes={table.count}", "ce"
    else:
        model, loss = "smp:Unet?encoder_name=resnet34", "bce_dice"
    chosen: dict[str, Any] = {
        "slides": str(slides.absolute()),
        "out": f"runs/{path.stem}",
        "model": model,
        "loss": loss,
        "memory": f"{max(1, psutil.virtual_memory().total // 2**31)} GiB",
    }
    if table is not None and not cohort.rows[0].further_masks:  # these are named by their columns
        named = (entry.rpartition("=")[::2] for entry in table.entries)
        chosen["classes"] = {name: int(text) if text.isdecimal() else text for name, text in named}
    return chosen
