"""Gains of many ranks, as tables: a row for each number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from gigagrad.plans.description import COSTLY, GOOD, Table, percent
from gigagrad.scaling import DATA, GROUPS, PIPELINE, TILE, Scaling, Shared
from gigagrad.units import format_bytes, format_seconds

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
