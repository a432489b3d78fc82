"""A settings file to begin with: what a cohort calls for, and every other setting with its default and its meaning."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import yaml

from gigagrad.cohorts import Cohort, class_table, folds_of, read_cohort, read_rows, survival_of
from gigagrad.config import described
from gigagrad.config.fit import FitConfig
from gigagrad.errors import WriteError
from gigagrad.files import write_text
from gigagrad.images.thumbnails import full_range, range_shown, samples

_WIDTH = 100
_LOOKED_AT: Final = 3
"""Slides."""
_COMPARED: Final = 8
"""Patients whose risks a step compares with each other."""
_OF_SCALE: Final = (
    "Its scale says which values are 0 and 1 in each channel: the 2nd and 98th percentiles, from a look at {} of the "
    "slides. Better is what you know of the data (reflectance: scale=0,10000)."
)


def write_template(path: Path, slides: Path, *, overwrite: bool = False) -> Path:
    """Write `path`, YAML that `fit` takes, for the cohort `slides`, of which a few are looked at.

    Settings that the cohort calls for stand in it; the others are comments with their defaults. Raises `ConfigError`
    for the cohort, `ImageError` for a slide that cannot be read and `WriteError` for a file that exists.
    """
    if path.exists() and not overwrite:
        raise WriteError(f"{path} exists; choose another --out or pass --overwrite")
    columns, rows = ((), ()) if slides.is_dir() else read_rows(slides)
    fold = next(iter(folds_of(slides, columns, rows)), None)
    cohort = read_cohort(slides, fold)
    looked, channels, scale = _look_at(cohort)
    chosen = _chosen(cohort, slides, path, survival="time" in columns and "label" not in columns)
    if channels != 3:
        chosen["model"] += f"&{'in_chans' if chosen['model'].startswith('timm:') else 'in_channels'}={channels}"
    if scale:
        numbers = (f"{value:.6g}" for pair in (scale[:1] if len(set(scale)) == 1 else scale) for value in pair)
        chosen["model"] += f"&scale={','.join(numbers)}"
    if fold is not None:
        chosen["fold"] = fold
    lines = [
        "# Settings of gigagrad fit. Uncomment what you want to change; paths are taken from this file's folder.",
        "",
    ]
    meanings = described(FitConfig)
    for field in dataclasses.fields(FitConfig):
        remark = f" {_OF_SCALE.format(looked)}" if field.name == "model" and scale else ""
        lines += [f"# {line}" for line in textwrap.wrap(meanings[field.name] + remark, _WIDTH)]
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        given = field.name in chosen
        text = yaml.safe_dump({field.name: chosen[field.name] if given else default}, sort_keys=False).rstrip()
        lines += [line if given else f"# {line}" for line in text.splitlines()] + [""]
    write_text(path, "\n".join(lines))
    return path


def _look_at(cohort: Cohort) -> tuple[int, int, list[tuple[float, float]]]:
    """Look at a few slides. Returns how many, how many channels they have, and which values are 0 and 1 in each: of
    bytes, and where it is what networks take for granted, none.
    """
    looked = []
    for row in cohort.rows[:_LOOKED_AT]:
        with cohort.telling(row), row.open() as slide:
            looked.append(samples(slide))
    alike = [values for values in looked if len(values) == len(looked[0])]
    channels = [np.concatenate(values) for values in zip(*alike, strict=True)]
    scale = [range_shown(values, values.dtype) for values in channels]
    known = all(pair == full_range(values.dtype) for pair, values in zip(scale, channels, strict=True))
    return len(alike), len(channels), [] if known or channels[0].dtype.itemsize == 1 else scale


def _chosen(cohort: Cohort, slides: Path, path: Path, *, survival: bool) -> dict[str, Any]:
    table = class_table(cohort)
    labels = [row.label for row in cohort.rows if row.label is not None]
    of_pixel = len(table.regions if table is not None else ()) or len(cohort.rows[0].masks)
    model, loss = "smp:Unet?encoder_name=resnet34", "bce_dice"
    times = [label for label in labels if survival_of(label) is not None]
    survival = bool(times) and (survival or any(label.endswith("+") for label in times))
    if labels:
        count = 1 if survival else table.count if table is not None else _classes_in(labels)
        model, loss = f"timm:resnet18?num_classes={count}", "cox" if survival else "ce" if count > 1 else "mse"
    elif of_pixel > 1:
        model += f"&classes={of_pixel}"
    elif table is not None and table.count > 2:
        model, loss = f"{model}&classes={table.count}", "ce"
    chosen: dict[str, Any] = {
        "slides": str(slides.absolute()),
        "out": f"runs/{path.stem}",
        "model": model,
        "loss": loss,
        "memory": f"{max(1, psutil.virtual_memory().total // 2**31)} GiB",
    }
    if survival:
        chosen["accumulate"] = _COMPARED
    if table is not None and not cohort.rows[0].further_masks:  # these are named by their columns
        named = (entry.rpartition("=")[::2] for entry in table.entries)
        chosen["classes"] = {name: int(text) if text.isdecimal() else text for name, text in named}
    return chosen


def _classes_in(labels: Sequence[str]) -> int:
    """Count the classes of labels that are numbers from 0 on; 1 where they measure something."""
    numbers = {float(label) for label in labels}
    highest = max(numbers)
    ids = min(numbers) >= 0 and all(number.is_integer() for number in numbers) and highest < 2 * len(numbers)
    return max(2, int(highest) + 1) if ids else 1
