"""Runs a network on noise and times the passes of its plan, each beside the work it had to do."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import nn

from gigagrad.events import Event, Events, TileDone
from gigagrad.execution.calibration.networks import draw_network, flops, is_dense, loss
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.process import held_bytes
from gigagrad.execution.run import Run
from gigagrad.execution.sources import Source, image_source, target_source
from gigagrad.graphs import Composite, Graph, capture
from gigagrad.plans import Limits, Machine, make_plan, split_stages
from gigagrad.plans.work import Work, mean_tile, sweep_work

Clock = Callable[[], float]

_MOST_PIXELS = 1_000_000
_SHORTEST_PX = 96
"""Side of the smallest drawn image: deep networks divide it by up to 40."""

_SLACK_BYTES = 2**30
"""By how much a timed run may exceed what its plan counts before freed memory is given back."""


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A network captured for noise of one size."""

    composite: Composite
    graph: Graph
    sources: dict[str, Source]

    def prepare(self, tile: tuple[int, int], *, workers: int) -> Prepared:
        """A plan with tiles of one shape for every stage, `workers` at a time (or fewer, where there are fewer)."""
        # What the process holds, and slack: a run that seems to exceed its plan would trim the heap all the time.
        held = held_bytes(torch.device("cpu"))
        limits = Limits(budget_bytes=None, base_bytes=held, reader_cache_bytes=0, runtime_bytes=_SLACK_BYTES)
        plan = make_plan(
            self.graph,
            limits,
            Machine(threads=workers),
            image_shape=self.sources["image"].spec.shape,
            backward=True,
            device="cpu",
            memory_format="channels_last",
            tiles=(tile,),
        )
        stages = split_stages(self.graph, [field.node for field in plan.kept])
        return Prepared(self.graph, plan, stages, torch.device("cpu"))

    def step(self, prepared: Prepared, events: Events) -> None:
        """One forward and backward; the gradients are thrown away."""
        with Run(prepared, self.sources, self._stored, events, backward=True) as run:
            run.run()

    def _stored(self, kind: str, name: str) -> torch.Tensor:
        owner = self.composite
        return (owner.get_parameter(name) if kind == "parameter" else owner.get_buffer(name)).detach()


def make_subject(
    model: nn.Module, criterion: Callable[..., torch.Tensor], size: tuple[int, int], *, dense: bool
) -> Subject:
    """Capture a model and a loss for a noise image `(3, *size)` and a mask of that size, or a class label."""
    rng = np.random.default_rng(0)
    image = image_source(rng.integers(0, 255, (3, *size), dtype=np.uint8))
    truth = rng.integers(0, 2, (1, *size), dtype=np.uint8) if dense else torch.tensor([1])
    target = target_source(truth, image)
    graph = capture(model, criterion, image.spec, target.spec)
    return Subject(Composite(model, criterion, None), graph, {"image": image, "target": target})


def draw_subject(number: int, draw: random.Random) -> Subject:
    """A random network with an image of a size that suits its cost."""
    network = draw_network(number)
    per_pixel = flops(network, (256, 256)) / 256**2
    pixels = min(10 ** draw.uniform(8.7, 10.3) / per_pixel, _MOST_PIXELS)
    width = max(_SHORTEST_PX, int((pixels * draw.uniform(0.6, 1.6)) ** 0.5))
    return make_subject(network, loss, (max(_SHORTEST_PX, int(pixels / width)), width), dense=is_dense(network))


def pass_seconds(subject: Subject, prepared: Prepared, rounds: int, clock: Clock = time.process_time) -> list[float]:
    """For each pass of the plan the least time of `rounds` runs; one more run before them warms up.

    A pass ends with its last tile, so what happens between two passes counts for the second; what happens after the
    last tile of all, for the last pass.
    """
    plan = prepared.plan
    ends = list(accumulate(plan.stages[step.stage].tile_count for step in plan.passes))
    best = [float("inf")] * len(ends)
    subject.step(prepared, Events())
    for _ in range(rounds):
        stamps: list[float] = []

        def note(event: Event, stamps: list[float] = stamps) -> None:
            if isinstance(event, TileDone):
                stamps.append(clock())

        start = clock()
        subject.step(prepared, Events((note,)))
        bounds = [start, *(stamps[end - 1] for end in ends[:-1]), clock()]
        best = [min(known, after - before) for known, (before, after) in zip(best, pairwise(bounds), strict=True)]
    return best


def pass_work(prepared: Prepared, cache_bytes: int) -> list[Work]:
    """The work of each pass of the plan."""
    found = []
    for step in prepared.plan.passes:
        stage = prepared.stages[step.stage]
        tile = mean_tile(prepared.grid(stage))
        found.append(sweep_work(prepared.graph, stage, tile, cache_bytes, gradient=step.phase != "forward"))
    return found
