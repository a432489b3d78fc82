"""The objective of a run: the loss and the rule of its targets, as they fit the cohort, its classes and the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import nn

from gigagrad.cohorts import Cohort, Size
from gigagrad.config.fit import FitConfig
from gigagrad.errors import ConfigError
from gigagrad.events import Events, Notice
from gigagrad.losses import Loss
from gigagrad.masks import IGNORED, ClassTable
from gigagrad.training.targets import TargetRule, output_channels

BALANCED = "balanced"


@dataclass(frozen=True, slots=True)
class Objective:
    """`loss` is without ignored pixels and with the weights of classes; `rule` says what targets may hold."""

    loss: Loss
    rule: TargetRule

    @classmethod
    def of(
        cls,
        config: FitConfig,
        loss: Loss,
        cohort: Cohort,
        sizes: Sequence[Size],
        table: ClassTable | None,
        model: nn.Module,
        events: Events,
    ) -> Self:
        """Fit `loss` to `model`. Raises `ConfigError` where loss, classes and model are not one another's, and
        `TargetError` for a mask of other channels.
        """
        labels = [row.label for row in cohort.rows if row.label is not None]
        dense = not labels
        asked = loss.class_ids or loss.survival or loss.binary
        channels = output_channels(model, sizes[0].shape) if asked else 1
        if labels:
            _check_outputs(config, loss, channels, labels, table)
        _check_channels(config, loss, channels, table)
        if dense and loss.class_ids and table is not None and channels > table.count:
            text = (
                f"there are {table.count} classes, and {config.model} has {channels} outputs; no mask shows the others"
            )
            events.emit(Notice(text, warning=True))
        ignores = dense and _ignores(loss, sizes, channels, table, events)
        if ignores:
            loss = loss.ignoring()
        rule = TargetRule(loss, channels, ignores)
        for row, size in zip(cohort.rows, sizes, strict=True):
            with cohort.telling(row):
                rule.check_channels(size.labels, named=row.mask is not None or row.label is not None)
        if config.class_weights:
            loss = loss.weighted(class_weights(config.class_weights, (), channels if loss.class_ids else 2))
        for _, each in loss.made_of:
            if isinstance(each, nn.Module):
                each.to(config.device)
        return cls(loss, rule)


def _check_channels(config: FitConfig, loss: Loss, channels: int, table: ClassTable | None) -> None:
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


def _check_outputs(
    config: FitConfig, loss: Loss, channels: int, labels: Sequence[str], table: ClassTable | None
) -> None:
    """Raise `ConfigError` for a classifier of more outputs than there are classes: what they say is noise."""
    if loss.binary and channels > 1:
        raise ConfigError(
            f"{config.loss} takes one output of a slide, and {config.model} has {channels}; give it one, as in "
            "timm:NAME?num_classes=1, or train with ce"
        )
    if not loss.class_ids:
        return
    classes = table.count if table is not None else 1 + max(int(float(label.removesuffix("+"))) for label in labels)
    if channels > classes:
        raise ConfigError(
            f"the labels are of {classes} classes and {config.model} has {channels} outputs; make them as many, as in "
            f"timm:NAME?num_classes={classes}, or name all the classes that it tells apart: --classes NAME=ID"
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
