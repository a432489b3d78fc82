"""A report's section on test slides with labels: measures with their intervals, confusion, slides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gigagrad.reports.run_data import mapping, number
from gigagrad.reports.tables import measure_name
from gigagrad.units import format_pixels

_MOST_SLIDES: Final = 500
"""Lines of a table that a browser still likes."""
_MOST_CLASSES: Final = 20
"""Columns that still fit beside each other."""


@dataclass(frozen=True, slots=True)
class SlideSection:
    """Texts for the page. `measures` are name, value and interval; `confusion` a line for each true class; `slides`
    name, label, what was predicted, its scores, and whether that is right, where there are classes.
    """

    measures: tuple[tuple[str, str, str], ...]
    classes: tuple[str, ...]
    confusion: tuple[tuple[str, tuple[str, ...]], ...]
    slides: tuple[tuple[str, str, str, str, bool], ...]

    @classmethod
    def of(cls, evaluation: Mapping[str, Any]) -> SlideSection | None:
        """Read `SlideEvaluation.to_dict` as a file holds it, without what is damaged; None where nothing is left."""
        others = {name: mapping(value) for name, value in evaluation.items() if name != "slides"}
        found = {name: each for name, each in others.items() if "low" in each}
        measures = tuple(
            (measure_name(name), _number(each.get("value")), _interval(each)) for name, each in found.items()
        )
        classes, counts = evaluation.get("classes"), evaluation.get("confusion")
        names = tuple(map(str, classes)) if isinstance(classes, list) else ()
        rows = counts if isinstance(counts, list) and all(isinstance(row, list) for row in counts) else []
        confusion = tuple((name, tuple(map(str, row))) for name, row in zip(names, rows, strict=False))
        slides = [_slide(str(name), mapping(each), names) for name, each in mapping(evaluation.get("slides")).items()]
        return cls(measures, names, confusion, tuple(slides[:_MOST_SLIDES])) if measures else None


@dataclass(frozen=True, slots=True)
class ClassSection:
    """Texts for the page, of masks: a line for each class or label, with its true pixels, Dice and IoU over all test
    slides, and which share of them was predicted as each of the `classes`.
    """

    classes: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, evaluation: Mapping[str, Any]) -> ClassSection | None:
        """Read `Evaluation.to_dict` as a file holds it, without what is damaged; None where nothing is left."""
        scores = {str(name): mapping(each) for name, each in mapping(evaluation.get("classes")).items()}
        counts = evaluation.get("confusion")
        rows = counts if isinstance(counts, list) and all(isinstance(row, list) for row in counts) else []
        square = 0 < len(rows) <= _MOST_CLASSES and {len(rows), len(scores)} == {len(row) for row in rows}
        lines = []
        for index, (name, each) in enumerate(scores.items()):
            pixels = number(each, "pixels")
            shares = (_share(count, pixels) for count in (rows[index] if square else ()))
            scored = (_number(each.get(measure)) for measure in ("dice", "iou"))
            lines.append((name, format_pixels(int(pixels)), *scored, *shares))
        return cls(tuple(scores) if square else (), tuple(lines)) if lines else None


def _share(count: object, pixels: float) -> str:
    return f"{count / pixels:.1%}" if isinstance(count, (int, float)) and pixels else "-"


def _slide(name: str, slide: Mapping[str, Any], classes: tuple[str, ...]) -> tuple[str, str, str, str, bool]:
    label, predicted = str(slide.get("label", "")), str(slide.get("predicted", ""))
    scores = mapping(slide.get("scores"))
    told = ", ".join(f"{column.removeprefix('probability_')} {_number(value)}" for column, value in scores.items())
    return name, label, predicted, told, not classes or label == predicted


def _interval(measure: Mapping[str, Any]) -> str:
    low, high = _number(measure.get("low")), _number(measure.get("high"))
    return "-" if "-" in (low, high) else f"{low} to {high}"


def _number(value: Any) -> str:
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return f"{value:.4f}" if usable else "-"
