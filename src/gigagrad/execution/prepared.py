"""What a run needs beside its inputs: made by the planner, run by `Run`, timed by trials and by calibration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from gigagrad.graphs import Graph
from gigagrad.plans import Grid, Plan, Stage
from gigagrad.stores import Codec, Rounding


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A captured graph with its plan, ready to run on any image of the same size."""

    graph: Graph
    plan: Plan
    stages: tuple[Stage, ...]
    device: torch.device
    scratch: Path | None = None
    """The folder for the files of kept fields."""
    rounding: Rounding | None = None
    """What the plan's packed fields are rounded by."""
    codec: Codec | None = None
    """What makes fewer bytes of bricks whose values are exact, where that is faster than the disk."""

    def grid(self, stage: Stage) -> Grid:
        return Grid(self.graph, stage, self.plan.stages[stage.index].tile)

    @property
    def layout(self) -> torch.memory_format:
        last = self.plan.memory_format == "channels_last"
        return torch.channels_last if last else torch.contiguous_format
