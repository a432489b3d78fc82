"""A cohort file: a CSV (commas, semicolons or tabs) with one row per slide and the columns

    slide   a file or folder that `open_image` reads; without a suffix, the slide of this name beside the cohort file
    split   train, val or test
    fold    (instead of `split`) a number: one of them is validated, the others are trained on
    mask    (dense targets) a mask or an annotation file that `open_mask` reads; empty: the tissue recipe makes it
    label   (slide-level targets) a number or a class name; a cohort has masks or labels, not both
    time    (survival, instead of `label`) a number, and
    event   1 where the event came at that time, 0 where there was none until then; or `censored`, the other way round
    case    a name that all slides of a patient have in common, which have one split; beside labels their outputs are
            averaged
    mpp     micrometres per pixel, where the file does not say
    name    what the slide is called in results; default: its file name, with its folder's where two are the same

and, where there are several images of each place or several labels of each pixel,

    slide:NAME  a further image, registered to the slide, at any resolution: its channels follow the slide's (a stain,
                a band)
    mask:NAME   (instead of `mask`) the mask of one label; the labels are those of the columns, in their order

Columns may have the names that other tools give them (`_ALIASES`; CLAM's `slide_id`, TRIDENT's `wsi`). Only `slide` is
needed to predict; training needs `split`, too, or split files. Further columns are left alone.
Relative paths are taken from the file's own folder, slides also from `slides/` there. A link to a file of another name
is called by its own. What is wrong is named with its line.

Split files, as CLAM writes them (`splits_0.csv`, `splits_1.csv`, ...), lie in the cohort file's folder, in `splits/`
there, or one folder deeper, and list the slides of each split in columns train, val and test, by name. The number of a
file is that of a fold: in it, those of `val` are validated.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Final, Literal, get_args

from gigagrad.errors import ConfigError
from gigagrad.events import SlideBegun
from gigagrad.images import Image, open_image
from gigagrad.images.layout import plain_stem
from gigagrad.images.opening import files_of

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
SLIDE_SUFFIXES: Final = (
    *(".bif", ".jpeg", ".jpg", ".mrxs", ".ndpi", ".png", ".scn", ".svs"),
    *(".svslide", ".tif", ".tiff", ".vms", ".vmu", ".zarr"),
)
"""Suffixes of slides in a folder; a file that is named itself may have any."""
_PICTURES: Final = ".jpeg", ".jpg", ".png"
_ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "slide": ("slide_path", "wsi", "wsi_path", "image", "image_path", "filename", "file", "path", "slide_id"),
    "mask": ("mask_path", "annotation", "annotations", "annotation_path"),
    "label": ("target",),
    "time": ("survival_months", "survival_time", "survival_days", "os_time", "os_months", "os_days", "duration"),
    "event": ("event_observed", "os_event", "os_status", "vital_status", "status", "dead"),
    "censored": ("censorship", "censoring"),
    "case": ("bag", "patient", "patient_id", "case_id"),
    "split": ("set", "subset", "partition"),
    "fold": (),
    "mpp": (),
    "name": ("slide_id", "slide_name"),
}
"""Other tools' names of our columns, the likeliest first; they count where the column itself is not there."""
_SPLIT_WORDS: Final[dict[str, Split]] = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}
_YES: Final = ("1", "1.0", "true", "yes", "dead", "deceased")
_NO: Final = ("0", "0.0", "false", "no", "alive", "living")
_MASK_NAME = re.compile(r"(?:(?P<of>.+)[ ._-])?(?:mask|masks|label|labels|labelmap)", re.IGNORECASE)
"""Names of files that are masks where the slide that they are of lies beside them."""
_SPLIT_FILE = re.compile(r"splits_(\d{1,4})\.csv")
_NUMBERED = re.compile(r"(slide|mask)[ _-]?(\d+)")
_MISSING: Final = ("NA", "N/A", "n/a", "NaN", "nan", "<NA>", "NULL", "null", "#N/A")
"""Texts that R, pandas, databases and spreadsheets write where there is no value."""
_EXPECTED: Final = "a cohort file begins with a line like: slide,mask,split"
_NO_TEXT: Final = f"it is not UTF-8 text; save the table as 'CSV UTF-8', as Excel calls it; {_EXPECTED}"
_MISSPELT = 0.8
"""From this ratio on, a further column's name is taken for a misspelt one of ours."""


@dataclass(frozen=True, slots=True)
class Row:
    """One slide. A mask of None with a label of None means that the tissue recipe labels it."""

    slide: Path
    mask: Path | None = None
    """The first label's mask, where there are several."""
    mpp: float | None = None
    split: Split | None = None
    label: str | None = None
    """The text as it is written; what reads labels knows what they are; times are as `survival_of` takes them."""
    called: str | None = None
    """A name beside the file's."""
    fold: int | None = None
    case: str | None = None
    """The name that all slides of one patient share."""
    line: int = field(default=0, compare=False)
    """In the file; 0 for a slide that was named by itself."""
    further_slides: tuple[Path, ...] = ()
    further_masks: tuple[Path, ...] = ()
    of_case: tuple[Row, ...] = ()
    """The slides of a case that is one bag (`patches.joined`), this one first."""

    @property
    def name(self) -> str:
        """Return what results and output files are called: the slide's file name without the suffix, or `called`;
        without ".ome" and ".cog", which are of formats.
        """
        return plain_stem(self.called or self.slide.stem)

    @property
    def masks(self) -> tuple[Path, ...]:
        """Return one for each label; none where the tissue recipe makes it."""
        return () if self.mask is None else (self.mask, *self.further_masks)

    @property
    def members(self) -> tuple[Row, ...]:
        """Return the rows of all slides that are read together: of a case that is one bag, else this one."""
        return self.of_case or (self,)

    @property
    def slides(self) -> tuple[Path, ...]:
        """Return the files of all images of the slide, of a case that is one bag those of all its slides."""
        return tuple(path for part in self.members for path in part._images)

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the slide's files and its masks."""
        return tuple(path for part in self.members for path in (*part._images, *part.masks))

    @property
    def _images(self) -> tuple[Path, ...]:
        return tuple(path for slide in (self.slide, *self.further_slides) for path in files_of(slide))

    def begun(self, image: Image | None = None, transform: int = 0) -> SlideBegun:
        """Tell that its tiles come next; `image` is the slide as `open` opens it, None of a bag."""
        if image is None:
            return SlideBegun(self.slide.resolve())
        return SlideBegun(self.slide.resolve(), image.levels[0].shape, image.shape[1:], transform)

    def open(self, level: int = 0, mpp: float | None = None) -> Image:
        """Open the slide and its further images as one; `mpp`, of level 0, is over all else. Raises `ImageError`."""
        return open_image((self.slide, *self.further_slides), level=level, mpp=mpp or self.mpp)


def is_table(path: Path) -> bool:
    """Return whether a file is a cohort file, and no slide, by its name."""
    return path.suffix.lower() in (".csv", ".tsv")


def slides_in(folder: Path) -> list[Path]:
    """List the slide files of a folder, in alphabetical order; hidden ones are left out, and masks of others."""
    masks = {path for paths in masks_beside(folder).values() for path in paths}
    return [path for path in _images_in(folder) if path not in masks]


def is_picture(path: Path) -> bool:
    """Return whether a file is a PNG or JPEG by its name, as thumbnails are."""
    return path.suffix.lower() in _PICTURES


def is_called_mask(path: Path) -> bool:
    """Return whether a file has the name of a mask."""
    return _MASK_NAME.fullmatch(plain_stem(path.stem)) is not None


def masks_beside(folder: Path) -> dict[Path, list[Path]]:
    """Find the images of a folder that are called as masks of others: `NAME_mask.tif` beside `NAME.svs`, or `mask.tif`
    beside the only slide. Return them by the slide that they are of.
    """
    called = {path: _MASK_NAME.fullmatch(plain_stem(path.stem)) for path in _images_in(folder)}
    slides = {plain_stem(path.stem): path for path, match in called.items() if match is None}
    only = next(iter(slides.values())) if len(slides) == 1 else None
    found: dict[Path, list[Path]] = {}
    for path, match in called.items():
        of = None if match is None else slides.get(match["of"]) if match["of"] else only
        if of is not None:
            found.setdefault(of, []).append(path)
    return found


def _images_in(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if path.suffix.lower() in SLIDE_SUFFIXES and not path.name.startswith(".")
    )


def read_rows(path: Path) -> tuple[tuple[str, ...], tuple[Row, ...]]:
    """Read the columns of a cohort file by our names, and its rows; the slides exist, but are not opened.

    Raises `ConfigError` naming the file, the line, what was found and what is expected.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else _NO_TEXT
        if path.is_dir():
            without = "images/ and masks/ in it" if masks_beside(path) else "masks"
            reason = f"it is a folder without {without}; {_EXPECTED}, and a folder has images/ and masks/"
        raise ConfigError(f"cannot read the cohort file {path}: {reason}") from error
    lines = text.splitlines()
    header = next(filter(None, lines), "")
    delimiter = max(",;\t", key=header.count)
    reader = csv.DictReader(lines, skipinitialspace=delimiter != "\t", strict=True, delimiter=delimiter)
    try:
        columns = reader.fieldnames = _columns(path, reader.fieldnames or ())
        rows = tuple(_row(path, reader.line_num, cells) for cells in reader if any(cells.values()))
    except csv.Error as error:
        raise ConfigError(f"{path} line {reader.line_num}: {error}; write it as comma-separated text") from error
    if not rows:
        raise ConfigError(f"{path} lists no slides; give it one line per slide below the header")
    return columns, with_own_names(rows)


def with_own_names(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Call slides of one file name by their folders, too: by as many as tell them apart."""
    rows = tuple(rows)
    by_name: dict[str, set[Path]] = {}
    for row in rows:
        by_name.setdefault(row.name, set()).add(row.slide)
    return tuple(
        row
        if row.called is not None or len(by_name[row.name]) == 1
        else dataclasses.replace(row, called="-".join((*told_apart(row.slide, by_name[row.name])[:-1], row.slide.stem)))
        for row in rows
    )


def told_apart(path: Path, others: Collection[Path], least: int = 2) -> tuple[str, ...]:
    """Return as many of a path's last parts as tell it from all others: `least` or more, and `least` where none do."""

    def last(each: Path, count: int) -> tuple[str, ...]:
        return each.relative_to(each.anchor).parts[-count:]

    for count in range(least, len(path.parts) + 1):
        if [last(other, count) for other in others].count(last(path, count)) == 1:
            return last(path, count)
    return last(path, least)


def folded(rows: Iterable[Row], fold: int) -> tuple[Row, ...]:
    """Give the rows the splits of a cross-validation: those of `fold` are validated, the others but `test` trained on.

    Where no row has a fold, they are as they were.
    """
    rows = tuple(rows)
    if all(row.fold is None for row in rows):
        return rows
    return tuple(
        row if row.split == "test" else dataclasses.replace(row, split="val" if row.fold == fold else "train")
        for row in rows
    )


def number_in(where: str, column: str, text: str) -> float:
    """Raise `ConfigError` for what is none, or not finite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{where}: the {column} must be a number, got {text!r}")
    return value


def columns_of(kind: str, columns: Iterable[str]) -> list[str]:
    """Return the columns `kind` and `kind:NAME`."""
    return [column for column in columns if column.partition(":")[0] == kind]


def _spelt(column: str) -> str:
    """Spell a column as we do; what follows a colon is a name of the user's."""
    kind, colon, name = column.partition(":")
    kind = kind.strip().lower()
    if not colon:
        return kind
    ours = next((each for each in ("slide", "mask") if kind in (each, *_ALIASES[each])), kind)
    return f"{ours}:{name.strip()}"


def _columns(path: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Put our names in the place of other tools'."""
    columns = [_spelt(name.strip()) for name in names]
    for ours, aliases in _ALIASES.items():
        found = next((alias for alias in aliases if alias in columns), None)
        if ours not in columns and found is not None:
            columns[columns.index(found)] = ours
    for column in (each for each in columns if ":" not in each):
        for ours in ("slide", "mask", "label", "split"):
            if ours not in columns and SequenceMatcher(None, column, ours).ratio() >= _MISSPELT:
                raise ConfigError(f"{path} line 1: unknown column {column[:80]!r}, did you mean {ours!r}?")
    for column in columns:
        if numbered := _NUMBERED.fullmatch(column):
            kind, number = numbered.groups()
            raise ConfigError(f"{path} line 1: unknown column {column!r}; a further {kind} is called {kind}:{number}")
        if columns.count(column) > 1 and column.partition(":")[0] in _ALIASES:
            raise ConfigError(f"{path} line 1: there are two columns {column!r}; keep one")
    if "mask" in columns and columns_of("mask", columns) != ["mask"]:
        raise ConfigError(f"{path} line 1: of several masks each is of a label; call the column 'mask' mask:NAME, too")
    if not columns_of("slide", columns):
        raise ConfigError(
            f"{path} line 1: the column 'slide' is missing, got {', '.join(columns)[:200] or 'nothing'}; {_EXPECTED}"
        )
    return tuple(columns)


def _row(path: Path, line: int, cells: Mapping[str | None, object]) -> Row:
    where = f"{path} line {line}"
    if None in cells or None in cells.values():
        raise ConfigError(f"{where}: more or fewer values than the header's columns; quote commas inside a value")
    values = {str(key): str(value).strip() for key, value in cells.items()}
    # Elsewhere it is no path and no number, which is told.
    values |= {column: "" for column in ("label", "case") if values.get(column) in _MISSING}
    slides, masks = (columns_of(kind, values) for kind in ("slide", "mask"))
    masks = masks if any(values[column] for column in masks) else []
    for column in (*slides, *masks):
        if not values[column]:
            raise ConfigError(f"{where}: the {column} is empty; write its path")
    images = [_existing(where, path, values[column], SLIDE_SUFFIXES) for column in slides]
    targets = [_existing(where, path, values[column]) for column in masks]
    mpp = number_in(where, "mpp", values["mpp"]) if values.get("mpp") else None
    if mpp is not None and mpp <= 0:
        raise ConfigError(f"{where}: the mpp must be a positive number of micrometres, got {mpp}")
    called = values.get("name") or None
    if called is not None and (Path(called).name != called or not called.isprintable() or len(called) > 200):
        raise ConfigError(f"{where}: the name {called[:80]!r} cannot be a file's; write one without slashes")
    return Row(
        slide=images[0],
        mask=targets[0] if targets else None,
        mpp=mpp,
        split=_split(where, values.get("split", "")),
        label=values.get("label") or survival_label(where, values),
        case=values.get("case") or None,
        called=called,
        fold=_fold(where, values["fold"]) if values.get("fold") else None,
        line=line,
        further_slides=tuple(images[1:]),
        further_masks=tuple(targets[1:]),
    )


def _fold(where: str, text: str) -> int:
    number = number_in(where, "fold", text)
    if not number.is_integer():
        raise ConfigError(f"{where}: the fold must be a whole number, got {text!r}")
    return int(number)


def _split(where: str, text: str) -> Split | None:
    if text and text.lower() not in _SPLIT_WORDS:
        raise ConfigError(f"{where}: unknown split {text!r}; use {', '.join(SPLITS)}")
    return _SPLIT_WORDS.get(text.lower())


def _existing(where: str, path: Path, text: str, suffixes: Sequence[str] = ()) -> Path:
    """Find the file or folder of this name, or with one of `suffixes` behind it, with which it may lie in `slides/`.

    A path that Windows has written counts where there is no file of that name. A link leads to its file, but where that
    has another name, as in the stores of DVC and git-annex, it is called by its own.
    """
    folder = path.absolute().parent
    texts = dict.fromkeys((text, text.replace("\\", "/")))
    try:
        places = [place / each for each in texts for place in (folder, *([folder / "slides"] if suffixes else []))]
        for place in places:
            for found in (place, *(place.with_name(place.name + suffix) for suffix in suffixes)):
                if found.exists():
                    target = found.resolve()
                    return target if target.name == found.name else found.parent.resolve() / found.name
        missing = places[0].resolve()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null character, links in a circle
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{where}: {text[:80]!r} is no path ({reason})") from error
    raise ConfigError(f"{where}: {missing} does not exist; relative paths are taken from the cohort file's folder")


def survival_of(text: str) -> tuple[float, bool] | None:
    """Read a survival time as R prints it, `12.5`, or `12.5+` where no event came until then; None for no time."""
    try:
        time = float(text.removesuffix("+"))
    except ValueError:
        return None
    return (time, not text.endswith("+")) if 0 <= time < math.inf else None


def survival_label(where: str, values: Mapping[str, str]) -> str | None:
    """Make the label of a row of a cohort file with a time and an event; None where it has no such columns, or others.

    Raises `ConfigError` for what cannot be read.
    """
    column = next((name for name in ("event", "censored") if name in values), None)
    if column is None or "time" not in values or {"label", "mask"} & values.keys():
        return None
    if survival_of(values["time"]) is None or values["time"].endswith("+"):
        raise ConfigError(f"{where}: the time must be a number, 0 or more, got {values['time'][:80]!r}")
    # cBioPortal writes 1:DECEASED.
    event = values[column].lower().partition(":")[0]
    if event not in (*_YES, *_NO):
        raise ConfigError(f"{where}: the {column} is {values[column][:80]!r}; write 1 or 0")
    return values["time"] + ("" if (event in _YES) == (column == "event") else "+")


def split_files(path: Path, columns: Collection[str]) -> dict[int, Path]:
    """Find the split files of a cohort file by number; none of one that has its splits or folds in `columns`.

    Raises `ConfigError` where several folders have some.
    """
    if {"split", "fold"} & set(columns):
        return {}
    files = [file for place in (".", "splits", "splits/*") for file in path.parent.glob(f"{place}/splits_*.csv")]
    numbered = {file: int(match[1]) for file in sorted(files) if (match := _SPLIT_FILE.fullmatch(file.name))}
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
    names: dict[str, set[Row]] = {}
    for row in rows:
        for name in (row.slide.name, row.slide.stem, row.name):
            names.setdefault(name, set()).add(row)
    of_rows: dict[Row, Split] = {}
    for name, split in splits.items():
        if len(found := names.get(name, set())) != 1:
            what = "several of" if found else "not"
            raise ConfigError(f"{files[number]} lists the slide {name!r}, which {path} has {what}")
        if of_rows.setdefault(row := next(iter(found)), split) != split:
            raise ConfigError(f"{files[number]} lists {row.slide.name} by two names, in {of_rows[row]} and in {split}")
    return tuple(dataclasses.replace(row, split=of_rows[row]) for row in rows if row in of_rows)


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
