"""The slides of a run with their targets, opened one at a time, and the steps that an epoch makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gigagrad.boxes import tiles
from gigagrad.cohorts import Cohort, Row, bags_of
from gigagrad.config.fit import FitConfig
from gigagrad.errors import ConfigError, TargetError
from gigagrad.images import Image, InputView
from gigagrad.images.tissue import write_label
from gigagrad.masks import IGNORED, ClassTable, ignoring_missing, open_mask
from gigagrad.models.preprocess import check_intensities
from gigagrad.training.augment import D4View, Jitter, draws_of, order_of, transform_of
from gigagrad.training.folder import Progress
from gigagrad.training.learner import Learner
from gigagrad.training.targets import CheckedMask, TargetRule, sample_mask

_BLOCK_PX = 2048
"""Side of the blocks in which masks are counted."""


def made_label(labels: Path, row: Row) -> Path:
    """Return where the tissue recipe's label of a row is."""
    return labels / f"{row.name}.tif"


class Dataset:
    """Slides as the network sees them, with their targets, at one pyramid level.

    Slides without a mask get one from the tissue recipe, written once to `labels` and read from there ever after.
    """

    def __init__(
        self, rule: TargetRule, *, level: int, look: InputView, labels: Path, table: ClassTable | None
    ) -> None:
        self._rule, self._level, self._look, self._labels, self._table = rule, level, look, labels, table
        self._label_ids = dict(table.ids) if table is not None else {}
        self._passed: set[Row] = set()

    @property
    def ignores(self) -> bool:
        """Return whether pixels that hold `IGNORED` are left out."""
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
        """Raise `TargetError` where every sample of every mask, as all of them were prepared, is 0 or ignored."""
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
        """Count how often each class occurs in the row's target, `(256,)`; a label counts once."""
        if row.label is not None:
            return np.bincount([int(self.label(row))], minlength=256)
        with row.open(self._level) as slide, self._open_mask(row, slide) as mask:
            mask = ignoring_missing(mask, self._look.of(slide)) if self.ignores else mask
            return count_pixels(mask, binary=self._rule.loss.binary, ignores=self.ignores)

    @contextmanager
    def open(self, row: Row, transform: int = 0) -> Iterator[tuple[Image, Image | Tensor]]:
        """Open the slide and its target, both turned by the same `transform`.

        Target pixels are checked as they are read (`TargetError`) until the row has `passed`.
        """
        with ExitStack() as stack:
            slide = stack.enter_context(row.open(self._level))
            slide = self._look.of(slide)
            if row.label is not None:
                yield _transformed(slide, transform), self.label(row)
                return
            mask = stack.enter_context(self._open_mask(row, slide))
            mask = mask if row in self._passed else CheckedMask(mask, self._rule)
            mask = ignoring_missing(mask, slide) if self.ignores else mask
            yield _transformed(slide, transform), _transformed(mask, transform)

    @contextmanager
    def seen(self, row: Row, transform: int = 0) -> Iterator[Image]:
        """Open the slide alone, as `open` gives it."""
        with self.open(row, transform) as (slide, _):
            yield slide

    def passed(self, row: Row) -> None:
        """Note that every pixel of the row's target has been read without complaint, so no check is needed again."""
        self._passed.add(row)

    def label(self, row: Row) -> Tensor:
        """Return the label of a row that has one, as the loss takes it. Raises `TargetError`."""
        assert row.label is not None
        if self._rule.loss.survival:
            return self._rule.survival(row.label, row.name)
        value = self._label_ids.get(row.label)
        if value is None and row.label.endswith("+"):
            raise TargetError(f"the label of {row.name} is {row.label}, a survival time; say --loss cox")
        return self._rule.label(float(row.label) if value is None else value, row.name)

    def _open_mask(self, row: Row, slide: Image) -> Image:
        return open_mask(row.masks or (made_label(self._labels, row),), slide, self._table, labels=self._rule.labels)


def _transformed(image: Image, transform: int) -> Image:
    return D4View(image, transform) if transform else image


def count_pixels(mask: Image, *, binary: bool, ignores: bool) -> NDArray[np.int64]:
    """Count the pixels of each class id in a mask, `(256,)`, `IGNORED` left out where the mask `ignores` it; in a
    `binary` one all others above 0 are of class 1.
    """
    counts = np.zeros(256, np.int64)
    for box in tiles(mask.height, mask.width, _BLOCK_PX, _BLOCK_PX):
        pixels = np.asarray(mask.read(box)).reshape(-1)
        pixels = pixels[pixels != IGNORED] if ignores else pixels
        # Of class ids all have been looked at: they are below the number of outputs.
        counts += np.bincount((pixels > 0) if binary else pixels.astype(np.uint8), minlength=256)
    return counts


Bag = tuple[Row, ...]
"""The least that a step sees: the slides of a patient, or a single one."""


class Steps:
    """Steps over a cohort's training slides; `pixels` are by row."""

    def __init__(
        self,
        config: FitConfig,
        cohort: Cohort,
        pixels: Mapping[Row, int],
        dataset: Dataset,
        jitter: Jitter,
        learner: Learner,
    ) -> None:
        self._config, self._pixels = config, pixels
        self._dataset, self._jitter, self._learner = dataset, jitter, learner
        self.bags: tuple[Bag, ...] = bags_of(cohort.of("train"))
        self._numbers = dict(zip(self.bags, accumulate(map(len, self.bags), initial=0), strict=False))
        """The number of each bag's first slide."""

    def remaining(self, progress: Progress) -> Iterator[list[Bag]]:
        """Yield the bags of each step that is left of an epoch."""
        order = order_of(self._config.seed, progress.epoch, len(self.bags))
        for first in range(progress.index, len(order), self._config.accumulate):
            yield [self.bags[i] for i in order[first : first + self._config.accumulate]]

    def made(self, progress: Progress) -> int:
        """Count the steps until then; `progress` counts the bags that they saw."""
        return progress.epoch * self._of(len(self.bags)) + self._of(progress.index)

    def _of(self, bags: int) -> int:
        return -(-bags // self._config.accumulate)

    def gradients(
        self, chosen: Sequence[Bag], progress: Progress, tell: Callable[[int, float], None]
    ) -> list[dict[str, float]]:
        """Give the parameters the gradients of a step; `tell` as in `Learner.add`. Returns what there is to log of each
        slide, or of all bags. Raises `ConfigError` if a loss is no longer a number.
        """
        learner, epoch = self._learner, progress.epoch
        if learner.group is None:
            pairs = [partial(self._varied, bag[0], self._numbers[bag], epoch) for bag in chosen]
            told = learner.add(pairs, [self._pixels[bag[0]] for bag in chosen], tell)
        else:
            opened = [
                [partial(self._seen, row, number, epoch) for number, row in enumerate(bag, self._numbers[bag])]
                for bag in chosen
            ]
            told = [learner.add_bags(opened, [self._dataset.label(bag[0]) for bag in chosen])]
        for bag, values in zip(chosen, told, strict=False):
            self._check_finite(values["loss"], progress, bag[0])
        return told

    def _check_finite(self, loss: float, progress: Progress, row: Row) -> None:
        if not math.isfinite(loss):
            ignored = (
                " (or its mask holds nothing but ignored pixels)" if math.isnan(loss) and self._dataset.ignores else ""
            )
            raise ConfigError(
                f"the loss became {loss} at step {self.made(progress) + 1} (slide {row.name}); "
                f"lower learning_rate (it is {self._config.learning_rate:g}){ignored}"
            )

    @contextmanager
    def _varied(self, row: Row, number: int, epoch: int) -> Iterator[tuple[Image, Image | torch.Tensor]]:
        """Open training slide `number` with its target, turned and coloured as in this epoch, which seeds what is
        drawn.
        """
        config = self._config
        transform = transform_of(config.seed, epoch, number) if config.augment else 0
        with self._dataset.open(row, transform) as (slide, target):
            torch.manual_seed(draws_of(config.seed, epoch, number))
            yield self._jitter.of(slide, config.seed, epoch, number), target
        self._dataset.passed(row)

    @contextmanager
    def _seen(self, row: Row, number: int, epoch: int) -> Iterator[Image]:
        with self._varied(row, number, epoch) as (slide, _):
            yield slide
