"""The losses a run can name. Plain functions of `(output, target)`, so that the engine captures them like any model.

Each works on whole images, tiles and tensors without pixels alike: nothing in them depends on the values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gigagrad.errors import ConfigError
from gigagrad.models.trust import check_trusted, import_callable
from gigagrad.prediction.classes import IGNORED


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and the targets it can take.

    `binary`: a mask holds 0 and at most one other value. `class_ids`: a mask or label holds integers below the model's
    number of output channels, or `IGNORED`.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    binary: bool = False
    class_ids: bool = False


def bce(output: Tensor, target: Tensor) -> Tensor:
    """Mean binary cross-entropy of logits; every target value above 0 counts as 1. Shapes must be equal."""
    return F.binary_cross_entropy_with_logits(output, (target > 0).to(output.dtype))


def dice(output: Tensor, target: Tensor) -> Tensor:
    """One minus the soft Dice coefficient of the whole image (Milletari et al., 2016); logits, values above 0 are 1.

    Sums over the image go into one quotient: a patch's Dice is another function, this one is exact on any tiling.
    """
    return tversky(output, target, false_positives=0.5, false_negatives=0.5)


def tversky(output: Tensor, target: Tensor, *, false_positives: float = 0.3, false_negatives: float = 0.7) -> Tensor:
    """One minus the Tversky index (Salehi et al., 2017) of the whole image, with 1 added above and below the line."""
    p, t = torch.sigmoid(output), (target > 0).to(output.dtype)
    hits = (p * t).sum()
    misses = false_positives * (p * (1 - t)).sum() + false_negatives * ((1 - p) * t).sum()
    return 1 - (hits + 1) / (hits + misses + 1)


def bce_dice(output: Tensor, target: Tensor) -> Tensor:
    """`bce` and `dice` added up."""
    return bce(output, target) + dice(output, target)


def focal(output: Tensor, target: Tensor, *, gamma: float = 2.0) -> Tensor:
    """Mean focal loss (Lin et al., 2017) of logits, without class weights; values above 0 count as 1."""
    t = (target > 0).to(output.dtype)
    entropy = F.binary_cross_entropy_with_logits(output, t, reduction="none")
    return ((1 - torch.exp(-entropy)) ** gamma * entropy).mean()


def ce(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of logits `(1, C, H, W)` and class ids `(1, 1, H, W)`, or `(1, C)` and `(1,)`; skips 255."""
    ids = target.squeeze(1) if target.ndim == 4 else target
    return F.cross_entropy(output, ids.to(torch.int64), ignore_index=IGNORED)


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error; the target is taken as numbers. Shapes must be equal."""
    return F.mse_loss(output, target.to(output.dtype))


_LOSSES = {
    "bce": Loss(bce, binary=True),
    "bce_dice": Loss(bce_dice, binary=True),
    "ce": Loss(ce, class_ids=True),
    "dice": Loss(dice, binary=True),
    "focal": Loss(focal, binary=True),
    "mse": Loss(mse),
    "tversky": Loss(tversky, binary=True),
}


def check_loss(name: str, origin: str | Path, trust: Collection[str]) -> None:
    """Raises `ModelError` where the file `origin` names a function as its loss that is not one of `trust`."""
    if name not in _LOSSES and ":" in name:
        check_trusted(name, origin, trust)


def named_loss(name: str) -> Loss:
    """The loss called `name`, or the function at `package.module:callable`. Raises `ConfigError` or `ModelError`."""
    if name in _LOSSES:
        return _LOSSES[name]
    if ":" in name:
        return Loss(import_callable(name))
    raise ConfigError(f"unknown loss {name!r}; use {', '.join(_LOSSES)} or package.module:callable")
