"""Overlap scores that add up strip by strip, so that no full-resolution plane is ever held.

Dice (1945) and Sorensen (1948): `2 |A and B| / (|A| + |B|)`; Jaccard (1912), also called IoU: `|A and B| / |A or B|`.
Both are ratios of counts, and counts of disjoint strips simply add.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gigagrad.errors import TargetError

_CHUNK_PIXELS = 1 << 20
"""Class ids are widened to int64 only this many pixels at a time."""


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
        """
        (counts,) = self.counts
        of_truth, of_pred = (np.flatnonzero(counts.sum(axis)) for axis in (1, 0))
        if max(np.count_nonzero(of_truth), np.count_nonzero(of_pred)) <= 1:
            binary = Confusion()
            binary.counts[:] = [[counts[0, 0], counts[0, 1:].sum()], [counts[1:, 0].sum(), counts[1:, 1:].sum()]]
            return binary
        largest = max(int(ids[ids != ignored].max(initial=1)) for ids in (of_truth, of_pred))
        several = Confusion(largest + 1, ignored)
        several.counts[0] = counts[: largest + 1, : largest + 1]
        several.ignored_pixels = int(counts[ignored].sum())
        return several

    def plus(self, other: Confusion) -> Confusion:
        """Add the counts of both; a class that one of them does not know occurs nowhere in it."""
        both = Confusion(max(self.classes, other.classes), self.ignored, self.planes)
        for each in (self, other):
            both.counts[:, : each.classes, : each.classes] += each.counts
            both.ignored_pixels += each.ignored_pixels
        return both

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, which `from_dict` reads."""
        return {"counts": self.counts.tolist(), "ignored": self.ignored, "ignored_pixels": self.ignored_pixels}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Read what `to_dict` gave. Raises `KeyError`, `TypeError` or `ValueError` for anything else."""
        counts = np.array(content["counts"], np.int64)
        planes, classes, _ = counts.shape
        found = cls(classes, content["ignored"], planes)
        found.counts += counts
        found.ignored_pixels = content["ignored_pixels"]
        return found

    @property
    def pixels(self) -> int:
        """Return how many count, of the label of which most are known."""
        return int(self.counts.sum((1, 2)).max())

    @property
    def foreground(self) -> int:
        """Return how many are truly of a class but the background, or of a label."""
        return int(self.counts[:, 1:].sum())

    def dice_of(self, class_id: int, plane: int = 0) -> float:
        """Return the Dice of one class; 1 where it is neither predicted nor true."""
        both, total = self._overlap(class_id, plane)
        return 2 * both / total if total else 1.0

    def iou_of(self, class_id: int, plane: int = 0) -> float:
        """Return the intersection over union of one class; 1 where it is neither predicted nor true."""
        both, total = self._overlap(class_id, plane)
        return both / (total - both) if total else 1.0

    @property
    def dice(self) -> float:
        """Return the Dice of the foreground: of class 1, or the mean over the classes or labels that occur at all."""
        return statistics.fmean(self.dice_of(*where) for where in self._occurring())

    @property
    def iou(self) -> float:
        """Return the IoU of the foreground, averaged as `dice` is."""
        return statistics.fmean(self.iou_of(*where) for where in self._occurring())

    def _overlap(self, class_id: int, plane: int) -> tuple[int, int]:
        counts = self.counts[plane]
        return int(counts[class_id, class_id]), int(counts[class_id].sum() + counts[:, class_id].sum())

    def _occurring(self) -> list[tuple[int, int]]:
        places = [(number, plane) for plane in range(self.planes) for number in range(1, self.classes)]
        return [place for place in places if self._overlap(*place)[1]] or [(1, 0)]


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
