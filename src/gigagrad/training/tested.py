"""How a network does on slides that it is not trained on: the loss of validation slides, scores of test slides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from gigagrad.cohorts import Cohort, Row, bags_of
from gigagrad.events import Events
from gigagrad.execution.engine import Engine
from gigagrad.execution.engine import compile as compile_engine
from gigagrad.images import Image
from gigagrad.losses import Loss, kind_of
from gigagrad.masks import ClassTable
from gigagrad.prediction.classes import Channels, image_shape
from gigagrad.prediction.cohort_scores import compare_labels
from gigagrad.prediction.evaluate import score_logits
from gigagrad.prediction.slide_scores import Reading, output_of
from gigagrad.training.config import FitConfig
from gigagrad.training.learner import Learner
from gigagrad.training.pairs import Pairs

_THRESHOLD = 0.5


@dataclass(frozen=True, slots=True)
class Tested:
    """Scores of test slides by name, in `metric`: Dice, risk or loss; and what `evaluate` says of labels."""

    metric: str
    scores: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)


def validate(learner: Learner, pairs: Pairs, rows: tuple[Row, ...], events: Events) -> float:
    """Mean loss over `rows`, or that of all bags, without turns and in eval mode. Emits the job `validate`."""
    learner.model.eval()
    losses: list[float] = []
    with events.job("validate", len(rows)) as advance:
        if (group := learner.group) is not None:
            bags = bags_of(rows)
            opened = [[partial(pairs.seen, row) for row in bag] for bag in bags]
            losses.append(group.loss(opened, [pairs.label(bag[0]) for bag in bags]))
            advance(len(rows), "")
        else:
            for row in rows:
                with pairs.open(row) as (slide, target):
                    losses.append(_loss(learner.engine, slide, target))
                pairs.passed(row)
                advance(len(losses), row.name)
    return math.fsum(losses) / len(losses)


def test(
    model: nn.Module,
    config: FitConfig,
    loss: Loss,
    pairs: Pairs,
    table: ClassTable | None,
    cohort: Cohort,
    events: Events,
) -> Tested:
    """Of masks Dice, of labels what `_of_labels` says, of anything else the loss. Emits the job `test`."""
    rows, kind = cohort.of("test"), kind_of(config.loss)
    of_pixels = cohort.rows[0].label is None
    dense = of_pixels and kind != "numbers"
    # Scores of slides are read off the output, of which the loss is one more line; unless it is a user's own.
    rated = not of_pixels and kind is not None
    engine = compile_engine(
        model,
        None if dense or rated else loss.function,
        memory=config.memory,
        scratch=config.scratch,
        device=config.device,
        precision=config.precision,
    )
    engine.events.subscribe(events.emit)
    metric = "dice" if dense else "risk" if loss.survival else "loss"
    if rated and rows:
        return Tested(metric, *_of_labels(engine, rows, pairs, loss, config.loss, table, events))
    scores: dict[str, float] = {}
    with events.job("test", len(rows)) as advance:
        for row in rows:
            with pairs.open(row) as (slide, target):
                if dense:
                    assert isinstance(target, Image)
                    shape = image_shape(engine, slide)
                    channels = Channels.of(1 if shape is None else shape[1], config.loss)
                    scores[row.name] = score_logits(engine.stream(slide), target, channels, table, slide).dice
                else:
                    scores[row.name] = _loss(engine, slide, target)
            advance(len(scores), f"{row.name}: {scores[row.name]:.4f}")
    return Tested(metric, scores)


def _of_labels(
    engine: Engine, rows: Sequence[Row], pairs: Pairs, loss: Loss, name: str, table: ClassTable | None, events: Events
) -> tuple[dict[str, float], dict[str, Any]]:
    """By slide or bag its loss, of survival the risk; and `SlideEvaluation.to_dict`, empty where there are several
    numbers of a slide. `name` is what the loss is called. Emits the job `test`.
    """
    outputs: dict[str, torch.Tensor] = {}
    with events.job("test", len(rows)) as advance:
        for row in rows:
            with pairs.seen(row) as slide:
                outputs[row.name] = output_of(engine, slide)
            advance(len(outputs), row.name)
    reading = Reading.of(next(iter(outputs.values())).shape[1], name, table)
    scores = {}
    for bag in bags_of(rows):
        output_NC = torch.cat([outputs[row.name] for row in bag]).mean(0, keepdim=True)
        called = bag[0].bag or bag[0].name
        target = pairs.label(bag[0]).to(output_NC.device)
        scores[called] = float(output_NC if loss.survival else loss.function(output_NC, target))
    if not reading.names and len(reading.columns) > 1:
        return scores, {}
    found = {row.name: (reading, reading.scores(outputs[row.name])) for row in rows}
    return scores, compare_labels(rows, found, table, _THRESHOLD).to_dict()


def _loss(engine: Engine, slide: Image, target: Image | torch.Tensor) -> float:
    value = engine.forward(slide, target)
    assert isinstance(value, torch.Tensor)
    return float(value)
