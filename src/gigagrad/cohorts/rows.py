"""A cohort file: a CSV with one row per slide and the columns

    slide   a file or folder that `open_image` reads
    split   train, val or test
    mask    (dense targets) an image of the slide's size; empty: the tissue recipe makes the label
    label   (slide-level targets) a number; a cohort has masks or labels, not both
    mpp     micrometres per pixel, where the file does not say

Only `slide` is needed to predict; training needs `split`, too. Further columns are left alone. Relative paths are taken
from the file's own folder. What is wrong is named with its line.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from gigagrad.errors import ConfigError, did_you_mean

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
_COLUMNS = ("slide", "mask", "label", "split", "mpp")


@dataclass(frozen=True, slots=True)
class Row:
    """One slide. A mask of None with a label of None means that the tissue recipe labels it."""

    slide: Path
    mask: Path | None = None
    mpp: float | None = None
    split: Split | None = None
    label: str | None = None
    """As it is written; what reads labels knows what they are."""
    line: int = field(default=0, compare=False)
    """In the file; 0 for a slide that was named by itself."""

    @property
    def name(self) -> str:
        """What the slide is called in results, and its output files: its file name without the suffix."""
        return self.slide.stem


def read_rows(path: Path) -> tuple[tuple[str, ...], tuple[Row, ...]]:
    """The columns of a cohort file, in lower case, and its rows; the slides exist, but are not opened.

    Raises `ConfigError` naming the file, the line, what was found and what is expected.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the cohort file {path}: {reason}") from error
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True, strict=True)
    try:
        columns = reader.fieldnames = _columns(path, reader.fieldnames or ())
        rows = tuple(_row(path, reader.line_num, cells) for cells in reader if any(cells.values()))
    except csv.Error as error:
        raise ConfigError(f"{path} line {reader.line_num}: {error}; write it as comma-separated text") from error
    if not rows:
        raise ConfigError(f"{path} lists no slides; give it one line per slide below the header")
    return columns, rows


def number_in(where: str, column: str, text: str) -> float:
    """Raises `ConfigError` for what is none, or not finite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{where}: the {column} must be a number, got {text!r}")
    return value


def _columns(path: Path, names: Sequence[str]) -> tuple[str, ...]:
    columns = tuple(name.strip().lower() for name in names)
    for column in columns:
        meant = did_you_mean(column, _COLUMNS)
        if meant and column not in _COLUMNS:
            raise ConfigError(f"{path} line 1: unknown column {column!r}{meant}")
    if "slide" not in columns:
        raise ConfigError(
            f"{path} line 1: the column 'slide' is missing, got {', '.join(columns)[:200] or 'nothing'}; "
            "a cohort file begins with a line like: slide,mask,split"
        )
    return columns


def _row(path: Path, line: int, cells: Mapping[str | None, object]) -> Row:
    where = f"{path} line {line}"
    if None in cells or None in cells.values():
        raise ConfigError(f"{where}: more or fewer values than the header's columns; quote commas inside a value")
    values = {str(key): str(value).strip() for key, value in cells.items()}
    if not values["slide"]:
        raise ConfigError(f"{where}: the slide is empty; write its path")
    split = values.get("split", "").lower() or None
    if split is not None and split not in SPLITS:
        raise ConfigError(f"{where}: unknown split {values['split']!r}; use {', '.join(SPLITS)}")
    mpp = number_in(where, "mpp", values["mpp"]) if values.get("mpp") else None
    if mpp is not None and mpp <= 0:
        raise ConfigError(f"{where}: the mpp must be a positive number of micrometres, got {mpp}")
    return Row(
        slide=_existing(where, path, values["slide"]),
        mask=_existing(where, path, values["mask"]) if values.get("mask") else None,
        mpp=mpp,
        split=split,
        label=values.get("label") or None,
        line=line,
    )


def _existing(where: str, path: Path, text: str) -> Path:
    try:
        found = (path.absolute().parent / text).resolve()
        exists = found.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null character, links in a circle
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{where}: {text[:80]!r} is no path ({reason})") from error
    if not exists:
        raise ConfigError(f"{where}: {found} does not exist; relative paths are taken from the cohort file's folder")
    return found
