"""How well masks agree with the true ones: Dice and IoU per slide, strip by strip, and their mean and spread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box, tiles
from gigagrad.errors import TargetError
from gigagrad.events import JobAdvanced, JobStarted, Listener
from gigagrad.images import Image, open_image
from gigagrad.prediction.sampling import require_mask
from gigagrad.prediction.scores import Confusion, mean_sd

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
class Evaluation:
    """The scores of a set of slides."""

    scores: tuple[Score, ...]

    @property
    def dice(self) -> tuple[float, float]:
        """Mean and sample standard deviation over the slides."""
        return mean_sd(score.dice for score in self.scores)

    @property
    def iou(self) -> tuple[float, float]:
        """Mean and sample standard deviation over the slides."""
        return mean_sd(score.iou for score in self.scores)

    def to_dict(self) -> dict[str, Any]:
        """What a summary file holds: Dice by slide with mean and sd, and IoU likewise."""
        return {
            "dice": {score.name: score.dice for score in self.scores},
            "mean": self.dice[0],
            "sd": self.dice[1],
            "iou": {score.name: score.iou for score in self.scores},
            "iou_mean": self.iou[0],
            "iou_sd": self.iou[1],
        }


def score_tiles(tiles_of_ids: Iterable[tuple[Box, NDArray[np.uint8]]], truth: Image, classes: int = 2) -> Confusion:
    """Compare disjoint predicted tiles, `(h, w)` class ids each, with the same boxes of the true mask.

    Raises `TargetError` when ids lie outside `classes`, `ImageError` when `truth` is no mask.
    """
    require_mask(truth)
    confusion = Confusion(classes)
    for box, ids in tiles_of_ids:
        confusion.add(ids, np.asarray(truth.read(box))[0])
    return confusion


def score_masks(predicted: Image, truth: Image, classes: int = 2) -> Confusion:
    """Compare two masks of the same size block by block. Raises `TargetError` when their sizes differ."""
    require_mask(predicted)
    if predicted.shape != truth.shape:
        raise TargetError(
            f"the mask of {predicted.name} is {predicted.shape[1]} x {predicted.shape[2]} px and the true mask "
            f"{truth.name} {truth.shape[1]} x {truth.shape[2]} px; both must have the slide's size"
        )
    blocks = tiles(predicted.shape[1], predicted.shape[2], _BLOCK_PX, _BLOCK_PX)
    return score_tiles(((box, np.asarray(predicted.read(box))[0]) for box in blocks), truth, classes)


def evaluate(
    pairs: Iterable[tuple[str, str | Path, str | Path]],
    classes: int = 2,
    listeners: tuple[Listener, ...] = (),
) -> Evaluation:
    """Score `(name, path of the predicted mask, path of the true mask)` for each slide.

    Raises `ImageError` or `TargetError` at the first pair that cannot be compared.
    """
    todo = list(pairs)
    scores = []
    for listener in listeners:
        listener(JobStarted("evaluate", len(todo)))
    for name, predicted_source, truth_source in todo:
        with open_image(predicted_source) as predicted, open_image(truth_source) as truth:
            confusion = score_masks(predicted, truth, classes)
        scores.append(Score(name, confusion.dice, confusion.iou, confusion.pixels))
        for listener in listeners:
            listener(JobAdvanced("evaluate", len(scores), len(todo), f"{name}: Dice {confusion.dice:.4f}"))
    return Evaluation(tuple(scores))
