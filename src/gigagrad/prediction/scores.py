"""Overlap scores that add up strip by strip, so that no full-resolution plane is ever held.

Dice (1945) and Sorensen (1948): `2 |A and B| / (|A| + |B|)`; Jaccard (1912), also called IoU: `|A and B| / |A or B|`.
Both are ratios of counts, and counts of disjoint strips simply add. An evaluation has them of each slide, with mean
and spread, and of each class over all slides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
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
from gigagrad.masks.classes import class_names
from gigagrad.prediction.classes import Channels, require_mask

_Pixels = NDArray[np.generic]
_CHUNK_PIXELS = 1 << 20
"""Class ids are widened to int64 only this many pixels at a time."""
_BLOCK_PX = 2048
"""Side of the blocks that are compared: two of them and a few temporaries are held at a time."""


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


class Confusion:
    """Counts of pixels by (plane, true class, predicted class), added up over strips, tiles and slides.

    Class 0 is background. With two classes (the default) every non-zero value means foreground, so masks of {0, 1},
    {0, 255} and booleans all count alike. With more, values are class ids and must lie below `classes`. Pixels whose
    true value is `ignored` do not count. Masks of several labels, which may overlap, have a plane of two classes each.
    """

    def __init__(self, classes: int = 2, ignored: int | None = None, planes: int = 1) -> None:
        if classes < 2:
            raise ValueError(f"a confusion needs at least 2 classes, got {classes}; background counts as one")
        self.classes, self.ignored, self.planes = classes, ignored, planes
        self.ignored_pixels = 0
        self.renumbered = False
        """True where masks of another value than 1 were taken for those of one class."""
        self.counts = np.zeros((planes, classes, classes), np.int64)

    def add(self, pred: NDArray[np.generic], truth: NDArray[np.generic]) -> None:
        """Count one strip or tile: integers or booleans of one shape, `(planes, ...)` where there are several.

        Raises `TargetError` for shapes that differ and for class ids outside `[0, classes)`.
        """
        pred, truth = np.asarray(pred), np.asarray(truth)
        if pred.shape != truth.shape:
            expected = "mask of its slide's size" if self.planes == 1 else "channel for each label"
            raise TargetError(f"the prediction is {pred.shape} and the true mask {truth.shape}; give a {expected}")
        assert self.planes in (1, len(pred))
        pairs = zip(pred.reshape(self.planes, -1), truth.reshape(self.planes, -1), strict=True)
        for plane, (of_pred, of_truth) in enumerate(pairs):
            if self.ignored is not None and (left_out := of_truth == self.ignored).any():
                of_pred, of_truth = of_pred[~left_out], of_truth[~left_out]
                self.ignored_pixels += int(np.count_nonzero(left_out))
            if self.classes == 2:
                of_pred, of_truth = of_pred != 0, of_truth != 0
                both, predicted, true = (int(np.count_nonzero(a)) for a in (of_pred & of_truth, of_pred, of_truth))
                rest = of_pred.size - predicted - true + both
                self.counts[plane] += np.array([[rest, predicted - both], [true - both, both]])
                continue
            for start in range(0, of_pred.size, _CHUNK_PIXELS):
                chunk = slice(start, start + _CHUNK_PIXELS)
                self._add_classes(plane, of_pred[chunk].astype(np.int64), of_truth[chunk].astype(np.int64))

    def _add_classes(self, plane: int, pred: NDArray[np.int64], truth: NDArray[np.int64]) -> None:
        for name, ids in (("prediction", pred), ("true mask", truth)):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.classes:
                raise TargetError(
                    f"the {name} holds class ids {low} to {high}, but there are {self.classes} classes "
                    f"(0 to {self.classes - 1}); renumber it or give the model more output channels"
                )
        pairs = np.bincount(truth * self.classes + pred, minlength=self.classes**2)
        self.counts[plane] += pairs.reshape(self.classes, self.classes)

    def narrowed(self, ignored: int) -> Confusion:
        """Narrow counts of every value of a byte: to foreground against background where each mask has but one value
        above 0, else those of the class ids up to the largest, where a true value of `ignored` does not count.

        A prediction of that value alone is foreground beside a true mask of one class, too. Raises `TargetError` where
        it is predicted beside others.
        """
        counts, left_out = self.counts[0].copy(), 0
        of_truth, of_pred = (np.flatnonzero(counts.sum(axis)) for axis in (1, 0))
        binary = bool(max(np.count_nonzero(of_truth), np.count_nonzero(of_pred)) <= 1)
        if not binary:
            left_out, counts[ignored] = int(counts[ignored].sum()), 0
            of_truth, of_pred = (np.flatnonzero(counts.sum(axis)) for axis in (1, 0))
            binary = {*of_pred.tolist()} - {0} == {ignored} and bool(np.count_nonzero(of_truth) <= 1)
        if binary:
            found = Confusion()
            found.renumbered = not {*of_truth.tolist(), *of_pred.tolist()} <= {0, 1}
            found.counts[:] = [[counts[0, 0], counts[0, 1:].sum()], [counts[1:, 0].sum(), counts[1:, 1:].sum()]]
        elif ignored in of_pred:
            raise TargetError(
                f"the prediction holds the value {ignored} beside class ids; of a true mask that is what is left out, "
                "of a prediction it is no class: renumber it"
            )
        else:
            largest = max(int(ids.max(initial=1)) for ids in (of_truth, of_pred))
            found = Confusion(largest + 1, ignored)
            found.counts[0] = counts[: largest + 1, : largest + 1]
        found.ignored_pixels = left_out
        return found

    def plus(self, other: Confusion) -> Confusion:
        """Add the counts of both; a class that one of them does not know occurs nowhere in it."""
        both = Confusion(max(self.classes, other.classes), self.ignored, self.planes)
        for each in (self, other):
            both.counts[:, : each.classes, : each.classes] += each.counts
            both.ignored_pixels += each.ignored_pixels
        return both

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, which `from_dict` reads."""
        found = {"counts": self.counts.tolist(), "ignored": self.ignored, "ignored_pixels": self.ignored_pixels}
        return found | {"renumbered": self.renumbered}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Read what `to_dict` gave. Raises `KeyError`, `TypeError` or `ValueError` for anything else."""
        counts = np.array(content["counts"], np.int64)
        planes, classes, _ = counts.shape
        found = cls(classes, content["ignored"], planes)
        found.counts += counts
        found.ignored_pixels = content["ignored_pixels"]
        found.renumbered = content.get("renumbered", False)  # not in earlier records
        return found

    @property
    def pixels(self) -> int:
        """Return how many count, of the label of which most are known."""
        return int(self.counts.sum((1, 2)).max())

    @property
    def foreground(self) -> int:
        """Return how many are truly of a class but the background, or of a label."""
        return int(self.counts[:, 1:].sum())

    @property
    def dice(self) -> float:
        """Return the Dice of the foreground: of class 1, or the mean over the classes or labels that occur at all."""
        return statistics.fmean(dice for dice, _ in self._occurring())

    @property
    def iou(self) -> float:
        """Return the IoU of the foreground, averaged as `dice` is."""
        return statistics.fmean(iou for _, iou in self._occurring())

    def _occurring(self) -> list[tuple[float, float]]:
        """Return Dice and IoU of the classes or labels that are predicted or true; 1 where none is."""
        every = (ClassScore.of("", number, plane) for plane in self.counts for number in range(1, self.classes))
        found = [(each.dice, each.iou) for each in every]
        return [(dice, iou) for dice, iou in found if dice is not None and iou is not None] or [(1.0, 1.0)]


def mean_sd(values: Iterable[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation (n - 1). One value has no spread: 0. No values: both NaN."""
    numbers = list(values)
    if not numbers:
        return math.nan, math.nan
    return statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def spread(values: Iterable[float]) -> str:
    """Write mean and sample standard deviation as text, `0.9500 +/- 0.0100`; of one value there is no deviation."""
    numbers = list(values)
    mean, sd = mean_sd(numbers)
    return f"{mean:.4f} +/- {sd:.4f}" if len(numbers) > 1 else f"{mean:.4f}"


@dataclass(frozen=True, slots=True)
class Score:
    """Agreement on one slide: `dice` and `iou` of the foreground (a mean over classes if there are several)."""

    name: str
    dice: float
    iou: float
    pixels: int


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
        scores = tuple(Score(name, each.dice, each.iou, each.pixels) for name, each in counts.items())
        if not counts:
            return cls(scores)
        every = reduce(Confusion.plus, counts.values())
        if every.planes > 1:
            names = class_names(every.planes + 1, table)[1:]
            return cls(
                scores, tuple(ClassScore.of(name, 1, plane) for name, plane in zip(names, every.counts, strict=True))
            )
        (pixels,) = every.counts
        names = class_names(every.classes, table)
        of_classes = tuple(ClassScore.of(name, number, pixels) for number, name in enumerate(names))
        return cls(scores, of_classes, tuple(tuple(row) for row in pixels.tolist()))

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
    threshold: float = 0.5,
) -> Confusion:
    """Compare tiles of `(1, C, h, w)` logits with the same boxes of the true mask; holds one tile at a time.

    With one channel every value of the mask above 0 is foreground, and so is a probability above `threshold`. `table`
    has the mask's classes; pixels that are ignored do not count, nor do those where `seen` has no data. Raises
    `ModelError` for outputs that are no segmentation, `TargetError` as `Confusion.add` does.
    """
    counts = counts_of(channels, channels.ignored(table, truth))
    for box, logits in prediction:
        counts.add(*_with_data(channels.mask(logits, threshold), truth, seen, box))
    return counts


def _with_data(pred: _Pixels, truth: Image, seen: Image | None, box: Box) -> tuple[_Pixels, _Pixels]:
    """Read both masks `(planes, h, w)` in this box, or `(planes, n)` of the pixels there where `seen` has data."""
    true = np.asarray(truth.read(box))
    missing = None if seen is None else seen.missing(box)
    return (pred, true) if missing is None else (pred[:, ~missing], true[:, ~missing])


def counts_of(channels: Channels, ignored: int | None) -> Confusion:
    """Return counts of no pixel yet, for masks of a model of these channels."""
    return Confusion(2 if channels.labels else channels.foreground + 1, ignored, channels.planes)


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
