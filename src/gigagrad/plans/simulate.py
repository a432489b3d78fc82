"""A plan walked pass by pass without running it: is it consistent, and what does it hold in memory when?

Nothing here trusts the planner. What a pass reads, what it needs to be finished and what its tiles cover is worked out
again from the graph, so that a plan for a size no machine at hand could run is checked all the same. Tiles are looked
at one axis at a time, as the geometry is separable: a terapixel has a thousand rows and columns of tiles, not a million
tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gigagrad.boxes import Span
from gigagrad.graphs import GATHER, SCATTER, Graph
from gigagrad.plans.geometry import Grid
from gigagrad.plans.keeping import Lifetime, lifetimes, whole_field_bytes
from gigagrad.plans.memory import tile_peak_bytes, worst_tile
from gigagrad.plans.plan import Pass, Plan, StagePlan
from gigagrad.plans.schedule import Cotangents, last_cotangents
from gigagrad.plans.stages import Stage, gathered, is_read, split_stages

_ALL_LOOKED_AT = 96
"""Of an axis with more tiles than this, halos are followed for the tiles at both borders and for some between."""


@dataclass(frozen=True, slots=True)
class PlanFault:
    """Where a plan contradicts its graph or itself. `step` is the index of the pass, None for the plan as a whole."""

    rule: str
    step: int | None
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}" if self.step is None else f"{self.rule} (pass {self.step}): {self.text}"


@dataclass(frozen=True, slots=True)
class Moment:
    """What is in memory during one pass, in bytes.

    What readers and parameters take is the most that any pass makes of it, so a total may lie a little above the plan's
    peak.
    """

    stage: int
    phase: str
    process_bytes: int
    """The process before the run, and what kernels and threads add."""
    reader_bytes: int
    parameter_bytes: int
    whole_field_bytes: int
    kept_bytes: int
    cotangent_bytes: int
    tile_bytes: int
    """All tiles being computed at once, at their peaks."""

    @property
    def total_bytes(self) -> int:
        fixed = self.process_bytes + self.reader_bytes + self.parameter_bytes + self.whole_field_bytes
        return fixed + self.kept_bytes + self.cotangent_bytes + self.tile_bytes


@dataclass(frozen=True, slots=True)
class Simulation:
    """The faults found (none in a sound plan) and the memory held over time."""

    faults: tuple[PlanFault, ...]
    moments: tuple[Moment, ...]

    @property
    def consistent(self) -> bool:
        return not self.faults


def simulate(graph: Graph, plan: Plan, *, backward: bool) -> Simulation:
    """Walk a plan of `graph`; `backward` says whether it is meant to give gradients.

    Checked: the stages are those of the fields kept; tiles partition every target, and what they read lies inside the
    fields; what a pass reads is complete and in memory; reductions and whole fields are finished before they are used;
    every stage that a gradient goes through is swept backward once, after all that read its results; bytes held stay
    within what the plan says, and its peak within the budget.
    """
    stages = split_stages(graph, [field.node for field in plan.kept])
    faults = list(_stage_faults(graph, plan, stages))
    if faults:
        return Simulation(tuple(faults), ())
    for described, stage in zip(plan.stages, stages, strict=True):
        faults += _tile_faults(graph, described, stage, backward=_differentiated(plan.passes, stage))
    lives = lifetimes(graph, stages, plan.passes)
    faults += _Walk(graph, plan.passes, stages, lives, backward=backward).faults()
    moments = _moments(graph, plan, lives)
    faults += _memory_faults(graph, plan, moments, backward=backward)
    return Simulation(tuple(faults), moments)


def _differentiated(passes: tuple[Pass, ...], stage: Stage) -> bool:
    return any(p.stage == stage.index and p.phase != "forward" for p in passes)


def _stage_faults(graph: Graph, plan: Plan, stages: tuple[Stage, ...]) -> Iterator[PlanFault]:
    """Whether the plan describes the stages that its kept fields make. Without that nothing else can be asked."""
    for i in sorted(gathered(graph) - {field.node for field in plan.kept}):
        yield PlanFault("kept", None, f"field {i} is read whole, but not kept")
    for field in plan.kept:
        node = graph[field.node]
        if not node.is_field or is_read(graph, field.node):
            yield PlanFault("kept", None, f"node {field.node} is no field that a stage computes")
        elif (field.shape, field.size_bytes) != (node.shape, node.nbytes):
            yield PlanFault("kept", None, f"field {field.node} is {node.shape}, {node.nbytes} bytes, in the graph")
    if len(plan.stages) != len(stages):
        yield PlanFault("stages", None, f"{len(plan.stages)} described, {len(stages)} by the fields kept")
    for described, stage in zip(plan.stages, stages, strict=False):
        said = (described.index, described.operators, described.reductions, described.keeps)
        found = (stage.index, len(stage.fields), len(stage.reductions), len(stage.kept))
        if said != found:
            yield PlanFault("stages", None, f"(index, operators, reductions, keeps) are {found}, not {said}")
    for index, p in enumerate(plan.passes):
        if not 0 <= p.stage < len(stages) or p.phase not in ("forward", "backward", "one pass"):
            yield PlanFault("stages", index, f"there is no {p.phase!r} of stage {p.stage}")


def _tile_faults(graph: Graph, described: StagePlan, stage: Stage, *, backward: bool) -> Iterator[PlanFault]:
    """Whether tiles partition every target, read only what is there, and take no more memory than they are said to."""
    grid = Grid(graph, stage, described.tile)
    where = f"stage {stage.index}"
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
        peak = tile_peak_bytes(graph, stage, worst_tile(grid), backward=backward)
        if described.tile_peak_bytes < peak:
            yield PlanFault("bytes", None, f"{where}: a tile takes {peak} bytes, not {described.tile_peak_bytes}")


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


class _Walk:
    """The passes in order, with what is finished and what is in memory at each."""

    def __init__(
        self,
        graph: Graph,
        passes: tuple[Pass, ...],
        stages: tuple[Stage, ...],
        lives: tuple[Lifetime, ...],
        *,
        backward: bool,
    ) -> None:
        self._graph, self._passes, self._stages, self._lives = graph, passes, stages, lives
        self._backward = backward
        self._awaited = awaited(graph)
        self._producers = {i: stage.index for stage in stages for i in (*stage.kept, *stage.reductions)}
        self._forward = {stage.index: self._passes_of(stage.index, {"forward", "one pass"}) for stage in stages}
        self._back = {stage.index: self._passes_of(stage.index, {"backward", "one pass"}) for stage in stages}

    def _passes_of(self, stage: int, phases: set[str]) -> list[int]:
        return [index for index, p in enumerate(self._passes) if p.stage == stage and p.phase in phases]

    def faults(self) -> Iterator[PlanFault]:
        for stage in self._stages:
            if len(self._forward[stage.index]) != 1:
                times = len(self._forward[stage.index])
                yield PlanFault("passes", None, f"stage {stage.index} is swept forward {times} times instead of once")
            yield from self._backward_faults(stage)
        for index, p in enumerate(self._passes):
            yield from self._ready_faults(index, self._stages[p.stage], p.phase)
            yield from self._memory_faults(index, self._stages[p.stage], p.phase)
        ends = [*self._graph.outputs, *self._graph.updates.values()]
        for awaited_node in sorted(set().union(*(self._needs(i) for i in ends))):
            if not self._finished(awaited_node, len(self._passes)):
                yield PlanFault(
                    "results", None, f"the result needs {self._named(awaited_node)}, which is never finished"
                )

    def _needs(self, node_id: int) -> frozenset[int]:
        """What must be finished before a global value, or a field that is read, is there."""
        node = self._graph[node_id]
        if not node.is_field or node.op == SCATTER:
            return self._awaited[node_id]
        return frozenset({node_id} if node_id in self._producers else ())

    def _finished(self, node_id: int, index: int) -> bool:
        """Whether the sweep that makes a reduction or a kept field has ended before pass `index`."""
        return any(done < index for done in self._forward[self._producers[node_id]])

    def _ready_faults(self, index: int, stage: Stage, phase: str) -> Iterator[PlanFault]:
        needs = set().union(*(self._needs(i) for i in (*stage.reads, *stage.globals)))
        if phase == "backward":
            needs |= {*stage.kept, *stage.reductions, *self._needs(self._graph.output)}
        for node_id in sorted(needs):
            if not self._finished(node_id, index):
                yield PlanFault("order", index, f"needs {self._named(node_id)}, which is not finished")
        if phase == "one pass":
            last = stage is self._stages[-1]
            if not last or last_cotangents(self._graph, stage) is Cotangents.AFTER_FORWARD:
                yield PlanFault("order", index, f"stage {stage.index} cannot go forward and backward in one pass")

    def _memory_faults(self, index: int, stage: Stage, phase: str) -> Iterator[PlanFault]:
        """Whether the stores that a pass reads and writes are there."""
        alive = {(life.field, life.cotangent) for life in self._lives if life.first <= index <= life.last}
        computed = [i for i in stage.reads if not is_read(self._graph, i)]
        for i in (*computed, *stage.kept):
            if (i, False) not in alive:
                yield PlanFault("memory", index, f"{self._named(i)} is not in memory")
        if phase != "forward":
            for i in (*stage.reads, *stage.kept):
                if self._graph[i].differentiable and (i, True) not in alive:
                    yield PlanFault("memory", index, f"the cotangent of {self._named(i)} is not in memory")

    def _needs_backward(self, stage: Stage) -> bool:
        return self._backward and any(self._graph[i].differentiable for i in (*stage.reductions, *stage.kept))

    def _backward_faults(self, stage: Stage) -> Iterator[PlanFault]:
        """Once backward where a gradient goes through, and only after everything that reads what the stage made."""
        times = len(self._back[stage.index])
        if times != self._needs_backward(stage):
            yield PlanFault("passes", None, f"stage {stage.index} is swept backward {times} times")
            return
        if not times:
            return
        own = {i for i in (*stage.kept, *stage.reductions) if self._graph[i].differentiable}
        for reader in self._stages:
            if reader is stage or not self._needs_backward(reader):
                continue
            read = own & set().union(*(self._needs(i) for i in (*reader.reads, *reader.globals)))
            if read and any(then >= self._back[stage.index][0] for then in self._back[reader.index]):
                text = f"stage {reader.index}, which reads {self._named(min(read))}, is swept backward later"
                yield PlanFault("cotangents", self._back[stage.index][0], text)

    def _named(self, node_id: int) -> str:
        node = self._graph[node_id]
        kind = "field" if node.is_field else "reduction"
        return f"{kind} {node_id} ({node.op}{f' in {node.origin.module_path}' if node.origin.module_path else ''})"


def awaited(graph: Graph) -> list[frozenset[int]]:
    """For each global (and each field laid out from one) the reductions and gathered fields it is computed from."""
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


def _moments(graph: Graph, plan: Plan, lives: tuple[Lifetime, ...]) -> tuple[Moment, ...]:
    moments = []
    for index, p in enumerate(plan.passes):
        held = {True: 0, False: 0}
        for life in lives:
            if life.first <= index <= life.last:
                held[life.cotangent] += life.nbytes(graph)
        moments.append(
            Moment(
                stage=p.stage,
                phase=p.phase,
                process_bytes=plan.base_bytes + plan.runtime_bytes,
                reader_bytes=plan.reader_bytes,
                parameter_bytes=plan.parameter_bytes,
                whole_field_bytes=plan.whole_field_bytes,
                kept_bytes=held[False],
                cotangent_bytes=held[True],
                tile_bytes=plan.workers * plan.stages[p.stage].tile_peak_bytes,
            )
        )
    return tuple(moments)


def _memory_faults(graph: Graph, plan: Plan, moments: tuple[Moment, ...], *, backward: bool) -> Iterator[PlanFault]:
    """Whether what is held at any time is within what the plan says."""
    whole = whole_field_bytes(graph, backward=backward)
    if plan.whole_field_bytes < whole:
        yield PlanFault("bytes", None, f"whole-field operators take {whole} bytes, not {plan.whole_field_bytes}")
    for index, moment in enumerate(moments):
        held = moment.kept_bytes + moment.cotangent_bytes
        if held > plan.kept_bytes:
            yield PlanFault("bytes", index, f"{held} bytes of fields are held, more than {plan.kept_bytes}")
        # What every pass needs for certain; parameters and pixels read ahead are counted at their own peaks.
        certain = plan.base_bytes + plan.runtime_bytes + whole + held + moment.tile_bytes
        if certain > plan.predicted_peak_bytes:
            yield PlanFault(
                "bytes", index, f"{certain} bytes are held, more than the {plan.predicted_peak_bytes} predicted"
            )
    if plan.budget_bytes is not None and plan.predicted_peak_bytes > plan.budget_bytes:
        yield PlanFault("budget", None, f"predicted {plan.predicted_peak_bytes} of {plan.budget_bytes} bytes")
