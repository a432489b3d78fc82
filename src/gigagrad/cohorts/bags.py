"""Bags: the slides of a patient, which have one label, and whose outputs are averaged."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gigagrad.cohorts.rows import Row
from gigagrad.errors import ConfigError


def bags_of(rows: Iterable[Row]) -> tuple[tuple[Row, ...], ...]:
    """The rows by bag, in the order of their first ones; a row without a bag or a label is one by itself."""
    bags: dict[object, list[Row]] = {}
    for number, row in enumerate(rows):
        bags.setdefault(number if row.bag is None or row.label is None else row.bag, []).append(row)
    return tuple(map(tuple, bags.values()))


def check_bags(path: Path, rows: Iterable[Row]) -> None:
    """Raises `ConfigError` for a bag whose slides differ in their label or their split."""
    for first, *others in bags_of(rows):
        for other in others:
            for what, one, two in (("label", first.label, other.label), ("split", first.split, other.split)):
                if one != two:
                    raise ConfigError(
                        f"{path} lines {first.line} and {other.line}: slides of {first.bag} have the {what}s {one} and "
                        f"{two}; slides of a bag have one, so correct it, or rename the column to keep them apart"
                    )
