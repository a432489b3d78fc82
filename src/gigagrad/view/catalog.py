"""Find what a command named: slides with what belongs to each, and runs. Nothing else is ever opened.

Every file is resolved when the command starts. In a folder that was named, a link that leads out of it is left out; a
link that was named itself is its user's word. A file that has become a link since is not opened again.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gigagrad.cohorts import Row, find_slides
from gigagrad.cohorts.cohort import is_cohort_folder
from gigagrad.cohorts.records import FILE_NAME, FOLDER, SlideResult, read_records
from gigagrad.cohorts.rows import is_table, masks_beside, slides_in, told_apart
from gigagrad.config import read_yaml
from gigagrad.errors import ConfigError, GigagradError
from gigagrad.files import digest_of
from gigagrad.images import Image
from gigagrad.images.layout import plain_stem
from gigagrad.images.opening import dicom_instances
from gigagrad.masks import ClassTable

METRICS: Final = "metrics.jsonl"
"""The file of a run that says that a folder is one, and has its curves."""
_MASKS_OF: Final = (".tif", ".tiff", ".png", ".zarr", ".geojson", ".json", ".xml", ".gz", ".zip")
_DEEPEST: Final = 3
_MOST_FOLDERS: Final = 1000
"""Limits of the search below a folder: how far down, and in how many folders."""
_MASK_FOLDERS: Final = ("annotations", "labels", "masks")
"""Names of folders that hold no slides, whatever the suffixes of their files."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Files of one prediction of a slide."""

    source: Path
    """The folder that `predict` wrote, or the file."""
    mask: Path | None = None
    """Class ids, or outlines."""
    probabilities: Path | None = None
    attention: Path | None = None
    """A map of what a model of bags attended to."""
    patches: Path | None = None
    """The patches of the bag with the attention of each."""
    table: ClassTable | None = None
    scores: tuple[tuple[str, float], ...] = ()
    """Numbers to sort by: Dice, or the scores of a model that scores whole slides."""
    network: str = ""
    """The SHA-256 of the network's weights."""
    of: str = ""
    """The name of what predicted it, where several did."""

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(filter(None, (self.mask, self.probabilities, self.attention, self.patches)))


@dataclass(frozen=True, slots=True)
class Item:
    """A slide, and the files that are shown over it."""

    row: Row
    image: Image | None = None
    """The slide, where it is open already; nobody here closes it."""
    labels: tuple[tuple[Path, ...], ...] = ()
    """Labels of it: each a mask, or masks of one label each."""
    predictions: tuple[Predicted, ...] = ()
    table: ClassTable | None = None
    label: str = ""
    """A name for people, which no other slide has."""
    plans: tuple[tuple[str, Path], ...] = ()
    """The plans of runs that learn from it, by their names."""

    @property
    def name(self) -> str:
        return self.row.name

    def open(self) -> AbstractContextManager[Image]:
        """Open the slide, to be closed behind a block. Raises `ImageError`."""
        return self.row.open() if self.image is None else nullcontext(self.image)

    @property
    def scores(self) -> dict[str, float]:
        return {
            f"{name} ({each.of})" if each.of else name: value
            for each in self.predictions
            for name, value in each.scores
        }

    @property
    def over(self) -> tuple[Path, ...]:
        """Return the files that are shown over it."""
        return tuple(path for paths in (*self.labels, *(each.files for each in self.predictions)) for path in paths)

    @property
    def files(self) -> tuple[Path, ...]:
        """Return every file that may be opened for it."""
        return (*((self.row.slide, *self.row.further_slides) if self.image is None else ()), *self.over)

    def check_same(self) -> None:
        """Raise `ConfigError` where one of its files is another one than when the command started."""
        for path in self.files:
            if path.resolve() != path or not path.exists():
                raise ConfigError(f"{path.name} is gone or has become a link since the page was started; start it anew")


@dataclass(frozen=True, slots=True)
class Run:
    """A folder that `fit` writes, or has written. `named`: a person has named it, and not a folder that it is in."""

    name: str
    metrics: Path
    named: bool = True

    @property
    def folder(self) -> Path:
        return self.metrics.parent


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything that a command named; slides and runs are asked for by their numbers.

    `parts` names what was found below a folder, `passed` what was not looked into, and why.
    """

    items: tuple[Item, ...]
    runs: tuple[Run, ...]
    parts: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()

    @property
    def folders(self) -> tuple[tuple[str, Path], ...]:
        """Return the folders that a job may be filling now, by the names of runs and of predictions."""
        predicted = {each.source: each.of for item in self.items for each in item.predictions if each.source.is_dir()}
        named = [(of or path.name, path) for path, of in predicted.items()]
        return (*((run.name, run.folder) for run in self.runs), *named)


def find(
    sources: Sequence[Path | Image],
    masks: Sequence[Path] = (),
    predictions: Path | None = None,
    classes: Sequence[str] = (),
) -> Catalog:
    """Find slides and runs of `sources`: slides, folders of them, cohort files, folders of `predict` and `fit`; of
    another folder also what lies up to three folders below it. An image that is open is a slide.

    `masks` are files of one slide, or folders with files called by the slides; `predictions` a folder that `predict`
    wrote, or a file of one slide. Raises `ConfigError` for a source that is missing or holds nothing to look at, and
    for a mask of nobody.
    """
    items: list[Item] = []
    runs: list[Run] = []
    parts: list[Path] = []
    names: list[str] = []
    passed: list[str] = []
    table = ClassTable.parse(classes) if classes else None
    for source in sources:
        if isinstance(source, Image):
            items.append(Item(Row(Path(source.name), called=source.name), source))
            continue
        below, left = _below(source)
        passed += left
        if left and not below and not _has_slides(source):
            raise ConfigError(f"nothing to show in {source}, where {few(left)} was passed over; name slides or a run")
        for each in below or [source]:
            if _is_run(each):
                runs.append(Run("/".join(each.resolve().parts[-2:]), (each / METRICS).resolve(), not below))
                items += _of_run(each, runs[-1].name)
            elif each == source or not _is_mask_folder(each):
                try:
                    items += _of_predictions(each) if _is_predictions(each) else _of_slides(each)
                except ConfigError:
                    if not below:
                        raise
                    continue  # a table that lists no slides, or predictions of slides that are gone
            if below:
                parts.append(each)
                names.append(each.relative_to(source).as_posix())
    items = _merged(items)
    if predictions is not None:
        items = _with_predictions(items, predictions)
    for path in masks:
        items = _with_mask(items, path)
    for path in filter(_is_mask_folder, parts):
        items = _with_masks_in(items, path, None if path.parent in sources else path.parent.resolve())
    if table is not None:
        items = [_with_table(item, table) for item in items]
    if not items and not runs:
        raise ConfigError(f"nothing to show in {', '.join(map(str, sources))}; name slides, a folder, a CSV or a run")
    return Catalog(tuple(_labelled(_named(items, runs))), tuple(runs), tuple(names), tuple(passed))


def few(names: Sequence[str], most: int = 4) -> str:
    """List the first of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _below(source: Path) -> tuple[list[Path], list[str]]:
    """Return what lies below a folder, itself first where it holds slides: runs, predictions, cohort files, folders of
    slides and of masks; nothing for other sources. And what was passed over: links out of the folder, and what lies too
    deep."""
    sources = (_is_run, _is_predictions, is_cohort_folder)
    if not source.is_dir() or source.suffix.lower() == ".zarr" or any(is_one(source) for is_one in sources):
        return [], []
    found, passed, folders, looked = list[Path](), list[str](), deque([source]), 0
    while folders:
        folder, looked = folders.popleft(), looked + 1
        place = folder.relative_to(source)
        if len(place.parts) > _DEEPEST or looked > _MOST_FOLDERS:
            passed.append(f"{place} (too deep)" if looked <= _MOST_FOLDERS else f"{place} (too many folders)")
            continue
        try:
            entries = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
        except OSError:
            passed.append(f"{place} (cannot be read)")
            continue
        for path in entries:
            if not _inside(source, path):
                passed += [f"{path.relative_to(source)} (a link to elsewhere)"] if path.is_dir() else []
            elif not path.is_dir():
                found += [path] if is_table(path) else []
            elif any(is_one(path) for is_one in (*sources, _has_slides, _is_mask_folder)):
                found.append(path)
            elif not path.is_symlink() and path.suffix.lower() != ".zarr":
                folders.append(path)
    return [source, *found] if found and _has_slides(source) else found, passed


def _has_slides(folder: Path) -> bool:
    return bool(slides_in(folder) or dicom_instances(folder))


def _is_mask_folder(path: Path) -> bool:
    return path.is_dir() and path.name.lower() in _MASK_FOLDERS


def _merged(items: Iterable[Item]) -> list[Item]:
    """Join what several sources know of one slide."""
    found: dict[tuple[Path, Image | None], Item] = {}
    for item in map(_resolved, items):
        key = item.row.slide, item.image
        found[key] = _with(found.get(key, item), item.labels, item.predictions, item.plans, item.table)
    over = {path for item in found.values() for path in item.over}
    return [item for (path, image), item in found.items() if path not in over or image is not None]


def _with(
    item: Item,
    labels: Iterable[tuple[Path, ...]] = (),
    predictions: Iterable[Predicted] = (),
    plans: Iterable[tuple[str, Path]] = (),
    table: ClassTable | None = None,
) -> Item:
    """Add what is known of a slide to what is known already."""
    return dataclasses.replace(
        item,
        labels=tuple(dict.fromkeys((*item.labels, *labels))),
        predictions=tuple(dict.fromkeys((*item.predictions, *predictions))),
        plans=tuple(dict.fromkeys((*item.plans, *plans))),
        table=item.table or table,
    )


def _inside(folder: Path, path: Path) -> Path | None:
    """Return the file that a path leads to, None where that lies outside of a folder."""
    found = path.resolve()
    return found if found.is_relative_to(folder.resolve()) else None


def _named(items: Sequence[Item], runs: Sequence[Run]) -> list[Item]:
    """Name what predicted, where several did: by the run whose network it was, else by the folder."""
    sources = list(dict.fromkeys(each.source for item in items for each in item.predictions))
    if len(sources) < 2 and sum(run.named for run in runs) < 2:
        return list(items)
    networks = {digest_of(run.folder / "best.pt"): run.name for run in runs if (run.folder / "best.pt").is_file()}
    names = {source: "/".join(told_apart(source, sources, least=1)) for source in sources}

    def named(predicted: Predicted) -> Predicted:
        return dataclasses.replace(predicted, of=networks.get(predicted.network, names[predicted.source]))

    return [dataclasses.replace(item, predictions=tuple(map(named, item.predictions))) for item in items]


def _labelled(items: Sequence[Item]) -> Iterator[Item]:
    """Call every slide by its name, and those of one name by their folders, too."""
    names = Counter(item.name for item in items)
    alike = [item.row.slide.with_suffix("") for item in items if names[item.name] > 1]
    for item in items:
        longer = "/".join(told_apart(item.row.slide.with_suffix(""), alike)) if names[item.name] > 1 else item.name
        yield dataclasses.replace(item, label=longer)


def _is_run(source: Path) -> bool:
    return source.is_dir() and ((source / METRICS).is_file() or (source / "config.yaml").is_file())


def _is_predictions(source: Path) -> bool:
    return source.is_dir() and ((source / FILE_NAME).is_file() or (source / FOLDER).is_dir())


def _of_predictions(folder: Path) -> list[Item]:
    records = [record for record in read_records(folder).values() if Path(record.slide).exists()]
    if not records:
        raise ConfigError(f"the slides of {folder} are gone; name them beside --predictions {folder}")
    return [_with_record(Item(Row(Path(record.slide))), folder, record) for record in records]


def _of_slides(source: Path) -> list[Item]:
    rows, beside = find_slides([source]), dict[Path, list[Path]]()
    if source.is_dir():
        rows = tuple(row for row in rows if all(_inside(source, path) for path in row.files))
        if not rows:
            raise ConfigError(f"all slides in {source} are links to other folders; name those")
        if not any(row.masks for row in rows):
            found = masks_beside(source).items()
            beside = {slide: [path for path in paths if _inside(source, path)] for slide, paths in found}
    return [
        Item(row, labels=tuple((path,) for path in beside.get(row.slide, ())) or ((row.masks,) if row.masks else ()))
        for row in rows
    ]


def _of_run(folder: Path, name: str) -> list[Item]:
    """Return the slides of a run's cohort, as far as its settings say where that is."""
    try:
        settings = read_yaml(folder / "config.yaml")
        cohort, classes = settings.get("slides"), settings.get("classes") or ()
        table = ClassTable.parse([str(entry) for entry in classes]) if classes else None
        rows = find_slides([Path(str(cohort))]) if cohort else ()
    except (GigagradError, OSError, ValueError, AttributeError, TypeError):
        return []  # its curves are there all the same
    plan = _inside(folder, folder / "plan.json")
    plans = ((name, plan),) if plan is not None else ()
    return [Item(row, labels=(row.masks,) if row.masks else (), table=table, plans=plans) for row in rows]


def _with_predictions(items: Sequence[Item], predictions: Path) -> list[Item]:
    if predictions.is_dir() and predictions.suffix != ".zarr":
        records = read_records(predictions)
        if not records:
            raise ConfigError(f"{predictions} holds no predictions; name the folder that 'gigagrad predict' wrote")
        names = Counter(item.name for item in items)

        def belongs(item: Item) -> bool:
            record = records.get(item.name)
            return record is not None and (names[item.name] == 1 or Path(record.slide).resolve() == item.row.slide)

        return [_with_record(item, predictions, records[item.name]) if belongs(item) else item for item in items]
    if len(items) != 1:
        raise ConfigError(f"{predictions} is of one slide, and {len(items)} are shown; name a folder with one for each")
    if not predictions.exists():
        raise ConfigError(f"there is no {predictions}; name the folder that 'gigagrad predict' wrote, or a mask")
    file = predictions.resolve()
    shares = predictions.parent.name == "probabilities"
    predicted = Predicted(file, probabilities=file) if shares else Predicted(file, mask=file)
    return [_with(items[0], predictions=[predicted])]


def _with_record(item: Item, folder: Path, record: SlideResult) -> Item:
    def file(output: str, *inner: str) -> Path | None:
        path = _inside(folder, folder.joinpath(record.files.get(output, ""), *inner))
        return path if output in record.files and path is not None and path.exists() else None

    scores = [*record.scores.items(), *([("Dice", record.dice)] if record.dice is not None else [])]
    entries = record.made_with.classes
    predicted = Predicted(
        folder.resolve(),
        mask=file("labelmap") or file("mask"),
        probabilities=file("probabilities"),
        attention=file("attention", f"{item.name}.tif"),
        patches=file("attention", f"{item.name}.geojson"),
        table=ClassTable.parse(entries) if entries else None,
        scores=tuple(scores),
        network=record.made_with.model_sha256,
    )
    return _with(item, predictions=[predicted])


def _with_mask(items: list[Item], path: Path) -> list[Item]:
    if path.is_dir() and path.suffix != ".zarr":
        if not any(_called(path, item.name) for item in items):
            raise ConfigError(
                f"no file in {path} is called like one of the slides; expected SLIDE.tif or SLIDE.geojson"
            )
        return _with_masks_in(items, path)
    if not path.exists():
        raise ConfigError(f"there is no mask {path}; check the path")
    if len(items) != 1:
        raise ConfigError(f"{path} is of one slide, and {len(items)} are shown; name a folder with a mask for each")
    return [_with(items[0], [(path.resolve(),)])]


def _with_table(item: Item, table: ClassTable) -> Item:
    predictions = tuple(dataclasses.replace(each, table=table) for each in item.predictions)
    return dataclasses.replace(item, table=table, predictions=predictions)


def _with_masks_in(items: Iterable[Item], folder: Path, near: Path | None = None) -> list[Item]:
    """Add what is called like each slide `near` it, unless that has it already. What several are called like is of the
    one with the longest name.
    """
    items = list(items)
    longer = {item.name: [each.name for each in items if each.name.startswith(f"{item.name}.")] for item in items}
    return [
        _with(item, [(path,) for path in _called(folder, item.name, longer[item.name])])
        if near is None or item.row.slide.is_relative_to(near)
        else item
        for item in items
    ]


def _called(folder: Path, name: str, longer: Sequence[str] = ()) -> list[Path]:
    """Return the files of a folder that are called by a slide, whatever follows its name behind a dot, but those of
    slides whose `longer` names begin with it.
    """
    return [
        found
        for path in sorted(folder.iterdir())
        if _is_called(path, name)
        and not any(_is_called(path, other) for other in longer)
        and path.suffix.lower() in _MASKS_OF
        and (found := _inside(folder, path))
    ]


def _is_called(path: Path, name: str) -> bool:
    return plain_stem(path.stem) == name or path.name.startswith(f"{name}.")


def _resolved(item: Item) -> Item:
    """Take the files that links lead to; the slide keeps its name."""

    def each(paths: Iterable[Path]) -> tuple[Path, ...]:
        return tuple(path.resolve() for path in paths)

    row = dataclasses.replace(
        item.row,
        called=item.row.name,
        slide=item.row.slide.resolve(),
        mask=None,
        further_slides=each(item.row.further_slides),
        further_masks=(),
    )
    return dataclasses.replace(item, row=row, labels=tuple(each(paths) for paths in item.labels))
