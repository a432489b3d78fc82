"""A cohort to train on: every row has a split, and masks or labels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gigagrad.cohorts.folders import is_cohort_folder, rows_of_folder
from gigagrad.cohorts.rows import Row, Split, columns_of, folded, number_in, read_rows, split_files, split_rows
from gigagrad.errors import ConfigError, GigagradError, ImageError, TargetError
from gigagrad.files import content_digest
from gigagrad.images import InputView
from gigagrad.images.views import AS_STORED
from gigagrad.masks import ClassTable, is_annotation_file, open_mask, read_annotations


@dataclass(frozen=True, slots=True)
class Cohort:
    """All rows in the order of the file, or of the folder; `classes` are those that a folder or its columns name."""

    path: Path
    rows: tuple[Row, ...]
    classes: tuple[str, ...] = ()

    def of(self, split: Split) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.split == split)

    def where(self, row: Row) -> str:
        """Return the place of a row, for messages."""
        return f"{self.path} line {row.line}" if row.line else f"{self.path}, {row.name}"

    @contextmanager
    def telling(self, row: Row) -> Iterator[None]:
        """Add to errors of the row's images and targets where it stands."""
        try:
            yield
        except (ImageError, TargetError) as error:
            raise type(error)(f"{self.where(row)}: {error}") from error

    @property
    def fingerprint(self) -> str:
        """Return a digest that changes whenever the rows do; a run is only continued on the cohort it began with."""
        text = "\n".join(
            "|".join(map(str, (r.slide, r.mask, r.label, r.split, r.mpp, *r.further_slides, *r.further_masks)))
            for r in self.rows
        )
        text += "".join(f"\n{r.bag}" for r in self.rows if r.bag is not None)
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()

    def contents(self, row: Row) -> dict[str, str]:
        """Digest the content of each file of the row, by path: annotations whole, slides and masks as
        `files.content_digest` has it. A run is only continued with the contents it began with.
        """
        paths = (row.slide, *row.further_slides, *row.masks)
        return {str(path): content_digest(path, whole=is_annotation_file(path)) for path in paths}


def read_cohort(path: str | Path, fold: int | None = None) -> Cohort:
    """Read and check a cohort file (`cohorts.rows`) or folder (`cohorts.folders`).

    The slides are not opened (`check_images` does that). Of a cohort with the column `fold`, the rows of `fold` are
    validated and the others trained on, except those whose split is `test`; of one with split files
    the file of that number counts. Raises `ConfigError` naming the file, the line, what was found and what is expected.
    """
    path = Path(path)
    if path.is_dir() and is_cohort_folder(path):
        rows, classes = rows_of_folder(path)
        _check_names(path, rows)
        return Cohort(path, rows, classes)
    columns, rows = read_rows(path)
    if files := split_files(path, columns):
        columns, rows = (*columns, "split"), split_rows(path, rows, files, fold)
    elif fold is not None:
        rows = _folded(path, columns, rows, fold)
    elif "split" not in columns:
        remedy = (
            "choose a fold to validate with --fold" if "fold" in columns else "training needs it: train, val or test"
        )
        raise ConfigError(f"{path} line 1: the column 'split' is missing; {remedy}")
    masks = columns_of("mask", columns)
    if masks and "label" in columns:
        raise ConfigError(f"{path} line 1: there is a column 'mask' and a column 'label'; a cohort has one of them")
    for row in rows:
        if row.split is None:
            raise ConfigError(f"{path} line {row.line}: the split is empty; use train, val or test")
        if "label" in columns and row.label is None:
            raise ConfigError(f"{path} line {row.line}: the label is empty")
    check_bags(path, rows)
    if not any(row.split == "train" for row in rows):
        raise ConfigError(f"{path} has no row with split 'train'; mark the slides to learn from")
    _check_names(path, rows)
    return Cohort(path, rows, tuple(name for _, _, name in (column.partition(":") for column in masks) if name))


def class_table(cohort: Cohort, entries: Sequence[str] = ()) -> ClassTable | None:
    """Return the classes of a cohort's masks or labels: of `entries`, of its folder or columns, or all names that
    occur.

    None where masks hold class ids and labels are numbers, which need no names. Raises `ConfigError` for an annotation
    file that cannot be read, a class that none of them has, and a row without a mask beside rows with annotations.
    """
    several = any(row.further_masks for row in cohort.rows)
    named = (*cohort.classes, *entries) if several else tuple(entries) or cohort.classes
    table = ClassTable.parse(named) if named else None
    texts = [row.label for row in cohort.rows if row.label is not None]
    if texts:
        return _of_labels(cohort, texts, table)
    found: set[str] = set()
    # A column of masks has one label, whatever its outlines are called.
    annotated = [row for row in cohort.rows if row.mask is not None and is_annotation_file(row.mask) and not several]
    for row in annotated:
        assert row.mask is not None
        try:
            found |= set(read_annotations(row.mask).names)
        except GigagradError as error:
            raise ConfigError(f"{cohort.where(row)}: {error}") from error
    if annotated and table is not None:
        if len(annotated) == len(cohort.rows):
            table.check_used(found, str(cohort.path))
        table.check_any_used(found, str(cohort.path))
        table.check_spelt(found, str(cohort.path))
        table = table.ignoring(found)
    elif annotated:
        if not found:
            raise ConfigError(f"{cohort.path}: no annotation covers an area; annotate what the network is to find")
        table = ClassTable.of_names(found)
        if table.count == 1:
            raise ConfigError(f"{cohort.path}: all annotations are background; annotate what the network is to find")
    for row in cohort.rows if table is not None else ():
        if row.mask is None:
            raise ConfigError(
                f"{cohort.where(row)}: the mask is empty, and the tissue recipe knows no classes; name one"
            )
    return table


class Size(NamedTuple):
    """Everything that is known of a row before a pixel is read."""

    shape: tuple[int, int, int]
    """`(C, H, W)` of the slide as it is looked at."""
    labels: int
    """Channels of the mask, 1 where there is none."""
    gaps: bool
    """True where pixels of the slide, or of a mask file, may hold no data."""


def check_images(
    cohort: Cohort, level: int, *, look: InputView = AS_STORED, table: ClassTable | None = None
) -> tuple[Size, ...]:
    """Open every slide and mask once. Reads no pixels.

    Raises `ConfigError` with the line of the first that is missing, unreadable or no picture of its partner.
    """
    sizes = []
    for row in cohort.rows:
        try:
            with row.open(level) as slide:
                seen, labels = look.of(slide), len(table.regions if table is not None else ()) or len(row.masks) or 1
                gaps = seen.missing_bytes > 0
                # Outlines were read by `class_table`, and are looked at once more before training.
                if not all(map(is_annotation_file, row.masks)):
                    with open_mask(row.masks, slide, table, labels=labels) as mask:
                        labels, gaps = mask.channels, gaps or mask.nodata is not None
                sizes.append(Size(seen.shape, labels, gaps))
        except GigagradError as error:
            raise ConfigError(f"{cohort.where(row)}: {error}") from error
    return tuple(sizes)


def _folded(path: Path, columns: Sequence[str], rows: Sequence[Row], fold: int) -> tuple[Row, ...]:
    if "fold" not in columns:
        raise ConfigError(f"{path} line 1: the column 'fold' is missing; add it, or leave out --fold")
    folds = {row.fold for row in rows}
    if fold not in folds:
        have = ", ".join(map(str, sorted(number for number in folds if number is not None)))
        raise ConfigError(f"{path} has no row of fold {fold}; its folds are {have or 'none'}")
    return folded(rows, fold)


def _of_labels(cohort: Cohort, texts: Sequence[str], table: ClassTable | None) -> ClassTable | None:
    """Make classes of labels: names count from 0 in alphabetical order; numbers stand for themselves."""
    if table is not None:
        known = {name for name, _ in table.ids}
        for row in cohort.rows:
            if row.label is not None and row.label not in known:
                raise ConfigError(f"{cohort.where(row)}: the label {row.label!r} is none of the classes {table}")
        return table
    try:
        for row in cohort.rows:
            number_in(cohort.where(row), "label", (row.label or "").removesuffix("+"))
    except ConfigError:
        if any(_is_number(text) for text in texts):
            raise
        return ClassTable(tuple((name, number) for number, name in enumerate(sorted(set(texts)))))
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_names(path: Path, rows: tuple[Row, ...]) -> None:
    first: dict[str, Row] = {}
    for row in rows:
        other = first.setdefault(row.name, row)
        if other is not row:
            what = "is listed on" if other.slide == row.slide else "shares its name with the slide of"
            here, there = (f"line {each.line}" if each.line else str(each.slide) for each in (row, other))
            raise ConfigError(
                f"{path} {here}: the slide {row.slide.name} {what} {there}; "
                "results are filed by name, so every slide needs its own"
            )


def bags_of(rows: Iterable[Row]) -> tuple[tuple[Row, ...], ...]:
    """Return the rows by bag, in the order of their first ones; a row without a bag or a label is one by itself."""
    bags: dict[object, list[Row]] = {}
    for number, row in enumerate(rows):
        bags.setdefault(number if row.bag is None or row.label is None else row.bag, []).append(row)
    return tuple(map(tuple, bags.values()))


def check_bags(path: Path, rows: Iterable[Row]) -> None:
    """Raise `ConfigError` for a bag whose slides differ in their label or their split."""
    for first, *others in bags_of(rows):
        for other in others:
            for what, one, two in (("label", first.label, other.label), ("split", first.split, other.split)):
                if one != two:
                    raise ConfigError(
                        f"{path} lines {first.line} and {other.line}: slides of {first.bag} have the {what}s {one} and "
                        f"{two}; slides of a bag have one, so correct it, or rename the column to keep them apart"
                    )
