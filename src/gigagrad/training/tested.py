"""How a finished network does on test slides that have labels: their loss, and what `evaluate` says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gigagrad.cohorts import Row, bags_of
from gigagrad.events import Events
from gigagrad.execution.engine import Engine
from gigagrad.losses import Loss
from gigagrad.masks import ClassTable
from gigagrad.prediction.cohort_scores import score_labels
from gigagrad.prediction.slide_scores import Reading, output_of
from gigagrad.training.pairs import Pairs

_THRESHOLD = 0.5


def test_labels(
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
    found = score_labels(rows, lambda row: (reading, reading.scores(outputs[row.name])), table, _THRESHOLD, Events(()))
    return scores, found.to_dict()
