"""Times tiles of random pixels: how long a step will take, and in which memory layout it is faster."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch

from gigagrad.boxes import Box
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.tile_program import PassContext, TileInputs
from gigagrad.graphs import Node
from gigagrad.plans import Grid, Segment
from gigagrad.plans.segments import differentiable_reductions, summed_globals
from gigagrad.stores import crop_shape
from gigagrad.threads import operator_threads

_ROUNDS = 5
_WINS_NEEDED = 4
_TIMINGS = 2
_CLEARLY = 0.85
"""Contiguous must take at most this share of channels_last's time, in most rounds, to be taken: on a busy machine
single timings are off by large factors, and the choice should not flicker."""


def trial_seconds(prepared: Prepared, memory_format: str, timings: int = _TIMINGS) -> tuple[float, ...]:
    """Time each pass in this layout, by the fastest of so many runs of a middle tile of it: the first run of every
    kernel is slower, and on a busy machine any run may be. Whole-field operators take what the cost model says.
    """
    layout = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
    plan, problem, found = prepared.plan, prepared.problem, list[float]()
    tiles = [(prepared.segments[step.segment], step.phase != "forward") for step in plan.passes]
    with operator_threads(plan.threads):
        runs = [[_tile_seconds(prepared, *tile, layout) for tile in tiles] for _ in range(timings)]
    forward = dict[int, float]()
    whole = plan.whole_seconds / max(1, len(plan.passes))
    for (segment, backward), seconds in zip(tiles, map(min, zip(*runs, strict=True)), strict=True):
        described = plan.segments[segment.index]
        computed = described.tile_count * seconds
        if backward:  # what was saved is not computed again
            computed -= described.saved_tiles * forward.get(segment.index, 0.0)
        else:
            forward[segment.index] = seconds
        reading = problem.reading.seconds_of(problem.graph, segment)
        found.append(problem.reading.pass_seconds(reading, computed / plan.workers, plan.readers) + whole)
    return tuple(found)


def _tile_seconds(prepared: Prepared, segment: Segment, backward: bool, layout: torch.memory_format) -> float:
    graph, tile = prepared.graph, prepared.grid(segment).middle
    generator = torch.Generator().manual_seed(0)

    def values(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point:
            made = torch.rand(shape, generator=generator).to(dtype)
        else:  # 0 and 1 are legal as class ids, as pixels and as truth values
            made = torch.randint(0, 2, shape, generator=generator).to(dtype)
        made = made.to(prepared.device.torch_device)
        return made.contiguous(memory_format=layout) if made.ndim == 4 else made

    crops, shares = {}, {}
    for i in segment.reads:
        box = tile.box(i)
        if box is not None:
            crops[i] = values(_crop_shape(graph[i], box), graph[i].dtype)
    for i in segment.kept:
        if graph[i].differentiable and not tile.wanted(i).empty:
            shares[i] = values(_crop_shape(graph[i], tile.wanted(i)), graph[i].dtype)
    boundary = {i: values(graph[i].shape, graph[i].dtype) for i in segment.globals}
    ones = {
        r: torch.ones(graph[r].shape, dtype=graph[r].dtype, device=prepared.device.torch_device)
        for r in differentiable_reductions(graph, segment)
    }
    program = prepared.programs(segment).at(tile)
    start = time.perf_counter()
    if backward:
        inputs = TileInputs(crops, shares, dict(shares))
        leaves = summed_globals(graph, segment)
        fields = [i for i in crops if graph[i].differentiable]
        context = PassContext(layout, globals=boundary, leaves=leaves, fields=fields, cotangents=ones)
        program.gradients(tile, inputs, context)
    else:
        with torch.no_grad():
            program.partial_sums(tile, program.run(tile, crops, boundary))
    prepared.device.synchronize()
    return time.perf_counter() - start


def _crop_shape(node: Node, box: Box) -> tuple[int, ...]:
    return crop_shape(node.stored_shape, node.stored_axes, box)


def faster_layout(prepared: Prepared) -> tuple[str, tuple[float, ...]]:
    """Find the faster memory format of the two and the seconds each pass would take in it (pixels at hand).

    The two are compared on tiles of half the side, so that the slower one, which may need more memory than the plan
    counts on, stays below the plan's own peak.
    """
    small = _with_tiles(
        prepared, [(max(1, h // 2), max(1, w // 2)) for h, w in (s.tile for s in prepared.plan.segments)]
    )
    trial_seconds(small, "channels_last", 1)  # the first run of every kernel is slower
    wins = losses = 0
    while wins < _WINS_NEEDED and losses <= _ROUNDS - _WINS_NEEDED:
        contiguous, last = (sum(trial_seconds(small, layout, 1)) for layout in ("contiguous", "channels_last"))
        won = contiguous < _CLEARLY * last
        wins, losses = wins + won, losses + (not won)
    layout = "contiguous" if wins == _WINS_NEEDED else "channels_last"
    return layout, trial_seconds(prepared, layout)


def _with_tiles(prepared: Prepared, tiles: list[tuple[int, int]]) -> Prepared:
    segments = tuple(
        dataclasses.replace(plan, tile=tile, tiles=Grid(prepared.graph, segment, tile).shape)
        for plan, segment, tile in zip(prepared.plan.segments, prepared.segments, tiles, strict=True)
    )
    return dataclasses.replace(prepared, plan=dataclasses.replace(prepared.plan, segments=segments))
