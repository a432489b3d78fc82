"""What a run needs beside its inputs: made by the planner, run by `Run`, timed by trials and by calibration."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gigagrad.devices import Device
from gigagrad.graphs import Graph
from gigagrad.plans import Grid, Plan, Problem, Stage
from gigagrad.plans.owners import Owners
from gigagrad.stores import Rounding


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A captured graph with its plan, ready to run on any image of the same size."""

    plan: Plan
    stages: tuple[Stage, ...]
    device: Device
    problem: Problem
    rounding: Rounding | None = None
    """What the plan's packed fields are rounded by."""
    taken: tuple[float, ...] | None = None
    """Seconds that each pass took when this ran last; None before, and after streams, in which others have a part."""
    _owners: dict[int, Owners] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.problem.graph

    def owners(self, ranks: int) -> Owners:
        """Who computes and holds what, of so many ranks: worked out once, whatever runs."""
        return self._owners.setdefault(ranks, Owners(self.graph, self.stages, self.plan, ranks))

    def grid(self, stage: Stage) -> Grid:
        return Grid(self.graph, stage, self.plan.stages[stage.index].tile)

    @property
    def layout(self) -> torch.memory_format:
        last = self.plan.memory_format == "channels_last"
        return torch.channels_last if last else torch.contiguous_format
