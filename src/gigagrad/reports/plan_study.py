"""A plan for people: its stages, the fate of each field, where memory and time go, and what more memory would buy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from gigagrad.plans import DISK, EXACT, HOST, MEMORY, Fate, Moment, Plan, Point
from gigagrad.units import format_bytes, format_pixels, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

_STAGES_SHOWN = 10
_FIELDS_SHOWN = 6
_BAR = 30
"""Characters of the longest bar."""
_WHERE = {MEMORY: "in memory", HOST: "on the host", DISK: "on disk"}
_FIELD_WIDTH, _MODULE_WIDTH = 34, 24


@dataclass(frozen=True, slots=True)
class PlanStudy:
    """A plan and what was worked out about it, for the terminal and for a picture."""

    model: str
    plan: Plan
    calibrated: bool
    """Whether the machine's rates were measured."""
    fates: tuple[Fate, ...]
    moments: tuple[Moment, ...]
    points: tuple[Point, ...]
    """The trade-off curve, least memory first, in the same seconds."""

    @property
    def seconds(self) -> float:
        return self.plan.predicted_seconds

    @property
    def pass_seconds(self) -> list[float]:
        return [share * self.seconds for share in self.plan.pass_shares]

    @property
    def smallest_bytes(self) -> int:
        """The smallest budget that works."""
        return self.points[0].budget_bytes

    def stage_seconds(self) -> list[float]:
        """By stage, over all its sweeps."""
        total = [0.0] * len(self.plan.stages)
        for p, seconds in zip(self.plan.passes, self.pass_seconds, strict=True):
            total[p.stage] += seconds
        return total


def plan_page(study: PlanStudy) -> RenderableType:
    """The whole page for a rich console, readable at 100 columns."""
    parts = [_header(study), _stages(study), *_dominating(study), _fates(study.fates), _memory(study), _curve(study)]
    return Group(*(item for part in parts for item in (part, Text())))


def _header(study: PlanStudy) -> RenderableType:
    plan = study.plan
    height, width = plan.image_shape[-2:]
    step = "prediction" if all(p.phase == "forward" for p in plan.passes) else "training step"
    at_once = f"{plan.workers} tiles at a time" if plan.workers > 1 else "one tile at a time"
    budget = "no budget set" if plan.budget_bytes is None else f"budget {format_bytes(plan.budget_bytes)}"
    rates = "by this machine's rates" if study.calibrated else "by typical rates; 'gigagrad calibrate' measures these"
    source = "from tiles that were timed" if plan.timed_seconds is not None else rates
    facts = Table.grid(padding=(0, 2))
    rows = [
        ("image", f"{height} x {width} px ({format_pixels(height * width)})"),
        ("runs", f"on {plan.device}, {plan.memory_format.replace('_', ' ')}, {at_once}"),
        ("peak memory", f"{format_bytes(plan.predicted_peak_bytes)} predicted ({budget})"),
        ("smallest budget", f"{format_bytes(study.smallest_bytes)} would work"),
        ("time", f"about {format_seconds(study.seconds)} ({source})"),
    ]
    for label, text in rows:
        facts.add_row(Text(label, style="dim"), Text(text))
    return Group(Text(f"{step.capitalize()} of {study.model}", style="bold"), facts)


def _stages(study: PlanStudy) -> RenderableType:
    plan, seconds = study.plan, study.stage_seconds()
    chosen = sorted(sorted(range(len(seconds)), key=lambda i: -seconds[i])[:_STAGES_SHOWN])
    title = (
        "Stages" if len(chosen) == len(seconds) else f"Stages: the {len(chosen)} of {len(seconds)} that take longest"
    )
    table = _table(title)
    for name in ("stage", "sweeps", "ops", "tiles", "tile px", "crop px", "read", "a tile", "time", ""):
        table.add_column(name, justify="left" if name == "sweeps" else "right", no_wrap=True, overflow="crop")
    for i in chosen:
        stage = plan.stages[i]
        table.add_row(
            str(stage.index),
            phases[0] if len(phases := [p.phase for p in plan.passes if p.stage == i]) == 1 else "there, back",
            str(stage.operators),
            f"{stage.tiles[0]}x{stage.tiles[1]}",
            f"{stage.tile[0]}x{stage.tile[1]}",
            f"{stage.crop[0]}x{stage.crop[1]}",
            f"{stage.computed_ratio:.3g}x",
            format_bytes(stage.tile_peak_bytes),
            format_seconds(seconds[i]),
            _share(seconds[i], study.seconds),
        )
    return table


def _dominating(study: PlanStudy) -> list[RenderableType]:
    """One sentence: which sweeps the time goes to, and how much of it to pixels that are read more than once."""
    if not study.seconds:
        return []
    order = sorted(zip(study.pass_seconds, study.plan.passes, strict=True), key=lambda pair: -pair[0])
    named = ", ".join(f"stage {p.stage} {p.phase} {_share(seconds, study.seconds)}" for seconds, p in order[:3])
    stages, weights = study.plan.stages, study.stage_seconds()
    ratio = sum(w * s.computed_ratio for w, s in zip(weights, stages, strict=True)) / study.seconds
    halo = (
        f"tiles read {ratio:.3g} times the pixels they are for" if ratio >= 1.05 else "hardly any pixel is read twice"
    )
    return [Text.assemble(("Most of the time: ", "bold"), f"{named}; on average {halo}.")]


def _fates(fates: Sequence[Fate]) -> RenderableType:
    """The largest of the fields that are kept and of those that are not, and how many there are of each kind."""
    kept = [fate for fate in fates if fate.kept]
    shown = [*kept[:_FIELDS_SHOWN], *[fate for fate in fates if not fate.kept][:_FIELDS_SHOWN]]
    shown.sort(key=lambda fate: -fate.size_bytes)
    table = _table("Fields" if len(shown) == len(fates) else f"Fields: the largest of {len(fates)}, kept and not kept")
    for name in ("size", "field", "module", "fate"):
        table.add_column(name, justify="right" if name == "size" else "left", no_wrap=True, overflow="crop")
    for fate in shown:
        operator = fate.operator.removeprefix("aten.").removeprefix("gigagrad.").partition(".")[0]
        table.add_row(
            format_bytes(fate.size_bytes),
            Text(f"{operator} {'x'.join(map(str, fate.shape[1:]))}"[:_FIELD_WIDTH]),
            Text(_end(fate.module or "the loss", _MODULE_WIDTH)),
            Text(_fate(fate), style="green" if fate.kept else "yellow" if fate.sweeps > 2 else ""),
        )
    again = sum(not fate.kept and fate.sweeps > 1 for fate in fates)
    once = len(fates) - len(kept) - again
    size = f" ({format_bytes(sum(fate.size_bytes for fate in kept))})" if kept else ""
    counts = f"All together: {len(kept)} kept{size}, {again} made more than once, {once} made once and forgotten."
    return Group(
        table, Text(counts), Text("Fields that are not kept are made tile by tile and are never whole.", style="dim")
    )


def _fate(fate: Fate) -> str:
    """At most 45 characters."""
    if fate.tier is not None:
        readers = ", ".join(map(str, fate.readers[:2])) + (" ..." if len(fate.readers) > 2 else "")
        stored = "" if fate.storage == EXACT else f" as {fate.storage}"
        return f"kept {_WHERE[fate.tier]}{stored} from stage {fate.stages[0]} for {readers}"
    if fate.sweeps == 1:
        return "made once"
    stages = f", {len(fate.stages)} stages" if len(fate.stages) > 1 else ""
    return f"made in {fate.sweeps} sweeps{stages}"


def _end(path: str, width: int) -> str:
    """The end of a dotted path, which tells more than its beginning."""
    return path if len(path) <= width else f"..{path[2 - width :]}"


def _memory(study: PlanStudy) -> RenderableType:
    parts = study.plan.memory_parts()
    longest = max((size for _, size in parts), default=1)
    table = _table("Memory at the peak")
    table.add_column("part")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("")
    for name, size in parts:
        table.add_row(name, format_bytes(size), _Bar(size / longest))
    return table


def _curve(study: PlanStudy) -> RenderableType:
    """A row for each point of the curve, a bar as long as its time; the plan itself among them."""
    plan = study.plan
    table = _table("Memory against time")
    for name in ("memory", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    table.add_column("fields kept", no_wrap=True)
    kept_bytes = sum(field.size_bytes for field in plan.kept)
    rows = [(p.predicted_peak_bytes, p.seconds, p.kept, p.kept_bytes, False) for p in study.points]
    own = (plan.predicted_peak_bytes, study.seconds, len(plan.kept), kept_bytes, True)
    # Two plans this close are one to a reader.
    rows = [row for row in rows if not (_close(row[0], own[0]) and _close(row[1], own[1]))]
    rows = sorted([*rows, own])
    longest = max((row[1] for row in rows), default=0) or 1
    for peak, seconds, kept, size, this in rows:
        fields = f"{kept}, {format_bytes(size)}" if kept else "none"
        table.add_row(
            format_bytes(peak),
            format_seconds(seconds),
            _Bar(seconds / longest),
            f"{fields}  <- this plan" if this else fields,
            style="bold" if this else "",
        )
    return table


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 0.01 * max(abs(a), abs(b))


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _table(title: str) -> Table:
    return Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=None,
        header_style="dim",
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )


@dataclass(frozen=True, slots=True)
class _Bar:
    """A bar of this share of the full length, in eighths of a character where the terminal has them."""

    share: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        eighths = max(1, round(8 * _BAR * self.share))
        if options.ascii_only:
            yield Text("#" * -(-eighths // 8))
        else:
            yield Text("\u2588" * (eighths // 8) + " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"[eighths % 8].strip())
