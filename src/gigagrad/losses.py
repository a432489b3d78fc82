"""The losses a run can name. Plain functions of `(output, target)`, so that the engine captures them like any model.

Each works on whole images, tiles and tensors without pixels alike: nothing in them depends on the values. Those that
take `ignored` leave out pixels of that value; None, the default, leaves out nothing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gigagrad.errors import ConfigError, TargetError, did_you_mean
from gigagrad.masks import IGNORED
from gigagrad.models.registry import check_trusted, import_callable
from gigagrad.named import parse_named

Kind = Literal["binary", "class ids", "numbers", "survival"]
"""Meanings of outputs, with targets to match: one logit, a logit for each class, numbers, the logarithm of a risk."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and the targets it can take.

    `binary`: a mask holds 0 and at most one other value. `class_ids`: a mask or label holds integers below the model's
    number of output channels, or `IGNORED`, which is left out. `made_of`: functions with their factors, which are added
    up; those of a binary loss take `ignored`, those of the library's losses of class ids and of `bce` take `weight`.
    `survival`: a target is a time and whether the event came then, and slides are compared with each other, so that the
    loss is of the outputs `(N, 1)` and targets `(N, 2)` of several.
    """

    made_of: tuple[tuple[float, Callable[..., Tensor]], ...]
    binary: bool = False
    class_ids: bool = False
    survival: bool = False

    @property
    def function(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return what the engine is given: `(output, target)` to one number."""
        if len(self.made_of) == 1 and self.made_of[0][0] == 1:
            return self.made_of[0][1]
        return Sum(self.made_of)

    def ignoring(self) -> Loss:
        """This loss without the pixels of value `IGNORED`. Raises `ConfigError` for one that knows no such pixels."""
        if self.class_ids:
            return self
        if not self.binary or any(_plain(each) not in _IGNORING.values() for _, each in self.made_of):
            raise ConfigError(f"the loss takes every pixel; use {', '.join(_IGNORING)}, or give all of them a class")
        return replace(self, made_of=tuple((factor, partial(each, ignored=IGNORED)) for factor, each in self.made_of))

    def weighted(self, weights: Sequence[float]) -> Loss:
        """This loss with weights of the classes, background first. Raises `ConfigError` where it has no classes."""
        taking = [_plain(each) in (bce, ce, clam) for _, each in self.made_of]
        if not any(taking) or (self.binary and len(weights) != 2):
            raise ConfigError(
                f"class_weights {', '.join(f'{weight:g}' for weight in weights)}: weights of classes are for ce "
                "and clam, and two of them for bce"
            )
        made = [
            (factor, Weighted(each, weights) if takes else each)
            for (factor, each), takes in zip(self.made_of, taking, strict=True)
        ]
        return replace(self, made_of=tuple(made))


class Weighted(nn.Module):
    """A loss with weights of classes as its `weight`, `(classes,)`."""

    weight: Tensor

    def __init__(self, function: Callable[..., Tensor], weights: Sequence[float]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("weight", torch.tensor(list(weights), dtype=torch.float32), persistent=False)

    def forward(self, output: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
        logits = output if isinstance(output, Tensor) else output[0]
        return self.function(output, target, weight=self.weight.to(logits.dtype))


class Sum(nn.Module):
    """Losses times their factors, added up."""

    def __init__(self, made_of: Sequence[tuple[float, Callable[..., Tensor]]]) -> None:
        super().__init__()
        self.factors = [factor for factor, _ in made_of]
        self.functions = [each for _, each in made_of]
        self.modules_among = nn.ModuleList(each for each in self.functions if isinstance(each, nn.Module))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        total = self.factors[0] * self.functions[0](output, target)
        for factor, each in zip(self.factors[1:], self.functions[1:], strict=True):
            total = total + factor * each(output, target)
        return total


def bce(output: Tensor, target: Tensor, *, ignored: int | None = None, weight: Tensor | None = None) -> Tensor:
    """Mean binary cross-entropy of logits; every target value above 0 counts as 1. Shapes must be equal.

    `weight` is that of the background and of the foreground, `(2,)`.
    """
    true = _is_true(output, target)
    if ignored is None and weight is None:
        return F.binary_cross_entropy_with_logits(output, true)
    entropy = F.binary_cross_entropy_with_logits(output, true, reduction="none")
    if weight is not None:
        entropy = entropy * (weight[0] + (weight[1] - weight[0]) * true)
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
    """One minus the Tversky index (Salehi et al., 2017) of the whole image, with 1 added above and below the line.

    Of several channels, each of its own label, it is their mean.
    """
    p, t = torch.sigmoid(output), _is_true(output, target)
    if ignored is not None:
        counted = (target != ignored).to(output.dtype)
        p, t = p * counted, t * counted
    pixels = [0, *range(2, output.ndim)]
    hits = (p * t).sum(pixels)
    misses = false_positives * (p * (1 - t)).sum(pixels) + false_negatives * ((1 - p) * t).sum(pixels)
    return (1 - (hits + 1) / (hits + misses + 1)).mean()


def bce_dice(output: Tensor, target: Tensor, *, ignored: int | None = None) -> Tensor:
    """`bce` and `dice` added up."""
    return bce(output, target, ignored=ignored) + dice(output, target, ignored=ignored)


def focal(output: Tensor, target: Tensor, *, gamma: float = 2.0, ignored: int | None = None) -> Tensor:
    """Mean focal loss (Lin et al., 2017) of logits, without class weights; values above 0 count as 1."""
    entropy = F.binary_cross_entropy_with_logits(output, _is_true(output, target), reduction="none")
    return _mean((1 - torch.exp(-entropy)) ** gamma * entropy, target, ignored)


def ce(output: Tensor, target: Tensor, *, weight: Tensor | None = None, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of logits `(1, C, H, W)` and class ids `(1, 1, H, W)`, or `(1, C)` and `(1,)`; skips 255.

    `weight` is that of each class, `(C,)`, and makes a weighted mean, as in PyTorch; of a single slide, in whose mean
    it would cancel out, the weighted loss.
    """
    if not isinstance(output, Tensor):
        raise TargetError(
            f"ce takes logits, and the model gives a {type(output).__name__}; the head clam trains with the loss clam"
        )
    ids = (target.squeeze(1) if target.ndim == 4 else target).to(torch.int64)
    reduction = "sum" if output.ndim == 2 and len(output) == 1 else "mean"
    return F.cross_entropy(
        output, ids, weight, ignore_index=IGNORED, label_smoothing=label_smoothing, reduction=reduction
    )


def clam(
    output: Tensor | tuple[Tensor, Tensor],
    target: Tensor,
    *,
    weight: Tensor | None = None,
    bag_weight: float = 0.7,
    subtyping: bool = False,
) -> Tensor:
    """Weigh cross-entropy of a bag with that of its patches (CLAM, Lu et al., 2021); target `(1,)`, a class id.

    `output` is what the head `clam` gives in training, logits `(1, C)` and `(C, 2 k, 2)` of the patches of most and of
    least attention: to the classifier of the bag's class the former are evidence, the latter none. With `subtyping`,
    classes exclude each other, so that to all other classifiers the former are none. Of logits alone, which the head
    gives in eval mode, it is `ce`.
    """
    if isinstance(output, Tensor):
        return ce(output, target, weight=weight)
    logits_1C, instances_CK2 = output
    of_class_C = (torch.arange(len(instances_CK2), device=target.device) == target).to(logits_1C.dtype)
    k = instances_CK2.shape[1] // 2
    no_CK, yes_CK = (-instances_CK2.log_softmax(2)).unbind(2)
    instance_C = of_class_C * torch.cat([yes_CK[:, :k], no_CK[:, k:]], 1).mean(1)
    if subtyping:
        instance_C = (instance_C + (1 - of_class_C) * no_CK[:, :k].mean(1)) / len(instance_C)
    return bag_weight * ce(logits_1C, target, weight=weight) + (1 - bag_weight) * instance_C.sum()


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error; the target is taken as numbers. Shapes must be equal."""
    if output.shape != target.shape:  # PyTorch would repeat one of them
        raise TargetError(
            f"mse compares numbers one by one, and the output is {tuple(output.shape)} and the target "
            f"{tuple(target.shape)}; give the model as many outputs as the target has"
        )
    return F.mse_loss(output, target.to(output.dtype))


def cox(output: Tensor, target: Tensor) -> Tensor:
    """Negative log partial likelihood of Cox (1972), ties as Efron (1977) has them, the mean over the events.

    `output` `(N, 1)` is the logarithm of each risk, `target` `(N, 2)` the time and 1 where the event came then, 0 where
    there was none until then. 0 where there is no event at all.
    """
    risk_N, (time_N, event_N) = output.flatten(), target.to(output.dtype).unbind(1)
    shifted_N = (risk_N - risk_N.detach().max()).exp()
    at_risk_N = ((time_N >= time_N[:, None]).to(output.dtype) * shifted_N).sum(1)
    tied_NN = (time_N == time_N[:, None]).to(output.dtype) * event_N
    # Of d events at one time, the first sees all of them at risk, the second a d-th less, and so on.
    earlier_N = tied_NN.tril(-1).sum(1) / tied_NN.sum(1).clamp(min=1)
    logarithm_N = (at_risk_N - earlier_N * (tied_NN * shifted_N).sum(1)).log() + risk_N.detach().max()
    return ((logarithm_N - risk_N) * event_N).sum() / event_N.sum().clamp(min=1)


def _is_true(output: Tensor, target: Tensor) -> Tensor:
    # PyTorch compares no unsigned integers but bytes.
    known = target.to(torch.int64) if target.dtype in (torch.uint16, torch.uint32, torch.uint64) else target
    return (known > 0).to(output.dtype)


def _mean(values: Tensor, target: Tensor, ignored: int | None) -> Tensor:
    """Over all pixels, or over those whose target is not `ignored`; 0 where that is none."""
    if ignored is None:
        return values.mean()
    counted = (target != ignored).to(values.dtype)
    return (values * counted).sum() / counted.sum().clamp(min=1)


_LOSSES: Final[dict[str, tuple[Callable[..., Tensor], Kind]]] = {
    "bce": (bce, "binary"),
    "bce_dice": (bce_dice, "binary"),
    "ce": (ce, "class ids"),
    "clam": (clam, "class ids"),
    "cox": (cox, "survival"),
    "dice": (dice, "binary"),
    "focal": (focal, "binary"),
    "mse": (mse, "numbers"),
    "tversky": (tversky, "binary"),
}
_OF_BAGS: Final = "clam"
_IGNORING: Final = {
    name: function for name, (function, kind) in _LOSSES.items() if kind in ("binary", "class ids") and name != _OF_BAGS
}
_SETTINGS: Final = ("gamma", "false_positives", "false_negatives", "label_smoothing", "bag_weight", "subtyping")
_TERM: Final = re.compile(r"\s*(?:(\d+\.?\d*|\.\d+)\s*\*)?\s*(\S+)\s*")


def check_loss(name: str, origin: str | Path, trust: Collection[str]) -> None:
    """Raises `ModelError` where the file `origin` names a function as its loss that is not one of `trust`."""
    for _, term in _terms(name):
        if ":" in term:
            check_trusted(term.partition("?")[0], origin, trust)


def named_loss(name: str) -> Loss:
    """The loss `name`: one of ours, or the function or class at `package.module:callable`, with settings after a `?`.

    Several are added up, with factors: `ce + 0.5*mine:dice?smooth=1`. Raises `ConfigError` or `ModelError`.
    """
    terms = [(factor, *_found(term)) for factor, term in _terms(name)]
    kinds = {kind for _, _, kind in terms}
    if {"binary", "class ids"} <= kinds:
        raise ConfigError(
            f"the loss {name!r} adds up losses of class ids and binary ones; a target is one or the other"
        )
    if "survival" in kinds and kinds & {"binary", "class ids", "numbers"}:
        raise ConfigError(f"the loss {name!r} adds up cox and one of single slides; a target is one or the other")
    return Loss(
        tuple((factor, function) for factor, function, _ in terms),
        binary="binary" in kinds,
        class_ids="class ids" in kinds,
        survival="survival" in kinds,
    )


def kind_of(name: str) -> Kind | None:
    """Return what the loss `name` makes of a model's outputs, by the first of ours in a sum; imports nothing.

    None for nothing but losses of the user's own. Raises `ConfigError` for a text that is none.
    """
    names = [term.partition("?")[0] for _, term in _terms(name)]
    return next((_LOSSES[each][1] for each in names if each in _LOSSES), None)


def _terms(name: str) -> list[tuple[float, str]]:
    """Factors and losses of a sum. Raises `ConfigError` for a text that is none."""
    found = [_TERM.fullmatch(term) for term in re.split(r"\s\+\s", name)]
    terms = [(float(match[1] or 1), match[2]) for match in found if match is not None]
    if len(terms) != len(found):
        raise ConfigError(f"cannot read the loss {name!r}; write a name, or several as in: ce + 0.5*mine:dice")
    return terms


def _found(term: str) -> tuple[Callable[..., Tensor], Kind | None]:
    """The function of a term, and what it takes; None where that is the user's affair."""
    name, settings = parse_named(term)
    if ":" in name:
        made = import_callable(name)
        try:
            if isinstance(made, type):
                return made(**settings), None
        except Exception as error:  # anybody's own constructor
            raise ConfigError(f"cannot make the loss {term!r}: {type(error).__name__}: {error}") from error
        return (partial(made, **settings) if settings else made), None
    if name not in _LOSSES:
        raise ConfigError(
            f"unknown loss {name!r}{did_you_mean(name, _LOSSES)}; use {', '.join(_LOSSES)} or package.module:callable"
        )
    function, kind = _LOSSES[name]
    known = [key for key in inspect.signature(function).parameters if key in _SETTINGS]
    for key in settings:
        if key not in known:
            raise ConfigError(f"the loss {name!r} has no setting {key!r}; it has {', '.join(known) or 'none'}")
    return (partial(function, **settings) if settings else function), kind


def _plain(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    while isinstance(function, partial):
        function = function.func
    return function
