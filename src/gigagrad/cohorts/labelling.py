"""Label many slides by the tissue recipe, one mask file each, so that an interrupted job continues where it stopped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from gigagrad.cohorts.rows import Row
from gigagrad.cohorts.slides import rows_of, run_job
from gigagrad.errors import ConfigError, ImageError
from gigagrad.events import Events, Listener
from gigagrad.images import PAPER_RECIPE, InputView, Recipe, open_image, write_label
from gigagrad.shares import Share


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
    mine, rows = Share.parse(share), [Row(Path(slide)) for slide in slides]
    masks = {row: Path(out) / f"{row.name}.tif" for row in rows}
    _check(masks)
    done = {row for row, mask in masks.items() if mask.exists() and not overwrite}

    def label(row: Row) -> tuple[Path, str]:
        if row in done:
            return masks[row], "done before"
        with open_image(row.slide, mpp=mpp) as slide:
            write_label(InputView(bands=tuple(bands)).of(slide), masks[row], recipe, overwrite=overwrite)
        return masks[row], "labelled"

    own, events = rows_of(mine, rows), Events(tuple(listeners))
    return tuple(run_job("label", own, mine, Path(out), events, label, done, failures=(ImageError,)))


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
