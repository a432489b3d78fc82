"""Hold what a run needs beside its inputs: made by the planner, run by `Run`, timed by trials and by calibration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from gigagrad.devices import Device
from gigagrad.execution.tile_program import TilePrograms
from gigagrad.graphs import Graph
from gigagrad.plans import Chunks, Grid, Plan, Problem, Segment, estimate, split_segments
from gigagrad.plans.chunks import chunks_of
from gigagrad.plans.plan import amount_of, total
from gigagrad.stores import Rounding

PlanKey = dict[str, Any]
"""The choices of a plan as plain types: enough to make the same plan again, in another process, too."""


@dataclass(slots=True, eq=False)
class Prepared:
    """A captured graph with its plan, ready to run on any image of the same size."""

    plan: Plan
    device: Device
    problem: Problem
    programs: TilePrograms
    compiled: int = 0
    """The number of kernels that its convolutions are compiled to."""
    ran: bool = False
    taken: tuple[float, ...] | None = None
    """Seconds that each pass took when this ran last; None before, and after streams, in which others have a part."""
    _chunks: dict[tuple[object, ...], Chunks] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.problem.graph

    @property
    def rounding(self) -> Rounding | None:
        return self.problem.rounding

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.plan.computed

    @property
    def fixed_bytes(self) -> int:
        """Bytes that the process holds beside the tiles, with what kernels add."""
        return total(self.problem.held) + amount_of(self.plan.fixed, estimate.COMPILED)

    def chunks(self, segment: int) -> Chunks:
        """Return the chunks of a segment's tiles: worked out once, whatever runs."""
        described = self.plan.segments[segment]
        key = segment, described.tile, described.chunks
        if key not in self._chunks:
            self._chunks[key] = chunks_of(self.graph, described)
        return self._chunks[key]

    def grid(self, segment: Segment) -> Grid:
        return self.chunks(segment.index).grid

    @property
    def layout(self) -> torch.memory_format:
        last = self.plan.memory_format == "channels_last"
        return torch.channels_last if last else torch.contiguous_format

    def has_run_as(self, plan: Plan) -> bool:
        """Say whether it has compiled what this plan needs."""
        return self.ran and plan_key(plan) == plan_key(self.plan)


def plan_key(plan: Plan) -> PlanKey:
    """Record what planning decided for one size."""
    return {
        "memory_format": plan.memory_format,
        "workers": plan.workers,
        "threads": plan.threads,
        "tiles": [list(segment.tile) for segment in plan.segments],
        "kept": [[field.node, field.tier] for field in plan.kept],
        "whole": plan.whole is not None,
        "whole_pixels": plan.whole_pixels,
    }


def read_plan_key(data: PlanKey) -> PlanKey:
    """Check a key that comes from elsewhere, also of an earlier version. Raises KeyError, TypeError or ValueError."""
    workers = int(data["workers"])
    return {
        "memory_format": data["memory_format"],
        "workers": workers,
        # Choices of earlier versions left it to PyTorch.
        "threads": int(data.get("threads", 1 if workers > 1 else torch.get_num_threads())),
        "tiles": [[int(height), int(width)] for height, width in data["tiles"]],
        "kept": [[int(node), str(tier)] for node, tier in data["kept"]],
        "whole": bool(data.get("whole", False)),
        "whole_pixels": int(data.get("whole_pixels", 0)),
    }


def suits(key: PlanKey, graph: Graph) -> bool:
    """Say whether a graph has these fields and as many segments: it may come from another version of a model."""
    if key["whole"]:
        return True
    if key["whole_pixels"] and graph.coarse_whole is None:
        return False
    graph = graph.with_whole(key["whole_pixels"])
    fields = [node for node, _ in key["kept"]]
    computed = all(i < len(graph.nodes) and graph[i].is_field and not graph[i].is_source for i in fields)
    return computed and len(split_segments(graph, fields)) == len(key["tiles"])
