"""How much each class weighs in a loss: as given, or by how rare it is in the training data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import tiles
from gigagrad.errors import ConfigError
from gigagrad.images import Image
from gigagrad.masks import IGNORED

BALANCED = "balanced"
_BLOCK_PX = 2048
"""Side of the blocks in which masks are counted."""


def class_weights(entries: Sequence[str], counts: Iterable[NDArray[np.int64]], classes: int) -> tuple[float, ...]:
    """Weights of `classes` classes, of the texts in `entries` or, for `balanced`, of their `counts`.

    Balanced weights are the inverse of each class's share, scaled to a mean of 1 over the classes that occur; a class
    that does not occur weighs 0. Without counts all are 1. Raises `ConfigError`.
    """
    if list(entries) == [BALANCED]:
        counted = list(counts)
        if not counted:
            return (1.0,) * classes
        total = np.sum(counted, axis=0)[:classes]
        occurring = total > 0
        inverse = np.divide(total.sum(), total, out=np.zeros(classes), where=occurring)
        return tuple(inverse / inverse[occurring].mean())
    try:
        weights = tuple(float(entry) for entry in entries)
    except ValueError:
        weights = ()
    if len(weights) != classes or min(weights) < 0 or not any(weights) or not np.isfinite(weights).all():
        raise ConfigError(
            f"class_weights must be {BALANCED!r} or {classes} numbers, one for each class from the background on, got "
            f"{', '.join(entries)}"
        )
    return weights


def count_pixels(mask: Image, *, binary: bool, ignores: bool) -> NDArray[np.int64]:
    """`(256,)`: how many pixels of a mask have each class id, `IGNORED` left out where the mask `ignores` it; of a
    `binary` one all others above 0 count as 1."""
    counts = np.zeros(256, np.int64)
    for box in tiles(mask.height, mask.width, _BLOCK_PX, _BLOCK_PX):
        pixels = np.asarray(mask.read(box)).reshape(-1)
        pixels = pixels[pixels != IGNORED] if ignores else pixels
        # Of class ids all have been looked at: they are below the number of outputs.
        counts += np.bincount((pixels > 0) if binary else pixels.astype(np.uint8), minlength=256)
    return counts
