"""A plan in words: facts and tables of text, the one place that says what there is to know of it.

Whoever shows a plan draws these in a way of its own: `str(plan)` as plain text, the terminal's page, the HTML report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from textwrap import wrap
from typing import TYPE_CHECKING

from gigagrad.units import format_bytes, format_pixels, format_seconds

if TYPE_CHECKING:
    from gigagrad.plans.plan import Plan, RankPlan

Facts = tuple[tuple[str, str], ...]
"""Labels and what is said under them."""

GOOD, COSTLY, OWN = "good", "costly", "own"
"""Kinds of rows that a colour may mark: what is saved, what is paid again and again, and the result itself."""

_LARGEST = 12
"""Kept fields and whole-field operators listed one by one: a deep network has more than anybody reads about."""
_PLACES = {"host": "host memory", "disk": "scratch files"}
"""Names for people of the tiers beside memory."""
_WIDTH = 100
"""Characters of a line of plain text."""
_TEXT_WIDTH = 16
"""Characters that a column of words is given at least; what is longer takes another line where that is possible."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text below the names of their columns, the columns that matter least at the end."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""
    bars: tuple[float, ...] = ()
    """For each row how long a bar it deserves, as a share of the longest; none where bars would say nothing."""
    tones: tuple[str, ...] = ()
    """For each row `GOOD`, `COSTLY`, `OWN` or nothing, where colours may help."""

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Say for each column whether it holds numbers, which stand on the right."""
        return tuple(
            all(row[i].lstrip("-")[:1].isdigit() or row[i] == "-" for row in self.rows)
            for i in range(len(self.columns))
        )

    def fitting(self, width: int) -> Table:
        """Drop the last columns, as far as there is no room for them in lines of `width` characters."""
        if not self.columns:
            return self
        longest = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        needed = [n if right else min(n, _TEXT_WIDTH) for n, right in zip(longest, self.numeric, strict=True)]
        count = len(needed)
        while count > 1 and sum(needed[:count]) + 2 * (count - 1) > width:
            count -= 1
        return replace(self, columns=self.columns[:count], rows=tuple(row[:count] for row in self.rows))


@dataclass(frozen=True, slots=True)
class Description:
    title: str
    facts: Facts
    tables: tuple[Table, ...]

    def __str__(self) -> str:
        """Return plain text."""
        blocks = [[self.title], _aligned(self.facts, (False, False))]
        for table in (table.fitting(_WIDTH) for table in self.tables):
            rows = _aligned([table.columns, *table.rows], table.numeric) if table.rows else []
            blocks.append([table.title, *rows, *wrap(table.note, _WIDTH)])
        return "\n\n".join("\n".join(lines) for lines in blocks)


def _aligned(rows: Sequence[tuple[str, ...]], right: Sequence[bool]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in rows
    ]


def describe(plan: Plan) -> Description:
    """Return everything that a plan says of itself."""
    source = "by the cost model" if plan.timed_seconds is None else TIMED
    tables = () if plan.whole else (segments_of(plan, len(plan.segments)), _kept(plan), *whole_fields_of(plan))
    return Description(
        f"{step_of(plan)} as planned",
        facts_of(plan, source),
        (*tables, memory_of(plan)),
    )


TIMED = "from tiles that were timed"
"""Source of the predicted time of a plan that has `timed_seconds`."""


def step_of(plan: Plan) -> str:
    """Name what is planned."""
    phases = [plan.whole] if plan.whole else [p.phase for p in plan.passes]
    return "Prediction" if all(phase == "forward" for phase in phases) else "Training step"


def facts_of(plan: Plan, source: str) -> Facts:
    """Return what is planned, for what, and what it takes; `source` says where the predicted time comes from."""
    *bag, channels, height, width = plan.image_shape
    at_once = f"{plan.workers} tiles at a time" if plan.workers > 1 else "one tile at a time"
    at_once += f", read by {plan.readers} threads" if plan.readers > 1 else ""
    runs = f"{plan.memory_format.replace('_', ' ')}, {at_once}"
    if plan.whole:
        runs = "the whole image at once, as PyTorch runs the model by itself"
    budget = "no budget set" if plan.budget_bytes is None else f"budget {format_bytes(plan.budget_bytes)}"
    elsewhere = [(_PLACES.get(amount.name, amount.name), amount.size_bytes) for amount in plan.elsewhere]
    whole = f", {format_seconds(plan.whole_seconds)} of it for whole fields" if plan.whole_field else ""
    return (
        _image(prod(bag), height, width, channels),
        ("runs", f"on {plan.device}, {runs}"),
        *((("ranks", _ranks(plan, plan.ranks)),) if plan.ranks is not None else ()),
        *((("passes over segments", _passes(plan) or "none"),) if not plan.whole else ()),
        *((("whole", _whole(plan)),) if plan.whole_pixels else ()),
        *((("saved", _saved(plan)),) if any(segment.saved_tiles for segment in plan.segments) else ()),
        ("predicted peak", f"{format_bytes(plan.predicted_peak_bytes)} ({budget})"),
        *((f"kept in {where}", f"{format_bytes(size)} at most") for where, size in elsewhere if size),
        ("predicted time", f"about {format_seconds(plan.predicted_seconds)} a step ({source}){whole}"),
    )


def _image(patches: int, height: int, width: int, channels: int) -> tuple[str, str]:
    if patches == 1:
        return "image", f"{height} x {width} px ({format_pixels(height * width)}), channels: {channels}"
    pixels = format_pixels(patches * height * width)
    return "bag", f"{patches:,} patches of {height} x {width} px ({pixels}), channels: {channels}; tiles are patches"


def _whole(plan: Plan) -> str:
    few = format_pixels(plan.whole_pixels)
    return f"fields of at most {few}, between the tiles of the others, as PyTorch runs them"


def _saved(plan: Plan) -> str:
    saving = [segment for segment in plan.segments if segment.saved_tiles]
    saved, all_tiles = (sum(getattr(one, name) for one in saving) for name in ("saved_tiles", "tile_count"))
    share = f"{saved:,} of {all_tiles:,}" if saved < all_tiles else f"all {saved:,}"
    of = "1 segment" if len(saving) == 1 else f"{len(saving)} segments"
    return f"activations of {share} tiles of {of}, which are not computed again"


def _ranks(plan: Plan, ranks: RankPlan) -> str:
    share = f"each holds at most {percent(ranks.held_share, 1)} of a field, " if plan.kept else ""
    return f"{ranks.count}; {share}all together send {format_bytes(ranks.sent_bytes)} a step"


def _passes(plan: Plan) -> str:
    """Return the passes in order, runs of one phase as ranges: `forward 0 to 10, backward 10 to 0`."""
    runs = [(phase, [p.segment for p in same]) for phase, same in groupby(plan.passes, lambda p: p.phase)]
    return ", ".join(f"{phase} {s[0]}" if len(s) == 1 else f"{phase} {s[0]} to {s[-1]}" for phase, s in runs)


def segments_of(plan: Plan, most: int) -> Table:
    """Return the segments that take longest, in order, and where the time goes."""
    pass_seconds = [share * plan.predicted_seconds for share in plan.pass_shares]
    seconds = [0.0] * len(plan.segments)
    for p, taken in zip(plan.passes, pass_seconds, strict=True):
        seconds[p.segment] += taken
    chosen = sorted(sorted(range(len(seconds)), key=lambda i: -seconds[i])[:most])
    few = f"Segments: the {len(chosen)} of {len(seconds)} that take longest"
    columns = (
        "segment passes tiles tile_px crop_px read per_tile time share operators sums keeps beside forward backward"
    )
    return Table(
        "Segments" if len(chosen) == len(seconds) else few,
        tuple(name.replace("_", " ") for name in columns.split()),
        tuple(
            (
                str(segment.index),
                phases[0]
                if len(phases := [p.phase for p in plan.passes if p.segment == segment.index]) == 1
                else "both",
                *(f"{height} x {width}" for height, width in (segment.tiles, segment.tile, segment.crop)),
                f"{segment.computed_ratio:.3g}x",
                format_bytes(segment.tile_peak_bytes),
                format_seconds(seconds[i]),
                percent(seconds[i], plan.predicted_seconds),
                str(len(segment.computes.fields)),
                str(len(segment.computes.reductions)),
                str(len(segment.computes.kept)),
                format_bytes(segment.beside_bytes),
                format_seconds(segment.forward_seconds),
                format_seconds(segment.backward_seconds),
            )
            for i in chosen
            for segment in (plan.segments[i],)
        ),
        _most_of_the_time(plan, pass_seconds, seconds),
    )


def _most_of_the_time(plan: Plan, pass_seconds: list[float], segment_seconds: list[float]) -> str:
    """Say which passes the time goes to, and how much of it to pixels that are read more than once."""
    total = plan.predicted_seconds
    if not total:
        return ""
    order = sorted(zip(pass_seconds, plan.passes, strict=True), key=lambda pair: -pair[0])
    named = ", ".join(f"segment {p.segment} {p.phase} {percent(seconds, total)}" for seconds, p in order[:3])
    ratio = sum(w * s.computed_ratio for w, s in zip(segment_seconds, plan.segments, strict=True)) / total
    halo = (
        f"tiles read {ratio:.3g} times the pixels they are for" if ratio >= 1.05 else "hardly any pixel is read twice"
    )
    return f"Most of the time: {named}; on average {halo}."


def _kept(plan: Plan) -> Table:
    if not plan.kept:
        return Table("Fields kept between segments: none (each segment computes from the image)")
    largest = sorted(plan.kept, key=lambda field: -field.size_bytes)
    total = format_bytes(sum(field.size_bytes for field in largest))
    return Table(
        f"Fields kept between segments: {len(largest)}, {total} in all",
        ("size", "where", "stored", "operator", "shape", "module", "node"),
        tuple(
            (
                format_bytes(field.size_bytes),
                field.tier,
                field.storage,
                field.operator,
                " x ".join(map(str, field.shape)),
                field.module or "the loss",
                str(field.node),
            )
            for field in largest[:_LARGEST]
        ),
        _smaller(len(largest)),
    )


def whole_fields_of(plan: Plan) -> tuple[Table, ...]:
    """Return the operators that run on whole fields, if there are any."""
    if not plan.whole_field:
        return ()
    largest = sorted(plan.whole_field, key=lambda operator: -operator.size_bytes)
    rows = tuple((format_bytes(o.size_bytes), o.operator, o.module or "the loss") for o in largest[:_LARGEST])
    title = f"Operators that run on whole fields: {len(largest)}"
    return (Table(title, ("size", "operator", "module"), rows, _smaller(len(largest))),)


def _smaller(count: int) -> str:
    return f"and {count - _LARGEST} smaller ones" if count > _LARGEST else ""


def memory_of(plan: Plan) -> Table:
    """Return the parts of the predicted peak."""
    parts = plan.memory_parts()
    rows = tuple((name, format_bytes(size)) for name, size in parts)
    longest = max((size for _, size in parts), default=1)
    return Table("Memory at the peak", ("part", "bytes"), rows, bars=tuple(size / longest for _, size in parts))


def percent(chunk: float, whole: float) -> str:
    return f"{100 * chunk / whole:.0f} %" if whole else "-"
