"""How well a network does on a slide, counted while its prediction streams by."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from gigagrad.boxes import Box
from gigagrad.images import Image
from gigagrad.prediction.classes import class_ids
from gigagrad.prediction.scores import Confusion
from gigagrad.training.losses import IGNORED


def confusion_of(prediction: Iterable[tuple[Box, Tensor]], mask: Image) -> Confusion:
    """Counts over `(box, logits (1, C, h, w))` tiles against the same boxes of `mask`; holds one tile at a time.

    With one channel every value of the mask above 0 is foreground; with several, pixels of class 255 do not count.
    """
    counts: Confusion | None = None
    for box, logits in prediction:
        channels = logits.shape[1]
        counts = counts or Confusion(max(2, channels))
        predicted, true = class_ids(logits), np.asarray(mask.read(box))[0]
        if channels > 1:
            # Agreement on background is what no score of a foreground class looks at.
            ignored = true == IGNORED
            predicted, true = np.where(ignored, 0, predicted), np.where(ignored, 0, true)
        counts.add(predicted, true)
    assert counts is not None, "a prediction has at least one tile"
    return counts
