"""A plan walked pass by pass without running it: is it consistent, and what does it hold in memory when?

Nothing here trusts the planner. What a pass reads, what it needs to be finished and what its tiles cover is worked out
again from the graph, so that a plan for a size no machine at hand could run is checked all the same. Tiles are looked
at one axis at a time, as the geometry is separable: a terapixel has a thousand rows and columns of tiles, not a million
tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from gigagrad.boxes import Span
from gigagrad.graphs import Graph
from gigagrad.plans import ledger
from gigagrad.plans.geometry import Grid
from gigagrad.plans.keeping import held_by_pass, kept_bytes, lifetimes
from gigagrad.plans.memory import tile_peak_bytes, whole_field_bytes, worst_tile
from gigagrad.plans.order import PlanFault, Walk
from gigagrad.plans.plan import Amount, Pass, Plan, StagePlan, amount_of, total
from gigagrad.plans.problem import Problem
from gigagrad.plans.stages import Stage, gathered, is_read, split_stages
from gigagrad.plans.traffic import plan_for_ranks

_ALL_LOOKED_AT = 96
"""Of an axis with more tiles than this, halos are followed for the tiles at both borders and for some between."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What is in memory during one pass.

    What does not depend on the pass alone is the most that its stage's passes make of it, so a total may lie a little
    above the plan's peak.
    """

    stage: int
    phase: str
    amounts: tuple[Amount, ...]

    @property
    def total_bytes(self) -> int:
        return total(self.amounts)


@dataclass(frozen=True, slots=True)
class Simulation:
    """The faults found (none in a sound plan) and the memory held over time."""

    faults: tuple[PlanFault, ...]
    moments: tuple[Moment, ...]

    @property
    def consistent(self) -> bool:
        return not self.faults


def simulate(problem: Problem, plan: Plan) -> Simulation:
    """Walk a plan that was made for a problem, whatever machine and budget that names.

    Checked: the stages are those of the fields kept; tiles partition every target, and what they read lies inside the
    fields; what a pass reads is complete and in memory; reductions and whole fields are finished before they are used;
    every stage that a gradient goes through is swept backward once, after all that read its results; bytes held stay
    within what the plan says, and its peak within the budget.
    """
    if plan.whole:
        return Simulation(tuple(_budget_faults(plan)), (Moment(0, plan.whole, plan.fixed),))
    if plan.ranks is not None:
        problem = dataclasses.replace(problem, ranks=plan.ranks.count, held_share=plan.ranks.held_share)
    graph = problem.graph
    stages = split_stages(graph, [field.node for field in plan.kept])
    faults = list(_stage_faults(problem, plan, stages))
    if faults:
        return Simulation(tuple(faults), ())
    for described, stage in zip(plan.stages, stages, strict=True):
        faults += _tile_faults(graph, described, stage, backward=_differentiated(plan.passes, stage))
    lives = lifetimes(graph, stages, plan.passes)
    faults += Walk(graph, plan.passes, stages, lives, backward=problem.backward).faults()
    tiers = {field.node: field.tier for field in plan.kept}
    held = held_by_pass(problem, stages, plan.passes, tiers, problem.memory)
    moments = tuple(_moment(plan, p, pair) for p, pair in zip(plan.passes, held, strict=True))
    faults += _memory_faults(problem, plan, moments)
    for tier in problem.tiers[1:]:
        most = max(map(sum, held_by_pass(problem, stages, plan.passes, tiers, tier)), default=0)
        if most > plan.bytes_in(tier.name):
            said = plan.bytes_in(tier.name)
            faults.append(PlanFault("bytes", None, f"{most} bytes are kept on '{tier.name}', not {said}"))
    faults += _sharing_faults(problem, plan)
    return Simulation(tuple(faults), moments)


def _sharing_faults(problem: Problem, plan: Plan) -> Iterator[PlanFault]:
    """Whether ranks hold and send what the plan says."""
    if plan.ranks is None:
        return
    found = plan_for_ranks(problem, plan)
    if found.sent_bytes != plan.ranks.sent_bytes:
        yield PlanFault("ranks", None, f"{found.sent_bytes} bytes are sent, not {plan.ranks.sent_bytes}")
    if found.held_share > plan.ranks.held_share or found.message_bytes > plan.ranks.message_bytes:
        told = f"a rank holds {found.held_share:.3f} of the fields, and messages take {found.message_bytes} bytes"
        yield PlanFault("ranks", None, f"{told}: more than said")


def _differentiated(passes: tuple[Pass, ...], stage: Stage) -> bool:
    return any(p.stage == stage.index and p.phase != "forward" for p in passes)


def _stage_faults(problem: Problem, plan: Plan, stages: tuple[Stage, ...]) -> Iterator[PlanFault]:
    """Whether the plan describes the stages that its kept fields make. Without that nothing else can be asked."""
    graph = problem.graph
    for i in sorted(gathered(graph) - {field.node for field in plan.kept}):
        yield PlanFault("kept", None, f"field {i} is read whole, but not kept")
    for field in plan.kept:
        node = graph[field.node]
        if not node.is_field or is_read(graph, field.node):
            yield PlanFault("kept", None, f"node {field.node} is no field that a stage computes")
        elif (field.shape, field.size_bytes) != (
            node.shape,
            size := kept_bytes(problem, node.id, problem.tier(field.tier)),
        ):
            yield PlanFault("kept", None, f"field {field.node} is {node.shape}, {size} bytes, in the graph")
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


def _moment(plan: Plan, p: Pass, held: tuple[int, int]) -> Moment:
    fields, cotangents = held
    changed = {ledger.FIELDS: fields, ledger.COTANGENTS: cotangents}
    own = [Amount(a.name, changed.get(a.name, a.size_bytes)) for a in plan.stages[p.stage].memory]
    return Moment(p.stage, p.phase, (*plan.fixed, *own))


def _memory_faults(problem: Problem, plan: Plan, moments: tuple[Moment, ...]) -> Iterator[PlanFault]:
    """Whether what is held at any time is within what the plan says."""
    whole = whole_field_bytes(problem.graph, backward=problem.backward)
    if (said := amount_of(plan.fixed, ledger.WHOLE)) < whole:
        yield PlanFault("bytes", None, f"whole-field operators take {whole} bytes, not {said}")
    for index, moment in enumerate(moments):
        stage = plan.stages[moment.stage]
        held, most = (
            amount_of(amounts, ledger.FIELDS, ledger.COTANGENTS) for amounts in (moment.amounts, stage.memory)
        )
        if held > most:
            yield PlanFault("bytes", index, f"{held} bytes of fields are held, more than {most}")
        tiles = amount_of(stage.memory, ledger.TILES)
        if tiles < plan.workers * stage.tile_peak_bytes:
            yield PlanFault("bytes", index, f"{plan.workers} tiles take more than {tiles} bytes")
        if moment.total_bytes > plan.predicted_peak_bytes:
            told = f"{moment.total_bytes} bytes are held, more than the {plan.predicted_peak_bytes} predicted"
            yield PlanFault("bytes", index, told)
    yield from _budget_faults(plan)


def _budget_faults(plan: Plan) -> Iterator[PlanFault]:
    if plan.budget_bytes is not None and plan.predicted_peak_bytes > plan.budget_bytes:
        yield PlanFault("budget", None, f"predicted {plan.predicted_peak_bytes} of {plan.budget_bytes} bytes")
