"""A plan for people: its segments, the placement of each field, where memory and time go, and what more memory
or more ranks would buy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from gigagrad import plans
from gigagrad.events import Events, Listener
from gigagrad.plans import EXACT, WORTH_SAYING, Advice, Amount, Placement, Plan, Point, Problem
from gigagrad.plans.description import (
    COSTLY,
    GOOD,
    OWN,
    TIMED,
    Description,
    Table,
    facts_of,
    memory_of,
    percent,
    segments_of,
    step_of,
    whole_fields_of,
)
from gigagrad.reports.tables import Shown
from gigagrad.scaling import DATA, GROUPS, PIPELINE, TILE, Scaling, Shared
from gigagrad.units import format_bytes, format_seconds

_SEGMENTS_SHOWN = 10
_FIELDS_SHOWN = 6
_RESOURCES = {"host": "host memory", "disk": "scratch"}
_WHERE = {"memory": "in memory", "host": "on the host", "disk": "on disk"}


@dataclass(frozen=True, slots=True)
class PlanStudy:
    """A plan and what was worked out about it, for the terminal and for a picture."""

    model: str
    plan: Plan
    rates: str
    """The rates that predict time where no tiles were timed, as in "by this machine's rates"."""
    placements: tuple[Placement, ...]
    moments: tuple[tuple[Amount, ...], ...]
    points: tuple[Point, ...]
    """The trade-off curve, least memory first, in the same seconds."""
    advice: tuple[Advice, ...] = ()
    """Suggestions that would make a step clearly faster, in the same seconds."""


def make_study(
    model: str, problem: Problem, plan: Plan, *, rates: str = "", listeners: tuple[Listener, ...] = ()
) -> PlanStudy:
    """Work out everything there is to say about a plan that was made for this problem: other plans, with less and more
    of what holds it back, are made for it. `rates` as in `PlanStudy`, by default those of the machine.
    """
    own = plans.estimate.problem_of(plan, problem)
    faults = plans.check(own, plan)
    assert not faults, "; ".join(map(str, faults))
    # Where tiles of this plan have been timed, the whole curve is scaled to them.
    scale = plan.predicted_seconds / plan.modelled_seconds if plan.modelled_seconds else 1.0
    costs = plans.Costs(problem.graph, problem.machine, rounds=problem.rounding is not None)
    with Events(listeners).preparing("try other budgets") as tried:

        def make(changed: Problem) -> Plan:
            tried(None)  # which of them is fastest says nothing: memory is no object
            return plans.make_plan(changed, costs=costs)

        points = plans.trade_off(lambda budget: make(dataclasses.replace(problem, budget_bytes=budget)))
        advice = plans.advise(own, plan, points, make)
    return PlanStudy(
        model=model,
        plan=plan,
        rates=rates or f"by {problem.machine.basis}",
        placements=plans.placements(problem.graph, plan),
        moments=plan.moments,
        points=tuple(dataclasses.replace(point, seconds=scale * point.seconds) for point in points),
        advice=tuple(dataclasses.replace(each, seconds=scale * each.seconds) for each in advice),
    )


def plan_page(study: PlanStudy, more: tuple[Table, ...] = ()) -> RenderableType:
    """Lay out the whole page for a rich console, readable at 100 columns, with `more` tables at its end."""
    described = describe_study(study)
    facts = RichTable.grid(padding=(0, 2))
    for label, text in described.facts:
        facts.add_row(Text(label, style="dim"), Text(text))
    parts: list[RenderableType] = [Group(Text(described.title, style="bold"), facts)]
    parts += [Shown(table, fitting=True) for table in (*described.tables, *more)]
    return Group(*(item for part in parts for item in (part, Text())))


def describe_study(study: PlanStudy) -> Description:
    """Describe the plan, with the placement of every field in place of the list of those that it keeps."""
    plan = study.plan
    facts = facts_of(plan, study.rates if plan.timed_seconds is None else TIMED)
    tables = (
        ()
        if plan.whole
        else (segments_of(plan, _SEGMENTS_SHOWN), *whole_fields_of(plan), _placements(study.placements))
    )
    labels = ["what would help", *("" for _ in study.advice[1:])]
    return Description(
        f"{step_of(plan)} of {study.model}",
        (
            *facts,
            ("smallest budget", f"{format_bytes(study.points[0].budget_bytes)} would work"),
            *zip(labels, advice_in_words(study), strict=True),
        ),
        (*tables, memory_of(plan), _curve(study)),
    )


def advice_in_words(study: PlanStudy) -> tuple[str, ...]:
    """Write a line for each resource of which more would help, or one that says why none would."""
    if study.plan.budget_bytes is None:
        return ("nothing: no budget holds this plan back",)
    if not study.advice:
        saved = percent(WORTH_SAYING, 1)
        return (f"neither memory nor scratch: twice as much would save less than {saved} of the time",)
    lines = [
        f"{format_bytes(each.size_bytes)} of {_RESOURCES.get(each.tier, each.tier)}: {format_seconds(each.seconds)}"
        for each in study.advice
    ]
    lines[0] += f" a step instead of {format_seconds(study.plan.predicted_seconds)}"
    return tuple(lines)


def _placements(placements: Sequence[Placement]) -> Table:
    """Tabulate the largest of the fields that are kept and of those that are not, and how many of each there are."""
    kept = [one for one in placements if one.kept]
    shown = [*kept[:_FIELDS_SHOWN], *[one for one in placements if not one.kept][:_FIELDS_SHOWN]]
    shown.sort(key=lambda one: -one.size_bytes)
    again = sum(not one.kept and one.passes > 1 for one in placements)
    once = len(placements) - len(kept) - again
    size = f" ({format_bytes(sum(one.size_bytes for one in kept))})" if kept else ""
    return Table(
        "Fields" if len(shown) == len(placements) else f"Fields: the largest of {len(placements)}, kept and not kept",
        ("size", "field", "module", "placement"),
        tuple((format_bytes(one.size_bytes), _field(one), one.module or "the loss", _placement(one)) for one in shown),
        f"All together: {len(kept)} kept{size}, {again} made more than once, {once} made once and forgotten. "
        "Fields that are not kept are made tile by tile and are never whole.",
        tones=tuple(GOOD if one.kept else COSTLY if one.passes > 2 else "" for one in shown),
    )


def _field(placement: Placement) -> str:
    operator = placement.operator.removeprefix("aten.").removeprefix("gigagrad.").partition(".")[0]
    return f"{operator} {'x'.join(map(str, placement.shape[1:]))}"


def _placement(placement: Placement) -> str:
    if placement.tier is not None:
        readers = ", ".join(map(str, placement.readers[:2])) + (" ..." if len(placement.readers) > 2 else "")
        stored = "" if placement.storage == EXACT else f" as {placement.storage}"
        where = _WHERE.get(placement.tier, f"in {placement.tier}")
        return f"kept {where}{stored} from segment {placement.segments[0]} for {readers}"
    if placement.passes == 1:
        return "made once"
    segments = f", {len(placement.segments)} segments" if len(placement.segments) > 1 else ""
    return f"made in {placement.passes} passes{segments}"


def _curve(study: PlanStudy) -> Table:
    """Tabulate the curve: a row for each point, a bar as long as its time; the plan itself among them."""
    plan = study.plan
    kept_bytes = sum(field.size_bytes for field in plan.kept)
    rows = [(p.predicted_peak_bytes, p.seconds, p.kept, p.kept_bytes, "") for p in study.points]
    own = (plan.predicted_peak_bytes, plan.predicted_seconds, len(plan.kept), kept_bytes, "<- this plan")
    # Two plans this close are one to a reader.
    rows = [row for row in rows if not (_close(row[0], own[0]) and _close(row[1], own[1]))]
    rows = sorted([*rows, own])
    longest = max(row[1] for row in rows) or 1
    return Table(
        "Memory against time",
        ("memory", "time", "fields kept", "their bytes", ""),
        tuple(
            (format_bytes(peak), format_seconds(seconds), str(kept), format_bytes(size) if kept else "-", this)
            for peak, seconds, kept, size, this in rows
        ),
        bars=tuple(row[1] / longest for row in rows),
        tones=tuple(OWN if row[4] else "" for row in rows),
    )


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 0.01 * max(abs(a), abs(b))


_WELL, _BADLY = 0.8, 0.5
"""Efficiencies from which on, and below which, a row gets a colour."""
_WHY = {
    TILE: "groups would wait",
    DATA: "only gradients travel",
    GROUPS: "no rank is idle",
    PIPELINE: "little crosses its cuts",
}


def scale_tables(scaling: Scaling, ranks: Sequence[int]) -> tuple[Table, ...]:
    """Tabulate what so many ranks take, hold and send; for several images a step also which way is fastest."""
    rows = [scaling.shared(count) for count in ranks]
    shown = [next(alike) for _, alike in groupby(rows, lambda row: (row.groups, row.tile.ranks))]
    idle = " Rows that only add idle ranks are left out." if len(shown) < len(rows) else ""
    tables = [
        Table(
            f"Ranks with {scaling.link} each",
            ("ranks", "time", "faster", "efficiency", "memory", "sent", "groups", "lost to"),
            tuple(map(_row, shown)),
            "Memory is that of the rank that needs most, sent the bytes of the one that sends most." + idle,
            tones=tuple(
                GOOD if row.efficiency >= _WELL else COSTLY if row.efficiency < _BADLY else "" for row in shown
            ),
        )
    ]
    if scaling.images > 1:
        tables.append(_ways(scaling, [row.ranks for row in shown if row.ranks > 1]))
    return tuple(tables)


def scale_rows(scaling: Scaling, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rows as plain types, for JSON; times in seconds."""
    return [
        {
            "ranks": row.ranks,
            "seconds": row.seconds,
            "times_faster": row.times_faster,
            "efficiency": row.efficiency,
            "memory_bytes": row.tile.memory_bytes,
            "sent_bytes": row.sent_bytes,
            "groups": row.groups,
            "ranks_a_group": row.tile.ranks,
            "lost_seconds": row.lost,
            "ways_seconds": scaling.ways(row.ranks),
        }
        for row in map(scaling.shared, ranks)
    ]


def _row(row: Shared) -> tuple[str, ...]:
    cause, lost = max(row.lost.items(), key=lambda item: item[1])
    return (
        str(row.ranks),
        format_seconds(row.seconds),
        f"{row.times_faster:.3g}x",
        percent(row.efficiency, 1),
        format_bytes(row.tile.memory_bytes),
        format_bytes(row.sent_bytes) if row.sent_bytes else "-",
        f"{row.groups} x {row.tile.ranks}",
        f"{cause}, {percent(lost, row.seconds)}" if row.ranks > 1 else "",
    )


def _ways(scaling: Scaling, ranks: Sequence[int]) -> Table:
    rows = []
    for count in ranks:
        ways = scaling.ways(count)
        fastest = min(ways, key=lambda way: ways[way])
        rows.append((str(count), *map(format_seconds, ways.values()), fastest, _WHY[fastest]))
    return Table(
        f"Which parallelism, for {scaling.images} images a step",
        ("ranks", TILE, DATA, GROUPS, PIPELINE, "fastest", "because"),
        tuple(rows),
    )
