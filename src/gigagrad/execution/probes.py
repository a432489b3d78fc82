"""Watch a run from pass to pass and from tile to tile, without a part in its results."""

from __future__ import annotations

import time
from functools import partial, reduce
from itertools import pairwise

from gigagrad.boxes import Box
from gigagrad.devices import MemoryGuard
from gigagrad.events import Events, Notice, TileBegun, TileDone, TilePlace
from gigagrad.execution.executor import Executor
from gigagrad.execution.needed import Needed
from gigagrad.execution.prepared import Prepared
from gigagrad.plans import Plan, Segment, TileGeometry

_PRIOR = 0.1
"""The share of a step's tiles that the plan's own seconds stand for."""


class Progress:
    """Tells listeners of every tile that is computed, and what is left of the step: what the passes took the last time,
    else the plan's seconds, scaled to what the tiles took so far. What was foretold counts as much as a tenth of the
    step would, for its beginning is not typical of it (docs/decisions/0012-time-model.md).
    """

    def __init__(self, prepared: Prepared, events: Events, needed: Needed | None = None) -> None:
        self._prepared, self._plan, self._events = prepared, prepared.plan, events
        seconds, passes = self._plan.predicted_seconds, [step.segment for step in self._plan.passes]
        planned = [share * seconds for share in self._plan.pass_shares]
        foretold = planned if prepared.taken is None else prepared.taken
        every = [self._plan.segments[segment].tile_count for segment in passes]
        counts = every if needed is None else [len(needed[segment]) for segment in passes]
        # Of each pass, what a tile adds to what was foretold.
        self._of_tiles = [seconds / count for seconds, count in zip(foretold, every, strict=True)]
        self._foretold_seconds = sum(one * count for one, count in zip(self._of_tiles, counts, strict=True))
        self._tile_count = sum(counts)
        self._done = 0
        self._began = time.perf_counter()
        self._passes_began: list[float] = []
        # Of what was foretold: what is over, and what each tile of this pass adds to it.
        self._over = self._of_tile = 0.0

    @property
    def pass_seconds(self) -> tuple[float, ...]:
        """Seconds that each pass took, asked at the end of the last one."""
        return tuple(end - start for start, end in pairwise([*self._passes_began, time.perf_counter()]))

    def begin_pass(self, index: int) -> None:
        self._passes_began.append(time.perf_counter())
        self._of_tile = self._of_tiles[index]

    def tile_begins(self, phase: str, segment: Segment, tile: TileGeometry) -> None:
        """Tell that a tile is handed to whoever computes it."""
        place = partial(place_of, self._prepared, segment, tile)
        count = len(self._plan.segments)
        self._events.emit(TileBegun(phase, segment.index, count, self._done, self._tile_count, place))

    def tile_done(self, phase: str) -> None:
        """Count a tile whose results are where they belong."""
        self._done += 1
        self._over += self._of_tile
        foretold, gone = self._foretold_seconds, time.perf_counter() - self._began
        slower = (gone + _PRIOR * foretold) / (self._over + _PRIOR * foretold)
        left = max(0.0, foretold - self._over) * slower
        self._events.emit(TileDone(phase, self._done, self._tile_count, left))


class Memory:
    """Makes room for what a pass takes, and computes fewer tiles at a time where another one might not fit."""

    def __init__(self, prepared: Prepared, guard: MemoryGuard, executor: Executor, events: Events) -> None:
        self._prepared, self.guard, self.executor, self._events = prepared, guard, executor, events
        self._tile_bytes = 0

    def begin_pass(self, index: int, fresh_bytes: int) -> None:
        """Begin one of the plan's passes; its buffers, taken next, add `fresh_bytes` to the memory of tiles."""
        prepared, plan = self._prepared, self._prepared.plan
        step = plan.passes[index]
        planned = plan.segments[step.segment]
        self._tile_bytes = planned.tile_peak_bytes
        self.guard.begin_pass(plan.workers * self._tile_bytes, planned.beside_bytes, planned.largest_block_bytes)
        self.executor.let_go()
        sums = 0 if step.phase == "forward" else prepared.bound(step.segment).sum_bytes
        self.guard.reserve(sums + fresh_bytes)

    def tile_done(self) -> None:
        executor = self.executor
        if executor.at_a_time > 1 and self.guard.is_short(self._tile_bytes, executor.at_a_time):
            executor.hold_one()
            told = (
                "the process holds more than was planned; to stay within the budget, fewer tiles are computed at a time"
            )
            self._events.emit_once(Notice(told))


def place_of(prepared: Prepared, segment: Segment, tile: TileGeometry) -> TilePlace:
    """Find where a tile is in the image."""
    grid, image = prepared.grid(segment), image_size(prepared.plan)
    graph, target = grid.graph, grid.graph[grid.reference]
    box = tile.wanted(target.id).resized(target.extent, image)
    read = ((graph[i], tile.box(i)) for i in segment.reads)
    crops = [crop.resized(node.extent, image) for node, crop in read if crop is not None]
    height, width = (side * of / own for side, of, own in zip(grid.tile, image, target.extent, strict=True))
    return TilePlace(box, reduce(Box.hull, crops, box), (height, width))


def image_size(plan: Plan) -> tuple[int, int]:
    """Return the height and width of a plan's image, in pixels; of a bag in patches, one in each row."""
    *bag, _, height, width = plan.image_shape
    return (bag[0], 1) if bag != [1] else (height, width)


def whole_begun(plan: Plan, phase: str) -> TileBegun:
    """Tell that all of an image is computed at once."""
    whole = Box.whole(*image_size(plan))
    return TileBegun(phase, 0, 1, 0, 1, lambda: TilePlace(whole, whole, whole.shape))
