"""Partition a plan over ranks: who computes which parts of every stage, which pixels of every field it holds for that,
and what travels.

A rank holds what its tiles write of a kept field, and what they read of it in any later pass. Of a field's cotangents,
during a pass that reads it, it holds what its tiles are the first to reach; what they add to pixels that other
ranks reach first travels when the pass is over, to whoever needs it next.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from gigagrad.boxes import Box, apart, shared, without
from gigagrad.graphs import Graph
from gigagrad.plans.parts import Parts, parts_of
from gigagrad.plans.plan import StagePlan
from gigagrad.plans.program import Tiles
from gigagrad.plans.stages import is_read

PartBox = tuple[int, Box]
"""The share of a part that goes to pixels which another rank reaches first: the part, and the box."""


class Partition:
    """The parts of a plan, its kept fields and the cotangents of what its stages read, divided among so many ranks."""

    def __init__(self, graph: Graph, stages: Sequence[StagePlan], passes: Sequence[Tiles], count: int) -> None:
        self.count = count
        self._graph, self._described = graph, stages
        self._stages = [stage.computes for stage in stages]
        self._producers = {field: stage.index for stage in self._stages for field in stage.kept}
        self.parts, self._first_part = cache(self._find_parts), cache(self._find_first_part)
        self.held, self.written, self.read = cache(self._find_held), cache(self._find_written), cache(self._find_read)
        self.halo = cache(self._find_halo)
        """Boxes that a rank sends another one of a kept field, once it is written: by field, sender and receiver."""
        self._differentiated = [self._stages[p.stage] for p in passes if p.phase != "forward"]
        self.adding, self._first = cache(self._find_adding), cache(self._find_first)
        self.held_cotangents = cache(self._find_held_cotangents)
        self.sums, self.overlaps = cache(self._find_sums), cache(self._find_overlaps)
        """Boxes that a rank sends another one after a pass over a stage, by stage, field, sender and receiver: of
        what it has summed up alone, and what its parts add to pixels that others reach first, in the order of parts."""

    def own(self, stage: int, rank: int) -> range:
        """Return the parts of a stage that a rank computes."""
        return range(self._first_part(stage, rank), self._first_part(stage, rank + 1))

    def whole(self, field: int) -> Box:
        """Return the box of all of a field."""
        node = self._graph[field]
        return Box.whole(node.size(0), node.size(1))

    def _find_halo(self, field: int, sender: int, receiver: int) -> list[Box]:
        missing = without(self.held(field, receiver), self.written(field, receiver))
        return shared(missing, self.written(field, sender))

    def _find_parts(self, stage: int) -> Parts:
        return parts_of(self._graph, self._described[stage])

    def _find_first_part(self, stage: int, rank: int) -> int:
        parts = self.parts(stage)
        return len(parts) if rank == self.count else parts.nearest(len(parts.grid) * rank // self.count)

    def _find_written(self, field: int, rank: int) -> list[Box]:
        """Return what a rank's tiles write of a kept field: of all ranks together the whole field, once."""
        stage = self._producers[field]
        return self.parts(stage).written(field, self._tiles(stage, rank))

    def _find_read(self, stage: int, field: int, rank: int) -> list[Box]:
        """Return what a rank's tiles read of a field in a pass of a stage; boxes may overlap."""
        return self.parts(stage).read(field, self._tiles(stage, rank))

    def _find_held(self, field: int, rank: int) -> list[Box]:
        """Return what a rank holds of a kept field."""
        if self._graph.gathers(field):
            return [self.whole(field)]
        reading = [stage.index for stage in self._stages if field in stage.reads]
        read = [box for stage in reading for box in self.read(stage, field, rank)]
        return apart([*self.written(field, rank), *read])

    def _tiles(self, stage: int, rank: int) -> range:
        own, parts = self.own(stage, rank), self.parts(stage)
        return range(parts.start(own.start), parts.start(own.stop))

    def wanted_next(self, stage: int, field: int, rank: int) -> list[Box]:
        """Return what a rank needs of a field's cotangents after a pass over a stage: what it is the first to reach in
        the next pass that adds to them; after the last one what it wrote, or all of it where no stage wrote it.
        """
        adding = self.adding(field)
        following = adding.index(stage) + 1
        return self._first(adding[following], field, rank) if following < len(adding) else self._at_last(field, rank)

    def elsewhere(self, stage: int, field: int, rank: int) -> list[Box]:
        """Return the pixels of a field that ranks before this one reach first in a pass over a stage."""
        return self.parts(stage).reached_before(field, self.own(stage, rank).start)

    def _find_sums(self, stage: int, field: int, sender: int, receiver: int) -> list[Box]:
        return shared(self._first(stage, field, sender), self.wanted_next(stage, field, receiver))

    def _find_overlaps(self, stage: int, field: int, sender: int, receiver: int) -> list[PartBox]:
        before = self.elsewhere(stage, field, sender)
        found = []
        for part in self.own(stage, sender) if before else ():
            boxes = [box for box in self.parts(stage).overlaps(field, part) if box is not None]
            for box in shared(shared(boxes, before), self.wanted_next(stage, field, receiver)):
                found.append((part, box))
        return found

    def _find_adding(self, field: int) -> list[int]:
        """Return the stages whose passes add to a field's cotangents, in the order in which they run."""
        return [stage.index for stage in self._differentiated if field in stage.reads]

    def _find_first(self, stage: int, field: int, rank: int) -> list[Box]:
        """Return the pixels that a rank's tiles reach before those of all others: of all ranks together the whole
        field.
        """
        last = rank == self.count - 1
        until = [self.whole(field)] if last else self.elsewhere(stage, field, rank + 1)
        return without(until, self.elsewhere(stage, field, rank))

    def _find_held_cotangents(self, field: int, rank: int) -> list[Box]:
        """Return what a rank holds of a field's cotangents, in any pass."""
        first = [box for stage in self.adding(field) for box in self._first(stage, field, rank)]
        return apart([*first, *self._at_last(field, rank)])

    def _at_last(self, field: int, rank: int) -> list[Box]:
        whole = is_read(self._graph, field)
        return [self.whole(field)] if whole else self.written(field, rank)
