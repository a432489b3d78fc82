"""Hold what a run needs beside its inputs: made by the planner, run by `Run`, timed by trials and by calibration."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gigagrad.devices import Device
from gigagrad.execution.tile_program import TilePrograms
from gigagrad.graphs import Graph
from gigagrad.plans import Grid, Parts, Plan, Problem, Stage
from gigagrad.plans.parts import parts_of
from gigagrad.stores import Rounding


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A captured graph with its plan, ready to run on any image of the same size."""

    plan: Plan
    device: Device
    problem: Problem
    programs: TilePrograms
    taken: tuple[float, ...] | None = None
    """Seconds that each pass took when this ran last; None before, and after streams, in which others have a part."""
    _parts: dict[tuple[object, ...], Parts] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.problem.graph

    @property
    def rounding(self) -> Rounding | None:
        return self.problem.rounding

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.plan.computed

    def parts(self, stage: int) -> Parts:
        """Return the parts of a stage's tiles: worked out once, whatever runs."""
        described = self.plan.stages[stage]
        key = stage, described.tile, described.parts
        if key not in self._parts:
            self._parts[key] = parts_of(self.graph, described)
        return self._parts[key]

    def grid(self, stage: Stage) -> Grid:
        return self.parts(stage.index).grid

    @property
    def layout(self) -> torch.memory_format:
        last = self.plan.memory_format == "channels_last"
        return torch.channels_last if last else torch.contiguous_format
