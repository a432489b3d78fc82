"""Checks a plan step by step without running it: is everything finished, and in memory, when a step needs it?

Nothing here trusts the planner. What a pass reads, what it needs to be finished and what its tiles cover is worked out
again from the graph, so that a plan for a size no machine at hand could run is checked all the same. Tiles are looked
at one axis at a time, as the geometry is separable: a terapixel has a thousand rows and columns of tiles, not a million
tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gigagrad.boxes import Span, without
from gigagrad.graphs import GATHER, SCATTER, Graph
from gigagrad.plans import estimate
from gigagrad.plans.chunks import chunks_of
from gigagrad.plans.emit import shared_by
from gigagrad.plans.geometry import Grid
from gigagrad.plans.liveness import kept_bytes
from gigagrad.plans.memory import tile_bytes, whole_field_bytes, worst_tile
from gigagrad.plans.partition import how_summed, late_gradients
from gigagrad.plans.plan import SAVED, Plan, SegmentPlan, amount_of
from gigagrad.plans.problem import Problem
from gigagrad.plans.program import Allocate, Exchange, Gather, Key, Release, Scalars, Step, Tiles
from gigagrad.plans.segments import (
    Cotangents,
    Segment,
    gathered,
    is_differentiated,
    is_read,
    last_cotangents,
    split_segments,
    summed_globals,
)

_ALL_LOOKED_AT = 96
"""Most tiles along an axis whose halos are all followed; of more only those at both borders and some between are."""


@dataclass(frozen=True, slots=True)
class PlanFault:
    """A contradiction between a plan and its graph, or inside the plan. `step` is the index of the step, None for the
    plan as a whole.
    """

    rule: str
    step: int | None
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}" if self.step is None else f"{self.rule} (step {self.step}): {self.text}"


def check(problem: Problem, plan: Plan) -> tuple[PlanFault, ...]:
    """Return the faults of a plan that was made for a problem, whatever machine and budget that names; none if sound.

    Checked: the segments are those of the fields kept; tiles partition every target, and what they read lies inside the
    fields; what a pass reads is complete and in memory; reductions and whole fields are finished before they are used;
    every segment that a gradient goes through is run backward once, after all that read its results; the sums of a pass
    travel and become numbers before anything else; every chunk is computed once; what is taken is released, but for
    results; bytes are those of the graph, and the peak is within the budget; ranks hold and send what the plan says.
    """
    if plan.whole:
        return tuple(_budget_faults(plan))
    problem = problem.of(plan.whole_pixels)
    segments = split_segments(problem.graph, [field.node for field in plan.kept])
    faults = list(_segment_faults(problem, plan, segments))
    if faults:
        return tuple(faults)
    for described in plan.segments:
        faults += _tile_faults(problem.graph, plan, described)
    faults += _StepChecker(problem, plan).faults()
    faults += _ending_faults(problem, plan)
    faults += _chunk_faults(problem, plan)
    faults += _memory_faults(problem, plan)
    faults += _budget_faults(plan)
    faults += _sharing_faults(problem, plan)
    return tuple(faults)


def _segment_faults(problem: Problem, plan: Plan, segments: tuple[Segment, ...]) -> Iterator[PlanFault]:
    """Find what is said of fields and segments and isn't so in the graph. Without that nothing else can be asked."""
    graph = problem.graph
    for i in sorted(gathered(graph) - {field.node for field in plan.kept}):
        yield PlanFault("kept", None, f"field {i} is read whole, but not kept")
    for field in plan.kept:
        node = graph[field.node]
        if not node.is_field or is_read(graph, field.node):
            yield PlanFault("kept", None, f"node {field.node} is no field that a segment computes")
        elif (field.shape, field.size_bytes) != (
            node.shape,
            size := kept_bytes(problem, node.id, problem.tier(field.tier)),
        ):
            yield PlanFault("kept", None, f"field {field.node} is {node.shape}, {size} bytes, in the graph")
    if plan.computed != segments:
        yield PlanFault("segments", None, "they are not those of the fields kept")
    for index, step in enumerate(plan.steps):
        if isinstance(step, Tiles) and not (
            0 <= step.segment < len(segments) and step.phase in ("forward", "backward", "one pass")
        ):
            yield PlanFault("segments", index, f"there is no {step.phase!r} of segment {step.segment}")


class _StepChecker:
    """The steps in order, with what is finished, pulled back and in memory at each."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self._graph, self._plan, self._backward = problem.graph, plan, problem.backward
        self._handed = problem.handed
        self._segments = plan.computed
        self._awaited = awaited(problem.graph)
        self._made = {i for segment in self._segments for i in (*segment.kept, *segment.reductions)}
        self._finished, self._there = set[int](), set[Key]()
        self._done: list[Tiles] = []
        self._at_work = False

    def faults(self) -> Iterator[PlanFault]:
        for index, step in enumerate(self._plan.steps):
            if isinstance(step, Allocate):
                yield from self._allocate(index, step)
            elif isinstance(step, Release):
                yield from self._release(index, step)
            elif isinstance(step, Tiles):
                self._at_work = True
                yield from self._tiles(index, step)
            elif isinstance(step, Scalars):
                self._at_work = False
        for key in sorted(key for key in self._there if not self._is_result(*key)):
            yield PlanFault("memory", None, f"{self._named(*key)} is never released")
        for segment in self._segments:
            for phase, wanted in (("forward", 1), ("backward", int(self._is_pulled(segment)))):
                times = sum(p.segment == segment.index and p.phase in (phase, "one pass") for p in self._done)
                if times != wanted:
                    told = f"segment {segment.index} is swept {phase} {times} times instead of {wanted}"
                    yield PlanFault("passes", None, told)
        ends = [*self._graph.outputs, *self._graph.updates.values()]
        for missing in sorted(set().union(*(self._needs(i) for i in ends)) - self._finished):
            yield PlanFault("results", None, f"the result needs {self._named(missing)}, which is never finished")

    def _allocate(self, index: int, step: Allocate) -> Iterator[PlanFault]:
        for buffer in step.buffers:
            if buffer.key in self._there:
                yield PlanFault("memory", index, f"{self._named(*buffer.key)} is there already")
            self._there.add(buffer.key)

    def _release(self, index: int, step: Release) -> Iterator[PlanFault]:
        if self._at_work:
            yield PlanFault("memory", index, "buffers are released before the sums of their pass have become numbers")
        for key in step.keys:
            if key not in self._there:
                yield PlanFault("memory", index, f"{self._named(*key)} is released, but not there")
            elif self._is_result(*key):
                yield PlanFault("results", index, f"{self._named(*key)} is a result, and released")
            self._there.discard(key)

    def _is_result(self, node_id: int, cotangent: bool) -> bool:
        """Say whether a buffer stays: with an image's own gradient, unless that leaves in strips."""
        return cotangent and self._graph[node_id].is_source and node_id != self._handed

    def _tiles(self, index: int, step: Tiles) -> Iterator[PlanFault]:
        segment, phase = self._segments[step.segment], step.phase
        needs = set().union(*(self._needs(i) for i in (*segment.reads, *segment.globals)))
        if phase == "backward":
            needs |= {*segment.kept, *segment.reductions, *self._needs(self._graph.output)}
        for node_id in sorted(needs - self._finished):
            yield PlanFault("order", index, f"needs {self._named(node_id)}, which is not finished")
        if phase == "one pass" and (
            segment is not self._segments[-1] or last_cotangents(self._graph, segment) is Cotangents.AFTER_FORWARD
        ):
            yield PlanFault("order", index, f"segment {segment.index} cannot go forward and backward in one pass")
        used = [(i, False) for i in (*segment.reads, *segment.kept) if not is_read(self._graph, i)]
        if phase != "forward":
            used += [(i, True) for i in (*segment.reads, *segment.kept) if self._graph[i].differentiable]
            yield from self._reader_faults(index, segment)
        for key in used:
            if key not in self._there:
                yield PlanFault("memory", index, f"{self._named(*key)} is not in memory")
        if phase != "backward":
            self._finished |= {*segment.kept, *segment.reductions}
        self._done.append(step)

    def _reader_faults(self, index: int, segment: Segment) -> Iterator[PlanFault]:
        """Find what reads this segment's results and isn't pulled back yet."""
        own = {i for i in (*segment.kept, *segment.reductions) if self._graph[i].differentiable}
        pulled = {p.segment for p in self._done if p.phase != "forward"}
        for reader in self._segments:
            if reader is not segment and reader.index not in pulled and self._is_pulled(reader):
                read = own & set().union(*(self._needs(i) for i in (*reader.reads, *reader.globals)))
                if read:
                    text = f"segment {reader.index}, which reads {self._named(min(read))}, is swept backward later"
                    yield PlanFault("cotangents", index, text)

    def _is_pulled(self, segment: Segment) -> bool:
        """Say whether a gradient goes through a segment."""
        return self._backward and is_differentiated(self._graph, segment)

    def _needs(self, node_id: int) -> frozenset[int]:
        """Return what must be finished before a global value, or a field that is read, is there."""
        node = self._graph[node_id]
        if not node.is_field or node.op == SCATTER:
            return self._awaited[node_id]
        return frozenset({node_id} if node_id in self._made else ())

    def _named(self, node_id: int, cotangent: bool = False) -> str:
        node = self._graph[node_id]
        kind = f"{'the cotangent of ' * cotangent}{'field' if node.is_field else 'reduction'}"
        return (
            f"{kind} {node_id} ({node.operator}{f' in {node.origin.module_path}' if node.origin.module_path else ''})"
        )


def _ending_faults(problem: Problem, plan: Plan) -> Iterator[PlanFault]:
    """Find a pass whose sums do not travel, or do not become numbers, right after it."""
    wanted, graph, segments = list[tuple[object, ...]](), problem.graph, plan.computed
    several = plan.ranks is not None and plan.ranks.count > 1
    for step in plan.passes:
        segment = segments[step.segment]
        gradients = how_summed(problem, summed_globals(graph, segment) if step.phase != "forward" else ())
        reductions = how_summed(problem, segment.reductions if step.phase != "backward" else ())
        cut = gradients.cut + reductions.cut
        gather = [("Gather", cut, False)] if several and cut else []
        wanted += [("Tiles",), ("Exchange", gradients, reductions), *gather, ("Scalars", step.segment)]
    if problem.backward:
        late = late_gradients(graph, segments) if several else []
        wanted += [("Scalars", None), *(("Gather", tuple(some), True) for some in late)]
    found = [(index, _kind(step)) for index, step in enumerate(plan.steps) if not isinstance(step, Allocate | Release)]
    for (index, one), other in zip([*found, (None, ())], [*wanted, ()], strict=False):
        if one != other:
            yield PlanFault("ends", index, f"{_shown(one)} stands where {_shown(other)} should")
            return


def _kind(step: Step) -> tuple[object, ...]:
    name = type(step).__name__
    if isinstance(step, Exchange):
        return name, step.gradients, step.reductions
    if isinstance(step, Gather):
        return name, step.nodes, step.gradients
    return (name, step.segment) if isinstance(step, Scalars) else (name,)


def _shown(kind: tuple[object, ...]) -> str:
    return f"{kind[0]}{kind[1:]}" if kind else "nothing"


def _chunk_faults(problem: Problem, plan: Plan) -> Iterator[PlanFault]:
    """Find chunks that no rank computes, or several do."""
    for index, step in enumerate(plan.steps):
        if isinstance(step, Tiles):
            first = step.first_chunks
            ends = (0, len(chunks_of(problem.graph, plan.segments[step.segment])))
            if len(first) < 2 or (first[0], first[-1]) != ends or list(first) != sorted(first):
                yield PlanFault("chunks", index, f"chunks begin at {first}, not from {ends[0]} to {ends[1]}")


def awaited(graph: Graph) -> list[frozenset[int]]:
    """List for each global (and each field laid out from one) the reductions and gathered fields behind it."""
    found: list[frozenset[int]] = []
    for node in graph.nodes:
        if node.is_reduction:
            found.append(frozenset({node.id}))
        elif node.op == GATHER:
            (field,) = node.operands
            found.append(found[field] if is_read(graph, field) else frozenset({field}))
        elif node.is_field and node.op != SCATTER:
            found.append(frozenset())
        else:
            found.append(frozenset().union(*(found[i] for i in node.operands)))
    return found


def _tile_faults(graph: Graph, plan: Plan, described: SegmentPlan) -> Iterator[PlanFault]:
    """Find tiles that do not partition their target, read what is not there, or take more memory than the plan says."""
    segment = described.computes
    grid = Grid(graph, segment, described.tile)
    where = f"segment {segment.index}"
    if described.tiles != grid.shape:
        yield PlanFault("tiles", None, f"{where} has {grid.shape} tiles of {described.tile} px, not {described.tiles}")
    for axis in (0, 1):
        count = min(described.tiles[axis], grid.shape[axis])
        ends = dict.fromkeys(grid.targets, 0)
        for index in range(count):
            for target, span in grid.wanted(axis, index).items():
                if span.start != ends[target]:
                    yield PlanFault("cover", None, f"{where}, axis {axis}: {span} of field {target} after {ends}")
                ends[target] = span.stop
        for target, end in ends.items():
            if end != graph[target].size(axis):
                missing = f"ends at {end} of {graph[target].size(axis)} px"
                yield PlanFault("cover", None, f"{where}, axis {axis}: field {target} {missing}")
        yield from _box_faults(graph, grid, axis, where)
    if not any(True for _ in _box_faults(graph, grid, 0, where)):
        backward = any(p.segment == segment.index and p.phase != "forward" for p in plan.passes)
        peak, between = tile_bytes(graph, segment, worst_tile(grid), backward=backward)
        if described.tile_peak_bytes < peak:
            yield PlanFault("bytes", None, f"{where}: a tile takes {peak} bytes, not {described.tile_peak_bytes}")
        held = described.saved_tiles // (1 if plan.ranks is None else plan.ranks.count) * between
        if (said := amount_of(described.memory, SAVED)) < held:
            told = f"{described.saved_tiles} tiles save {between} bytes each, not {said} in all"
            yield PlanFault("bytes", None, f"{where}: {told}")


def _box_faults(graph: Graph, grid: Grid, axis: int, where: str) -> Iterator[PlanFault]:
    count = grid.shape[axis]
    third = _ALL_LOOKED_AT // 3
    step = max(1, (count - 2 * third) // third)
    for index in sorted({*range(min(count, third)), *range(0, count, step), *range(max(0, count - third), count)}):
        try:
            geometry = grid.axis_geometry(axis, index)
        except AssertionError as error:
            yield PlanFault("boxes", None, f"{where}, axis {axis}, tile {index}: {error}")
            continue
        for field, span in geometry.spans.items():
            if span.empty or not span.within(Span(0, graph[field].size(axis))):
                size = graph[field].size(axis)
                yield PlanFault("boxes", None, f"{where}, axis {axis}: {span} of field {field}, which has {size} px")


def _memory_faults(problem: Problem, plan: Plan) -> Iterator[PlanFault]:
    """Find what takes more than the plan says."""
    whole = whole_field_bytes(problem.graph, backward=problem.backward)
    if (said := amount_of(plan.fixed, estimate.WHOLE)) < whole:
        yield PlanFault("bytes", None, f"whole-field operators take {whole} bytes, not {said}")
    for segment in plan.segments:
        if (tiles := amount_of(segment.memory, estimate.TILES)) < plan.workers * segment.tile_peak_bytes:
            yield PlanFault(
                "bytes", None, f"{plan.workers} tiles of segment {segment.index} take more than {tiles} bytes"
            )
    kept = {field.node: field for field in plan.kept}
    for index, step in enumerate(plan.steps):
        for buffer in step.buffers if isinstance(step, Allocate) else ():
            node, field = problem.graph[buffer.node], kept.get(buffer.node)
            tier = problem.memory.name if field is None else field.tier
            nbytes = node.nbytes if buffer.cotangent else 0 if field is None else field.size_bytes
            if buffer.size_bytes < nbytes and buffer.node != problem.handed:
                told = f"a buffer of node {buffer.node} takes {nbytes} bytes, not {buffer.size_bytes}"
                yield PlanFault("bytes", index, told)
            if buffer.tier != tier:
                yield PlanFault("bytes", index, f"a buffer of node {buffer.node} is in {buffer.tier!r}, not {tier!r}")
            held = [box for own in buffer.held for box in own]
            if missing := without([node.box], held):
                yield PlanFault("bytes", index, f"nobody holds {missing[0]} of a buffer of node {buffer.node}")


def _budget_faults(plan: Plan) -> Iterator[PlanFault]:
    if plan.budget_bytes is not None and plan.predicted_peak_bytes > plan.budget_bytes:
        yield PlanFault("budget", None, f"predicted {plan.predicted_peak_bytes} of {plan.budget_bytes} bytes")


def _sharing_faults(problem: Problem, plan: Plan) -> Iterator[PlanFault]:
    """Find where ranks would hold or send something else than the plan says."""
    if plan.ranks is None:
        return
    found = shared_by(problem, plan, plan.ranks.count)
    assert found.ranks is not None
    if found.steps != plan.steps or found.ranks.sent_bytes != plan.ranks.sent_bytes:
        yield PlanFault("ranks", None, f"{found.ranks.sent_bytes} bytes are sent, not {plan.ranks.sent_bytes}")
    if found.ranks.held_share > plan.ranks.held_share or found.ranks.message_bytes > plan.ranks.message_bytes:
        told = f"{found.ranks.held_share:.3f} of the fields, and messages take {found.ranks.message_bytes} bytes"
        yield PlanFault("ranks", None, f"a rank holds {told}: more than said")
