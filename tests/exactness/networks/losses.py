"""Losses: functions of one output and the target. `Loss` adds up the heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .functions import resized
from .recipe import Options


def _dice(p: Tensor, t: Tensor, axes: tuple[int, ...]) -> Tensor:
    return (1 - (2 * (p * t).sum(axes) + 1) / (p.sum(axes) + t.sum(axes) + 1)).mean()


def _tversky(o: Tensor, t: Tensor) -> Tensor:
    p = o.sigmoid()
    hit, false, missed = (p * t).sum(), (p * (1 - t)).sum(), ((1 - p) * t).sum()
    return (1 - (hit + 1) / (hit + 0.3 * false + 0.7 * missed + 1)) ** 0.75


def _focal(o: Tensor, t: Tensor) -> Tensor:
    bce = F.binary_cross_entropy_with_logits(o, t, reduction="none")
    p = torch.exp(-bce)
    return ((0.25 * t + 0.75 * (1 - t)) * (1 - p) ** 2 * bce).mean()


def _balanced(o: Tensor, t: Tensor) -> Tensor:
    share = t.mean((0, 2, 3), keepdim=True)
    return F.binary_cross_entropy_with_logits(o, t, pos_weight=(1 - share) / (share + 0.01))


def _correlation(o: Tensor, t: Tensor) -> Tensor:
    a, b = o - o.mean(), t - t.mean()
    return 1 - (a * b).sum() / ((a.square().sum() + 0.1).sqrt() * (b.square().sum() + 0.1).sqrt())


def _hardest(o: Tensor, t: Tensor) -> Tensor:
    losses = F.binary_cross_entropy_with_logits(o, t, reduction="none").flatten()
    return losses.topk(max(1, losses.numel() // 4)).values.mean()


def _lovasz(o: Tensor, t: Tensor) -> Tensor:
    """The Lovasz extension of the Jaccard index: the errors are sorted over all positions."""
    errors, order = (1 - o * (2 * t - 1)).flatten().sort(descending=True)
    truth = t.flatten()[order]
    meeting, union = truth.sum() - truth.cumsum(0), truth.sum() + (1 - truth).cumsum(0)
    steps = torch.cat([torch.zeros(1, dtype=o.dtype, device=o.device), 1 - meeting / union]).diff()
    return F.elu(errors).dot(steps)


def _smooth(o: Tensor, t: Tensor) -> Tensor:
    rough = (o[:, :, 1:] - o[:, :, :-1]).square().mean() + (o[:, :, :, 1:] - o[:, :, :, :-1]).square().sum() / 100
    return F.mse_loss(o, t) + 0.1 * rough


def _masked(o: Tensor, t: Tensor) -> Tensor:
    inside = (t > 0.3).to(o.dtype)
    return (F.smooth_l1_loss(o, t, reduction="none") * inside).sum() / (inside.sum() + 1)


def _frequencies(o: Tensor, t: Tensor) -> Tensor:
    """Class weights from how often each class occurs in this target."""
    counts = F.one_hot(t[:, 0].long(), o.shape[1]).sum((0, 1, 2)).to(o.dtype)
    return F.cross_entropy(o, t[:, 0].long(), weight=counts.sum() / (counts + 1))


def _dice_of_classes(o: Tensor, t: Tensor) -> Tensor:
    truth = F.one_hot(t[:, 0].long(), o.shape[1]).permute(0, 3, 1, 2).to(o.dtype)
    return _dice(o.softmax(1), truth, (0, 2, 3)) + F.nll_loss(o.log_softmax(1), t[:, 0].long())


def _dense(generator: torch.Generator, channels: int, size: Sequence[int]) -> Tensor:
    return torch.rand(channels, *size, dtype=torch.float64, generator=generator)


def _binary(generator: torch.Generator, channels: int, size: Sequence[int]) -> Tensor:
    return (_dense(generator, channels, size) < 0.3).double()


def _classes(generator: torch.Generator, channels: int, size: Sequence[int]) -> Tensor:
    return torch.randint(0, channels, (1, *size), generator=generator)


def _ignored(generator: torch.Generator, channels: int, size: Sequence[int]) -> Tensor:
    some = torch.rand(1, *size, generator=generator) < 0.2
    return _classes(generator, channels, size).masked_fill(some, 255).to(torch.uint8)


def _label(generator: torch.Generator, channels: int, size: Sequence[int]) -> Tensor:
    return torch.randint(0, channels, (1,), generator=generator)


class Criterion(NamedTuple):
    """A loss of one output: `None` where `Loss` itself holds what it needs."""

    function: Callable[[Tensor, Tensor], Tensor] | None
    target: Callable[[torch.Generator, int, Sequence[int]], Tensor]


LOSSES: dict[str, Criterion] = {
    "mse": Criterion(F.mse_loss, _dense),
    "bce": Criterion(F.binary_cross_entropy_with_logits, _dense),
    "mse sum": Criterion(lambda o, t: F.mse_loss(o, t, reduction="sum"), _dense),
    "cross entropy": Criterion(None, _ignored),
    "dice": Criterion(lambda o, t: _dice(o.sigmoid(), t, (0, 1, 2, 3)), _binary),
    "dice of classes": Criterion(_dice_of_classes, _classes),
    "bce + dice": Criterion(
        lambda o, t: F.binary_cross_entropy_with_logits(o, t) + _dice(o.sigmoid(), t, (2, 3)), _binary
    ),
    "tversky": Criterion(_tversky, _binary),
    "focal": Criterion(_focal, _binary),
    "balanced": Criterion(_balanced, _binary),
    "frequencies": Criterion(_frequencies, _classes),
    "label": Criterion(lambda o, t: F.cross_entropy(o.mean((2, 3)) if o.ndim == 4 else o, t), _label),
    "label of largest": Criterion(lambda o, t: F.cross_entropy(o.amax((2, 3)) + o.logsumexp((2, 3)), t), _label),
    "correlation": Criterion(_correlation, _dense),
    "log of mean": Criterion(lambda o, t: torch.log(1 + (o * t).square().mean()), _dense),
    "smooth": Criterion(_smooth, _dense),
    "masked": Criterion(_masked, _dense),
    "learned": Criterion(None, _dense),
    "hardest": Criterion(_hardest, _dense),
    "lovasz": Criterion(_lovasz, _binary),
}
CLASS_LOSSES = ("cross entropy", "dice of classes", "frequencies", "label", "label of largest")


class Loss(nn.Module):
    """The named loss of each output, resized to the target, weighted and added up."""

    def __init__(self, name: str, options: Options, classes: int) -> None:
        super().__init__()
        self.name, self.options = name, options
        if name == "cross entropy":
            weight = torch.linspace(0.5, 1.5, classes) if options["weighted"] else None
            self.entropy = nn.CrossEntropyLoss(
                weight, ignore_index=255, label_smoothing=options["smoothing"], reduction=options["reduction"]
            )
        elif name == "learned":
            self.variance = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, outputs: Any, target: Tensor) -> Tensor:
        if isinstance(outputs, Tensor):
            return self._one(outputs, target)
        first, second = (outputs["out"], outputs["aux"]) if isinstance(outputs, dict) else outputs
        return self._one(first, target) + 0.4 * self._one(second, target)

    def _one(self, output: Tensor, target: Tensor) -> Tensor:
        if target.ndim == 4 and output.ndim == 4:
            output = resized(output, target.shape[-2:], "bilinear", False)
        function = LOSSES[self.name].function
        if function is not None:
            return function(output, target)
        if self.name == "cross entropy":
            return self.entropy(output, target[:, 0].long())
        near, far = F.mse_loss(output, target), F.huber_loss(output, target, delta=0.5)
        return torch.exp(-self.variance[0]) * near + torch.exp(-self.variance[1]) * far + self.variance.sum()
