"""Overlap scores that add up strip by strip, so that no full-resolution plane is ever held.

Dice (1945) and Sorensen (1948): `2 |A and B| / (|A| + |B|)`; Jaccard (1912), also called IoU: `|A and B| / |A or B|`.
Both are ratios of counts, and counts of disjoint strips simply add.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gigagrad.errors import TargetError

_CHUNK_PIXELS = 1 << 20
"""Class ids are widened to int64 only this many pixels at a time."""


class Counts(ABC):
    """How pixels agree, to be added up over strips, tiles and slides. `planes` is the channels of the masks."""

    planes: int

    @abstractmethod
    def add(self, pred: NDArray[np.generic], truth: NDArray[np.generic]) -> None:
        """Count one strip or tile of two masks, `(planes, h, w)` both. Raises `TargetError`."""

    @abstractmethod
    def plus(self, other: Self) -> Self:
        """The counts of both."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """As `counts_from` takes them."""

    @property
    @abstractmethod
    def pixels(self) -> int:
        """Those that count."""

    @property
    @abstractmethod
    def foreground(self) -> int:
        """Those that are truly of a class but the background, or of a label."""

    @property
    @abstractmethod
    def dice(self) -> float:
        """Of the foreground, averaged over its classes or labels."""

    @property
    @abstractmethod
    def iou(self) -> float:
        """Of the foreground, averaged as `dice` is."""


class Confusion(Counts):
    """Counts of pixels by (true class, predicted class); class 0 is background.

    With two classes (the default) every non-zero value means foreground, so masks of {0, 1}, {0, 255} and booleans
    all count alike. With more, values are class ids and must lie below `classes`. Pixels whose true value is `ignored`
    do not count.
    """

    def __init__(self, classes: int = 2, ignored: int | None = None) -> None:
        if classes < 2:
            raise ValueError(f"a confusion needs at least 2 classes, got {classes}; background counts as one")
        self.planes = 1
        self.classes = classes
        self.ignored = ignored
        self.ignored_pixels = 0
        self.counts = np.zeros((classes, classes), np.int64)

    def add(self, pred: NDArray[np.generic], truth: NDArray[np.generic]) -> None:
        """Count one strip or tile: arrays of the same shape, class ids of integer or bool dtype.

        Raises `TargetError` for shapes that differ and for class ids outside `[0, classes)`.
        """
        pred, truth = np.asarray(pred), np.asarray(truth)
        if pred.shape != truth.shape:
            raise TargetError(
                f"the prediction is {pred.shape} and the true mask {truth.shape}; give a mask of its slide's size"
            )
        if self.ignored is not None and (left_out := truth == self.ignored).any():
            pred, truth = pred[~left_out], truth[~left_out]
            self.ignored_pixels += int(np.count_nonzero(left_out))
        if self.classes == 2:
            of_pred, of_truth = pred != 0, truth != 0
            both, predicted, true = (int(np.count_nonzero(a)) for a in (of_pred & of_truth, of_pred, of_truth))
            self.counts += np.array([[pred.size - predicted - true + both, predicted - both], [true - both, both]])
            return
        flat_pred, flat_truth = pred.reshape(-1), truth.reshape(-1)
        for start in range(0, flat_pred.size, _CHUNK_PIXELS):
            chunk = slice(start, start + _CHUNK_PIXELS)
            self._add_classes(flat_pred[chunk].astype(np.int64), flat_truth[chunk].astype(np.int64))

    def _add_classes(self, pred: NDArray[np.int64], truth: NDArray[np.int64]) -> None:
        for name, ids in (("prediction", pred), ("true mask", truth)):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.classes:
                raise TargetError(
                    f"the {name} holds class ids {low} to {high}, but there are {self.classes} classes "
                    f"(0 to {self.classes - 1}); renumber it or give the model more output channels"
                )
        pairs = np.bincount(truth * self.classes + pred, minlength=self.classes**2)
        self.counts += pairs.reshape(self.classes, self.classes)

    def narrowed(self, ignored: int) -> Confusion:
        """Of counts of every value of a byte: those of foreground against background where each mask has but one value
        above 0, else those of the class ids up to the largest, where a true value of `ignored` does not count."""
        of_truth, of_pred = (np.flatnonzero(self.counts.sum(axis)) for axis in (1, 0))
        if max(np.count_nonzero(of_truth), np.count_nonzero(of_pred)) <= 1:
            binary = Confusion()
            corner, of_true, of_predicted = self.counts[0, 0], self.counts[1:, 0].sum(), self.counts[0, 1:].sum()
            binary.counts[:] = [[corner, of_predicted], [of_true, self.counts[1:, 1:].sum()]]
            return binary
        largest = max(int(ids[ids != ignored].max(initial=1)) for ids in (of_truth, of_pred))
        several = Confusion(largest + 1, ignored)
        several.counts[:] = self.counts[: largest + 1, : largest + 1]
        several.ignored_pixels = int(self.counts[ignored].sum())
        return several

    def plus(self, other: Self) -> Self:
        """The counts of both; a class that one of them does not know occurs nowhere in it."""
        both = type(self)(max(self.classes, other.classes), self.ignored)
        for each in (self, other):
            both.counts[: each.classes, : each.classes] += each.counts
            both.ignored_pixels += each.ignored_pixels
        return both

    def to_dict(self) -> dict[str, Any]:
        return {"counts": self.counts.tolist(), "ignored": self.ignored, "ignored_pixels": self.ignored_pixels}

    @property
    def pixels(self) -> int:
        return int(self.counts.sum())

    @property
    def foreground(self) -> int:
        return int(self.counts[1:].sum())

    def dice_of(self, class_id: int) -> float:
        """Dice of one class; 1 where it is neither predicted nor true."""
        both, total = self._overlap(class_id)
        return 2 * both / total if total else 1.0

    def iou_of(self, class_id: int) -> float:
        """Intersection over union of one class; 1 where it is neither predicted nor true."""
        both, total = self._overlap(class_id)
        return both / (total - both) if total else 1.0

    @property
    def dice(self) -> float:
        """Dice of the foreground: of class 1, or the mean over the foreground classes that occur at all."""
        return statistics.fmean(self.dice_of(k) for k in self._occurring())

    @property
    def iou(self) -> float:
        """IoU of the foreground, averaged as `dice` is."""
        return statistics.fmean(self.iou_of(k) for k in self._occurring())

    def _overlap(self, class_id: int) -> tuple[int, int]:
        both = int(self.counts[class_id, class_id])
        return both, int(self.counts[class_id].sum() + self.counts[:, class_id].sum())

    def _occurring(self) -> list[int]:
        return [k for k in range(1, self.classes) if self._overlap(k)[1]] or [1]


class LabelCounts(Counts):
    """Of several labels, which may overlap: for each the `Confusion` of pixels that have it and pixels that do not."""

    def __init__(self, of_labels: Iterable[Confusion]) -> None:
        self.of_labels = tuple(of_labels)
        self.planes = len(self.of_labels)

    def add(self, pred: NDArray[np.generic], truth: NDArray[np.generic]) -> None:
        if pred.shape != truth.shape:
            raise TargetError(
                f"the prediction is {pred.shape} and the true mask {truth.shape}; give a channel for each label"
            )
        for counts, predicted, true in zip(self.of_labels, pred, truth, strict=True):
            counts.add(predicted, true)

    def plus(self, other: Self) -> Self:
        return type(self)(one.plus(another) for one, another in zip(self.of_labels, other.of_labels, strict=True))

    def to_dict(self) -> dict[str, Any]:
        return {"of_labels": [counts.to_dict() for counts in self.of_labels]}

    @property
    def pixels(self) -> int:
        """Of the label of which most are known."""
        return max(counts.pixels for counts in self.of_labels)

    @property
    def foreground(self) -> int:
        return sum(counts.foreground for counts in self.of_labels)

    @property
    def dice(self) -> float:
        return statistics.fmean(counts.dice for counts in self._occurring())

    @property
    def iou(self) -> float:
        return statistics.fmean(counts.iou for counts in self._occurring())

    def _occurring(self) -> list[Confusion]:
        return [counts for counts in self.of_labels if counts.counts[1].any() or counts.counts[0, 1]] or [
            self.of_labels[0]
        ]


def counts_from(content: Mapping[str, Any]) -> Counts:
    """What `Counts.to_dict` gave. Raises `KeyError`, `TypeError` or `ValueError` for anything else."""
    return LabelCounts(map(_confusion, content["of_labels"])) if "of_labels" in content else _confusion(content)


def _confusion(content: Mapping[str, Any]) -> Confusion:
    found = Confusion(len(content["counts"]), content["ignored"])
    found.counts[:] = content["counts"]
    found.ignored_pixels = content["ignored_pixels"]
    return found


def mean_sd(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1). One value has no spread: 0. No values: both NaN."""
    numbers = list(values)
    if not numbers:
        return math.nan, math.nan
    return statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def spread(values: Iterable[float]) -> str:
    """Mean and sample standard deviation as text, `0.9500 +/- 0.0100`; of one value there is no deviation."""
    numbers = list(values)
    mean, sd = mean_sd(numbers)
    return f"{mean:.4f} +/- {sd:.4f}" if len(numbers) > 1 else f"{mean:.4f}"
