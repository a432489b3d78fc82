"""Label many slides by the tissue recipe, one mask file each, so that an interrupted job continues where it stopped."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from gigagrad.errors import ConfigError, ImageError, WriteError
from gigagrad.events import Events, JobAdvanced, JobFinished, JobStarted, Listener, Notice
from gigagrad.images.look import Look
from gigagrad.images.opening import open_image
from gigagrad.images.tissue import PAPER_RECIPE, Recipe, write_label


def label_slides(
    slides: Sequence[str | Path],
    out: str | Path,
    *,
    recipe: Recipe = PAPER_RECIPE,
    mpp: float | None = None,
    bands: Sequence[int | str] = (),
    overwrite: bool = False,
    listeners: Iterable[Listener] = (),
) -> tuple[Path, ...]:
    """Write `out/STEM.tif`, a full-size mask of 0 and 1, for every slide, and return the paths in the same order.

    A slide that cannot be read or labelled is told (`Notice`) and left out; the others go on.

    `mpp` is micrometres per pixel of all slides, over what their files say; `bands` are the channels to look at. A mask
    that exists is kept, as it is whole (masks are written under another name first), unless `overwrite`. Emits the job
    `label`, counted in slides.

    Raises `ConfigError` for two slides of one name or a missing slide before anything is written, `WriteError` for a
    mask that cannot be written, and `ImageError` at the end where slides failed; masks made until then remain.
    """
    sources, out = [Path(slide) for slide in slides], Path(out)
    masks = [out / f"{source.stem}.tif" for source in sources]
    _check(sources, masks)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"cannot make the folder {out}: {error.strerror}; choose another --out") from error
    events = Events(tuple(listeners))
    events.emit(JobStarted("label", len(sources)))
    start = time.monotonic()
    failed: list[str] = []
    for done, (source, mask) in enumerate(zip(sources, masks, strict=True), 1):
        kept = mask.exists() and not overwrite
        said = f"{source.stem}: done before" if kept else source.stem
        if not kept:
            try:
                with open_image(source, mpp=mpp) as slide:
                    write_label(Look(bands=tuple(bands)).of(slide), mask, recipe, overwrite=overwrite)
            except ImageError as error:
                failed.append(str(error))
                said = f"{source.stem}: failed"
                events.emit(Notice(str(error), warning=True))
        events.emit(JobAdvanced("label", done, len(sources), said))
    events.emit(JobFinished("label", time.monotonic() - start))
    if failed:
        more = f" ({len(failed)} of {len(sources)} slides failed)" if len(sources) > 1 else ""
        raise ImageError(f"{failed[0]}{more}")
    return tuple(masks)


def _check(sources: Sequence[Path], masks: Sequence[Path]) -> None:
    if not sources:
        raise ConfigError("no slides to label; name at least one file")
    owners: dict[Path, Path] = {}
    for source, mask in zip(sources, masks, strict=True):
        if not source.exists():
            raise ConfigError(f"{source} does not exist; check the path")
        other = owners.setdefault(mask, source)
        if other is not source:
            raise ConfigError(f"{other} and {source} would both be labelled as {mask}; rename one or label them apart")
        if mask.exists() and mask.samefile(source):
            raise ConfigError(f"the mask of {source} would replace the slide itself; choose another --out")
