"""The cohort file: which slides there are, what is known about each, and what each is used for.

A CSV with one row per slide and the columns

    slide   a file or folder that `open_image` reads
    split   train, val or test
    mask    (dense targets) an image of the slide's size; empty: the tissue recipe makes the label
    label   (slide-level targets) a number; a cohort has masks or labels, not both
    mpp     (optional) micrometres per pixel, where the file does not say

Relative paths are taken from the CSV's own folder. Everything that can be wrong is found before training starts and
named with its line.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from gigagrad.errors import ConfigError, GigagradError
from gigagrad.images import open_image

SPLITS = ("train", "val", "test")
_COLUMNS = ("slide", "mask", "label", "split", "mpp")

Split = Literal["train", "val", "test"]


@dataclass(frozen=True, slots=True)
class Row:
    """One slide. `mask` None with `label` None means that the tissue recipe labels it; `line` is in the CSV."""

    slide: Path
    mask: Path | None
    label: float | None
    split: Split
    mpp: float | None
    line: int

    @property
    def name(self) -> str:
        """What the slide is called in results: its file name without the suffix."""
        return self.slide.stem


@dataclass(frozen=True, slots=True)
class Cohort:
    """All rows in the order of the file."""

    path: Path
    rows: tuple[Row, ...]

    def of(self, split: Split) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.split == split)

    @property
    def fingerprint(self) -> str:
        """Changes whenever the rows do; a run is only continued on the cohort it began with."""
        text = "\n".join(f"{r.slide}|{r.mask}|{r.label}|{r.split}|{r.mpp}" for r in self.rows)
        return hashlib.sha256(text.encode()).hexdigest()


def read_cohort(path: str | Path) -> Cohort:
    """Read and check the text of a cohort file; the slides are not opened (`check_images` does that).

    Raises `ConfigError` naming the file, the line, what was found and what is expected.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the cohort file {path}: {reason}") from error
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True, strict=True)
    rows: list[Row] = []
    try:
        columns = _check_columns(path, reader.fieldnames or ())
        reader.fieldnames = columns
        for cells in reader:
            if any(value for value in cells.values()):
                rows.append(_parse_row(path, reader.line_num, cells))
    except csv.Error as error:
        raise ConfigError(f"{path} line {reader.line_num}: {error}; write it as comma-separated text") from error
    if not rows:
        raise ConfigError(f"{path} lists no slides; give it one line per slide below the header")
    if not any(row.split == "train" for row in rows):
        raise ConfigError(f"{path} has no row with split 'train'; mark the slides to learn from")
    _check_names(path, rows)
    return Cohort(path, tuple(rows))


def check_images(cohort: Cohort, level: int) -> tuple[tuple[int, int, int], ...]:
    """Open every slide and mask once, and return the slides' shapes `(C, H, W)`. Reads no pixels.

    Raises `ConfigError` with the line of the first that is missing, unreadable or of another size than its partner.
    """
    shapes = []
    for row in cohort.rows:
        try:
            with open_image(row.slide, level=level, mpp=row.mpp) as slide:
                shapes.append(slide.shape)
                if row.mask is None:
                    continue
                with open_image(row.mask, level=level) as mask:
                    if mask.shape[1:] != slide.shape[1:]:
                        raise ConfigError(
                            f"the mask {row.mask} is {mask.shape[1]} x {mask.shape[2]} px and its slide "
                            f"{slide.shape[1]} x {slide.shape[2]} px at level {level}; give a mask of the slide's size"
                        )
                    if mask.shape[0] != 1:
                        raise ConfigError(f"the mask {row.mask} has {mask.shape[0]} channels; give one of class ids")
        except GigagradError as error:
            raise ConfigError(f"{cohort.path} line {row.line}: {error}") from error
    return tuple(shapes)


def _check_columns(path: Path, names: object) -> list[str]:
    assert isinstance(names, (list, tuple))
    columns = [str(name).strip().lower() for name in names]
    for column in columns:
        if column and column not in _COLUMNS:
            close = get_close_matches(column, _COLUMNS, n=1)
            hint = f", did you mean {close[0]!r}?" if close else f"; known are {', '.join(_COLUMNS)}"
            raise ConfigError(f"{path} line 1: unknown column {column!r}{hint}")
    for required in ("slide", "split"):
        if required not in columns:
            raise ConfigError(
                f"{path} line 1: the column {required!r} is missing, got {', '.join(columns) or 'nothing'}; "
                "a cohort file begins with a line like: slide,mask,split"
            )
    if "mask" in columns and "label" in columns:
        raise ConfigError(f"{path} line 1: there is a column 'mask' and a column 'label'; a cohort has one of them")
    return columns


def _parse_row(path: Path, line: int, cells: Mapping[str | None, object]) -> Row:
    where = f"{path} line {line}"
    if None in cells or None in cells.values():
        raise ConfigError(f"{where}: more or fewer values than the header's columns; quote commas inside a value")
    values = {str(key): str(value).strip() for key, value in cells.items()}
    if not values["slide"]:
        raise ConfigError(f"{where}: the slide is empty")
    split = values["split"].lower()
    if split not in SPLITS:
        raise ConfigError(f"{where}: unknown split {values['split']!r}; use {', '.join(SPLITS)}")
    label = _number(where, "label", values["label"]) if "label" in values else None
    if "label" in values and label is None:
        raise ConfigError(f"{where}: the label is empty")
    mpp = _number(where, "mpp", values.get("mpp", ""))
    return Row(
        slide=_existing(where, path, values["slide"]),
        mask=_existing(where, path, values["mask"]) if values.get("mask") else None,
        label=label,
        split=split,  # type: ignore[arg-type]
        mpp=mpp,
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


def _number(where: str, column: str, text: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{where}: the {column} must be a number, got {text!r}")
    return value


def _check_names(path: Path, rows: list[Row]) -> None:
    first: dict[str, Row] = {}
    for row in rows:
        other = first.setdefault(row.name, row)
        if other is not row:
            what = "is listed on" if other.slide == row.slide else "shares its name with the slide of"
            raise ConfigError(
                f"{path} line {row.line}: the slide {row.slide.name} {what} line {other.line}; "
                "results are kept by name, so every slide needs its own"
            )
