"""Which slides a person meant: files, folders and CSV files as one list."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gigagrad.errors import ConfigError

SLIDE_SUFFIXES: Final = (
    *(".bif", ".jpeg", ".jpg", ".mrxs", ".ndpi", ".png", ".scn", ".svs"),
    *(".svslide", ".tif", ".tiff", ".vms", ".vmu", ".zarr"),
)
"""What counts as a slide in a folder; a file that is named itself may have any suffix."""


@dataclass(frozen=True, slots=True)
class SlideInput:
    """One slide to predict. `mask` (the true one) and `mpp` are known only where a CSV file names them."""

    slide: Path
    mask: Path | None = None
    mpp: float | None = None

    @property
    def stem(self) -> str:
        """The name that all output files share."""
        return self.slide.stem


def find_slides(sources: Iterable[str | Path], split: str | None = None) -> tuple[SlideInput, ...]:
    """All slides of `sources` in order; folders alphabetically, CSV files row by row (see `PredictConfig.slides`).

    Raises `ConfigError` for a source that does not exist or holds no slide, for unreadable rows (with their line), and
    for two slides whose outputs would have the same name.
    """
    found = [slide for source in sources for slide in _of_source(Path(source), split)]
    by_stem: dict[str, Path] = {}
    for entry in found:
        other = by_stem.setdefault(entry.stem, entry.slide)
        if other != entry.slide:
            raise ConfigError(
                f"{other} and {entry.slide} would both be written as {entry.stem}; rename one or predict them apart"
            )
    return tuple({entry.stem: entry for entry in found}.values())


def _of_source(source: Path, split: str | None) -> Iterator[SlideInput]:
    if not source.exists():
        raise ConfigError(f"there is no {source}; name slide files, a folder of slides or a CSV file")
    if source.suffix.lower() == ".csv":
        yield from _of_csv(source, split)
    elif source.is_dir() and source.suffix.lower() != ".zarr":
        slides = sorted(
            path for path in source.iterdir() if path.suffix.lower() in SLIDE_SUFFIXES and not path.name.startswith(".")
        )
        if not slides:
            raise ConfigError(f"{source} holds no slides; expected files ending in {', '.join(SLIDE_SUFFIXES)}")
        yield from map(SlideInput, slides)
    else:
        yield SlideInput(source)


def _of_csv(source: Path, split: str | None) -> list[SlideInput]:
    try:
        with source.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = [name.strip() for name in reader.fieldnames or ()]
            if "slide" not in columns:
                raise ConfigError(f"{source} has no column 'slide'; its columns are: {', '.join(columns) or 'none'}")
            reader.fieldnames = columns
            rows = [(reader.line_num, {key: (row[key] or "").strip() for key in columns}) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{source} is no readable CSV file ({error}); save it as UTF-8 with commas") from error
    if split is not None:
        rows = [(line, row) for line, row in rows if row.get("split") == split]
    if not rows:
        wanted = f" with split '{split}'" if split is not None else ""
        raise ConfigError(f"{source} has no rows{wanted}; list one slide per row")
    return [_of_row(source, line, row) for line, row in rows]


def _of_row(source: Path, line: int, row: dict[str, str]) -> SlideInput:
    if not row["slide"]:
        raise ConfigError(f"{source}, line {line}: the slide is missing; write its path")
    slide = source.parent / row["slide"]
    if not _exists(slide):
        raise ConfigError(f"{source}, line {line}: there is no {slide}; paths count from the CSV file's folder")
    mask = source.parent / row["mask"] if row.get("mask") else None
    if mask is not None and not _exists(mask):
        raise ConfigError(f"{source}, line {line}: there is no mask {mask}; leave the field empty if there is none")
    try:
        mpp = float(row["mpp"]) if row.get("mpp") else None
    except ValueError:
        mpp = math.nan
    if mpp is not None and not 0 < mpp < math.inf:
        raise ConfigError(f"{source}, line {line}: mpp is '{row['mpp']}'; write a number of micrometres")
    return SlideInput(slide, mask, mpp)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long
        return False
