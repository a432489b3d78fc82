"""A cohort to train on: every row has a split, and masks or labels. It is a cohort file, or a folder: nnU-Net's, or
images beside masks of the same names.

    dataset.json, imagesTr/CASE_0000.png, labelsTr/CASE.png            nnU-Net v2; also imagesTs and labelsTs,
                                                                       channels in CASE_0001.png and so on, and
                                                                       labels that are regions of several ids
    images/NAME.png, masks/NAME.png                                    also `labels` or `annotations` for `masks`, and
                                                                       NAME.geojson.gz and the like
    train/images, train/masks, val/images, ...                         the same for each split

Where a folder has no split, every fifth case, in alphabetical order, is validated: nnU-Net's fold of a fifth, by rule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from gigagrad.cohorts.patches import Patches, joined
from gigagrad.cohorts.rows import (
    SPLITS,
    Row,
    Split,
    columns_of,
    folded,
    number_in,
    read_rows,
    slides_in,
    split_files,
    split_rows,
    with_own_names,
)
from gigagrad.errors import ConfigError, GigagradError, ImageError, TargetError
from gigagrad.files import content_digest, read_json
from gigagrad.images import InputView
from gigagrad.images.layout import plain_stem
from gigagrad.images.views import AS_STORED
from gigagrad.masks import ClassTable, is_annotation_file, open_mask, read_annotations
from gigagrad.masks.annotations import annotation_stem


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
            for row in self.rows
            for r in row.members
        )
        text += "".join(f"\n{r.case}" for row in self.rows for r in row.members if r.case is not None)
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()

    def contents(self, row: Row) -> dict[str, str]:
        """Digest the content of each file of the row, by path: annotations whole, slides and masks as
        `files.content_digest` has it. A run is only continued with the contents it began with.
        """
        return {str(path): content_digest(path, whole=is_annotation_file(path)) for path in row.files}


def read_cohort(path: str | Path, fold: int | None = None, patches: Patches | None = None) -> Cohort:
    """Read and check a cohort file (`cohorts.rows`) or folder. Where slides are read as `patches`, the slides of a case
    are one row.

    The slides are not opened (`check_images` does that). Of a cohort with the column `fold`, the rows of `fold` are
    validated and the others trained on, except those whose split is `test`; of one with split files
    the file of that number counts. Raises `ConfigError` naming the file, the line, what was found and what is expected.
    """
    path = Path(path)
    if path.is_dir() and is_cohort_folder(path):
        rows, classes = rows_of_folder(path)
        if patches is not None:
            raise ConfigError(
                f"{path} has masks, and patches are read as one bag, which learns from a label of the slide; give a "
                "cohort file with a column 'label', or leave out --patch-size"
            )
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
    if masks and "label" in columns and not (patches is not None and patches.tissue == "mask"):
        raise ConfigError(f"{path} line 1: there is a column 'mask' and a column 'label'; a cohort has one of them")
    for row in rows:
        if row.split is None:
            raise ConfigError(f"{path} line {row.line}: the split is empty; use train, val or test")
        if "label" in columns and row.label is None:
            raise ConfigError(f"{path} line {row.line}: the label is empty")
    check_cases(path, rows)
    if not any(row.split == "train" for row in rows):
        raise ConfigError(f"{path} has no row with split 'train'; mark the slides to learn from")
    _check_names(path, rows)
    if patches is not None:
        if without := next((row for row in rows if row.label is None), None):
            raise ConfigError(
                f"{path} line {without.line}: patches are read as one bag, which learns from a label of the slide, and "
                "there is none; add a column 'label', or leave out --patch-size to learn from masks of whole slides"
            )
        return Cohort(path, joined(rows))
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

    shape: tuple[int, ...]
    """`(C, H, W)` of the slide as it is looked at; `(N, C, h, w)` of its patches."""
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
    of_slides: dict[Path, Row] = {}
    for row in rows:
        other = first.setdefault(row.name, row)
        if other is not row:
            what = "is listed on" if other.slide == row.slide else "shares its name with the slide of"
            here, there = (f"line {each.line}" if each.line else str(each.slide) for each in (row, other))
            raise ConfigError(
                f"{path} {here}: the slide {row.slide.name} {what} {there}; "
                "results are filed by name, so every slide needs its own"
            )
        other = of_slides.setdefault(row.slide.resolve(), row)
        if other.split != row.split:
            raise ConfigError(
                f"{path} line {row.line}: the slide {row.slide.name} has the split {row.split}, and on line "
                f"{other.line} it has {other.split}; a slide has one, so leave one of the lines out"
            )


def cases_of(rows: Iterable[Row]) -> tuple[tuple[Row, ...], ...]:
    """Return the rows by case, in the order of their first ones; a row without a case or a label is one by itself."""
    cases: dict[object, list[Row]] = {}
    for number, row in enumerate(rows):
        cases.setdefault(number if row.case is None or row.label is None else row.case, []).append(row)
    return tuple(map(tuple, cases.values()))


def check_cases(path: Path, rows: Iterable[Row]) -> None:
    """Raise `ConfigError` for a case whose slides differ in their label or their split, whether they have labels or
    masks.
    """
    cases: dict[str, Row] = {}
    for row in rows:
        first = row if row.case is None else cases.setdefault(row.case, row)
        for what, one, two in (("label", first.label, row.label), ("split", first.split, row.split)):
            if one != two:
                raise ConfigError(
                    f"{path} lines {first.line} and {row.line}: slides of {first.case} have the {what}s {one} "
                    f"and {two}; slides of a case have one, so correct it, or rename the column to keep them apart"
                )


_MASK_FOLDERS = ("masks", "labels", "annotations")
_VALIDATED_EVERY = 5


def is_cohort_folder(folder: Path) -> bool:
    """Return whether `rows_of_folder` knows what the folder is."""
    return (folder / "dataset.json").is_file() or any((folder / place / "images").is_dir() for place in ("", *SPLITS))


def rows_of_folder(folder: Path) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """Read the rows of a cohort folder, every one with a split, and its classes as `ClassTable.parse` takes them.

    Raises `ConfigError` naming the image without a mask, or what the folder lacks.
    """
    if (folder / "dataset.json").is_file():
        return _of_nnunet(folder)
    if (folder / "images").is_dir():
        rows = list(_with_splits(_matched(folder)))
    else:
        split = [each for each in SPLITS if (folder / each / "images").is_dir()]
        rows = [replace(row, split=each) for each in split for row in _matched(folder / each)]
    if not rows:
        raise ConfigError(
            f"{folder} holds no images; expected files in images/ and masks/, or in train/images and so on"
        )
    return with_own_names(rows), ()


def _matched(folder: Path) -> Iterator[Row]:
    place = next((folder / name for name in _MASK_FOLDERS if (folder / name).is_dir()), None)
    if place is None:
        raise ConfigError(f"{folder} has images/ but no folder of masks; expected one of {', '.join(_MASK_FOLDERS)}")
    masks: dict[str, list[Path]] = {}
    for path in sorted(place.iterdir()):
        if not path.name.startswith("."):
            masks.setdefault(_stem(path), []).append(path)
    for slide in slides_in(folder / "images"):
        found = masks.get(_stem(slide), [])
        if not found:
            raise ConfigError(f"{slide} has no mask; expected {place.name}/{_stem(slide)} with the suffix of a mask")
        if len(found) > 1:
            names = " and ".join(path.name for path in found[:3])
            raise ConfigError(f"{slide} has several masks in {place.name}/, {names}; leave one of them there")
        yield Row(slide, found[0])


def _stem(path: Path) -> str:
    """Return the name that an image and its mask share, without the suffixes of their formats."""
    return plain_stem(annotation_stem(path))


def _of_nnunet(folder: Path) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    path = folder / "dataset.json"
    try:
        settings: Mapping[str, Any] = read_json(path)
        classes, suffix = _classes(settings), str(settings["file_ending"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"cannot read {path} as nnU-Net's: {error}; it needs labels with an id or a list of ids, and file_ending"
        ) from error
    rows = list(_with_splits(_cases(folder, "Tr", suffix)))
    if (folder / "labelsTs").is_dir():
        rows += [replace(row, split="test") for row in _cases(folder, "Ts", suffix)]
    if not rows:
        raise ConfigError(f"{folder} has no case; expected imagesTr/CASE_0000{suffix} and labelsTr/CASE{suffix}")
    return tuple(rows), classes


def _classes(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the classes of a dataset's labels, as `ClassTable.parse` takes them.

    Where a label is a region of several ids, all are, and `regions_class_order` has of each, later ones over earlier
    ones, the id that it becomes in a label map. The id to ignore is called so. Raises `ValueError`.
    """
    held = {str(name): ids if isinstance(ids, list) else [ids] for name, ids in settings["labels"].items()}
    if not all(ids and all(type(number) is int for number in ids) for ids in held.values()):
        raise ValueError("a label is neither an id nor a list of ids")
    ignored = held.pop("ignore", [])
    if any(len(ids) > 1 for ids in held.values()):
        regions = {name: ids for name, ids in held.items() if set(ids) != {0}}
        order = settings.get("regions_class_order")
        if not isinstance(order, list) or len(order) != len(regions):
            raise ValueError(f"regions_class_order is {order}, and there are {len(regions)} regions to have an id each")
        for (name, ids), first in zip(regions.items(), order, strict=True):
            if first not in ids:
                raise ValueError(f"regions_class_order has {first} for {name!r}, whose ids are {ids}")
            held[name] = list(dict.fromkeys([first, *ids]))
    named = [f"{name}={'+'.join(map(str, ids))}" for name, ids in held.items()]
    return (*named, *(f"{number}=ignore" for number in ignored))


def _cases(folder: Path, part: str, suffix: str) -> Iterator[Row]:
    """Yield the rows of CASE_0000, CASE_0001, ...: the files of a case hold its channels."""
    images, labels = folder / f"images{part}", folder / f"labels{part}"
    files = slides_in(images) if images.is_dir() else []
    for case, of_case in groupby(files, lambda file: file.name.removesuffix(suffix).rpartition("_")[0]):
        slides = list(of_case)
        for number, slide in enumerate(slides):
            expected = images / f"{case}_{number:04}{suffix}"
            if slide != expected:
                raise ConfigError(f"{slide} is there and {expected} is not; a case's files are numbered from 0000 on")
        mask = labels / f"{case}{suffix}"
        if not mask.is_file():
            raise ConfigError(f"{slides[0]} has no mask; expected {mask}")
        yield Row(slides[0], mask, called=case, further_slides=tuple(slides[1:]))


def _with_splits(rows: Iterable[Row]) -> Iterator[Row]:
    for index, row in enumerate(rows):
        yield replace(row, split="val" if index % _VALIDATED_EVERY == _VALIDATED_EVERY - 1 else "train")
