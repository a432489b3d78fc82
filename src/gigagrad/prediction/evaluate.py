"""Agreement of masks with the true ones: Dice and IoU per slide, strip by strip, and their mean and spread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gigagrad.boxes import Box, tiles
from gigagrad.errors import TargetError
from gigagrad.events import Events, Listener
from gigagrad.images import Image
from gigagrad.images.opening import open_ids
from gigagrad.masks import ClassTable
from gigagrad.prediction.classes import Channels, class_names
from gigagrad.prediction.sampling import require_mask
from gigagrad.prediction.scores import Confusion, mean_sd

_Pixels = NDArray[np.generic]
_BLOCK_PX = 2048
"""Side of the blocks that are compared: two of them and a few temporaries are held at a time."""


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
        """Score the class `number` by counts of true class and predicted class."""
        both, pixels = int(counts[number, number]), int(counts[number].sum())
        total = pixels + int(counts[:, number].sum())
        return cls(name, 2 * both / total if total else None, both / (total - both) if total else None, pixels)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The scores of a set of slides, and over the pixels of all of them those of each class, the background included,
    with the `confusion` by true class and predicted class; or those of each label, which have none.
    """

    scores: tuple[Score, ...]
    of_classes: tuple[ClassScore, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, counts: Mapping[str, Confusion], table: ClassTable | None = None) -> Self:
        """Score slides by their counts, by name; `table` names their classes."""
        every: Confusion | None = None
        for each in counts.values():
            every = each if every is None else every.plus(each)
        scores = tuple(Score(name, each.dice, each.iou, each.pixels) for name, each in counts.items())
        return cls(scores, *_of_classes(every, table))

    @property
    def dice(self) -> tuple[float, float]:
        """Return mean and sample standard deviation over the slides."""
        return mean_sd(score.dice for score in self.scores)

    @property
    def iou(self) -> tuple[float, float]:
        """Return mean and sample standard deviation over the slides."""
        return mean_sd(score.iou for score in self.scores)

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes or labels, those of one name with their ids."""
        same = self.same_names
        return tuple(f"{each.name} ({number})" if each.name in same else each.name for number, each in self._numbered())

    @property
    def same_names(self) -> dict[str, list[int]]:
        """Return the ids of classes of one name, by that name."""
        ids: dict[str, list[int]] = {}
        for number, each in self._numbered():
            ids.setdefault(each.name, []).append(number)
        return {name: numbers for name, numbers in ids.items() if len(numbers) > 1}

    def _numbered(self) -> Iterable[tuple[int, ClassScore]]:
        return enumerate(self.of_classes, 0 if self.confusion else 1)

    def to_dict(self) -> dict[str, Any]:
        """Return what a summary file holds: Dice by slide with mean and sd, IoU likewise, classes, confusion."""
        return {
            "dice": {score.name: score.dice for score in self.scores},
            "mean": self.dice[0],
            "sd": self.dice[1],
            "iou": {score.name: score.iou for score in self.scores},
            "iou_mean": self.iou[0],
            "iou_sd": self.iou[1],
            "classes": {
                name: {"dice": each.dice, "iou": each.iou, "pixels": each.pixels}
                for name, each in zip(self.classes, self.of_classes, strict=True)
            },
            "confusion": [list(row) for row in self.confusion],
        }


def score_masks(predicted: Image, truth: Image, counts: Confusion) -> Confusion:
    """Add to `counts` how two masks of the same size agree where `predicted` has data, block by block.

    Raises `TargetError` when their sizes differ, and as `Confusion.add` does, `ImageError` when one of them is no mask.
    """
    for mask in (predicted, truth):
        require_mask(mask, counts.planes)
    if predicted.shape != truth.shape:
        raise TargetError(
            f"the mask of {predicted.name} is {predicted.shape[1]} x {predicted.shape[2]} px and the true mask "
            f"{truth.name} {truth.shape[1]} x {truth.shape[2]} px; both must have the slide's size"
        )
    for box in tiles(predicted.shape[1], predicted.shape[2], _BLOCK_PX, _BLOCK_PX):
        counts.add(*_with_data(np.asarray(predicted.read(box)), truth, predicted, box))
    return counts


def score_logits(
    prediction: Iterable[tuple[Box, Tensor]],
    truth: Image,
    channels: Channels,
    table: ClassTable | None,
    seen: Image | None = None,
) -> Confusion:
    """Compare tiles of `(1, C, h, w)` logits with the same boxes of the true mask; holds one tile at a time.

    With one channel every value of the mask above 0 is foreground. `table` has the mask's classes; pixels that are
    ignored do not count, nor do those where `seen` has no data. Raises `ModelError` for outputs that are no
    segmentation, `TargetError` as `Confusion.add` does.
    """
    counts = counts_of(channels, channels.ignored(table, truth))
    for box, logits in prediction:
        counts.add(*_with_data(channels.mask(logits), truth, seen, box))
    return counts


def _with_data(pred: _Pixels, truth: Image, seen: Image | None, box: Box) -> tuple[_Pixels, _Pixels]:
    """Read both masks `(planes, h, w)` in this box, or `(planes, n)` of the pixels there where `seen` has data."""
    true = np.asarray(truth.read(box))
    missing = None if seen is None else seen.missing(box)
    return (pred, true) if missing is None else (pred[:, ~missing], true[:, ~missing])


def counts_of(channels: Channels, ignored: int | None) -> Confusion:
    """Return counts of no pixel yet, for masks of a model of these channels."""
    return Confusion(2 if channels.labels else channels.foreground + 1, ignored, channels.planes)


def _of_classes(
    every: Confusion | None, table: ClassTable | None
) -> tuple[tuple[ClassScore, ...], tuple[tuple[int, ...], ...]]:
    """Return the scores of each class and the confusion, or those of each label without one."""
    if every is None:
        return (), ()
    if every.planes > 1:
        names = class_names(every.planes + 1, table)[1:]
        return tuple(ClassScore.of(name, 1, of) for name, of in zip(names, every.counts, strict=True)), ()
    (counts,) = every.counts
    of_classes = (ClassScore.of(name, number, counts) for number, name in enumerate(class_names(every.classes, table)))
    return tuple(of_classes), tuple(tuple(row) for row in counts.tolist())


def evaluate(
    pairs: Iterable[tuple[str, str | Path, str | Path]], classes: int = 2, listeners: tuple[Listener, ...] = ()
) -> Evaluation:
    """Score `(name, path of the predicted mask, path of the true mask)` for each slide. Emits the job `evaluate`.

    Raises `ImageError` or `TargetError` at the first pair that cannot be compared.
    """

    pairs, found = list(pairs), dict[str, Confusion]()
    with Events(listeners).job("evaluate", len(pairs)) as advance:
        for name, predicted_source, truth_source in pairs:
            with open_ids(predicted_source) as predicted, open_ids(truth_source) as truth:
                found[name] = score_masks(predicted, truth, Confusion(classes))
            advance(len(found), f"{name}: Dice {found[name].dice:.4f}")
    return Evaluation.of(found)
