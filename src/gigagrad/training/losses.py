"""The losses a run can name. Plain functions of `(output, target)`, so that the engine captures them like any model.

Each works on whole images, tiles and tensors without pixels alike: nothing in them depends on the values. Those that
take `ignored` leave out pixels of that value; None, the default, leaves out nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gigagrad.errors import ConfigError
from gigagrad.masks import IGNORED
from gigagrad.models.trust import check_trusted, import_callable


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and the targets it can take.

    `binary`: a mask holds 0 and at most one other value; the function takes `ignored`. `class_ids`: a mask or label
    holds integers below the model's number of output channels, or `IGNORED`, which the function leaves out.
    """

    function: Callable[..., Tensor]
    binary: bool = False
    class_ids: bool = False

    def ignoring(self) -> Loss:
        """This loss without the pixels of value `IGNORED`. Raises `ConfigError` for one that knows no such pixels."""
        if self.class_ids:
            return self
        if not self.binary:
            raise ConfigError(f"the loss takes every pixel; use {', '.join(_IGNORING)}, or give all of them a class")
        return Loss(partial(self.function, ignored=IGNORED), binary=True)


def bce(output: Tensor, target: Tensor, *, ignored: int | None = None) -> Tensor:
    """Mean binary cross-entropy of logits; every target value above 0 counts as 1. Shapes must be equal."""
    if ignored is None:
        return F.binary_cross_entropy_with_logits(output, _is_true(output, target))
    entropy = F.binary_cross_entropy_with_logits(output, _is_true(output, target), reduction="none")
    return _mean(entropy, target, ignored)


def dice(output: Tensor, target: Tensor, *, ignored: int | None = None) -> Tensor:
    """One minus the soft Dice coefficient of the whole image (Milletari et al., 2016); logits, values above 0 are 1.

    Sums over the image go into one quotient: a patch's Dice is another function, this one is exact on any tiling.
    """
    return tversky(output, target, false_positives=0.5, false_negatives=0.5, ignored=ignored)


def tversky(
    output: Tensor,
    target: Tensor,
    *,
    false_positives: float = 0.3,
    false_negatives: float = 0.7,
    ignored: int | None = None,
) -> Tensor:
    """One minus the Tversky index (Salehi et al., 2017) of the whole image, with 1 added above and below the line."""
    p, t = torch.sigmoid(output), _is_true(output, target)
    if ignored is not None:
        counted = (target != ignored).to(output.dtype)
        p, t = p * counted, t * counted
    hits = (p * t).sum()
    misses = false_positives * (p * (1 - t)).sum() + false_negatives * ((1 - p) * t).sum()
    return 1 - (hits + 1) / (hits + misses + 1)


def bce_dice(output: Tensor, target: Tensor, *, ignored: int | None = None) -> Tensor:
    """`bce` and `dice` added up."""
    return bce(output, target, ignored=ignored) + dice(output, target, ignored=ignored)


def focal(output: Tensor, target: Tensor, *, gamma: float = 2.0, ignored: int | None = None) -> Tensor:
    """Mean focal loss (Lin et al., 2017) of logits, without class weights; values above 0 count as 1."""
    entropy = F.binary_cross_entropy_with_logits(output, _is_true(output, target), reduction="none")
    return _mean((1 - torch.exp(-entropy)) ** gamma * entropy, target, ignored)


def ce(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of logits `(1, C, H, W)` and class ids `(1, 1, H, W)`, or `(1, C)` and `(1,)`; skips 255."""
    ids = target.squeeze(1) if target.ndim == 4 else target
    return F.cross_entropy(output, ids.to(torch.int64), ignore_index=IGNORED)


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error; the target is taken as numbers. Shapes must be equal."""
    return F.mse_loss(output, target.to(output.dtype))


def _is_true(output: Tensor, target: Tensor) -> Tensor:
    return (target > 0).to(output.dtype)


def _mean(values: Tensor, target: Tensor, ignored: int | None) -> Tensor:
    """Over all pixels, or over those whose target is not `ignored`; 0 where that is none."""
    if ignored is None:
        return values.mean()
    counted = (target != ignored).to(values.dtype)
    return (values * counted).sum() / counted.sum().clamp(min=1)


_LOSSES = {
    "bce": Loss(bce, binary=True),
    "bce_dice": Loss(bce_dice, binary=True),
    "ce": Loss(ce, class_ids=True),
    "dice": Loss(dice, binary=True),
    "focal": Loss(focal, binary=True),
    "mse": Loss(mse),
    "tversky": Loss(tversky, binary=True),
}
_IGNORING = tuple(name for name, loss in _LOSSES.items() if loss.binary or loss.class_ids)


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
