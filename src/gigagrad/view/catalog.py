"""Find what a command named: slides with what belongs to each, and runs. Nothing else is ever opened.

Every file is resolved when the command starts. In a folder that was named, a link that leads out of it is left out; a
link that was named itself is its user's word. A file that has become a link since is not opened again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gigagrad.cohorts import Row, find_slides
from gigagrad.config import read_yaml
from gigagrad.errors import ConfigError, GigagradError
from gigagrad.images.layout import plain_stem
from gigagrad.masks import ClassTable
from gigagrad.prediction.outputs import FILE_NAME, FOLDER, SlideResult, read_records

METRICS: Final = "metrics.jsonl"
"""The file of a run that says that a folder is one, and has its curves."""
_MASKS_OF: Final = (".tif", ".tiff", ".png", ".zarr", ".geojson", ".json", ".xml", ".gz", ".zip")


@dataclass(frozen=True, slots=True)
class Item:
    """A slide, and the files that are shown over it."""

    row: Row
    labels: tuple[tuple[Path, ...], ...] = ()
    """Labels of it: each a mask, or masks of one label each."""
    mask: Path | None = None
    """A prediction: class ids, or outlines."""
    probabilities: Path | None = None
    attention: Path | None = None
    """A map of what a model of bags attended to."""
    table: ClassTable | None = None
    scores: tuple[tuple[str, float], ...] = ()
    """Numbers to sort by: Dice, or the scores of a model that scores whole slides."""

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def files(self) -> tuple[Path, ...]:
        """Return every file that may be opened for it."""
        shown = (self.mask, self.probabilities, self.attention)
        labels = (path for paths in self.labels for path in paths)
        return (self.row.slide, *self.row.further_slides, *labels, *(path for path in shown if path is not None))

    def check_same(self) -> None:
        """Raise `ConfigError` where one of its files is another one than when the command started."""
        for path in self.files:
            if path.resolve() != path or not path.exists():
                raise ConfigError(f"{path.name} is gone or has become a link since the page was started; start it anew")


@dataclass(frozen=True, slots=True)
class Run:
    """A folder that `fit` writes, or has written."""

    name: str
    metrics: Path


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything that a command named; slides and runs are asked for by their numbers."""

    items: tuple[Item, ...]
    runs: tuple[Run, ...]


def find(
    sources: Sequence[Path],
    masks: Sequence[Path] = (),
    predictions: Path | None = None,
    classes: Sequence[str] = (),
) -> Catalog:
    """Find slides and runs of `sources`: slides, folders of them, cohort files, folders of `predict` and `fit`.

    `masks` are files of one slide, or folders with files called by the slides; `predictions` a folder that `predict`
    wrote, or a file of one slide. Raises `ConfigError` for a source that is missing or holds nothing to look at, and
    for a mask of nobody.
    """
    items: list[Item] = []
    runs: list[Run] = []
    table = ClassTable.parse(classes) if classes else None
    for source in sources:
        if _is_run(source):
            runs.append(Run("/".join(source.resolve().parts[-2:]), (source / METRICS).resolve()))
            items += _of_run(source)
        elif _is_predictions(source):
            items += [_with_record(Item(Row(Path(record.slide))), source, record) for record in _records(source)]
        else:
            items += _of_slides(source)
    items = _merged(items)
    if predictions is not None:
        items = _with_predictions(items, predictions)
    for path in masks:
        items = _with_mask(items, path)
    if table is not None:
        items = [dataclasses.replace(item, table=table) for item in items]
    if not items and not runs:
        raise ConfigError(f"nothing to show in {', '.join(map(str, sources))}; name slides, a folder, a CSV or a run")
    return Catalog(tuple(map(_resolved, items)), tuple(runs))


def _merged(items: Iterable[Item]) -> list[Item]:
    """Join what several sources know of one slide. Raises `ConfigError` for two slides of one name."""
    found: dict[str, Item] = {}
    for item in items:
        known = found.setdefault(item.name, item)
        if known.row.slide.resolve() != item.row.slide.resolve():
            raise ConfigError(f"{known.row.slide} and {item.row.slide} are both called {item.name}; show one at a time")
        found[item.name] = dataclasses.replace(
            known,
            labels=tuple(dict.fromkeys((*known.labels, *item.labels))),
            mask=known.mask or item.mask,
            probabilities=known.probabilities or item.probabilities,
            attention=known.attention or item.attention,
            table=known.table or item.table,
            scores=known.scores or item.scores,
        )
    return list(found.values())


def _is_run(source: Path) -> bool:
    return source.is_dir() and ((source / METRICS).is_file() or (source / "config.yaml").is_file())


def _is_predictions(source: Path) -> bool:
    return source.is_dir() and ((source / FILE_NAME).is_file() or (source / FOLDER).is_dir())


def _records(folder: Path) -> list[SlideResult]:
    records = list(read_records(folder).values())
    if not any(Path(record.slide).exists() for record in records):
        raise ConfigError(f"the slides of {folder} are gone; name them beside --predictions {folder}")
    return [record for record in records if Path(record.slide).exists()]


def _of_slides(source: Path) -> list[Item]:
    rows = find_slides([source])
    if source.is_dir():
        inside = source.resolve()
        rows = tuple(row for row in rows if all(path.resolve().is_relative_to(inside) for path in row.files))
        if not rows:
            raise ConfigError(f"all slides in {source} are links to other folders; name those")
    return [Item(row, labels=(row.masks,) if row.masks else ()) for row in rows]


def _of_run(folder: Path) -> list[Item]:
    """Return the slides of a run's cohort, as far as its settings say where that is."""
    try:
        settings = read_yaml(folder / "config.yaml")
        cohort, classes = settings.get("slides"), settings.get("classes") or ()
        table = ClassTable.parse([str(entry) for entry in classes]) if classes else None
        rows = find_slides([Path(str(cohort))]) if cohort else ()
    except (GigagradError, OSError, ValueError, AttributeError, TypeError):
        return []  # its curves are there all the same
    return [Item(row, labels=(row.masks,) if row.masks else (), table=table) for row in rows]


def _with_predictions(items: Sequence[Item], predictions: Path) -> list[Item]:
    if predictions.is_dir() and predictions.suffix != ".zarr":
        records = read_records(predictions)
        if not records:
            raise ConfigError(f"{predictions} holds no predictions; name the folder that 'gigagrad predict' wrote")
        return [_with_record(item, predictions, records[item.name]) if item.name in records else item for item in items]
    if len(items) != 1:
        raise ConfigError(f"{predictions} is of one slide, and {len(items)} are shown; name a folder with one for each")
    if not predictions.exists():
        raise ConfigError(f"there is no {predictions}; name the folder that 'gigagrad predict' wrote, or a mask")
    if predictions.parent.name == "probabilities":
        return [dataclasses.replace(items[0], probabilities=predictions)]
    return [dataclasses.replace(items[0], mask=predictions)]


def _with_record(item: Item, folder: Path, record: SlideResult) -> Item:
    inside = folder.resolve()

    def file(output: str, *inner: str) -> Path | None:
        path = folder.joinpath(record.files.get(output, ""), *inner)
        there = output in record.files and path.exists() and path.resolve().is_relative_to(inside)
        return path if there else None

    scores = [*record.scores.items(), *([("Dice", record.dice)] if record.dice is not None else [])]
    entries = record.made_with.classes
    return dataclasses.replace(
        item,
        mask=file("labelmap") or file("mask"),
        probabilities=file("probabilities"),
        attention=file("attention", f"{item.name}.tif"),
        table=ClassTable.parse(entries) if entries else item.table,
        scores=tuple(scores),
    )


def _with_mask(items: Sequence[Item], path: Path) -> list[Item]:
    if path.is_dir() and path.suffix != ".zarr":
        named = [(item, [(each,) for each in _called(path, item.name)]) for item in items]
        if not any(found for _, found in named):
            raise ConfigError(
                f"no file in {path} is called like one of the slides; expected SLIDE.tif or SLIDE.geojson"
            )
        return [dataclasses.replace(item, labels=(*item.labels, *found)) for item, found in named]
    if not path.exists():
        raise ConfigError(f"there is no mask {path}; check the path")
    if len(items) != 1:
        raise ConfigError(f"{path} is of one slide, and {len(items)} are shown; name a folder with a mask for each")
    return [dataclasses.replace(items[0], labels=(*items[0].labels, (path,)))]


def _called(folder: Path, name: str) -> list[Path]:
    """Return the files of a folder that are called by a slide, whatever follows its name behind a dot."""
    inside = folder.resolve()
    return [
        path
        for path in sorted(folder.iterdir())
        if (plain_stem(path.stem) == name or path.name.startswith(f"{name}."))
        and path.suffix.lower() in _MASKS_OF
        and path.resolve().is_relative_to(inside)
    ]


def _resolved(item: Item) -> Item:
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
    return dataclasses.replace(
        item,
        row=row,
        labels=tuple(each(paths) for paths in item.labels),
        mask=item.mask and item.mask.resolve(),
        probabilities=item.probabilities and item.probabilities.resolve(),
        attention=item.attention and item.attention.resolve(),
    )
