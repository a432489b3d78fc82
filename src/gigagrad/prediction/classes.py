"""From a network's output to class ids, and what the classes are called: shared by prediction, scores and training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gigagrad.errors import ConfigError, ModelError
from gigagrad.images import Image
from gigagrad.masks import IGNORED, ClassTable

if TYPE_CHECKING:
    import torch

_PALETTE = ((0, 200, 255), (213, 94, 0), (0, 158, 115), (204, 121, 167), (0, 114, 178), (230, 159, 0), (240, 228, 66))
"""After a cyan that stands out on pink and purple, colours of Okabe and Ito (2008), told apart by colour-blind eyes."""


@dataclass(frozen=True, slots=True)
class MaskClass:
    """One foreground class of a mask: its id (1 to 255), its name, and its colour as 8-bit red, green, blue."""

    id: int
    name: str
    color: tuple[int, int, int]


def mask_classes(count: int, names: Sequence[str] = ()) -> tuple[MaskClass, ...]:
    """Foreground classes 1 to `count`, named `names` or else "Foreground" (one class) or "Class 1", "Class 2", ...

    Raises `ConfigError` when there are names for another number of classes.
    """
    if names and len(names) != count:
        raise ConfigError(
            f"got {len(names)} class names ({', '.join(names)}) for {count} foreground classes; "
            "name every class except the background"
        )
    chosen = names or (["Foreground"] if count == 1 else [f"Class {k}" for k in range(1, count + 1)])
    return tuple(MaskClass(k + 1, name, _PALETTE[k % len(_PALETTE)]) for k, name in enumerate(chosen))


def class_names(count: int, table: ClassTable | None) -> tuple[str, ...]:
    """Of a mask's class ids 0 to `count - 1`: those of the table, else "Background" and as `mask_classes` has it."""
    background = next((name for name, number in table.ids if number == 0), "") if table is not None else ""
    known = table.foreground if table is not None else ()
    named = [*known, *(each.name for each in mask_classes(max(count - 1, 1))[len(known) :])]
    return (background or "Background", *named[: count - 1])


def foreground_count(channels: int) -> int:
    """How many foreground classes an output of `channels` channels tells apart: one logit, or background + classes."""
    return max(1, channels - 1)


def ignored_value(channels: int, table: ClassTable | None, truth: Image | None = None) -> int | None:
    """The value in true masks that no score of a model with so many output channels looks at, None where all count.

    As in training: of several channels, whose loss takes class ids, where the table has anything to ignore, and where
    `truth` says that it is no data.
    """
    says_so = truth is not None and truth.nodata == IGNORED
    return IGNORED if channels > 1 or says_so or (table is not None and table.ignores) else None


def class_ids(logits_NCHW: torch.Tensor, threshold: float = 0.5) -> NDArray[np.uint8]:
    """`(1, C, h, w)` logits as `(h, w)` uint8 class ids, 0 = background.

    One channel: 1 where `sigmoid(logit) > threshold`, compared on the logit's side, `logit > ln(t / (1 - t))`, because
    the sigmoid rounds to exactly 0 or 1 far from its middle. Several channels: the largest wins, channel 0 is the
    background. A NaN logit never wins. `threshold` lies strictly between 0 and 1.

    Raises `ModelError` for an output without image axes, a batch above 1, or more classes than a byte can hold.
    """
    if logits_NCHW.ndim != 4 or logits_NCHW.shape[0] != 1:
        raise ModelError(
            f"the model's output is {tuple(logits_NCHW.shape)}, expected (1, classes, height, width); "
            "prediction needs a segmentation model"
        )
    channels = logits_NCHW.shape[1]
    if channels > 256:
        raise ModelError(f"the model has {channels} output channels; a mask of bytes holds at most 256 classes")
    if channels == 1:
        ids = logits_NCHW[0, 0] > math.log(threshold / (1 - threshold))
    else:
        ids = logits_NCHW[0].nan_to_num(nan=-math.inf).argmax(0)
    return ids.byte().cpu().numpy()
