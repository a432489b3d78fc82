"""Choosing the tile shape: the fastest that fits in the budget, by a small cost model of the machine.

Small tiles compute their halos again and again and pay a fixed price per operator; large ones fall out of the caches.
Both effects are in the model; the measured consequences are in docs/decisions/0002-tile-shape.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from gigagrad.errors import BudgetError
from gigagrad.graphs import Graph
from gigagrad.plans.geometry import Grid, TileGeometry, lattice
from gigagrad.plans.memory import crop_bytes, tile_peak_bytes, worst_tile
from gigagrad.plans.plan import Pass, Plan, StagePlan
from gigagrad.plans.schedule import make_passes
from gigagrad.plans.stages import Stage, split_stages

_SMALLEST_SIDE_PX = 16
_LARGEST_SIDE_PX = 4096
_ALLOCATOR_SLACK = 1.5
"""Resident bytes per byte allocated: freed blocks that the allocator has not given back (bench/tile_memory.py)."""

_SHARED_EFFICIENCY = 0.5
"""What each further thread adds when threads share the operators of one tile (bench/tile_shape.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the cost model knows of the machine. Rates are for all threads together."""

    threads: int = 1
    cache_bytes: int = 32 * 2**20
    cached_bytes_per_second: float = 40e9
    memory_bytes_per_second: float = 12e9
    flops_per_second: float = 100e9
    seconds_per_operator: float = 60e-6

    @classmethod
    def detect(cls, threads: int) -> Machine:
        """The last-level cache as the kernel reports it; the rates stay at their defaults."""
        sizes = []
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}.get(text[-1], 1))
        return cls(threads=threads, cache_bytes=max(sizes)) if sizes else cls(threads=threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The memory a plan may count on, in bytes. `budget_bytes=None` means that only speed decides."""

    budget_bytes: int | None
    base_bytes: int
    peak_bytes: int
    """The highest the process has been before the run; the peak of the whole process cannot be below it."""
    reader_cache_bytes: int
    runtime_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """What the process holds whatever the tiles: itself, the readers' caches and what kernels still add."""
        return self.base_bytes + self.runtime_bytes + self.reader_cache_bytes


def make_plan(
    graph: Graph,
    limits: Limits,
    machine: Machine,
    *,
    image_shape: tuple[int, ...],
    backward: bool,
    device: str,
    memory_format: str,
    tiles: tuple[tuple[int, int], ...] | None,
) -> Plan:
    """The fastest plan that fits, or the one with these `tiles` (one shape for each stage; the last serves the rest).

    Raises:
        BudgetError: even the smallest tile does not fit; names the stage, the tile and every number.
    """
    stages = split_stages(graph)
    passes = make_passes(graph, stages, backward=backward)
    options = []
    refusal: BudgetError | None = None
    for workers in dict.fromkeys((machine.threads, 1)):
        parameter_bytes = _parameter_bytes(graph, workers, backward=backward)
        try:
            options.append(_fit(graph, stages, passes, limits, machine, tiles, workers, parameter_bytes))
        except BudgetError as error:
            refusal = error  # of the last, which is the leanest
    if not options:
        assert refusal is not None
        raise refusal
    best = min(options, key=lambda option: option.seconds)
    return Plan(
        image_shape=image_shape,
        device=device,
        memory_format=memory_format,
        workers=best.workers,
        stages=best.stages,
        passes=passes,
        budget_bytes=limits.budget_bytes,
        base_bytes=limits.base_bytes,
        parameter_bytes=best.parameter_bytes,
        reader_bytes=limits.reader_cache_bytes + best.ahead_bytes,
        runtime_bytes=limits.runtime_bytes,
        predicted_peak_bytes=max(best.peak_bytes, limits.peak_bytes),
        predicted_seconds=None,
    )


@dataclass(frozen=True, slots=True)
class _Option:
    """A way to run all stages; `seconds` is the cost model's, for comparing options only."""

    workers: int
    stages: tuple[StagePlan, ...]
    seconds: float
    parameter_bytes: int
    ahead_bytes: int
    peak_bytes: int


def _fit(
    graph: Graph,
    stages: tuple[Stage, ...],
    passes: tuple[Pass, ...],
    limits: Limits,
    machine: Machine,
    tiles: tuple[tuple[int, int], ...] | None,
    workers: int,
    parameter_bytes: int,
) -> _Option:
    """For each stage the fastest tile that fits beside the others' needs. Raises `BudgetError` if one has none."""
    # Each worker's crop, two being read, and with several workers one more in the queue.
    crops_ahead = workers + 2 + (workers > 1)
    fixed = limits.fixed_bytes + parameter_bytes

    def total(stage_plan: StagePlan, ahead: int) -> int:
        return fixed + ahead + int(workers * stage_plan.tile_peak_bytes * _ALLOCATOR_SLACK)

    seconds, peak, most_ahead, chosen = 0.0, fixed, 0, []
    for stage in stages:
        sweeps = [p for p in passes if p.stage == stage.index]
        differentiates = any(p.phase != "forward" for p in sweeps)
        shapes = [tiles[min(stage.index, len(tiles) - 1)]] if tiles else _candidates(graph, stage)
        costed = [_cost(graph, stage, shape, machine, crops_ahead, backward=differentiates) for shape in shapes]
        budget = limits.budget_bytes
        fitting = [c for c in costed if budget is None or total(c[1], c[2]) <= budget]
        if not fitting:
            _, leanest, ahead = min(costed, key=lambda c: total(c[1], c[2]))
            assert budget is not None
            needed = total(leanest, ahead)
            raise BudgetError(
                f"stage {stage.index} does not fit: its leanest tile, {leanest.tile[0]} x {leanest.tile[1]} px with a "
                f"crop of {leanest.crop[0]} x {leanest.crop[1]} px, works on {leanest.tile_peak_bytes:,} bytes beside "
                f"{fixed:,} bytes for the process, the parameters and the readers",
                budget_bytes=budget,
                needed_bytes=needed,
                smallest_bytes=_roomy(needed),
            )
        speedups = {c[1].tile: _speedup(machine.threads, workers, c[1].tile_count) for c in fitting}
        cost, best, ahead = min(fitting, key=lambda c: c[0] / speedups[c[1].tile])
        seconds += len(sweeps) * cost / speedups[best.tile]
        peak, most_ahead = max(peak, total(best, ahead)), max(most_ahead, ahead)
        chosen.append(best)
    return _Option(workers, tuple(chosen), seconds, parameter_bytes, most_ahead, peak)


def _speedup(threads: int, workers: int, tile_count: int) -> float:
    """How much faster than one thread: whole tiles share out well unless they are few, single operators less so."""
    if workers == 1:
        return 1 + _SHARED_EFFICIENCY * (threads - 1)
    return tile_count / -(-tile_count // workers)


def _roomy(needed_bytes: int) -> int:
    """A budget to recommend: some MiB to spare, because a process never starts twice with the same size, and rounded
    up to a number that survives being printed with three digits and typed in again.
    """
    step = max(16 * 2**20, 1 << (needed_bytes.bit_length() - 6))
    return -(-(needed_bytes + 8 * 2**20) // step) * step


def _parameter_bytes(graph: Graph, workers: int, *, backward: bool) -> int:
    """Of every parameter and every global value made from them: the value or its copy in working layout, and, where it
    has one, the plain gradient, the float64 sum and the contributions of the tiles at work and of one that is done.
    """
    contributions = workers + (workers > 1)
    total = 0
    for node in graph.nodes:
        if node.op == "parameter" or not (node.is_field or node.is_source):
            total += node.nbytes
            if backward and node.differentiable:
                total += (1 + contributions) * node.nbytes + 8 * prod(node.shape)
    return total


def _candidates(graph: Graph, stage: Stage) -> list[tuple[int, int]]:
    """Tile shapes worth costing: squares in steps of the lattice, cut to the field's own size."""
    grid = Grid(graph, stage, (1, 1))
    size = tuple(graph[grid.reference].size(axis) for axis in (0, 1))
    steps = lattice(graph, stage)
    shapes = []
    side = _SMALLEST_SIDE_PX
    while side <= _LARGEST_SIDE_PX:
        shapes.append(tuple(min(_round_up(side, steps[axis]), size[axis]) for axis in (0, 1)))
        side = max(side + 16, side * 5 // 4)
    return [(h, w) for h, w in dict.fromkeys(shapes)]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _cost(
    graph: Graph, stage: Stage, shape: tuple[int, int], machine: Machine, crops_ahead: int, *, backward: bool
) -> tuple[float, StagePlan, int]:
    """Seconds per pixel by the model, the stage's plan with this tile, and the bytes of crops read ahead."""
    grid = Grid(graph, stage, shape)
    tile = worst_tile(grid)
    boxes = [box for i in stage.images if (box := tile.box(i)) is not None]
    crop = max((box.shape for box in boxes), default=(0, 0))
    useful = min(shape[0], graph[grid.reference].size(0)) * min(shape[1], graph[grid.reference].size(1))
    scale = _image_pixels(graph, stage) / (graph[grid.reference].size(0) * graph[grid.reference].size(1))
    plan = StagePlan(
        index=stage.index,
        operators=len(stage.fields),
        reductions=len(stage.reductions),
        tile=shape,
        tiles=grid.shape,
        crop=crop,
        computed_ratio=crop[0] * crop[1] / (useful * scale),
        tile_peak_bytes=tile_peak_bytes(graph, stage, tile, backward=backward),
    )
    ahead = crops_ahead * sum(crop_bytes(graph, tile, i) for i in stage.images)
    return _tile_seconds(graph, stage, tile, machine, backward=backward) / useful, plan, ahead


def _image_pixels(graph: Graph, stage: Stage) -> int:
    return max((graph[i].size(0) * graph[i].size(1) for i in stage.images), default=1)


def _tile_seconds(graph: Graph, stage: Stage, tile: TileGeometry, machine: Machine, *, backward: bool) -> float:
    sweeps = 3 if backward else 1  # a backward costs about two forwards
    seconds = 0.0
    for node_id in stage.fields:
        own = crop_bytes(graph, tile, node_id)
        traffic = own + sum(crop_bytes(graph, tile, i) for i in set(graph[node_id].operands) if graph[i].is_field)
        cached = traffic <= machine.cache_bytes // 2
        rate = machine.cached_bytes_per_second if cached else machine.memory_bytes_per_second
        seconds += traffic / rate + _flops(graph, node_id, own) / machine.flops_per_second
        seconds += machine.seconds_per_operator
    return sweeps * seconds


def _flops(graph: Graph, node_id: int, crop: int) -> float:
    """Multiplications and additions of a convolution or a linear layer on a crop of this many bytes."""
    node = graph[node_id]
    if not node.op.startswith(("aten.conv", "aten.linear")):
        return 0.0
    field, weight = graph[node.operands[0]], graph[node.operands[1]]
    outputs = crop / node.dtype.itemsize
    if "transpose" in node.op:
        inputs = outputs * prod(field.shape) / prod(node.shape)
        return 2.0 * inputs * prod(weight.shape[1:])
    return 2.0 * outputs * prod(weight.shape[1:])
