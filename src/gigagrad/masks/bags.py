"""Open the patches of a slide that show tissue, or those that somebody else has chosen, as a bag."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, overload

from gigagrad.errors import ConfigError, ImageError
from gigagrad.images import Image, open_image, require_mpp
from gigagrad.images.coordinates import Coordinates, Corners, read_coordinates
from gigagrad.images.opening import Source
from gigagrad.images.pixels import Array
from gigagrad.images.slide_bag import (
    SCANNERS_DIFFER,
    CaseBag,
    Sampling,
    Shares,
    SlideBag,
    at_level,
    coarse_level,
    grid,
    mask_cells,
    shares,
    tissue_cells,
)
from gigagrad.masks.annotations import is_annotation_file, read_annotations
from gigagrad.masks.classes import ClassTable, is_ignored
from gigagrad.masks.opening import Labels, open_mask
from gigagrad.masks.outlines import Outlines

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

_SAME_MAGNIFICATION: Final = 1.25
"""The factor up to which a file's patches may be larger or smaller: TRIDENT takes 0.2 to 0.3 um/px for 40x."""
_ROUNDED: Final = 0.01
"""The difference, relative, by which sizes of levels are rounded."""
Coords: TypeAlias = "str | Path | Array | None"
Tissue: TypeAlias = "Literal['auto'] | str | Path | Outlines | Image | Array | torch.Tensor | None"


@overload
def open_bag(
    slide: Source,
    size: int = 224,
    mpp: float | None = 0.5,
    *,
    tissue: Tissue | Sequence[Tissue] = "auto",
    coords: Coords | Sequence[Coords] = None,
    step: int | None = None,
    least_tissue: float = 0.1,
    whole_only: bool = False,
) -> SlideBag: ...


@overload
def open_bag(
    slide: list[Any] | tuple[Any, ...],
    size: int = 224,
    mpp: float | None = 0.5,
    *,
    tissue: Tissue | Sequence[Tissue] = "auto",
    coords: Coords | Sequence[Coords] = None,
    step: int | None = None,
    least_tissue: float = 0.1,
    whole_only: bool = False,
) -> CaseBag: ...


def open_bag(
    slide: Source | list[Any] | tuple[Any, ...],
    size: int = 224,
    mpp: float | None = 0.5,
    *,
    tissue: Tissue | Sequence[Tissue] = "auto",
    coords: Coords | Sequence[Coords] = None,
    step: int | None = None,
    least_tissue: float = 0.1,
    whole_only: bool = False,
) -> SlideBag | CaseBag:
    """Open the patches of a slide, or of all slides of a case, as a bag.

    Args:
        slide: as `open_image` takes it; several in a list or tuple are one bag, in their order.
        size: pixels a side of a patch.
        mpp: micrometres per pixel of the patches. They are read from the coarsest level that is as fine, and made
            smaller where it is finer by more than a twentieth. None: level 0 as it is.
        tissue: "auto" takes patches of which our own recipe (`images.tissue`) finds tissue; or a mask, as `open_mask`
            takes it, where anything above 0 is tissue, and outlines of all classes; None takes all patches. Of several
            slides one for all, or a list of one for each.
        coords: patches that somebody has chosen instead: a file of TRIDENT or CLAM, a CSV (`images.coordinates`), or an
            array `(N, 2)` of x and y, of their top left pixels in level 0. Of several slides a list. Where a file says
            how large its patches are in level 0, that counts, and has to be what `size` and `mpp` ask for.
        step: pixels between the corners of two patches, in pixels of the patches; None puts them side by side.
        least_tissue: share of a patch that has to be tissue.
        whole_only: leave out patches that reach beyond the slide. Else they are filled as `Image.read` fills.

    Patches are in the order of the file, so that reading from the first to the last decodes each of its tiles once.

    Raises `ImageError` for a slide or mask that cannot be read, for an unknown or too coarse resolution, and where no
    patch is left; `TargetError` for a mask of another slide; `ConfigError` for settings.
    """
    slides = [*slide] if isinstance(slide, list | tuple) else [slide]
    if not slides:
        raise ImageError("got an empty list of slides; name one or more")
    masks, corners = _for_each("tissue", tissue, len(slides)), _for_each("coords", coords, len(slides))
    with ExitStack() as opened:
        bags = [
            opened.enter_context(_open(*each, size, mpp, step, least_tissue, whole_only))
            for each in zip(slides, masks, corners, strict=True)
        ]
        bag = CaseBag(bags) if isinstance(slide, list | tuple) else bags[0]
        opened.pop_all()
    return bag


def _for_each(what: str, given: Any, slides: int) -> list[Any]:
    """Return what was given for each of the slides."""
    several = isinstance(given, list | tuple)
    found = [*given] if several else [given] * slides
    if len(found) != slides or not (several or slides == 1 or given is None or _is_auto(given)):
        raise ConfigError(
            f"got {what} of {len(given) if several else 1} slides for {slides}; expected a list of one for each"
        )
    return found


def _open(
    source: Source,
    tissue: Tissue,
    coords: Coords,
    size: int,
    mpp: float | None,
    step: int | None,
    least_tissue: float,
    whole_only: bool,
) -> SlideBag:
    if size < 1 or not (mpp is None or 0 < mpp < math.inf):
        raise ConfigError(f"got patches of {size} px at {mpp} um/px; expected numbers above 0")
    if not 0 <= least_tissue <= 1:
        raise ConfigError(f"got least_tissue {least_tissue:g}, expected a share of a patch from 0 to 1")
    if coords is not None and (step is not None or not (tissue is None or _is_auto(tissue))):
        raise ConfigError("got coords, and with them a step or a mask of tissue; coords say all of that")
    with ExitStack() as opened:
        slide = open_image(source)
        if slide is not source:
            opened.enter_context(slide)
        with at_level(slide, 0) as full:
            base = full.mpp if mpp is None else require_mpp(full)
        side = float(size) if mpp is None or base is None else size * mpp / base
        share: Shares | None = None
        if coords is None:
            sampling = Sampling.choose(slide, size, side)
            corners = grid(slide, sampling, step)
            corners, share = _with_tissue(slide, corners, sampling.side, tissue, least_tissue)
        else:
            given = read_coordinates(coords, slide)
            corners = given.corners
            sampling = Sampling.choose(slide, size, side) if given.side is None else _sampled(slide, given, size, side)
            given.check_inside(slide, sampling.side)
        if whole_only:
            whole = sampling.inside(corners, slide)
            corners, share = corners[whole], None if share is None else share[whole]
            if not whole.any():
                raise ImageError(
                    f"no patch of {sampling.side} px of level 0 lies wholly in {slide.name} of {_size(slide)}, with "
                    "tissue on it; take smaller patches, or those over the edge: whole_only=False"
                )
        image, owned = slide, slide is not source
        if slide.shape[1:] != slide.levels[sampling.level].shape:
            image, owned = slide.at_level(sampling.level), True
            if slide is not source:
                slide.close()
        opened.pop_all()
        opened.callback(image.close if owned else _nothing)
        overlap = 0 if coords is not None or step is None else max(0, size - step)
        bag = SlideBag(
            *(image, corners, sampling),
            name=slide.name,
            mpp=base,
            overlap=overlap,
            tissue_share=share,
            owned=owned,
        )
        opened.pop_all()
    return bag


def _nothing() -> None:
    """Leave open what somebody else has opened."""


def _is_auto(tissue: object) -> bool:
    return isinstance(tissue, str) and tissue == "auto"


def _size(slide: Image) -> str:
    height, width = slide.levels[0].shape
    return f"{height} x {width} px"


def _sampled(slide: Image, given: Coordinates, size: int, side: float) -> Sampling:
    """Sample patches that are as large in level 0 as a file says. Raises `ImageError` where others are asked for."""
    assert given.side is not None
    theirs = given.size or size
    factor = max(given.side / side, side / given.side)
    if factor > (_SAME_MAGNIFICATION if theirs == size else 1 + SCANNERS_DIFFER):
        resolution = "mpp=None" if slide.mpp is None else f"mpp={_base(slide) * given.side / theirs:.3g}"
        raise ImageError(
            f"{given.name} has patches of {theirs} px that are {given.side:g} px of level 0; asked for {size} px that "
            f"are {side:.4g} px of {slide.name}; open them with size={theirs}, {resolution}"
        )
    return Sampling.choose(slide, size, given.side, slack=_ROUNDED)


def _base(slide: Image) -> float:
    with at_level(slide, 0) as full:
        return require_mpp(full)


def _with_tissue(
    slide: Image, corners: Corners, side: int, tissue: Tissue, least: float
) -> tuple[Corners, Shares | None]:
    """Return the patches of which at least a share is tissue, and their shares."""
    if tissue is None:
        return corners, None
    cells, cell_px = find_tissue(slide, side, tissue)
    share = shares(cells, cell_px, corners, side)
    there = (share >= least) & (share > 0)
    if not there.any():
        raise ImageError(
            f"{slide.name} has no patch of {side} px of level 0 with at least {least:g} of tissue (the most has "
            f"{share.max():.2g}, of {len(share)}); lower least_tissue, give a mask of tissue or coords, or take all "
            "patches: tissue=None"
        )
    return corners[there], share[there]


def find_tissue(slide: Image, side: int, tissue: Source | Outlines) -> tuple[NDArray[np.float64], tuple[float, float]]:
    """Find how much of each cell of a slide is tissue, and how many pixels of level 0 a cell is high and wide: about
    16, less where what is looked at is small, `side` px of level 0.

    `tissue` is "auto", our own recipe, or a mask as `open_mask` takes it, where anything above 0 is tissue. Raises
    `ImageError` and `TargetError` as `open_bag`.
    """
    level, cell = coarse_level(slide, side)
    with at_level(slide, level) as coarse:
        if _is_auto(tissue):
            cells = tissue_cells(coarse, cell)
        else:
            with Labels(_mask(tissue, coarse)) as mask:
                cells = mask_cells(mask, cell)
        full = slide.levels[0].shape
        return cells, (cell * full[0] / coarse.height, cell * full[1] / coarse.width)


def _mask(tissue: Source | Outlines, slide: Image) -> Image:
    """Open tissue as a mask in which anything but tissue is 0 or no data."""
    if isinstance(tissue, str | Path) and is_annotation_file(Path(tissue)):
        tissue = read_annotations(tissue)
    if not isinstance(tissue, Outlines):
        return open_mask(tissue, slide)
    if slide.georeference is None and tissue.crs is not None:
        # TRIDENT writes pixels, and names some reference system beside them.
        tissue = replace(tissue, crs=None, origin="corner")
    names = [name for name in tissue.names if not is_ignored(name)]
    return open_mask(tissue, slide, ClassTable(tuple((name, 1) for name in names), unlabelled=0))
