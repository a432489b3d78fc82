"""A plan's data as labelled facts and tables in people's units, for the terminal and the HTML report alike.

Works from the JSON form of a plan by its naming rule (units stand in the names: `peak_bytes`, `seconds`, `halo_px`), so
that a plan may gain stages and columns without a change here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gigagrad.units import format_bytes, format_pixels, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType


_LARGEST_SHOWN = 12


@dataclass(frozen=True, slots=True)
class PlanTable:
    """A titled table of text; all rows are as long as `columns`. `numeric` says which columns align right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class PlanView:
    """What there is to show of a plan: `(label, value)` facts, then tables."""

    facts: tuple[tuple[str, str], ...]
    tables: tuple[PlanTable, ...]


def plan_view(plan: Mapping[str, Any]) -> PlanView:
    """`plan` is what `Plan.to_dict()` gives and `plan.json` holds."""
    facts: list[tuple[str, str]] = []
    tables: list[PlanTable] = []
    for name, value in plan.items():
        if isinstance(value, Mapping):
            inner = plan_view(value)
            facts += [(f"{_label(name)}: {label}", text) for label, text in inner.facts]
            tables += inner.tables
        elif name == "passes" and isinstance(value, list):
            facts.append((_label(name), _passes(value)))
        elif isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
            tables.append(_table(name, value))
        else:
            facts.append((_label(name), show(name, value)))
    return PlanView(tuple(facts), tuple(tables))


def show(name: str, value: Any) -> str:
    """`value` in the unit that its name's last word states; lists of numbers as sizes, `256 x 512`."""
    if value is None or value == [] or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        if all(isinstance(item, int) for item in value):
            return " x ".join(map(str, value))
        return ", ".join(show(name, item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{_label(str(key))} {show(str(key), item)}" for key, item in value.items())
    if not isinstance(value, (int, float)):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    unit = name.rpartition("_")[2]
    if unit == "bytes":
        return format_bytes(int(value))
    if unit in ("seconds", "second"):
        return format_seconds(value)
    if unit in ("pixels", "pixel"):
        return format_pixels(int(value))
    text = f"{value:,}".replace(",", "\u202f") if isinstance(value, int) else f"{value:.4g}"
    return f"{text} px" if unit == "px" else text


def plan_renderable(plan: Mapping[str, Any]) -> RenderableType:
    """The plan for a rich console."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    view = plan_view(plan)
    facts = Table.grid(padding=(0, 2))
    for label, text in view.facts:
        facts.add_row(Text(label, style="dim"), Text(text))
    parts: list[RenderableType] = [facts]
    for held in view.tables:
        table = Table(title=Text(held.title), title_justify="left", header_style="bold")
        for column, numeric in zip(held.columns, held.numeric, strict=True):
            table.add_column(Text(column), justify="right" if numeric else "left", overflow="fold")
        for row in held.rows:
            table.add_row(*map(Text, row))
        parts.append(table)
    return Group(*parts)


def _passes(passes: list[Mapping[str, Any]]) -> str:
    """The sweeps in order, runs of one phase as ranges: `forward 0 to 10, backward 10 to 0`."""
    runs: list[tuple[str, Any, Any]] = []
    for step in passes:
        phase, stage = str(step.get("phase")), step.get("stage")
        if runs and runs[-1][0] == phase:
            runs[-1] = (phase, runs[-1][1], stage)
        else:
            runs.append((phase, stage, stage))
    return ", ".join(
        f"{phase} {first}" if first == last else f"{phase} {first} to {last}" for phase, first, last in runs
    )


def _table(name: str, rows: list[Mapping[str, Any]]) -> PlanTable:
    """Of what is listed with its size, the largest; a deep network keeps more fields than anybody reads about."""
    title = _label(name)
    if len(rows) > _LARGEST_SHOWN and all("size_bytes" in row for row in rows):
        title = f"{title}: the largest {_LARGEST_SHOWN} of {len(rows)}"
        rows = sorted(rows, key=lambda row: -row["size_bytes"])[:_LARGEST_SHOWN]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return PlanTable(
        title=title,
        columns=tuple(_label(key) for key in keys),
        rows=tuple(tuple(show(key, row.get(key)) for key in keys) for row in rows),
        numeric=tuple(
            all(
                isinstance(row.get(key), (int, float, type(None))) and not isinstance(row.get(key), bool)
                for row in rows
            )
            for key in keys
        ),
    )


def _label(name: str) -> str:
    words = name.split("_")
    if len(words) > 1 and words[-1] in ("bytes", "px"):
        words.pop()
    elif words[-1] == "seconds":
        words[-1] = "time"
    return " ".join(words).capitalize()
