"""Splits in files of their own, as CLAM writes them: `splits_0.csv`, `splits_1.csv`, ... of a cohort file.

They lie in its folder, in `splits/` there, or one folder deeper, and list the slides of each split in columns train,
val and test, by name. The number of a file is that of a fold: in it, those of `val` are validated.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from gigagrad.cohorts.rows import SPLITS, Row, Split
from gigagrad.errors import ConfigError

_NAME = re.compile(r"splits_(\d{1,4})\.csv")


def split_files(path: Path, columns: Collection[str]) -> dict[int, Path]:
    """Find the split files of a cohort file by number; none of one that has its splits or folds in `columns`.

    Raises `ConfigError` where several folders have some.
    """
    if {"split", "fold"} & set(columns):
        return {}
    files = [file for place in (".", "splits", "splits/*") for file in path.parent.glob(f"{place}/splits_*.csv")]
    numbered = {file: int(match[1]) for file in sorted(files) if (match := _NAME.fullmatch(file.name))}
    if len(folders := sorted({str(file.parent) for file in numbered})) > 1:
        raise ConfigError(f"{path} has split files in {' and '.join(folders)}; leave those of one task there")
    return {number: file for file, number in numbered.items()}


def folds_of(path: Path, columns: Collection[str], rows: Iterable[Row]) -> list[int]:
    """Return the numbers of a cohort file's folds, in its rows or as split files. Raises as `split_files`."""
    numbers = {row.fold for row in rows if row.fold is not None}
    return sorted(numbers or split_files(path, columns))


def split_rows(path: Path, rows: Iterable[Row], files: dict[int, Path], fold: int | None) -> tuple[Row, ...]:
    """Read the rows that the file of `fold`, or the only one, lists, each with its split.

    Raises `ConfigError` for a fold that has no file, for several files and no fold, for a file that cannot be read, and
    for a slide in it that the cohort has not.
    """
    numbers = ", ".join(map(str, files))
    if fold is None and len(files) > 1:
        raise ConfigError(
            f"{path} has {len(files)} split files, of the folds {numbers}; train with --fold {next(iter(files))}, say, "
            "or leave but one of them there"
        )
    number = next(iter(files)) if fold is None else fold
    if number not in files:
        raise ConfigError(f"{path} has no split file of fold {number}; its folds are {numbers}")
    splits = _splits_in(files[number])
    rows = tuple(rows)
    names = {name: row for row in rows for name in (row.slide.name, row.slide.stem, row.name)}
    if missing := [name for name in splits if name not in names]:
        raise ConfigError(f"{files[number]} lists the slide {missing[0]!r}, which {path} has not")
    of_rows = {names[name]: split for name, split in splits.items()}
    return tuple(replace(row, split=of_rows[row]) for row in rows if row in of_rows)


def _splits_in(file: Path) -> dict[str, Split]:
    """Read the split of each slide. Raises `ConfigError` for a slide in two of them."""
    splits: dict[str, Split] = {}
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            reader = csv.DictReader(text, strict=True)
            if not {*SPLITS} <= {*(reader.fieldnames or ())}:
                raise ConfigError(f"{file} line 1: expected the columns {', '.join(SPLITS)}")
            for cells in reader:
                for split in SPLITS:
                    if (name := (cells[split] or "").strip()) and splits.setdefault(name, split) != split:
                        raise ConfigError(
                            f"{file} line {reader.line_num}: {name!r} is in {splits[name]} and in {split}"
                        )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read the split file {file}: {error}") from error
    return splits
