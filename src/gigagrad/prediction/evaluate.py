"""How well masks agree with the true ones: Dice and IoU per slide, strip by strip, and their mean and spread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gigagrad.boxes import Box, tiles
from gigagrad.errors import TargetError
from gigagrad.events import Events, Listener
from gigagrad.images import Image, open_image
from gigagrad.masks import ClassTable
from gigagrad.prediction.classes import class_ids, class_names, foreground_count, ignored_value
from gigagrad.prediction.sampling import require_mask
from gigagrad.prediction.scores import Confusion, mean_sd

_BLOCK_PX = 2048
"""Side of the blocks that are compared: two of them and a few temporaries are held at a time."""

_Ids = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Score:
    """Agreement on one slide: `dice` and `iou` of the foreground (a mean over classes if there are several)."""

    name: str
    dice: float
    iou: float
    pixels: int


@dataclass(frozen=True, slots=True)
class ClassScore:
    """Agreement on one class over all slides, None where it is neither predicted nor true; its true `pixels`."""

    name: str
    dice: float | None
    iou: float | None
    pixels: int

    @classmethod
    def of(cls, name: str, number: int, counts: NDArray[np.int64]) -> Self:
        """Of the class `number`, of counts by true class and predicted class."""
        both, pixels = int(counts[number, number]), int(counts[number].sum())
        total = pixels + int(counts[:, number].sum())
        return cls(name, 2 * both / total if total else None, both / (total - both) if total else None, pixels)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The scores of a set of slides; `confusion` has the pixels of all of them by true class and predicted class."""

    scores: tuple[Score, ...]
    classes: tuple[str, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()

    @property
    def dice(self) -> tuple[float, float]:
        """Mean and sample standard deviation over the slides."""
        return mean_sd(score.dice for score in self.scores)

    @property
    def iou(self) -> tuple[float, float]:
        """Mean and sample standard deviation over the slides."""
        return mean_sd(score.iou for score in self.scores)

    @property
    def of_classes(self) -> tuple[ClassScore, ...]:
        """Of each class, the background included, over the pixels of all slides."""
        counts = np.array(self.confusion, np.int64).reshape(len(self.classes), -1)
        return tuple(ClassScore.of(name, number, counts) for number, name in enumerate(self.classes))

    def to_dict(self) -> dict[str, Any]:
        """What a summary file holds: Dice by slide with mean and sd, IoU likewise, classes, and the confusion."""
        return {
            "dice": {score.name: score.dice for score in self.scores},
            "mean": self.dice[0],
            "sd": self.dice[1],
            "iou": {score.name: score.iou for score in self.scores},
            "iou_mean": self.iou[0],
            "iou_sd": self.iou[1],
            "classes": {c.name: {"dice": c.dice, "iou": c.iou, "pixels": c.pixels} for c in self.of_classes},
            "confusion": [list(row) for row in self.confusion],
        }


def score_tiles(
    tiles_of_ids: Iterable[tuple[Box, NDArray[np.uint8]]],
    truth: Image,
    classes: int = 2,
    *,
    ignored: int | None = None,
    seen: Image | None = None,
) -> Confusion:
    """Compare disjoint predicted tiles, `(h, w)` class ids each, with the same boxes of the true mask.

    Pixels whose true value is `ignored` do not count, nor do those where `seen` has no data. Raises `TargetError` when
    ids lie outside `classes`, `ImageError` when `truth` is no mask.
    """
    require_mask(truth)
    confusion = Confusion(classes, ignored)
    for box, ids in tiles_of_ids:
        confusion.add(*_with_data(ids, np.asarray(truth.read(box))[0], seen, box))
    return confusion


def score_masks(predicted: Image, truth: Image, classes: int = 2, *, ignored: int | None = None) -> Confusion:
    """Compare two masks of the same size block by block, as `score_tiles` does, where `predicted` has data.

    Raises `TargetError` when their sizes differ.
    """
    require_mask(predicted)
    if predicted.shape != truth.shape:
        raise TargetError(
            f"the mask of {predicted.name} is {predicted.shape[1]} x {predicted.shape[2]} px and the true mask "
            f"{truth.name} {truth.shape[1]} x {truth.shape[2]} px; both must have the slide's size"
        )
    blocks = tiles(predicted.shape[1], predicted.shape[2], _BLOCK_PX, _BLOCK_PX)
    pixels = ((box, np.asarray(predicted.read(box))[0]) for box in blocks)
    return score_tiles(pixels, truth, classes, ignored=ignored, seen=predicted)


def score_logits(
    prediction: Iterable[tuple[Box, Tensor]], truth: Image, table: ClassTable | None, seen: Image | None = None
) -> Confusion:
    """Compare tiles of `(1, C, h, w)` logits with the same boxes of the true mask; holds one tile at a time.

    With one channel every value of the mask above 0 is foreground. `table` has the mask's classes; pixels of
    `ignored_value` do not count, nor do those where `seen` has no data. Raises `ModelError` for outputs that are no
    segmentation, `TargetError` as `Confusion` does.
    """
    counts: Confusion | None = None
    for box, logits in prediction:
        channels = logits.shape[1]
        counts = counts or Confusion(foreground_count(channels) + 1, ignored_value(channels, table, truth))
        counts.add(*_with_data(class_ids(logits), np.asarray(truth.read(box))[0], seen, box))
    assert counts is not None, "a prediction has at least one tile"
    return counts


def _with_data(ids: _Ids, true_ids: _Ids, seen: Image | None, box: Box) -> tuple[_Ids, _Ids]:
    missing = None if seen is None else seen.missing(box)
    return (ids, true_ids) if missing is None else (ids[~missing], true_ids[~missing])


def score_each(
    scored: Sequence[tuple[str, Callable[[], Confusion]]], events: Events, table: ClassTable | None = None
) -> Evaluation:
    """Score slides by name, one after the other; `table` names their classes. Emits the job `evaluate`."""
    scores: list[Score] = []
    every: Confusion | None = None
    with events.job("evaluate", len(scored)) as advance:
        for name, count in scored:
            counts = count()
            every = counts if every is None else every.plus(counts)
            scores.append(Score(name, counts.dice, counts.iou, counts.pixels))
            advance(len(scores), f"{name}: Dice {counts.dice:.4f}")
    if every is None:
        return Evaluation(())
    confusion = tuple(tuple(row) for row in every.counts.tolist())
    return Evaluation(tuple(scores), class_names(every.classes, table), confusion)


def evaluate(
    pairs: Iterable[tuple[str, str | Path, str | Path]], classes: int = 2, listeners: tuple[Listener, ...] = ()
) -> Evaluation:
    """Score `(name, path of the predicted mask, path of the true mask)` for each slide. Emits the job `evaluate`.

    Raises `ImageError` or `TargetError` at the first pair that cannot be compared.
    """

    def score(predicted_source: str | Path, truth_source: str | Path) -> Confusion:
        with open_image(predicted_source) as predicted, open_image(truth_source) as truth:
            return score_masks(predicted, truth, classes)

    return score_each([(name, partial(score, predicted, truth)) for name, predicted, truth in pairs], Events(listeners))
