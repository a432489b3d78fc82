"""Which rank computes which parts of every stage, which pixels of every field it holds for that, and what travels.

A rank holds what its tiles write of a kept field, and what they read of it in any later pass. Of a field's cotangents,
while a stage is swept that reads it, it holds what its tiles are the first to reach; what they add to pixels that other
ranks reach first travels when the sweep is over, to whoever needs it next.
"""

from __future__ import annotations

from functools import lru_cache

from gigagrad.boxes import Box, apart, shared, without
from gigagrad.graphs import Graph
from gigagrad.plans.geometry import Grid
from gigagrad.plans.parts import Front, JoinOrder, Parts
from gigagrad.plans.plan import Plan
from gigagrad.plans.stages import Stage, is_read


def up(count: int) -> list[dict[int, int]]:
    """Who sends to whom until the first rank has everybody's: neighbours, then pairs of neighbours, and so on."""
    steps = [1 << power for power in range((count - 1).bit_length())]
    return [{rank: rank - step for rank in range(step, count, 2 * step)} for step in steps]


def down(count: int) -> list[dict[int, int]]:
    """The same backwards, until all have what the first one had."""
    return [{receiver: sender for sender, receiver in senders.items()} for senders in reversed(up(count))]


Strip = tuple[int, Box]
"""What a part adds to pixels that another rank reaches first: the part, and which."""


class Shares:
    """Of a plan's work, for so many ranks."""

    def __init__(self, graph: Graph, stages: tuple[Stage, ...], plan: Plan, count: int) -> None:
        self.count = count
        self._graph, self._stages, self._plan = graph, stages, plan
        self._producers = {field: stage.index for stage in stages for field in stage.kept}
        self.parts = lru_cache(maxsize=None)(self._find_parts)
        self._first_part = lru_cache(maxsize=None)(self._find_first_part)
        self.held = lru_cache(maxsize=None)(self._find_held)
        self.held_cotangents = lru_cache(maxsize=None)(self._find_held_cotangents)
        self.written = lru_cache(maxsize=None)(self._find_written)
        self._read = lru_cache(maxsize=None)(self._find_read)
        self._first = lru_cache(maxsize=None)(self._find_first)

    def _find_parts(self, stage: int) -> Parts:
        grid = Grid(self._graph, self._stages[stage], self._plan.stages[stage].tile)
        return Parts(grid, self._plan.stages[stage].parts, by_rows=grid.by_rows)

    def own(self, stage: int, rank: int) -> range:
        """The parts of a stage that a rank computes."""
        return range(self._first_part(stage, rank), self._first_part(stage, rank + 1))

    def _find_first_part(self, stage: int, rank: int) -> int:
        parts = self.parts(stage)
        return len(parts) if rank == self.count else parts.nearest(len(parts.grid) * rank // self.count)

    def before(self, stage: int, rank: int) -> int | None:
        """The last part with tiles before those of a rank, if there is one."""
        parts = self.parts(stage)
        return next((part for part in reversed(range(self.own(stage, rank).start)) if parts.tiles(part)), None)

    def following(self, stage: int, rank: int) -> int:
        """The first part with tiles behind those of a rank; where there is none, as many as there are parts."""
        parts = self.parts(stage)
        return next((p for p in range(self.own(stage, rank).stop, len(parts)) if parts.tiles(p)), len(parts))

    def joins(self, stage: int) -> list[dict[tuple[int, int], int]]:
        """How sums reach the first rank: at each step who sends to whom, and how many that are not joined yet."""
        parts, held = self.parts(stage), []
        for rank in range(self.count):
            held.append(order := JoinOrder(self.before(stage, rank)))
            for part in self.own(stage, rank):
                if parts.tiles(part):
                    order.append(part)
        steps: list[dict[tuple[int, int], int]] = []
        for receivers in up(self.count):
            steps.append(step := {})
            for sender, receiver in receivers.items():
                held[sender].join_before(self.behind(stage, sender, receiver))
                step[sender, receiver] = len(held[sender].parts)
                for part in held[sender].parts:
                    held[receiver].append(part)
        return steps

    def behind(self, stage: int, sender: int, receiver: int) -> int:
        """The first part behind those that a sender has gathered on the way up."""
        return self.following(stage, min(2 * sender - receiver, self.count) - 1)

    def _tiles(self, stage: int, rank: int) -> range:
        own, parts = self.own(stage, rank), self.parts(stage)
        return range(parts.start(own.start), parts.start(own.stop))

    # Values of kept fields

    def _find_written(self, field: int, rank: int) -> list[Box]:
        """What a rank's tiles write of a kept field: of all ranks together the whole field, once."""
        stage = self._producers[field]
        return self.parts(stage).written(field, self._tiles(stage, rank))

    def _find_read(self, stage: int, field: int, rank: int) -> list[Box]:
        """What a rank's tiles read of a field in a sweep of a stage; boxes may overlap."""
        return self.parts(stage).read(field, self._tiles(stage, rank))

    def _find_held(self, field: int, rank: int) -> list[Box]:
        """What a rank holds of a kept field."""
        if self._graph.gathers(field):
            return [self.whole(field)]
        reading = [stage.index for stage in self._stages if field in stage.reads]
        read = [box for stage in reading for box in self._read(stage, field, rank)]
        return apart([*self.written(field, rank), *read])

    def halo(self, field: int, sender: int, receiver: int) -> list[Box]:
        """What a rank sends another one of a kept field, once it is written."""
        missing = without(self.held(field, receiver), self.written(field, receiver))
        return shared(missing, self.written(field, sender))

    # Cotangents

    def adding(self, field: int) -> list[int]:
        """The stages whose sweeps add to a field's cotangents, in the order in which they run."""
        passes = (p for p in self._plan.passes if p.phase != "forward")
        return [p.stage for p in passes if field in self._stages[p.stage].reads]

    def _find_first(self, stage: int, field: int, rank: int) -> list[Box]:
        """The pixels that a rank's tiles reach before those of all others: of all ranks together the whole field."""
        own, parts = self.own(stage, rank), self.parts(stage)
        until = [self.whole(field)] if rank == self.count - 1 else self._behind(parts.front(field, own.stop), field)
        return without(until, self._behind(parts.front(field, own.start), field))

    def wanted_next(self, stage: int, field: int, rank: int) -> list[Box]:
        """Of a field's cotangents, what a rank needs when a stage has been swept: what it is the first to reach in the
        next sweep that adds to them; after the last one what it wrote, or all of it where no stage wrote it.
        """
        adding = self.adding(field)
        following = adding.index(stage) + 1
        if following < len(adding):
            return self._first(adding[following], field, rank)
        return [self.whole(field)] if is_read(self._graph, field) else self.written(field, rank)

    def _find_held_cotangents(self, field: int, rank: int) -> list[Box]:
        """What a rank holds of a field's cotangents."""
        adding = self.adding(field)
        boxes = [box for stage in adding for box in self._first(stage, field, rank)]
        last = adding[-1:]
        wanted = self.wanted_next(last[0], field, rank) if last else self.written(field, rank)
        return apart([*boxes, *wanted])

    def sums(self, stage: int, field: int, sender: int, receiver: int) -> list[Box]:
        """Of what a rank has summed up alone, what it sends another one."""
        return shared(self._first(stage, field, sender), self.wanted_next(stage, field, receiver))

    def strips(self, stage: int, field: int, sender: int, receiver: int) -> list[Strip]:
        """What a rank's parts add to pixels that others reach first and `receiver` wants, in the order of parts."""
        parts, own = self.parts(stage), self.own(stage, sender)
        before = self._behind(parts.front(field, own.start), field)
        found = []
        for part in own if before else ():
            boxes = [box for box in parts.strips(field, part) if box is not None]
            for box in shared(shared(boxes, before), self.wanted_next(stage, field, receiver)):
                found.append((part, box))
        return found

    def foreign(self, stage: int, field: int, rank: int) -> list[Box]:
        """The pixels that ranks before this one reach first."""
        return self._behind(self.parts(stage).front(field, self.own(stage, rank).start), field)

    # Boxes

    def whole(self, field: int) -> Box:
        """The box of all of a field."""
        node = self._graph[field]
        return Box.whole(node.size(0), node.size(1))

    def _behind(self, front: Front, field: int) -> list[Box]:
        return [box for box, which in front.split(self.whole(field)) if which is not None]
