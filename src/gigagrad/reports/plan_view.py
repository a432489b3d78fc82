"""A plan's description for a rich console."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from gigagrad.plans.description import COSTLY, GOOD, OWN, Description, Table

_BAR = 30
"""Characters of the longest bar."""
_STYLES = {GOOD: "green", COSTLY: "yellow", OWN: "bold"}


def renderable(description: Description) -> RenderableType:
    """The whole page, readable at 100 columns."""
    facts = RichTable.grid(padding=(0, 2))
    for label, text in description.facts:
        facts.add_row(Text(label, style="dim"), Text(text))
    parts: list[RenderableType] = [Group(Text(description.title, style="bold"), facts)]
    parts += [_Fitted(table) for table in description.tables]
    return Group(*(item for part in parts for item in (part, Text())))


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A table with the columns for which the console has room, words in several lines where they need them."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bars = [_Bar(share) for share in self.table.bars]
        table = self.table.fitting(options.max_width - (_BAR + 2 if bars else 0))
        right = table.numeric
        before = max((i + 1 for i, numeric in enumerate(right) if numeric), default=0)  # bars stand beside numbers
        shown = RichTable(
            title=Text(table.title, style="bold"),
            title_justify="left",
            box=None,
            header_style="dim",
            padding=(0, 2, 0, 0),
            pad_edge=False,
        )
        for i, name in enumerate(table.columns):
            if bars and i == before:
                shown.add_column()
            shown.add_column(Text(name), justify="right" if right[i] else "left", no_wrap=right[i], overflow="fold")
        tones = table.tones or ("",) * len(table.rows)
        for i, (row, tone) in enumerate(zip(table.rows, tones, strict=True)):
            cells: list[RenderableType] = [*map(Text, row)]
            cells[before:before] = bars[i : i + 1]
            shown.add_row(*cells, style=_STYLES.get(tone, ""))
        yield shown if table.rows else Text(table.title, style="bold")
        if table.note:
            yield Text(table.note)


@dataclass(frozen=True, slots=True)
class _Bar:
    """A bar of this share of the full length, in eighths of a character where the terminal has them."""

    share: float

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_BAR, _BAR)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        eighths = max(1, round(8 * _BAR * self.share))
        if options.ascii_only:
            yield Text("#" * -(-eighths // 8))
        else:
            yield Text("\u2588" * (eighths // 8) + " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"[eighths % 8].strip())
