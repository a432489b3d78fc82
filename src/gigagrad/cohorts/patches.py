"""Which patches of a slide are read, and bags of them: of a row of a cohort, or of all slides of a case together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box
from gigagrad.cohorts.rows import Row
from gigagrad.errors import ConfigError, ImageError
from gigagrad.files import content_digest
from gigagrad.images import Image, InputView
from gigagrad.images.image import View
from gigagrad.images.pixels import Pixels
from gigagrad.images.slide_bag import CaseBag, SlideBag
from gigagrad.images.views import AS_STORED
from gigagrad.masks import open_bag

TISSUE = ("auto", "mask", "all")


@dataclass(frozen=True, slots=True)
class Patches:
    """The patches that are read of a slide. Raises `ConfigError` for numbers out of range.

    Attributes:
        size: pixels a side of a patch.
        mpp: micrometres per pixel of the patches; None: level 0 as it is.
        overlap: of patches beside each other, in their pixels.
        tissue: `auto` takes patches on tissue, by our own recipe; `mask` those on the row's mask; `all` every patch.
        least_tissue: share of a patch that has to be tissue.
        coords: a folder of files with the corners of the patches (`open_bag`), called by the slides; then overlap and
            tissue are theirs.
    """

    size: int
    mpp: float | None = 0.5
    overlap: int = 0
    tissue: str = "auto"
    least_tissue: float = 0.1
    coords: Path | None = None

    def __post_init__(self) -> None:
        if self.mpp is not None and not 0 < self.mpp < math.inf:
            raise ConfigError(f"mpp must be a positive number of micrometres per pixel of patches, got {self.mpp}")
        if self.overlap >= self.size:
            raise ConfigError(f"patches of {self.size} px overlap by less than that, got {self.overlap}")

    def __str__(self) -> str:
        resolution = "level 0" if self.mpp is None else f"{self.mpp:g} um/px"
        if self.coords is not None:
            return f"{self.size} px at {resolution}, corners in {self.coords}"
        overlap = f" with an overlap of {self.overlap} px" if self.overlap else ""
        share = "" if self.tissue == "all" else f", at least {self.least_tissue:g} of each"
        return f"{self.size} px at {resolution}{overlap}, tissue {self.tissue}{share}"

    def file(self, row: Row) -> Path | None:
        """Find the file of corners of a slide; None where there are no such files. Raises `ImageError`."""
        if self.coords is None:
            return None
        names = [f"{place}{row.name}{end}" for place in ("", "patches/") for end in (".h5", "_patches.h5", ".csv")]
        found = next((path for path in map(self.coords.joinpath, names) if path.is_file()), None)
        if found is None:
            raise ImageError(f"{self.coords} has no corners of {row.name}: neither {' nor '.join(names)}")
        return found

    def files(self, row: Row) -> tuple[Path, ...]:
        """Return the files of corners that a row needs. Raises `ImageError`."""
        return tuple(path for part in row.members if (path := self.file(part)) is not None)

    def contents(self, row: Row) -> dict[str, str]:
        """Digest the files of corners that a row needs, by path."""
        return {str(path): content_digest(path, whole=True) for path in self.files(row)}

    def open(self, row: Row, slide: Image) -> SlideBag:
        """Open the patches of one slide. Closing them leaves `slide` open. Raises `ImageError`."""
        if (file := self.file(row)) is not None:
            return open_bag(slide, self.size, self.mpp, coords=file)
        if self.tissue == "mask" and row.mask is None:
            raise ImageError(f"{row.name} has no mask of tissue; give one in a column mask, or take --tissue auto")
        return open_bag(
            slide,
            self.size,
            self.mpp,
            tissue={"auto": "auto", "mask": row.mask}.get(self.tissue),
            step=self.size - self.overlap,
            least_tissue=self.least_tissue,
        )


class Bags:
    """The bags of a cohort's rows, as a network sees them. Looks for tissue once in a slide.

    `mpp`, of all slides' level 0, is over what their files say.
    """

    def __init__(self, patches: Patches, look: InputView = AS_STORED, mpp: float | None = None) -> None:
        self.patches, self._look, self._mpp = patches, look, mpp
        self._found: dict[tuple[Path, ...], NDArray[np.int32]] = {}
        """Corners by the files that they follow from."""

    @contextmanager
    def open(self, row: Row) -> Iterator[SlideBag | CaseBag]:
        """Open the patches of a row: of a slide, or of all slides of its case. Raises `ImageError`."""
        with ExitStack() as opened:
            bags = [self._open(part, opened) for part in row.members]
            yield bags[0] if len(bags) == 1 else opened.enter_context(CaseBag(bags, name=row.name))

    def _open(self, row: Row, opened: ExitStack) -> SlideBag:
        slide, size, mpp = opened.enter_context(row.open(mpp=self._mpp)), self.patches.size, self.patches.mpp
        seen = slide if self._look == AS_STORED else Seen(slide, self._look)
        if (file := self.patches.file(row)) is not None:
            return opened.enter_context(open_bag(seen, size, mpp, coords=file))
        if (corners := self._found.get(row.files)) is None:
            with self.patches.open(row, slide) as bag:
                corners = self._found[row.files] = bag.coords.astype(np.int32)
        return opened.enter_context(open_bag(seen, size, mpp, coords=corners))


class Seen(View):
    """A slide as a network sees it, at each of its levels. Closing it leaves `slide` open."""

    def __init__(self, slide: Image, look: InputView, *, owned: bool = False) -> None:
        self._slide, self._look, self._owned = slide, look, owned
        seen = look.of(slide)
        level = [each.shape for each in slide.levels].index(slide.shape[1:])
        mpp = None if slide.mpp is None else slide.mpp / slide.levels[level].downsample
        super().__init__(seen, seen.shape, level=level, mpp=mpp, georeference=None, open_level=self._at)

    def _at(self, level: int) -> Image:
        return Seen(self._slide.at_level(level), self._look, owned=True)

    def _read_inside(self, box: Box) -> Pixels:
        return self._image.read(box)

    def _release(self) -> None:
        if self._owned:
            self._slide.close()


def joined(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Make one row of the slides of each case, called by it, in the order of their first ones: they are one bag.

    Raises `ConfigError` for a case whose name cannot be a file's, or is that of another slide.
    """
    cases: dict[object, list[Row]] = {}
    for number, row in enumerate(rows):
        cases.setdefault(number if row.case is None else row.case, []).append(row)
    found: dict[str, Row] = {}
    for first, *others in cases.values():
        row = first
        if (case := first.case) is not None:
            if Path(case).name != case or case == ".." or not case.isprintable() or len(case) > 200:
                raise ConfigError(f"the case {case[:80]!r} cannot be a file's name; write one without slashes")
            row = replace(first, called=case, case=None, of_case=(first, *others))
        if found.setdefault(row.name, row) is not row:
            raise ConfigError(f"there are two slides or cases of the name {row.name!r}; rename one of them")
    return tuple(found.values())
