"""Label many slides by the tissue recipe, one mask file each, so that an interrupted job continues where it stopped."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from gigagrad.errors import ConfigError, WriteError
from gigagrad.events import Events, JobAdvanced, JobFinished, JobStarted, Listener
from gigagrad.images.opening import open_image
from gigagrad.images.tissue import PAPER_RECIPE, Recipe, write_label


def label_slides(
    slides: Sequence[str | Path],
    out: str | Path,
    *,
    recipe: Recipe = PAPER_RECIPE,
    mpp: float | None = None,
    overwrite: bool = False,
    listeners: Iterable[Listener] = (),
) -> tuple[Path, ...]:
    """Write `out/STEM.tif`, a full-size mask of 0 and 1, for every slide, and return the paths in the same order.

    `mpp` is micrometres per pixel of all slides, over what their files say. A mask that exists is kept, as it is whole
    (masks are written under another name first), unless `overwrite`. Emits the job `label`, counted in slides.

    Raises `ConfigError` for two slides of one name or a missing slide before anything is written, `ImageError` for a
    slide that cannot be labelled and `WriteError` for a mask that cannot be written; masks made until then remain.
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
    for done, (source, mask) in enumerate(zip(sources, masks, strict=True), 1):
        kept = mask.exists() and not overwrite
        if not kept:
            with open_image(source, mpp=mpp) as slide:
                write_label(slide, mask, recipe, overwrite=overwrite)
        events.emit(JobAdvanced("label", done, len(sources), f"{source.stem}: done before" if kept else source.stem))
    events.emit(JobFinished("label", time.monotonic() - start))
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
