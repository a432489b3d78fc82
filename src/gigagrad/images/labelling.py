"""Label many slides by the tissue recipe, one mask file each, so that an interrupted job continues where it stopped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from gigagrad.errors import ConfigError, ImageError
from gigagrad.events import Events, Listener, Notice
from gigagrad.files import size_of
from gigagrad.images.layout import plain_stem
from gigagrad.images.look import Look
from gigagrad.images.opening import open_image
from gigagrad.images.tissue import PAPER_RECIPE, Recipe, write_label
from gigagrad.shares import Share, claimed


def label_slides(
    slides: Sequence[str | Path],
    out: str | Path,
    *,
    recipe: Recipe = PAPER_RECIPE,
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
    mine = Share.parse(share)
    sources, out = [Path(slide) for slide in slides], Path(out)
    masks = [out / f"{plain_stem(source.stem)}.tif" for source in sources]
    _check(sources, masks)
    events = Events(tuple(listeners))
    own = mine.deal(list(zip(sources, masks, strict=True)), [size_of(source) for source in sources])
    kept = [mask.exists() and not overwrite for _, mask in own]
    sizes = [0 if there else size_of(source) for (source, _), there in zip(own, kept, strict=True)]
    failed: list[str] = []
    with (
        claimed(out, mine, [mask.stem for _, mask in own]),
        events.job(mine.named("label"), len(own), sizes=sizes) as advance,
    ):
        for done, ((source, mask), there) in enumerate(zip(own, kept, strict=True), 1):
            said = f"{mask.stem}: done before" if there else mask.stem
            if not there:
                try:
                    with open_image(source, mpp=mpp) as slide:
                        write_label(Look(bands=tuple(bands)).of(slide), mask, recipe, overwrite=overwrite)
                except ImageError as error:
                    failed.append(str(error))
                    said = f"{mask.stem}: failed"
                    events.emit(Notice(str(error), warning=True))
            advance(done, said)
    if failed:
        more = f" ({len(failed)} of {len(own)} slides failed)" if len(own) > 1 else ""
        raise ImageError(f"{failed[0]}{more}")
    return tuple(mask for _, mask in own)


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
