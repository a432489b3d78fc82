"""What each step of a run sees: which slides, in which order, turned, coloured and seeded as this epoch has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

import torch

from gigagrad.cohorts import Cohort, Row, bags_of
from gigagrad.errors import ConfigError
from gigagrad.images import Image
from gigagrad.training.augment import draws_of, order_of, turn_of
from gigagrad.training.checkpoint import Progress
from gigagrad.training.colours import Jitter
from gigagrad.training.config import FitConfig
from gigagrad.training.learner import Learner
from gigagrad.training.pairs import Pairs

Bag = tuple[Row, ...]
"""What a step sees at least: the slides of a patient, or a single one."""


class Steps:
    """Of a cohort's training slides; `pixels` of each row."""

    def __init__(
        self,
        config: FitConfig,
        cohort: Cohort,
        pixels: Mapping[Row, int],
        pairs: Pairs,
        jitter: Jitter,
        learner: Learner,
    ) -> None:
        self._config, self._pixels = config, pixels
        self._pairs, self._jitter, self._learner = pairs, jitter, learner
        self.bags: tuple[Bag, ...] = bags_of(cohort.of("train"))
        self._numbers = dict(zip(self.bags, accumulate(map(len, self.bags), initial=0), strict=False))
        """Of each bag's first slide."""

    def left(self, progress: Progress) -> Iterator[list[Bag]]:
        """The bags of each step that is left of an epoch."""
        order = order_of(self._config.seed, progress.epoch, len(self.bags))
        for first in range(progress.index, len(order), self._config.accumulate):
            yield [self.bags[i] for i in order[first : first + self._config.accumulate]]

    def made(self, progress: Progress) -> int:
        """How many steps there were until then; `progress` counts the bags that they saw."""
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
            told = [learner.add_bags(opened, [self._pairs.label(bag[0]) for bag in chosen])]
        for bag, values in zip(chosen, told, strict=False):
            self._check_finite(values["loss"], progress, bag[0])
        return told

    def _check_finite(self, loss: float, progress: Progress, row: Row) -> None:
        if not math.isfinite(loss):
            ignored = (
                " (or its mask holds nothing but ignored pixels)" if math.isnan(loss) and self._pairs.ignores else ""
            )
            raise ConfigError(
                f"the loss became {loss} at step {self.made(progress) + 1} (slide {row.name}); "
                f"lower learning_rate (it is {self._config.learning_rate:g}){ignored}"
            )

    @contextmanager
    def _varied(self, row: Row, number: int, epoch: int) -> Iterator[tuple[Image, Image | torch.Tensor]]:
        """Training slide `number` with its target, turned and coloured as in this epoch, which seeds what is drawn."""
        config = self._config
        turn = turn_of(config.seed, epoch, number) if config.augment else 0
        with self._pairs.open(row, turn) as (slide, target):
            torch.manual_seed(draws_of(config.seed, epoch, number))
            yield self._jitter.of(slide, config.seed, epoch, number), target
        self._pairs.passed(row)

    @contextmanager
    def _seen(self, row: Row, number: int, epoch: int) -> Iterator[Image]:
        with self._varied(row, number, epoch) as (slide, _):
            yield slide
