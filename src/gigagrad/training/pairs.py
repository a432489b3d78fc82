"""Slides with their targets, opened one at a time, the way the engine takes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from gigagrad.cohorts import Row
from gigagrad.errors import TargetError
from gigagrad.images import Image, Look
from gigagrad.images.tissue import write_label
from gigagrad.masks import IGNORED, ClassTable, ignoring_missing, open_mask
from gigagrad.models.preprocess import check_intensities
from gigagrad.training.augment import Turned
from gigagrad.training.class_weights import count_pixels
from gigagrad.training.targets import CheckedMask, TargetRule, sample_mask


def made_label(labels: Path, row: Row) -> Path:
    """Where the tissue recipe's label of a row is."""
    return labels / f"{row.name}.tif"


class Pairs:
    """Opens the slide, as it is looked at, and the target of a row at one pyramid level.

    Slides without a mask get one from the tissue recipe, written once to `labels` and read from there ever after.
    """

    def __init__(self, rule: TargetRule, *, level: int, look: Look, labels: Path, table: ClassTable | None) -> None:
        self._rule, self._level, self._look, self._labels, self._table = rule, level, look, labels, table
        self._label_ids = dict(table.ids) if table is not None else {}
        self._passed: set[Row] = set()

    @property
    def ignores(self) -> bool:
        """Whether pixels that hold `IGNORED` are left out."""
        return self._rule.ignores or self._rule.loss.class_ids

    def prepare(self, row: Row, model: nn.Module) -> set[int]:
        """Make the row's label if the recipe has to, and look at samples of its target and of what `model` will see.
        Returns the whole numbers among those of a mask.

        Raises `TargetError` and `ImageError`.
        """
        with row.open(self._level) as slide:
            check_intensities(model, self._look.of(slide))
            if row.label is not None:
                self.label(row)
                return set()
            if not row.masks and not made_label(self._labels, row).exists():
                self._labels.mkdir(parents=True, exist_ok=True)
                write_label(slide, made_label(self._labels, row))
            with self._open_mask(row, slide) as mask:
                return sample_mask(mask, self._rule) - ({IGNORED} if mask.nodata == IGNORED else set())

    def check_seen(self, seen: set[int]) -> None:
        """Raises `TargetError` where every sample of every mask, as all of them were prepared, is 0 or ignored."""
        if self._table is None and self.ignores and IGNORED in seen and seen <= {0, IGNORED}:
            raise TargetError(
                f"the masks hold 0 and {IGNORED} only, and {IGNORED} is ignored by losses of class ids, by others for "
                f"no data; say --classes {IGNORED}=1 if it is the foreground, or {IGNORED}=ignore"
            )
        if self._table is None and self._rule.loss.binary and self.ignores and 0 not in seen:
            raise TargetError(
                "the masks hold nothing but foreground, and no data elsewhere, which is ignored; if that is the "
                f"background, say --classes {max(seen, default=IGNORED)}=1"
            )

    def counts(self, row: Row) -> NDArray[np.int64]:
        """How often each class occurs in the row's target, `(256,)`; a label counts once."""
        if row.label is not None:
            return np.bincount([int(self.label(row))], minlength=256)
        with row.open(self._level) as slide, self._open_mask(row, slide) as mask:
            mask = ignoring_missing(mask, self._look.of(slide)) if self.ignores else mask
            return count_pixels(mask, binary=self._rule.loss.binary, ignores=self.ignores)

    @contextmanager
    def open(self, row: Row, turn: int = 0) -> Iterator[tuple[Image, Image | Tensor]]:
        """The slide and its target, both laid down by the same `turn`.

        Target pixels are checked as they are read (`TargetError`) until the row has `passed`.
        """
        with ExitStack() as stack:
            slide = stack.enter_context(row.open(self._level))
            slide = self._look.of(slide)
            if row.label is not None:
                yield _turned(slide, turn), self.label(row)
                return
            mask = stack.enter_context(self._open_mask(row, slide))
            mask = mask if row in self._passed else CheckedMask(mask, self._rule)
            yield _turned(slide, turn), _turned(ignoring_missing(mask, slide) if self.ignores else mask, turn)

    @contextmanager
    def seen(self, row: Row, turn: int = 0) -> Iterator[Image]:
        """The slide alone, as `open` gives it."""
        with self.open(row, turn) as (slide, _):
            yield slide

    def passed(self, row: Row) -> None:
        """Every pixel of the row's target has been read without complaint, so it need not be checked again."""
        self._passed.add(row)

    def label(self, row: Row) -> Tensor:
        """Of a row that has one, as the loss takes it. Raises `TargetError`."""
        assert row.label is not None
        if self._rule.loss.survival:
            return self._rule.survival(row.label, row.name)
        value = self._label_ids.get(row.label)
        if value is None and row.label.endswith("+"):
            raise TargetError(f"the label of {row.name} is {row.label}, a survival time; say --loss cox")
        return self._rule.label(float(row.label) if value is None else value, row.name)

    def _open_mask(self, row: Row, slide: Image) -> Image:
        return open_mask(row.masks or (made_label(self._labels, row),), slide, self._table, labels=self._rule.labels)


def _turned(image: Image, turn: int) -> Image:
    return Turned(image, turn) if turn else image
