"""Estimate the memory of a plan as a list of named amounts that adds up to its peak, and the time of its passes.

Memory is counted only here. What no choice of tiles changes is *fixed*; the rest is each segment's own, in its
passes. The peak is the fixed part and the hungriest segment's. The allowances are in `gigagrad.allowances`, with what
each was measured from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Final, NamedTuple

from gigagrad.allowances import (
    ALLOCATOR_CACHE_PER_TILE,
    ALLOCATOR_FRAGMENTATION,
    FEW_TILES,
    FRAGMENTATION_BESIDE_WHOLE,
    FRAGMENTATION_OF_DOUBLING,
    FREED_OF_RECORDED,
    HEAP_TOP_BYTES,
    LEAST_ALLOCATOR_CACHE_BYTES,
    MAPPED_BYTES,
    MOST_ALLOCATOR_CACHE_BYTES,
    MOST_FURTHER_FRAGMENTATION,
    READ_AHEAD,
    SAVED_FRAGMENTATION,
    WRITES_BEHIND,
)
from gigagrad.graphs import Graph
from gigagrad.plans.chunks import chunk_count, waiting_sums
from gigagrad.plans.cost import TileCost
from gigagrad.plans.geometry import reference, runs_by_rows
from gigagrad.plans.memory import gradient_sum_bytes, whole_field_bytes
from gigagrad.plans.plan import COTANGENTS as COTANGENTS
from gigagrad.plans.plan import FIELDS as FIELDS
from gigagrad.plans.plan import Amount, Plan, SegmentPlan, amount_of, total
from gigagrad.plans.problem import Problem
from gigagrad.plans.saving import Savable
from gigagrad.plans.segments import Segment, moved_fields
from gigagrad.stores import Tier
from gigagrad.stores.store import Size

ABOUT_AS_FAST = 1.1
"""Times that differ by less are alike, as far as rates can tell."""
_GIVEN_BACK = 0.4
"""Share of what a tile takes that it touches anew where nothing may be held between tiles (by page faults of the
paper's network 0.37 and 0.39 on a Xeon with AMX)."""

PROCESS: Final = "process before the run"
READERS: Final = "readers' caches"
OPTIMIZER: Final = "optimizer's state"
STEP: Final = "kernels' code and threads"
GRADIENTS: Final = "gradients and values of parameters"
WHOLE: Final = "whole-field operators"
WHOLE_FRAGMENTATION: Final = "freed blocks beside whole fields"
MESSAGES: Final = "messages between ranks"
COMPILED: Final = "compiled convolutions"
WEIGHTS: Final = "weights in the layout of tiles"
ALLOCATOR_CACHE: Final = "freed blocks held for the next tiles"
OVERLAPS: Final = "cotangents where chunks of a segment overlap"
SUMS: Final = "sums and working copies of parameters"
WAITING: Final = "crops on their way"
OUTPUT: Final = "output"
TILES: Final = "tiles being computed"
ACTIVATIONS: Final = "activations and gradients of the whole image"
ACTIVATION_FRAGMENTATION: Final = "freed blocks of activations"
IMAGES: Final = "images and labels"
FRAGMENTATION: Final = "freed blocks of tiles"
RESULTS: Final = "results of the recorded step"
RECORDED_FRAGMENTATION: Final = "freed blocks of the recorded step"
_OF_SEGMENTS: Final = FIELDS, COTANGENTS, OVERLAPS, SUMS, WAITING, OUTPUT, TILES, FRAGMENTATION
"""Amounts of a segment, in the order in which they are counted."""


def problem_of(plan: Plan, problem: Problem) -> Problem:
    """Return the problem that a plan solves: this one, or the one in which images are read crop by crop."""
    return problem if problem.unplaced is None or amount_of(plan.fixed, IMAGES) else problem.unplaced


def fixed_amounts(problem: Problem, message_bytes: int = 0) -> tuple[Amount, ...]:
    """Return what no choice of tiles changes, but compiled convolutions. Messages of ranks take `message_bytes`."""
    graph, backward = problem.graph, problem.backward
    gradients, whole = _gradient_bytes(graph, backward=backward), whole_field_bytes(graph, backward=backward)
    beside = int(FRAGMENTATION_BESIDE_WHOLE * (gradients + whole)) if whole else 0
    messages = () if problem.ranks == 1 else (Amount(MESSAGES, message_bytes),)
    amounts = (
        *problem.held,
        Amount(IMAGES, problem.image_bytes),
        Amount(GRADIENTS, gradients),
        Amount(RESULTS, gradients if problem.is_recorded else 0),
        Amount(WHOLE, whole),
        Amount(WHOLE_FRAGMENTATION, beside),
        *messages,
    )
    if not problem.is_recorded or problem.budget_bytes is None:
        return amounts
    room = max(0, problem.budget_bytes - total(amounts))
    return (*amounts, Amount(RECORDED_FRAGMENTATION, int(FREED_OF_RECORDED * room)))


def weights(problem: Problem, segments: Iterable[Segment], peak_bytes: int) -> Amount:
    """Count a copy of all weights that serves every pass, where the budget has room beside a peak without it."""
    graph, room = problem.graph, problem.budget_bytes
    read = {i for segment in segments for i in segment.globals if graph[i].is_source and len(graph[i].shape) == 4}
    nbytes = sum(graph[i].nbytes for i in read)
    return Amount(WEIGHTS, nbytes if room is None or peak_bytes + nbytes <= room else 0)


def allocator_cache(problem: Problem, peak_bytes: int, tiles_bytes: int) -> Amount:
    """Count what the allocator may hold between tiles, where the budget has room beside a peak without it."""
    useful = useful_allocator_cache_bytes(tiles_bytes)
    if problem.is_recorded and problem.budget_bytes is None:
        useful = max(useful, int(FREED_OF_RECORDED * peak_bytes))
    room = useful if problem.budget_bytes is None else problem.budget_bytes - peak_bytes
    return Amount(ALLOCATOR_CACHE, max(0, min(useful, room)))


def useful_allocator_cache_bytes(tiles_bytes: int) -> int:
    """Return as many bytes as let next to no tile touch new pages, of tiles that take `tiles_bytes` side by side."""
    return max(
        LEAST_ALLOCATOR_CACHE_BYTES, min(MOST_ALLOCATOR_CACHE_BYTES, int(ALLOCATOR_CACHE_PER_TILE * tiles_bytes))
    )


class TileChoice(NamedTuple):
    """A tile shape for a segment."""

    seconds: float
    size_bytes: int
    compiled: int
    cost: TileCost


@dataclass(eq=False)
class SegmentTiles:
    """The tile shapes that may serve one segment, and the memory and time that its passes take with each. `held` is
    what is kept in memory during them: the fields and the cotangents of the pass in which both together are most.
    """

    problem: Problem
    segment: Segment
    workers: int
    kept: Mapping[int, str]
    held: tuple[int, int]
    phases: Sequence[str]
    """The phases of its passes."""
    room: int | None = None
    """Bytes beside what is fixed, but for compiled convolutions."""
    most_readers: int = 1
    """While tiles are chosen, time is that of so many; their crops are counted once it is known how many there are."""
    readers: int = 1
    """Number of threads that read ahead of its tiles."""
    shapes: Sequence[tuple[int, int]] = ()
    """All shapes worth costing, the smallest first."""
    costs: list[TileCost] = field(default_factory=list)
    exact: set[tuple[int, int]] = field(default_factory=set)
    """The shapes that were costed exactly."""
    _counted: dict[TileCost, tuple[int, ...]] = field(default_factory=dict)
    _known: dict[TileCost, TileChoice] = field(default_factory=dict)
    _passes: dict[tuple[TileCost, str], float] = field(default_factory=dict)
    _work: dict[tuple[TileCost, str], tuple[float, list[tuple[float, float]]]] = field(default_factory=dict)
    _saved: dict[TileCost, TileCost] = field(default_factory=dict)
    """Costs where backward passes compute nothing again."""

    def __post_init__(self) -> None:
        """Find what it has in common with those `beside` other fields."""
        _ = self.backward, self._moving, self._working_bytes, self._elsewhere, self._overlapping

    @cached_property
    def backward(self) -> bool:
        """Say whether one of the passes computes gradients."""
        return any(phase != "forward" for phase in self.phases)

    def beside(self, segment: Segment, held: tuple[int, int]) -> SegmentTiles:
        """Return the same for a segment that is alike, wherever it stands in a plan, beside what is held then."""
        found = copy(self)
        found.segment, found.held, found.costs, found.exact = segment, held, [*self.costs], {*self.exact}
        if held != self.held:
            found._known, found._passes = {}, {}
        return found

    def neighbours(self, shape: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the next smaller and the next larger shape, where they were not costed."""
        place, costed = self.shapes.index(shape), {cost.tile for cost in self.costs}
        return [each for each in self.shapes[max(0, place - 1) : place + 2] if each not in costed]

    def learn(self, exact: TileCost) -> None:
        """Replace what a tile in the middle told of a shape by its exact cost."""
        self.costs[[cost.tile for cost in self.costs].index(exact.tile)] = exact
        self.exact.add(exact.tile)

    def forget_rough(self) -> None:
        self.costs[:] = [cost for cost in self.costs if cost.tile in self.exact]

    def choices(self) -> list[TileChoice]:
        for cost in self.costs:
            if cost not in self._known:
                self._known[cost] = TileChoice(self.seconds(cost), self.total(cost), cost.compiled, cost)
        return [self._known[cost] for cost in self.costs]

    def leanest_of_the_fast(self) -> TileCost:
        """Return the leanest of the tiles that are about as fast as the fastest."""
        costs = sorted(self.costs, key=self.seconds)
        good_enough = ABOUT_AS_FAST * self.seconds(costs[0])
        return min((cost for cost in costs if self.seconds(cost) <= good_enough), key=self.total)

    @property
    def least_seconds(self) -> float:
        """Return the time of the fastest tiles that fit; nothing where none do."""
        fitting = [each.seconds for each in self.choices() if self.room is None or each.size_bytes <= self.room]
        return min(fitting, default=0.0)

    @property
    def least_bytes(self) -> int:
        return min(map(self.total, self.costs))

    def total(self, cost: TileCost) -> int:
        return sum(self.held) + sum(self._bytes_of(cost))

    def describe(self, cost: TileCost) -> SegmentPlan:
        segment, graph = self.segment, self.problem.graph
        target = graph[reference(graph, segment)]
        read = max((i for i in segment.reads if i in cost.crops), key=lambda i: prod(cost.crops[i]), default=target.id)
        return SegmentPlan(
            computes=segment,
            tile=cost.tile,
            tiles=cost.tiles,
            crop=cost.crop,
            computed_ratio=cost.computed_ratio,
            tile_peak_bytes=cost.tile_peak_bytes,
            largest_block_bytes=cost.largest_block_bytes,
            chunks=self.chunks,
            memory=self.amounts(cost),
            beside_bytes=self.mapped_bytes(cost),
            forward_seconds=self._pass_seconds(cost, "forward"),
            backward_seconds=self._pass_seconds(cost, "backward") if self.backward else 0.0,
            shape=target.extent,
            read_shape=graph[read].extent,
        )

    def read_by(self, readers: int) -> None:
        """Count so many readers and their crops from now on."""
        if (readers, readers) != (self.readers, self.most_readers):
            self.readers = self.most_readers = readers
            self._counted, self._known, self._passes = {}, {}, {}

    def useful_readers(self, cost: TileCost) -> int:
        """Return the number of threads that these tiles can feed."""
        reading, seconds = self.problem.reading, self._reading_seconds(cost)
        return max(reading.readers(seconds, self._processing_and_tiers(cost, phase)[0]) for phase in self.phases)

    def savable(self, cost: TileCost) -> Savable | None:
        """Return what tiles may save from the forward to the backward pass; None where only one of them is made."""
        if tuple(self.phases) != ("forward", "backward") or not self.problem.saves or self.problem.rounding:
            return None
        of_one = self._tiles_of_most(cost)
        nbytes = int((1 + SAVED_FRAGMENTATION) * cost.saved_bytes)
        if cost not in self._saved:
            self._saved[cost] = replace(
                cost,
                backward_seconds=cost.backward_seconds - cost.again_seconds,
                backward_calls=cost.backward_calls - cost.forward_calls,
            )
        again = self._saved[cost]
        self._counted[again] = self._bytes_of(cost)
        seconds = self._pass_seconds(cost, "backward") - self._pass_seconds(again, "backward")
        copies = sum(self.problem.graph[i].nbytes for i in self.segment.globals)
        return Savable(cost.tile_count, of_one, nbytes, copies, seconds / cost.tile_count)

    def seconds(self, cost: TileCost) -> float:
        return sum(self._pass_seconds(cost, phase) for phase in self.phases)

    def _pass_seconds(self, cost: TileCost, phase: str) -> float:
        """Predict one pass. Tiers and images are read ahead, and tiles written behind: the slowest link counts, or the
        processor.
        """
        if (cost, phase) not in self._passes:
            processing, tiers = self._processing_and_tiers(cost, phase)
            read = self.problem.reading.pass_seconds(self._reading_seconds(cost), processing, self.most_readers)
            self._passes[cost, phase] = max(tiers, read)
        return self._passes[cost, phase]

    def _processing_and_tiers(self, cost: TileCost, phase: str) -> tuple[float, float]:
        """Predict what computing tiles takes, with what tiers ask of the same cores, and what the slowest tier takes.

        What tiles take in memory beyond what a heap holds is new to the first of them, and some of it to all others
        where too little may be held between them.
        """
        machine = self.problem.machine
        if (cost, phase) not in self._work:
            self._work[cost, phase] = self._work_of(cost, phase)
        processing, moving = self._work[cost, phase]
        new = max(0, self.workers * cost.tile_peak_bytes - HEAP_TOP_BYTES)
        processing += machine.page_seconds(new + self._tiles_of_most(cost) * self._given_back_bytes(cost))
        slowest = 0.0
        for processor, link in moving:
            processing += processor
            slowest = max(slowest, link)
        return processing, slowest

    def _work_of(self, cost: TileCost, phase: str) -> tuple[float, list[tuple[float, float]]]:
        """Predict what computing tiles takes, and what each other tier takes of the cores and of its link: the same
        whatever is held beside them.
        """
        problem, machine, count = self.problem, self.problem.machine, self._tiles_of_most(cost)
        computing = cost.forward_seconds if phase == "forward" else cost.backward_seconds
        calls = cost.forward_calls if phase == "forward" else cost.backward_calls
        share = count / cost.tile_count
        processing = machine.wall_seconds(share * computing, share * calls, self.workers, count)
        moved = [(tier, count * self._moved_bytes(cost, phase, tier)) for tier in problem.tiers[1:]]
        tiers = [(tier.processor_seconds(n, machine), tier.link_seconds(n, machine)) for tier, n in moved]
        return processing + machine.host_seconds(count), tiers

    def _reading_seconds(self, cost: TileCost) -> float:
        """Predict what one thread takes to read the images for the tiles of the rank that has most."""
        problem = self.problem
        seconds = problem.reading.seconds_of(problem.graph, self.segment)
        return seconds * self._tiles_of_most(cost) / cost.tile_count

    def _tiles_of_most(self, cost: TileCost) -> int:
        """Return the number of tiles of the rank that has most."""
        return -(-cost.tile_count // self.problem.ranks)

    def _given_back_bytes(self, cost: TileCost) -> float:
        """Predict the bytes of one tile whose pages are new to it."""
        if self.room is None:
            return 0.0
        useful = useful_allocator_cache_bytes(self.workers * cost.tile_peak_bytes)
        held = min(max(self.room - self.total(cost), 0), useful)
        return _GIVEN_BACK * (1 - held / useful) * cost.tile_peak_bytes

    def _moved_bytes(self, cost: TileCost, phase: str, tier: Tier) -> float:
        """Return the bytes that one tile of a pass reads from and writes to a tier."""
        moving = self._moving[phase != "forward"].get(tier.name, ())
        return sum(tier.crop_bytes(size, cost.crops.get(i, (0, 0)), pixel) for i, size, pixel in moving)

    @cached_property
    def _moving(self) -> tuple[dict[str, list[tuple[int, Size, int]]], ...]:
        """The fields that a forward and that a backward pass move, each as often as it moves, by the tier in which they
        are kept, with their sizes and the bytes of a pixel there.
        """
        problem, graph = self.problem, self.problem.graph
        found = dict[str, list[tuple[int, Size, int]]](), dict[str, list[tuple[int, Size, int]]]()
        for backward, moving in enumerate(found):
            values, cotangents = moved_fields(graph, self.segment, backward=bool(backward))
            for place, i in enumerate((*values, *cotangents)):
                if (name := self.kept.get(i)) is not None:
                    pixel = graph[i].bytes_per_pixel
                    if place < len(values):
                        pixel = problem.stored_bytes_per_pixel(i, problem.tier(name))
                    moving.setdefault(name, []).append((i, graph[i].extent, pixel))
        return found

    def amounts(self, cost: TileCost) -> tuple[Amount, ...]:
        """Return the amounts for a tile shape."""
        return tuple(map(Amount, _OF_SEGMENTS, (*self.held, *self._bytes_of(cost))))

    def _bytes_of(self, cost: TileCost) -> tuple[int, ...]:
        """Return their bytes but for what is held, counted once: they are asked for often while tiles are chosen."""
        if cost not in self._counted:
            self._counted[cost] = self._count(cost)
        return self._counted[cost]

    def _count(self, cost: TileCost) -> tuple[int, ...]:
        tiles = self.workers * cost.tile_peak_bytes
        fragmentation = int(ALLOCATOR_FRAGMENTATION * tiles) + self._further_fragmentation(cost)
        copies, sums = self._working_bytes
        # One more waits where a rank's chunks begin and end inside a node of the tree.
        sums *= 1 + waiting_sums(self.chunks, cost.tile_count) + (min(self.chunks, self.problem.ranks) > 2)
        # The only tile is gone when what it gave is added to sums that did not exist before.
        apart = min(tiles + fragmentation, sums) if cost.tile_count == 1 else 0
        waiting, output = self._waiting_bytes(cost), self._output_bytes(cost)
        overlaps, sums = self._overlap_bytes(cost), copies + sums - apart
        return overlaps, sums, waiting, output, tiles, fragmentation

    @cached_property
    def chunks(self) -> int:
        return chunk_count(self._working_bytes[1])

    def mapped_bytes(self, cost: TileCost) -> int:
        """Count what freed memory does not serve: of what comes and goes beside the tiles, what is taken from the
        system block by block, and what tiles need beyond any order of freed blocks.
        """
        graph = self.problem.graph
        crops = [height * width * graph[i].bytes_per_pixel for i, (height, width) in cost.crops.items()]
        large = max(crops, default=0) >= MAPPED_BYTES
        waiting = self._waiting_bytes(cost) if large else self._behind_bytes(cost)  # rows of files are large anyway
        weights = [graph[i].nbytes for i in self.segment.globals if self.backward and graph[i].differentiable]
        mapped = waiting + self._shares * sum(n for n in weights if n >= MAPPED_BYTES)
        return mapped + self._further_fragmentation(cost)

    @property
    def _shares(self) -> int:
        """Number of tiles' shares of a gradient that exist at a time: of those being computed, and one that is being
        added.
        """
        return self.workers + (self.workers > 1)

    @cached_property
    def _working_bytes(self) -> tuple[int, int]:
        """Bytes of every global that the segment reads: its copy in working layout and the tiles' shares of its
        gradient; and of the sums of those.
        """
        graph, read = self.problem.graph, self.segment.globals
        copies = sum(graph[i].nbytes for i in read if len(graph[i].shape) == 4)
        if not self.backward:
            return copies, 0
        copies += self._shares * sum(graph[i].nbytes for i in read if graph[i].differentiable)
        return copies, gradient_sum_bytes(graph, self.segment, self.problem.sum_dtype)

    def _waiting_bytes(self, cost: TileCost) -> int:
        # With several workers one more is in the queue, where there are as many.
        ahead = min(self.readers + READ_AHEAD + (self.workers > 1), max(0, cost.tile_count - self.workers))
        # And what each further reader makes a crop of.
        crops = (ahead + self.readers - 1) * cost.crop_bytes + self.workers * cost.own_crop_bytes
        return crops + self._decoding_bytes + self._behind_bytes(cost)

    @property
    def _decoding_bytes(self) -> int:
        """Bytes that readers hold of files while they decode."""
        images = any(self.problem.graph[i].is_source for i in self.segment.reads)
        return self.readers * self.problem.reading.thread_bytes if images else 0

    def _behind_bytes(self, cost: TileCost) -> int:
        """Count results that wait to be written to other tiers, and what goes to or from these on its way, at most."""
        graph, segment = self.problem.graph, self.segment
        if not self._elsewhere:
            return 0

        def behind(fields: tuple[int, ...]) -> int:
            there = (i for i in fields if i in self._elsewhere)
            return sum(prod(cost.crops.get(i, (0, 0))) * graph[i].bytes_per_pixel for i in there)

        most = behind(segment.kept)
        if self.backward:
            most = max(most, behind(tuple(i for i in segment.reads if graph[i].differentiable)))
        buffers = [
            tier.buffer_bytes(size, cost.crops.get(i, (0, 0)), graph[i].bytes_per_pixel)
            for i, (tier, size) in self._elsewhere.items()
        ]
        return (WRITES_BEHIND + 1) * most + max(buffers)  # those that wait, and the one on its way

    @cached_property
    def _elsewhere(self) -> dict[int, tuple[Tier, Size]]:
        """The fields that the segment reads and keeps in other tiers than the memory, and their sizes."""
        problem, graph, memory = self.problem, self.problem.graph, self.problem.memory.name
        found = [i for i in (*self.segment.reads, *self.segment.kept) if self.kept.get(i, memory) != memory]
        return {i: (problem.tier(self.kept[i]), graph[i].extent) for i in found}

    def _overlap_bytes(self, cost: TileCost) -> int:
        """Count the overlaps of one chunk: what its crops share with the lines of tiles before it and, where it begins
        inside a line, with the tile before it.
        """
        found = 0
        if not self.backward or min(self.chunks, cost.tile_count) <= 1:
            return found
        across, along, fields = self._overlapping
        for i, sizes, pixel in fields:
            if (crop := cost.crops.get(i)) is None:
                continue
            length = sizes[along]
            if cost.tiles[across] < self.chunks:
                tiles = -(-cost.tile_count // self.chunks)
                found += crop[across] * _shared_pixels(length, cost.tiles[along], crop[along]) * pixel
                length = min(length, (tiles - 1) * -(-length // cost.tiles[along]) + crop[along])
            found += _shared_pixels(sizes[across], cost.tiles[across], crop[across]) * length * pixel
        return found

    @cached_property
    def _overlapping(self) -> tuple[int, int, list[tuple[int, Size, int]]]:
        """The axis across lines of tiles, that along them, and the fields whose cotangents crops share."""
        graph = self.problem.graph
        across = 0 if runs_by_rows(self.segment, graph[reference(graph, self.segment)]) else 1
        read = [graph[i] for i in self.segment.reads if graph[i].differentiable]
        return across, 1 - across, [(node.id, node.extent, node.bytes_per_pixel) for node in read]

    def _further_fragmentation(self, cost: TileCost) -> int:
        """Count what many tiles side by side need beyond `ALLOCATOR_FRAGMENTATION`."""
        if self.workers == 1 or cost.tile_count <= FEW_TILES:
            return 0
        further = FRAGMENTATION_OF_DOUBLING * math.log2(cost.tile_count / FEW_TILES)
        return int(self.workers * cost.tile_peak_bytes * min(further, MOST_FURTHER_FRAGMENTATION))

    def _output_bytes(self, cost: TileCost) -> int:
        graph, image = self.problem.graph, self.problem.handed
        if self.segment.output is not None:
            return self.problem.output_bytes(cost.tile[0], graph[self.segment.output].shape)
        if image is None or image not in cost.crops or not self.backward:
            return 0
        # A row of crops, the next one while what both share is copied to it, one that waits for what a chunk shares
        # with the one before it, and what the sink makes of a strip.
        rows, node = cost.crops[image][0], graph[image]
        return 3 * rows * node.size(1) * node.bytes_per_pixel + self.problem.output_bytes(rows, node.shape)


def _shared_pixels(size: int, tiles: int, crop: int) -> int:
    """Return the pixels that two neighbouring crops share along an axis, at most: tiles differ by a pixel or two."""
    return 0 if tiles == 1 else min(crop, max(0, crop - size // tiles) + 2)


def _gradient_bytes(graph: Graph, *, backward: bool) -> int:
    """Count the gradients of all parameters, and the global values made from parameters and sums."""
    found = 0
    for node in graph.nodes:
        if node.op == "parameter":
            found += max(node.nbytes, 4 * math.prod(node.shape)) if backward and node.differentiable else 0
        elif not (node.is_field or node.is_source or node.whole):
            found += node.nbytes
    return found
