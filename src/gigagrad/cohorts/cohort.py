"""A cohort to train on: every row has a split, and masks or labels."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from gigagrad.cohorts.rows import Row, Split, number_in, read_rows
from gigagrad.errors import ConfigError, GigagradError
from gigagrad.images import open_image


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
    """Read and check the text of a cohort file (`cohorts.rows`); the slides are not opened (`check_images` does that).

    Raises `ConfigError` naming the file, the line, what was found and what is expected.
    """
    path = Path(path)
    columns, rows = read_rows(path)
    if "split" not in columns:
        raise ConfigError(f"{path} line 1: the column 'split' is missing; training needs it: train, val or test")
    if "mask" in columns and "label" in columns:
        raise ConfigError(f"{path} line 1: there is a column 'mask' and a column 'label'; a cohort has one of them")
    for row in rows:
        if row.split is None:
            raise ConfigError(f"{path} line {row.line}: the split is empty; use train, val or test")
        if "label" in columns:
            if row.label is None:
                raise ConfigError(f"{path} line {row.line}: the label is empty")
            number_in(f"{path} line {row.line}", "label", row.label)
    if not any(row.split == "train" for row in rows):
        raise ConfigError(f"{path} has no row with split 'train'; mark the slides to learn from")
    _check_names(path, rows)
    return Cohort(path, rows)


def check_images(cohort: Cohort, level: int, *, grey: bool = False) -> tuple[tuple[int, int, int], ...]:
    """Open every slide and mask once, and return the shapes `(C, H, W)` to train on. Reads no pixels.

    Raises `ConfigError` with the line of the first that is missing, unreadable or of another size than its partner.
    """
    shapes = []
    for row in cohort.rows:
        try:
            with open_image(row.slide, level=level, mpp=row.mpp) as slide:
                shapes.append((slide.grey() if grey else slide).shape)
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


def _check_names(path: Path, rows: tuple[Row, ...]) -> None:
    first: dict[str, Row] = {}
    for row in rows:
        other = first.setdefault(row.name, row)
        if other is not row:
            what = "is listed on" if other.slide == row.slide else "shares its name with the slide of"
            raise ConfigError(
                f"{path} line {row.line}: the slide {row.slide.name} {what} line {other.line}; "
                "results are filed by name, so every slide needs its own"
            )
