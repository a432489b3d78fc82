"""A small cost model of the machine: what one tile of a stage takes in time and in memory.

Small tiles compute their halos again and again and pay a fixed price per operator; large ones fall out of the caches.
Both effects are in the model; the measured consequences are in docs/decisions/0002-tile-shape.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gigagrad.graphs import Graph
from gigagrad.plans.geometry import Grid, TileGeometry, lattice
from gigagrad.plans.keeping import convolution_flops
from gigagrad.plans.memory import crop_bytes, tile_peak_bytes, worst_tile
from gigagrad.plans.plan import StagePlan
from gigagrad.plans.stages import Stage

_SMALLEST_SIDE_PX = 16
_LARGEST_SIDE_PX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the cost model knows of the machine. Rates are for all threads together."""

    threads: int = 1
    cache_bytes: int = 32 * 2**20
    cached_bytes_per_second: float = 40e9
    memory_bytes_per_second: float = 12e9
    flops_per_second: float = 100e9
    seconds_per_operator: float = 60e-6
    scratch_bytes_per_second: float = 1e9

    @classmethod
    def detect(cls, threads: int) -> Machine:
        """The last-level cache as the kernel reports it; the rates stay at their defaults."""
        sizes = []
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}.get(text[-1], 1))
        return cls(threads=threads, cache_bytes=max(sizes)) if sizes else cls(threads=threads)


@dataclass(frozen=True, slots=True)
class TileCost:
    """One stage with one tile shape. Seconds are one thread's, for the whole stage."""

    plan: StagePlan
    seconds: float
    crop_bytes: int
    """What is read ahead for each tile."""
    crops: Mapping[int, tuple[int, int]]
    """Height and width of a tile's crop of each field that the stage reads or keeps."""


class Costs:
    """Costs of the stages of one graph, each computed once: plans that keep other fields share most of their stages."""

    def __init__(self, graph: Graph, machine: Machine) -> None:
        self._graph = graph
        self._machine = machine
        self._known: dict[tuple[object, ...], TileCost] = {}

    def of(self, stage: Stage, shape: tuple[int, int], *, backward: bool) -> TileCost:
        key = (stage.kept, stage.reductions, stage.output, stage.fields, stage.reads, shape, backward)
        if key not in self._known:
            self._known[key] = self._cost(stage, shape, backward=backward)
        return self._known[key]

    def sweep_seconds(self, stage: Stage, shape: tuple[int, int]) -> float:
        """One forward sweep by one thread, judged by a tile in the middle: quicker than `of`, for comparing cuts."""
        grid = Grid(self._graph, stage, shape)
        rows, columns = grid.shape
        tile = grid[rows // 2 * columns + columns // 2]
        reference = self._graph[grid.reference]
        pixels = reference.size(0) * reference.size(1)
        return self._tile_seconds(stage, tile, backward=False) * pixels / tile.wanted(grid.reference).area

    def _cost(self, stage: Stage, shape: tuple[int, int], *, backward: bool) -> TileCost:
        graph = self._graph
        grid = Grid(graph, stage, shape)
        tile = worst_tile(grid)
        boxes = [box for i in stage.reads if (box := tile.box(i)) is not None]
        crop = max((box.shape for box in boxes), key=lambda s: s[0] * s[1], default=(0, 0))
        reference = graph[grid.reference]
        useful = min(shape[0], reference.size(0)) * min(shape[1], reference.size(1))
        scale = _largest_read_px(graph, stage) / (reference.size(0) * reference.size(1))
        plan = StagePlan(
            index=stage.index,
            operators=len(stage.fields),
            reductions=len(stage.reductions),
            keeps=len(stage.kept),
            tile=shape,
            tiles=grid.shape,
            crop=crop,
            computed_ratio=crop[0] * crop[1] / (useful * scale),
            tile_peak_bytes=tile_peak_bytes(graph, stage, tile, backward=backward),
        )
        read = sum(crop_bytes(graph, tile, i) for i in stage.reads)
        # The kept fields' shares come along with their cotangents.
        cotangents = 2 * sum(crop_bytes(graph, tile, i) for i in stage.kept) if backward else 0
        pixels = reference.size(0) * reference.size(1)
        own = {i: tile.wanted(i).shape for i in stage.kept}
        crops = {i: box.shape for i in stage.reads if (box := tile.box(i)) is not None} | own
        seconds = self._tile_seconds(stage, tile, backward) * pixels / useful
        return TileCost(plan, seconds, read + cotangents, crops)

    def _tile_seconds(self, stage: Stage, tile: TileGeometry, backward: bool) -> float:
        graph, machine = self._graph, self._machine
        sweeps = 3 if backward else 1  # a backward costs about two forwards
        moved = sum(crop_bytes(graph, tile, i) for i in (*stage.reads, *stage.kept))
        seconds = moved / machine.memory_bytes_per_second
        for node_id in stage.fields:
            own = crop_bytes(graph, tile, node_id)
            traffic = own + sum(crop_bytes(graph, tile, i) for i in set(graph[node_id].operands) if graph[i].is_field)
            cached = traffic <= machine.cache_bytes // 2
            rate = machine.cached_bytes_per_second if cached else machine.memory_bytes_per_second
            share = own / graph[node_id].nbytes
            seconds += traffic / rate + share * convolution_flops(graph, node_id) / machine.flops_per_second
            seconds += machine.seconds_per_operator
        return sweeps * seconds


def candidates(graph: Graph, stage: Stage) -> list[tuple[int, int]]:
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


def _largest_read_px(graph: Graph, stage: Stage) -> int:
    return max((graph[i].size(0) * graph[i].size(1) for i in stage.reads), default=1)
