"""Hold what a run needs beside its inputs: made by the planner, run by `Run`, timed by trials and by calibration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gigagrad.boxes import Box
from gigagrad.devices import Device
from gigagrad.execution.seeds import SEED, drawing
from gigagrad.execution.tile_program import SegmentPrograms
from gigagrad.graphs import Graph, Merge, merge_of
from gigagrad.graphs.crops import OnDevices
from gigagrad.plans import Chunks, Grid, Plan, Problem, Segment, estimate, split_segments
from gigagrad.plans.chunks import chunks_of, waiting_sums
from gigagrad.plans.memory import gradient_sum_bytes
from gigagrad.plans.partition import sum_dtype
from gigagrad.plans.plan import amount_of, total
from gigagrad.plans.segments import summed_globals
from gigagrad.stores import FieldSpec, Rounding

Shape = tuple[tuple[int, ...], torch.dtype]
PlanKey = dict[str, Any]
"""The choices of a plan as plain types: enough to make the same plan again, in another process, too."""


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """Holds what the tiles of a segment's passes have in common in every run."""

    segment: Segment
    programs: SegmentPrograms
    leaves: tuple[int, ...]
    """The nodes, beside fields, whose gradients a backward pass sums."""
    reduced: frozenset[int]
    """The fields that its reductions reduce."""
    merges: Mapping[int, Merge]
    """Reductions that are merged otherwise than by adding up."""
    gradients: Mapping[int, Shape]
    """Shapes and dtypes of the sums of gradients."""
    reductions: Mapping[int, Shape]
    sum_bytes: int
    """Bytes that the sums of gradients of a backward pass take."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Prepared:
    """A captured graph with its plan, ready to run on any image of the same size."""

    plan: Plan
    device: Device
    problem: Problem
    compiled: int = 0
    """The number of kernels that its convolutions are compiled to."""
    ran: bool = False
    taken: tuple[float, ...] | None = None
    """Seconds that each pass took when this ran last; None before, and after streams, in which others have a part."""
    _chunks: dict[tuple[object, ...], Chunks] = field(default_factory=dict)
    windows: dict[tuple[int, bool, int], list[tuple[Box, FieldSpec]]] = field(init=False, default_factory=dict)
    """Windows that ranks hold of buffers, by node, whether of cotangents, and rank."""
    _passes: dict[int, Pass] = field(init=False, default_factory=dict)
    _programs: dict[Segment, SegmentPrograms] = field(default_factory=dict)
    _constants: dict[str, OnDevices] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.problem.graph

    @property
    def rounding(self) -> Rounding | None:
        return self.problem.rounding

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.plan.computed

    def constant(self, name: str) -> torch.Tensor:
        """Return a constant of the graph, on the device."""
        if name not in self._constants:
            self._constants[name] = OnDevices(self.graph.constants[name])
        return self._constants[name].on(self.device.torch_device)

    @property
    def may_be_recorded(self) -> bool:
        """Say whether a step of it asks for the same whatever is in an image, all of it in the device's own memory."""
        elsewhere = any(field.tier != self.problem.memory.name for field in self.plan.kept)
        draws = any(self.graph[i].op != SEED for i in drawing(self.graph))
        return self.problem.is_recorded and not (elsewhere or draws)

    @property
    def places_images(self) -> bool:
        """Say whether the device holds the images and labels during a run."""
        return amount_of(self.plan.fixed, estimate.IMAGES) > 0

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

    def programs(self, segment: Segment) -> SegmentPrograms:
        """Return the programs of a segment's tiles, each made when a tile first asks for it."""
        found = self._programs.get(segment)
        if found is None:
            made = SegmentPrograms(self.graph, segment, self.device.torch_device)
            found = self._programs.setdefault(segment, made)
        return found

    def bound(self, segment: int) -> Pass:
        """Return what passes of a segment need that no run changes."""
        found = self._passes.get(segment)
        if found is None:
            found = self._passes[segment] = self._bind(segment)
        return found

    def _bind(self, index: int) -> Pass:
        graph, segment, described = self.graph, self.segments[index], self.plan.segments[index]
        leaves, sums = summed_globals(graph, segment), self.device.sum_dtype

        def shapes(nodes: Iterable[int]) -> dict[int, Shape]:
            return {i: (graph[i].shape, sum_dtype(self.problem, i)) for i in nodes}

        waiting = 1 + waiting_sums(described.chunks, described.tile_count)
        merges = ((i, merge_of(graph[i])) for i in segment.reductions)
        return Pass(
            segment=segment,
            programs=self.programs(segment),
            leaves=tuple(leaves),
            reduced=frozenset(graph[i].operands[0] for i in segment.reductions),
            merges={i: merge for i, merge in merges if merge is not None},
            gradients=shapes(leaves),
            reductions=shapes(segment.reductions),
            sum_bytes=waiting * gradient_sum_bytes(graph, segment, sums),
        )

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
        "saved": [segment.saved_tiles for segment in plan.segments],
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
        "saved": [int(tiles) for tiles in data.get("saved", [0] * len(data["tiles"]))],
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
