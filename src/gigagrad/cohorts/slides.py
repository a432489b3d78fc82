"""Slides that a person names (files, folders, cohort files) as one list; jobs that go through a share of them; and the
job that labels them by the tissue recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from gigagrad.cohorts.cohort import is_cohort_folder, rows_of_folder
from gigagrad.cohorts.rows import (
    SLIDE_SUFFIXES,
    Row,
    folded,
    is_called_mask,
    is_picture,
    is_table,
    read_rows,
    slides_in,
    split_files,
    split_rows,
    with_own_names,
)
from gigagrad.errors import ConfigError, ImageError
from gigagrad.events import Events, Listener, Notice
from gigagrad.files import size_of
from gigagrad.images import InputView, open_image, write_label
from gigagrad.images.opening import dicom_instances, open_ids
from gigagrad.images.views import at_another_resolution
from gigagrad.shares import Share, claimed


def find_slides(sources: Iterable[str | Path], split: str | None = None, fold: int | None = None) -> tuple[Row, ...]:
    """Find all slides of `sources` in order; folders alphabetically, cohort files row by row, those with this split; of
    a cohort with folds, the one that it has where `fold` is validated.

    Slides of one file name in several folders are called by folder and file name; of a slide that is named twice, what
    is known of it counts. Raises `ConfigError` for a source that does not exist or holds no slide, for unreadable rows
    (with their line), for two slides whose outputs would have the same name all the same, and for a slide of which two
    things are said.
    """
    paths = [Path(source) for source in sources]
    rows = with_own_names(row for path in paths for row in _of_source(path, split, fold))
    if split is not None and not any(map(_has_rows, paths)):
        raise ConfigError(f"{paths[0]} has no splits; leave out --split, or name the cohort file")
    by_name: dict[str, Row] = {}
    for row in rows:
        other = by_name.setdefault(row.name, row)
        if other.slide.resolve() != row.slide.resolve():
            raise ConfigError(
                f"{other.slide} and {row.slide} would both be written as {row.name}; rename one, or give them to two "
                "commands with an --out each"
            )
        by_name[row.name] = _one_of(other, row)
    return tuple(by_name.values())


def _one_of(one: Row, other: Row) -> Row:
    """Return what two rows say of a slide. Raises `ConfigError` where they contradict each other."""
    said: dict[str, Any] = {}
    for name in ("mask", "further_masks", "further_slides", "label", "case", "mpp"):
        first, second = getattr(one, name), getattr(other, name)
        if first and second and first != second:
            lines = f"lines {one.line} and {other.line}" if one.line and other.line else "two sources"
            both = (", ".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in (first, second))
            raise ConfigError(
                f"{one.name} is named twice, by {lines}, with the {name.replace('_', ' ')} {' and '.join(both)}; a "
                "slide has one, so leave one of them out"
            )
        said[name] = first or second
    return replace(other, **said)


def _has_rows(source: Path) -> bool:
    """Return whether a source is a cohort, whose rows may have splits."""
    return is_table(source) or (source.is_dir() and is_cohort_folder(source))


def _of_source(source: Path, split: str | None, fold: int | None) -> Iterator[Row]:
    if not source.exists():
        raise ConfigError(f"there is no {source}; name slide files, a folder of slides or a CSV file")
    if _has_rows(source):
        columns, every = ((), rows_of_folder(source)[0]) if source.is_dir() else read_rows(source)
        every = every if fold is None else folded(every, fold)
        if split is not None and not source.is_dir() and (files := split_files(source, columns)):
            every = split_rows(source, every, files, fold)
        rows = [row for row in every if split is None or row.split == split]
        if not rows:
            have = ", ".join(sorted({row.split for row in every if row.split is not None}))
            folds = sorted({row.fold for row in every if row.fold is not None})
            remedy = f"choose another, its splits are {have}" if have else "it has no splits; leave out --split"
            if folds and not have:
                remedy = (
                    f"its rows have folds: give the run of one, as RUN/fold-{folds[0]}, with --split val for the "
                    "slides that it has not learnt from; 'evaluate --split all' takes every slide"
                )
            raise ConfigError(f"{source} has no rows with split '{split}'; {remedy}")
        yield from rows
    elif source.is_dir() and source.suffix.lower() != ".zarr" and not _is_dicom(source):
        slides = slides_in(source)
        if not slides:
            raise ConfigError(f"{source} holds no slides; expected files ending in {', '.join(SLIDE_SUFFIXES)}")
        yield from map(Row, slides)
    else:
        yield Row(source)


def _is_dicom(folder: Path) -> bool:
    """Return whether a folder is a slide of DICOM. Raises `ConfigError` for one with other slides in it."""
    if not dicom_instances(folder):
        return False
    beside = [path for path in slides_in(folder) if not (is_picture(path) or is_called_mask(path))]
    if beside:
        raise ConfigError(
            f"{folder} holds instances of DICOM, which are one slide, and {beside[0].name}; move the instances into a "
            "folder of their own, and name both"
        )
    return True


_Made = TypeVar("_Made")


def rows_of(share: Share, rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows of a share; all shares have nearly as many bytes of slides."""
    return share.deal(rows, [size_of(row.slide) for row in rows])


def run_job(
    job: str,
    rows: Sequence[Row],
    share: Share,
    out: Path | None,
    events: Events,
    work: Callable[[Row], tuple[_Made, str]],
    done: Collection[Row],
    *,
    failures: tuple[type[Exception], ...] = (),
    subject: str = "",
) -> list[_Made]:
    """Do `work` for the `rows` of a share, claimed in the folder `out`, and return what it made of each.

    `work` also returns a few words for the progress of the `job` (of a `subject`), which is counted in slides; those
    that were `done` before take no time. A slide that raises one of `failures` is told (`Notice`)
    and left out. Raises `ImageError` at the end where there were any, and what `claimed` and `work` raise.
    """
    results: list[_Made] = []
    failed: list[str] = []
    sizes = [0 if row in done else size_of(row.slide) for row in rows]
    with (
        nullcontext() if out is None else claimed(out, share, [row.name for row in rows]),
        events.job(share.named(job), len(rows), subject, sizes) as advance,
    ):
        for number, row in enumerate(rows, 1):
            try:
                value, words = work(row)
                results.append(value)
            except failures as error:
                words = "failed"
                failed.append(f"{row.name}: {error}")
                events.emit(Notice(failed[-1], warning=True))
            advance(number, f"{row.name}: {words}")
    if failed:
        raise ImageError(failed[0] + (f" ({len(failed)} of {len(rows)} slides failed)" if len(rows) > 1 else ""))
    return results


def label_slides(
    slides: Sequence[str | Path],
    out: str | Path,
    *,
    mpp: float | None = None,
    bands: Sequence[int | str] = (),
    share: str = "1/1",
    overwrite: bool = False,
    listeners: Iterable[Listener] = (),
) -> tuple[Path, ...]:
    """Write `out/STEM.tif`, a full-size mask of 0 and 1, for every slide, and return the paths in the same order; of a
    `share`, as "2/4", for its slides.

    A slide that cannot be read or labelled is told (`Notice`) and left out; the others go on.

    `mpp` is micrometres per pixel of all slides, over what their files say; `bands` are the channels to look at. A mask
    that exists is kept, as it is whole (masks are written under another name first), unless `overwrite`. Emits the job
    `label`, counted in slides.

    Raises `ConfigError` for two slides of one name or a missing slide before anything is written, `WriteError` for a
    mask that cannot be written, and `ImageError` at the end where slides failed; masks made until then remain.
    """
    mine, rows = Share.parse(share), [Row(Path(slide)) for slide in slides]
    masks = {row: Path(out) / f"{row.name}.tif" for row in rows}
    _check(masks)
    done = {row for row, mask in masks.items() if mask.exists() and not overwrite}

    def label(row: Row) -> tuple[Path, str]:
        if row in done:
            _check_same(row, masks[row])
            return masks[row], "done before"
        with open_image(row.slide, mpp=mpp) as slide:
            write_label(InputView(bands=tuple(bands)).of(slide), masks[row], overwrite=overwrite)
        return masks[row], "labelled"

    own, events = rows_of(mine, rows), Events(tuple(listeners))
    return tuple(run_job("label", own, mine, Path(out), events, label, done, failures=(ImageError,)))


def _check_same(row: Row, path: Path) -> None:
    """Raise `ImageError` for a mask whose proportions are not the slide's: it is of another one of this name. What is
    no mask tells so where it is used.
    """
    try:
        with open_ids(path) as mask, open_image(row.slide) as slide:
            shapes = mask.shape[1:], slide.shape[1:]
    except ImageError:
        return
    if shapes[0] != shapes[1] and not at_another_resolution(*shapes):
        sizes = " and the slide ".join(f"{height} x {width} px" for height, width in shapes)
        raise ImageError(f"{path} is {sizes}, so it is of another; choose another --out or pass --overwrite")


def _check(masks: dict[Row, Path]) -> None:
    if not masks:
        raise ConfigError("no slides to label; name at least one file")
    owners: dict[Path, Path] = {}
    for row, mask in masks.items():
        if not row.slide.exists():
            raise ConfigError(f"{row.slide} does not exist; check the path")
        other = owners.setdefault(mask, row.slide)
        if other is not row.slide:
            raise ConfigError(
                f"{other} and {row.slide} would both be labelled as {mask}; rename one or label them apart"
            )
        if mask.exists() and mask.samefile(row.slide):
            raise ConfigError(f"the mask of {row.slide} would replace the slide itself; choose another --out")
