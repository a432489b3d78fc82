"""Scores and rates as tables for a rich console."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gigagrad.prediction import Evaluation, SlideEvaluation
from gigagrad.prediction.scores import spread
from gigagrad.prediction.slide_metrics import RESAMPLES
from gigagrad.units import format_pixels

if TYPE_CHECKING:
    from gigagrad.execution.calibration import Calibration
    from gigagrad.training import FoldResult

_MEASURES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auc": "area under the ROC curve",
    "brier": "Brier score",
    "c_index": "C-index",
    "calibration_error": "calibration error",
    "mse": "mean squared error",
    "mae": "mean absolute error",
    "r2": "R2",
}
_WIDEST_CONFUSION = 8
"""Classes whose confusion still fits beside each other on a terminal."""


def measure_name(name: str) -> str:
    """Name a measure of an evaluation for a person."""
    return _MEASURES.get(name) or f"{name.removeprefix('auc_')} against the rest"


def evaluation_tables(evaluation: Evaluation | SlideEvaluation) -> Group:
    """Tabulate all that is to be said of an evaluation, one table below the other."""
    if isinstance(evaluation, Evaluation):
        # Of foreground and background, the table of slides has said it all.
        more = len(evaluation.classes) > (2 if evaluation.confusion else 0)
        return Group(score_table(evaluation), *([_class_table(evaluation)] if more else []))
    shown = 0 < len(evaluation.classes) <= _WIDEST_CONFUSION
    confusion = [_confusion_table(evaluation.classes, evaluation.confusion)] if shown else []
    return Group(_slide_table(evaluation), _measure_table(evaluation), *confusion)


def _class_table(evaluation: Evaluation) -> Table:
    """Tabulate one line per class or label over the pixels of all slides; of classes, which share of the true pixels
    was predicted as which.
    """
    shown = bool(evaluation.confusion) and len(evaluation.classes) <= _WIDEST_CONFUSION
    table = Table(header_style="bold", caption="all slides; right: true pixels by predicted class" if shown else None)
    table.add_column("Class" if evaluation.confusion else "Label", overflow="fold")
    for heading in ("Pixels", "Dice", "IoU"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in evaluation.classes if shown else ():
        table.add_column(Text(name), justify="right", overflow="fold")
    for number, (name, each) in enumerate(zip(evaluation.classes, evaluation.of_classes, strict=True)):
        scores = ("-" if score is None else f"{score:.4f}" for score in (each.dice, each.iou))
        row = evaluation.confusion[number] if shown else ()
        shares = (f"{count / each.pixels:.1%}" if each.pixels else "-" for count in row)
        table.add_row(Text(name), format_pixels(each.pixels), *scores, *shares)
    return table


def _slide_table(evaluation: SlideEvaluation) -> Table:
    """Tabulate one line per slide; in red where the class is another one than the label's."""
    table = Table(header_style="bold")
    table.add_column("Slide", overflow="fold")
    for heading in ("Label", "Predicted", *(["Probability"] if evaluation.classes else [])):
        table.add_column(heading, justify="right")
    for slide in evaluation.slides:
        cells, style = [slide.label, slide.predicted], ""
        if evaluation.classes:
            cells.append(f"{slide.outputs[evaluation.classes.index(slide.predicted)]:.4f}")
            style = "" if evaluation.classes[int(slide.truth)] == slide.predicted else "red"
        table.add_row(*(Text(cell) for cell in (slide.name, *cells)), style=style)
    return table


def _measure_table(evaluation: SlideEvaluation) -> Table:
    table = Table(header_style="bold", caption=f"{len(evaluation.slides)} slides, drawn again {RESAMPLES} times")
    table.add_column("Measure")
    table.add_column("Value", justify="right")
    table.add_column("95 % interval", justify="right")
    for name, measure in evaluation.measures.items():
        said = measure_name(name)
        ends = "-" if math.isnan(measure.low) else f"{measure.low:.4f} to {measure.high:.4f}"
        table.add_row(
            Text(said if name in _MEASURES else f"  {said}"),
            "-" if math.isnan(measure.value) else f"{measure.value:.4f}",
            ends,
        )
    return table


def _confusion_table(names: Sequence[str], counts: Sequence[Sequence[int]]) -> Table:
    """Tabulate true classes in lines, predicted ones in columns."""
    table = Table(header_style="bold")
    table.add_column("True \\ predicted", overflow="fold")
    for name in names:
        table.add_column(Text(name), justify="right", overflow="fold")
    for name, row in zip(names, counts, strict=True):
        table.add_row(Text(name), *(str(count) for count in row))
    return table


def score_table(evaluation: Evaluation) -> Table:
    """Tabulate one line per slide; below them the mean and the sample standard deviation over slides."""
    table = Table(header_style="bold", show_footer=True)
    dice, iou = (spread(getattr(score, name) for score in evaluation.scores) for name in ("dice", "iou"))
    table.add_column("Slide", footer="mean +/- sd" if len(evaluation.scores) > 1 else "mean", overflow="fold")
    table.add_column("Pixels", justify="right")
    table.add_column("Dice", footer=dice, justify="right", no_wrap=True)
    table.add_column("IoU", footer=iou, justify="right", no_wrap=True)
    for score in evaluation.scores:
        table.add_row(Text(score.name), format_pixels(score.pixels), f"{score.dice:.4f}", f"{score.iou:.4f}")
    return table


def folds_table(folds: Sequence[FoldResult]) -> Table:
    """Tabulate one line per fold; below them the mean and the sample standard deviation over folds."""
    table = Table(header_style="bold", show_footer=True)
    table.add_column("Fold", footer="mean +/- sd", justify="right")
    table.add_column("Slides", justify="right")
    table.add_column("Best epoch", justify="right")
    for name in folds[0].scores:
        heading = {"dice": "Dice", "iou": "IoU"}.get(name, _MEASURES.get(name, name))
        table.add_column(heading, footer=spread(fold.scores[name] for fold in folds), justify="right")
    for fold in folds:
        scores = (f"{score:.4f}" for score in fold.scores.values())
        table.add_row(str(fold.fold), str(fold.slides), str(fold.best_epoch), *scores)
    return table


def rates_table(calibration: Calibration) -> Table:
    """Tabulate the rates of one thread, of its further threads, and of the tiers."""
    machine, disk = calibration.machine, calibration.disk
    way = "direct" if disk.direct else "through the page cache"
    rows = {
        "convolutions": f"{machine.flops_per_second / 1e9:,.0f} GFLOP/s",
        "operators, values in the cache": f"{machine.cached_bytes_per_second / 1e9:,.1f} GB/s",
        "operators, values in memory": f"{machine.memory_bytes_per_second / 1e9:,.1f} GB/s",
        "a call of an operator": f"{machine.seconds_per_operator * 1e6:,.0f} us",
        "a further thread, a tile each": f"{machine.side_by_side_efficiency:.0%}",
        "a further thread, the same tile": f"{machine.shared_efficiency:.0%}",
        "copies in memory": f"{machine.copy_bytes_per_second / 1e9:,.1f} GB/s",
        f"disk, write ({way})": f"{disk.write / 1e9:,.2f} GB/s",
        f"disk, read ({way})": f"{disk.read / 1e9:,.2f} GB/s",
        "fields in files, one thread's work": f"{machine.file_bytes_per_second / 1e9:,.2f} GB/s",
        "lossless codec": f"{machine.codec_bytes_per_second / 1e9:,.2f} GB/s, {machine.codec_ratio:.2f} : 1",
    }
    table = Table(header_style="bold", caption=f"measured in {calibration.seconds:.0f} s")
    table.add_column("What one thread does")
    table.add_column("Rate", justify="right")
    for name, rate in rows.items():
        table.add_row(name, rate)
    return table
