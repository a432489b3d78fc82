"""Slides with their targets, opened one at a time, the way the engine takes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import Tensor

from gigagrad.cohorts import Row
from gigagrad.images import Image, open_image
from gigagrad.images.tissue import write_label
from gigagrad.training.augment import Turned
from gigagrad.training.targets import CheckedMask, TargetRule, sample_mask


class Pairs:
    """Opens the slide, in its colours or in grey, and the target of a row at one pyramid level.

    Slides without a mask get one from the tissue recipe, written once to `labels` and read from there ever after.
    """

    def __init__(self, rule: TargetRule, *, level: int, grey: bool, labels: Path) -> None:
        self._rule, self._level, self._grey, self._labels = rule, level, grey, labels
        self._passed: set[Row] = set()

    def prepare(self, row: Row) -> None:
        """Make the row's label if the recipe has to, and look at samples of its target. Raises `TargetError`."""
        if row.label is not None:
            self._rule.label(float(row.label), row.name)
            return
        path = self._mask_path(row)
        if row.mask is None and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open_image(row.slide, level=self._level, mpp=row.mpp) as slide:
                write_label(slide, path)
        with self._open_mask(row) as mask:
            sample_mask(mask, self._rule)

    @contextmanager
    def open(self, row: Row, turn: int = 0) -> Iterator[tuple[Image, Image | Tensor]]:
        """The slide and its target, both laid down by the same `turn`.

        Target pixels are checked as they are read (`TargetError`) until the row has `passed`.
        """
        with ExitStack() as stack:
            slide = stack.enter_context(open_image(row.slide, level=self._level, mpp=row.mpp))
            slide = slide.grey() if self._grey else slide
            if row.label is not None:
                yield _turned(slide, turn), self._rule.label(float(row.label), row.name)
                return
            mask = stack.enter_context(self._open_mask(row))
            yield _turned(slide, turn), _turned(mask if row in self._passed else CheckedMask(mask, self._rule), turn)

    def passed(self, row: Row) -> None:
        """Every pixel of the row's target has been read without complaint, so it need not be checked again."""
        self._passed.add(row)

    def _mask_path(self, row: Row) -> Path:
        return row.mask or self._labels / f"{row.name}.tif"

    def _open_mask(self, row: Row) -> Image:
        # A label made by the recipe exists at the level it was made for, and at no other.
        return open_image(self._mask_path(row), level=self._level if row.mask else 0)


def _turned(image: Image, turn: int) -> Image:
    return Turned(image, turn) if turn else image
