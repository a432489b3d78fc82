"""The loss of a run and the targets that it can take, and one clear line where it cannot.

A mask is checked twice, neither time with a pass of its own: a handful of places before training begins, so that a
cohort of the wrong kind fails at once, and every pixel as it passes by when the slide is first trained on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gigagrad.boxes import Box, spread
from gigagrad.cohorts import Cohort, Size, cases_of, survival_of
from gigagrad.cohorts.rows import Split
from gigagrad.config.fit import FitConfig
from gigagrad.errors import ConfigError, ModelError, TargetError
from gigagrad.events import Events, Notice
from gigagrad.execution.compiling import compile as compile_engine
from gigagrad.images import Image
from gigagrad.images.image import View
from gigagrad.images.pixels import Pixels
from gigagrad.losses import Loss
from gigagrad.masks import IGNORED, ClassTable
from gigagrad.prediction.slide_scores import ONE_ANSWER


@dataclass(frozen=True, slots=True)
class TargetRule:
    """A rule of what targets may hold: `loss` decides, `channels` is the number of output channels of the model.

    `ignores`: pixels of value `IGNORED` are left out, of a binary mask too.
    """

    loss: Loss
    channels: int
    ignores: bool = False

    @property
    def labels(self) -> int:
        """Return how many labels a pixel may have at once: with a binary loss as many as the model has channels."""
        return self.channels if self.loss.binary else 1

    def check_channels(self, channels: int, named: bool) -> None:
        """Raise `TargetError` for a mask of so many channels; `named`: somebody named it, and no recipe made it."""
        if not named and self.labels > 1:
            raise TargetError(f"the mask is empty, and the tissue recipe makes one label of {self.labels}; name a mask")
        if channels in (1, self.labels) or not (self.loss.binary or self.loss.class_ids):
            return
        each = f", or {self.labels}, one for each label" if self.labels > 1 else ""
        remedy = f"give the model {channels} outputs for as many labels" if self.loss.binary else "name one mask"
        if channels in (3, 4):
            remedy += ", or save a picture in colours in grey or with a palette"
        raise TargetError(
            f"the mask has {channels} channels, and the model {self.channels} outputs; the loss takes one channel of "
            f"class ids{each}; {remedy}"
        )

    def label(self, value: float, name: str) -> Tensor:
        """Read a slide's number for the loss: `(1,)` int64 class id, else `(1, 1)` float32. Raises `TargetError`."""
        if not self.loss.class_ids:
            if self.loss.binary and value not in (0, 1):
                raise TargetError(f"the label of {name} is {value:g}; a binary loss takes 0 or 1")
            return torch.tensor([[value]], dtype=torch.float32)
        if value != int(value) or not 0 <= value < self.channels:
            raise TargetError(
                f"the label of {name} is {value:g}; ce takes a class from 0 to {self.channels - 1} with this model"
            )
        return torch.tensor([int(value)], dtype=torch.int64)

    def survival(self, text: str, name: str) -> Tensor:
        """Read a survival time: `(1, 2)` float32, the time and whether the event came. Raises `TargetError`."""
        found = survival_of(text)
        if found is None:
            raise TargetError(
                f"the label of {name} is {text!r}; cox takes a time and an event: columns 'time' and 'event', or a "
                "label like 12.5, with a plus behind it where there was no event until then"
            )
        return torch.tensor([found], dtype=torch.float32)

    def foreign(self, pixels: np.ndarray[Any, np.dtype[Any]], foreground: float | None) -> str | None:
        """Say what is wrong with these pixels, in a few words; None if nothing is. Cheap: a maximum and a comparison.

        `foreground` is the value beside 0 that a binary mask has shown so far.
        """
        largest = pixels.max()
        if pixels.dtype.kind == "f" and not np.isfinite(pixels).all():
            return "NaN or infinite values"
        if self.loss.binary:
            if self.ignores:
                pixels = pixels[pixels != IGNORED]
                largest = pixels.max(initial=0)
            known = largest if foreground is None or largest == 0 else foreground
            wrong = pixels[(pixels != 0) & (pixels != known)] if largest else pixels[pixels != 0]
            if wrong.size:
                return f"the values {wrong[0]:g} and {known:g}; a binary loss takes 0 and one other value"
        if self.loss.class_ids:
            if pixels.dtype.kind not in "uib":
                return f"{pixels.dtype} values; ce takes whole numbers, which are class ids"
            if pixels.dtype.kind == "i" and (smallest := pixels.min()) < 0:
                return f"class {smallest}; ce takes 0 to {self.channels - 1} with this model"
            if largest >= self.channels:
                wrong = pixels[(pixels >= self.channels) & (pixels != IGNORED)]
                if wrong.size:
                    return f"class {wrong.max()}; ce takes 0 to {self.channels - 1} with this model ({IGNORED}: ignore)"
        return None


class CheckedMask(View):
    """`mask` as it is, except that reading values which break `rule` raises `TargetError`."""

    def __init__(self, mask: Image, rule: TargetRule) -> None:
        super().__init__(mask)
        self._rule = rule
        self._foreground: float | None = None
        self._lock = Lock()

    def _read_inside(self, box: Box) -> Pixels:
        pixels = self._image.read(box)
        values = np.asarray(pixels)
        with self._lock:
            problem = self._rule.foreign(values, self._foreground)
            if problem is None and self._foreground is None and self._rule.loss.binary:
                counted = values[values != IGNORED] if self._rule.ignores else values
                self._foreground = float(counted.max(initial=0)) or None
        if problem is not None:
            raise TargetError(f"the mask of {self.name} holds {problem}; renumber it or choose another --loss")
        return pixels


def sample_mask(mask: Image, rule: TargetRule) -> set[int]:
    """Check small boxes spread over `mask`, and return the whole numbers in them. Raises `TargetError`."""
    checked = CheckedMask(mask, rule)
    seen: set[int] = set()
    for box in spread(mask.height, mask.width):
        seen |= {int(value) for value in np.unique(np.asarray(checked.read(box)))}
    return seen


def output_channels(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Return the size of the model's channel axis for an image of this `(C, H, W)`, or a bag of this `(N, C, h, w)`,
    found without computing a pixel.

    Raises `CaptureError` for a model that does not take such an image, `ModelError` for one that answers of each patch.
    """
    return _output_shape(model, shape)[1]


def planned_target(model: nn.Module, loss: Loss, shape: tuple[int, ...]) -> NDArray[Any]:
    """Make a target of zeros to plan a step with: a mask of the image `(C, H, W)`, of one value seen everywhere, or a
    label where the model gives one answer, as of a bag `(N, C, h, w)`. Raises as `output_channels`.
    """
    found = _output_shape(model, shape)
    labels = found[1] if loss.binary else 1
    if len(found) > 2:
        return np.broadcast_to(np.uint8(0), (labels, *shape[-2:]))
    if loss.survival:
        return np.zeros((1, 2), np.float32)
    return np.zeros(1, np.int64) if loss.class_ids else np.zeros((1, labels), np.float32)


def _output_shape(model: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the model's output. Raises as `output_channels`."""
    batch = shape if len(shape) == 4 else (1, *shape)
    try:
        with torch.no_grad():
            output = copy.deepcopy(model).eval().to("meta")(torch.empty(batch, dtype=torch.uint8, device="meta"))
        found = tuple(map(int, output.shape))
    except Exception:  # of any model's own; capture can do more, and says in our words what is wrong
        graph = compile_engine(model).problem(torch.zeros((), dtype=torch.uint8).expand(shape)).graph
        found = graph[graph.output].shape
    if len(shape) == 4 and (len(found) != 2 or found[0] != 1):
        raise ModelError(f"the model's output is {found} for {shape[0]} patches, {ONE_ANSWER}")
    return found


BALANCED = "balanced"


def fit_loss(
    config: FitConfig,
    loss: Loss,
    cohort: Cohort,
    sizes: Sequence[Size],
    table: ClassTable | None,
    model: nn.Module,
    events: Events,
) -> tuple[Loss, TargetRule]:
    """Fit `loss` to cohort, classes and model: without ignored pixels and with the weights of classes. Returns it with
    the rule of its targets.

    Raises `ConfigError` where loss, classes and model are not one another's, and
    `TargetError` for a mask of other channels.
    """
    labels = [row.label for row in cohort.rows if row.label is not None]
    dense = not labels
    asked = loss.class_ids or loss.survival or loss.binary
    channels = output_channels(model, sizes[0].shape) if asked or config.patches is not None else 1
    _check_channels(config, loss, channels, labels, table)
    if dense and loss.class_ids and table is not None and channels > table.count:
        text = f"there are {table.count} classes, and {config.model} has {channels} outputs; no mask shows the others"
        events.emit(Notice(text, warning=True))
    ignores = dense and _ignores(loss, sizes, channels, table, events)
    if ignores:
        loss = loss.ignoring()
    rule = TargetRule(loss, channels, ignores)
    for row, size in zip(cohort.rows, sizes, strict=True):
        with cohort.telling(row):
            rule.check_channels(size.labels, named=row.mask is not None or row.label is not None)
    if loss.survival:
        _check_compared(rule, cohort, events)
    if config.class_weights:
        loss = loss.weighted(class_weights(config.class_weights, (), channels if loss.class_ids else 2))
    for _, each in loss.made_of:
        if isinstance(each, nn.Module):
            each.to(config.device)
    return loss, rule


_LEARNT_FROM: Final[tuple[Split, ...]] = ("train", "val")


def _check_compared(rule: TargetRule, cohort: Cohort, events: Events) -> None:
    """Raise `ConfigError` where the loss of the training cases is the same whatever their risks; of the cases to
    validate that is told.
    """
    for split in _LEARNT_FROM:
        cases = cases_of(cohort.of(split))
        times = [tuple(rule.survival(case[0].label or "", case[0].name)[0].tolist()) for case in cases]
        compared = any(event and sum(other >= time for other, _ in times) > 1 for time, event in times)
        if not cases or compared:
            continue
        text = f"cox compares nothing in split {split!r}: no case has the event while another one is followed still"
        if split == "train":
            raise ConfigError(f"{text}; give it cases that have")
        kept = "every epoch has the same validation loss, and the weights of the first one are kept"
        events.emit(Notice(f"{text}; {kept}", warning=True))


def _check_channels(
    config: FitConfig, loss: Loss, channels: int, labels: Sequence[str], table: ClassTable | None
) -> None:
    """Raise `ConfigError` for a model of other output channels than the loss and the classes need; a classifier has no
    more of them than there are classes: what they say would be noise.
    """
    if labels and loss.binary and channels > 1:
        raise ConfigError(
            f"{config.loss} takes one output of a slide, and {config.model} has {channels}; give it one, as in "
            "timm:NAME?num_classes=1, or train with ce"
        )
    if labels and loss.class_ids:
        classes = table.count if table is not None else 1 + max(int(float(label.removesuffix("+"))) for label in labels)
        if channels > classes:
            raise ConfigError(
                f"the labels are of {classes} classes and {config.model} has {channels} outputs; make them as many, as "
                f"in timm:NAME?num_classes={classes}, or name all the classes that it tells apart: --classes NAME=ID"
            )
    if loss.survival and channels != 1:
        raise ConfigError(f"cox takes one output of a slide, a risk, and {config.model} has {channels}; give it one")
    regions = () if table is None else table.regions
    if regions and not (loss.binary and channels == len(regions)):
        raise ConfigError(
            f"the classes are regions that may overlap ({table}): they take a binary loss, bce_dice for one, and a "
            f"model of {len(regions)} output channels, got {config.loss} and {config.model}"
        )
    if loss.class_ids and channels > IGNORED:
        raise ConfigError(
            f"{config.model} has {channels} outputs, and ce leaves out what has the id {IGNORED}; it takes up to "
            f"{IGNORED} classes"
        )
    # A class without a channel of its own is the background; of labels, each has one.
    needed = 0 if table is None else table.count - (1 if loss.binary and channels > 1 else 0)
    if (loss.class_ids or channels > 1) and needed > channels:
        raise ConfigError(
            f"there are {needed} classes ({table}), and {config.model} has {channels} output channels; give the model "
            "one for each"
        )


def _ignores(loss: Loss, sizes: Sequence[Size], channels: int, table: ClassTable | None, events: Events) -> bool:
    """Return whether pixels of masks are left out; of a loss that cannot, it is told where only what is missing is."""
    # Masks of several labels tell 255 from what is true of a pixel, whatever they are made of.
    if (table is not None and table.ignores) or (loss.binary and channels > 1):
        return True
    if not any(size.gaps for size in sizes):
        return False
    if not (loss.binary or loss.class_ids):
        text = "the loss takes every pixel, those without data among them, which are 0"
        events.emit(Notice(text, warning=True))
    return loss.binary or loss.class_ids


def class_weights(entries: Sequence[str], counts: Iterable[NDArray[np.int64]], classes: int) -> tuple[float, ...]:
    """Make weights of `classes` classes, of the texts in `entries` or, for `balanced`, of their `counts`.

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
