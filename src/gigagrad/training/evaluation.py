"""Evaluation on slides that a network is not trained on: the loss of validation slides, scores of test slides.

Of several ranks, groups share out the slides of a validation, computing each as in a step, and single ranks those of a
test, since an image that a model returns comes from one process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from gigagrad.cohorts import Cohort, Row, bags_of
from gigagrad.config.fit import FitConfig
from gigagrad.events import Events
from gigagrad.execution.compiling import compile as compile_engine
from gigagrad.execution.engine import Engine
from gigagrad.images import Image
from gigagrad.losses import Loss, kind_of
from gigagrad.masks import ClassTable
from gigagrad.prediction.classes import Channels, image_shape
from gigagrad.prediction.cohort_scores import compare_labels
from gigagrad.prediction.scores import Confusion, Evaluation, score_logits
from gigagrad.prediction.slide_scores import Reading, output_of
from gigagrad.ranks import Mesh, Ranks
from gigagrad.training.dataset import Dataset
from gigagrad.training.learner import Learner
from gigagrad.training.sharing import plan_alike

_THRESHOLD = 0.5


def validate(learner: Learner, dataset: Dataset, rows: tuple[Row, ...], events: Events, mesh: Mesh) -> float:
    """Return the mean loss over `rows`, or that of all bags, without turns and in eval mode. Emits the job
    `validate`.
    """
    learner.model.eval()
    with events.job("validate", len(rows)) as advance:
        if (group := learner.group) is not None:
            bags = bags_of(rows)
            opened = [[partial(dataset.seen, row) for row in bag] for bag in bags]
            losses = [group.loss(opened, [dataset.label(bag[0]) for bag in bags])]
            advance(len(rows), "")
        else:
            engine = learner.engine
            with dataset.open(rows[0]) as (slide, target):
                plan_alike(engine, lambda: engine.plan(slide, target, backward=False), mesh.data)

            def loss(row: Row) -> float:
                with dataset.open(row) as (slide, target):
                    value = _loss(engine, slide, target)
                dataset.passed(row)
                return value

            losses = mesh.data.map(rows, loss, lambda done, _: advance(done, rows[done - 1].name))
    return math.fsum(losses) / len(losses)


def test(
    model: nn.Module,
    config: FitConfig,
    loss: Loss,
    dataset: Dataset,
    table: ClassTable | None,
    cohort: Cohort,
    events: Events,
    ranks: Ranks,
) -> tuple[str, dict[str, float], dict[str, Any]]:
    """Score test slides: masks by Dice, labels by `_of_labels`, anything else by the loss. Emits the job `test`.

    Returns what they are scored by, Dice, risk or loss; the scores by name; and what `evaluate` says of labels, or of
    the classes of masks.
    """
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
    if not rows:
        return metric, {}, {}
    with dataset.open(rows[0]) as (slide, target):
        plan_alike(engine, lambda: engine.plan(slide, target if engine.loss else None, backward=False), ranks)
    if rated:
        return metric, *_of_labels(engine, rows, dataset, loss, config.loss, table, events, ranks)

    def score(row: Row) -> tuple[float, dict[str, Any] | None]:
        with dataset.open(row) as (slide, target):
            if not dense:
                return _loss(engine, slide, target), None
            assert isinstance(target, Image)
            shape = image_shape(engine, slide)
            channels = Channels.of(1 if shape is None else shape[1], config.loss)
            counts = score_logits(engine.stream(slide), target, channels, table, slide)
            return counts.dice, counts.to_dict()

    with events.job("test", len(rows)) as advance:

        def tell(done: int, value: tuple[float, Any]) -> None:
            advance(done, f"{rows[done - 1].name}: {value[0]:.4f}")

        found = ranks.map(rows, score, tell)
    scores = {row.name: value for row, (value, _) in zip(rows, found, strict=True)}
    if not dense:
        return metric, scores, {}
    counts = {row.name: Confusion.from_dict(content) for row, (_, content) in zip(rows, found, strict=True)}
    said = Evaluation.of(counts, table).to_dict()
    return metric, scores, {name: said[name] for name in ("classes", "confusion")}


def _of_labels(
    engine: Engine,
    rows: Sequence[Row],
    dataset: Dataset,
    loss: Loss,
    name: str,
    table: ClassTable | None,
    events: Events,
    ranks: Ranks,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Score slides or bags by their loss, or by the risk; and by `SlideEvaluation.to_dict`, empty for several
    numbers of a slide. `name` is what the loss is called. Emits the job `test`.
    """

    def output(row: Row) -> tuple[str, list[list[float]]]:
        with dataset.seen(row) as slide:
            found = output_of(engine, slide)
        return str(found.dtype).removeprefix("torch."), found.tolist()

    with events.job("test", len(rows)) as advance:
        found = ranks.map(rows, output, lambda done, _: advance(done, rows[done - 1].name))
    outputs = {
        row.name: torch.tensor(values, dtype=getattr(torch, dtype))
        for row, (dtype, values) in zip(rows, found, strict=True)
    }
    reading = Reading.of(next(iter(outputs.values())).shape[1], name, table)
    scores = {}
    for bag in bags_of(rows):
        output_NC = torch.cat([outputs[row.name] for row in bag]).mean(0, keepdim=True)
        called = bag[0].bag or bag[0].name
        target = dataset.label(bag[0]).to(output_NC.device)
        scores[called] = float(output_NC if loss.survival else loss.function(output_NC, target))
    if not reading.names and len(reading.columns) > 1:
        return scores, {}
    read = {row.name: (reading, reading.scores(outputs[row.name])) for row in rows}
    return scores, compare_labels(rows, read, table, _THRESHOLD).to_dict()


def _loss(engine: Engine, slide: Image, target: Image | torch.Tensor) -> float:
    value = engine.forward(slide, target)
    assert isinstance(value, torch.Tensor)
    return float(value)
