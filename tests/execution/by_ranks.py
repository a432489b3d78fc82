"""One image by several ranks in threads of this process: what each of them finds, as bits."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gigagrad as gg
from gigagrad.execution.model_state import stored_in
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.run import Run
from gigagrad.execution.seeds import drawing, draws_of
from gigagrad.execution.sources import opened_sources
from gigagrad.plans.emit import shared_by
from gigagrad.ranks import Ranks


@dataclass(frozen=True)
class RankRun:
    """A planned step, captured once for all ranks: tracing is not for several threads."""

    engine: gg.Engine
    prepared: Prepared
    image: Any
    target: Any


def prepared_for(
    model: nn.Module, loss: Callable[[Any, Any], torch.Tensor], image: Any, target: Any, **options: Any
) -> RankRun:
    return prepared_by(gg.compile(model, loss, **options), image, target)


def prepared_by(engine: gg.Engine, image: Any, target: Any) -> RankRun:
    engine.in_tiles = True
    with opened_sources(engine._composite, image, target) as sources:
        graph = engine._captures.get(sources).graph
        prepared = engine._planner.prepare(graph, sources, None, backward=True)
    return RankRun(engine, prepared, image, target)


def outcome(run: RankRun, ranks: Ranks, journal: Path | None = None) -> tuple[str, int]:
    """A hash of the loss, of all gradients and of the buffers' new values, and the bytes that this rank sent."""
    engine, prepared, before = run.engine, run.prepared, ranks.sent_bytes
    planned = 1 if prepared.plan.ranks is None else prepared.plan.ranks.count
    if planned != ranks.count:
        plan = shared_by(prepared.problem, prepared.plan, ranks.count)
        prepared = dataclasses.replace(prepared, plan=plan)
    with opened_sources(engine._composite, run.image, run.target) as sources:
        stored = stored_in(engine._composite, prepared.graph)
        draws = draws_of(0, None, ranks, drawn=bool(drawing(prepared.graph)))
        options: dict[str, Any] = {"draws": draws, "ranks": ranks, "journal": journal}
        with Run(prepared, sources, stored, engine.events, **options) as step:
            step.run()
    found = [step.output]
    for results in (step.gradients, step.input_gradients, step.updates):
        found += [value for _, value in sorted(results.items())]
    digest = hashlib.sha256()
    for value in found:
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest(), ranks.sent_bytes - before
