"""Scores and rates as tables of text, which the terminal and the HTML report show each in its way.

An evaluation is read from what its `to_dict` gives, as files hold it; what is damaged there is left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from gigagrad.plans.description import COSTLY, GOOD, OWN, Table
from gigagrad.prediction import Evaluation, SlideEvaluation
from gigagrad.prediction.scores import mean_sd, spread
from gigagrad.prediction.slide_scores import RESAMPLES
from gigagrad.units import format_pixels

if TYPE_CHECKING:
    from gigagrad.execution.calibration import Calibration
    from gigagrad.training import FoldResult

_DRAWN: Final = f"drawn again {RESAMPLES} times"
WRONG: Final = "wrong"
"""The tone of a row that says what should not be."""
_MEASURES: Final = {
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
_MOST_CLASSES: Final = 20
"""Columns of a confusion that still fit beside each other on a page."""
_MOST_ON_A_TERMINAL: Final = 8


def mapping(value: Any) -> Mapping[str, Any]:
    """Return `value` if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def number(record: Mapping[str, Any], name: str) -> float:
    """Return the finite number of that name, 0 if there is none."""
    value = record.get(name)
    return float(value) if is_number(value) and math.isfinite(value) else 0.0


def counted(count: int, noun: str, plural: str = "") -> str:
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def measure_name(name: str) -> str:
    """Name a measure of an evaluation for a person."""
    return _MEASURES.get(name) or f"{name.removeprefix('auc_')} against the rest"


def evaluation_tables(evaluation: Evaluation | SlideEvaluation) -> tuple[Table, ...]:
    """Tabulate all that is to be said of an evaluation on a terminal."""
    content = evaluation.to_dict()
    if isinstance(evaluation, SlideEvaluation):
        names = evaluation.classes
        wrong = [each.name for each in evaluation.slides if names and names[int(each.truth)] != each.predicted]
        return label_tables(content, wrong, most_classes=_MOST_ON_A_TERMINAL)
    # Of foreground and background, the table of slides has said it all.
    more = len(evaluation.classes) > (2 if evaluation.confusion else 0)
    return (_mask_table(evaluation), *(class_tables(content, _MOST_ON_A_TERMINAL) if more else ()))


def _mask_table(evaluation: Evaluation) -> Table:
    """Tabulate one row per slide; below them the mean and the sample standard deviation over slides."""
    scores = evaluation.scores
    rows = [(each.name, format_pixels(each.pixels), f"{each.dice:.4f}", f"{each.iou:.4f}") for each in scores]
    dice, iou = (spread(getattr(score, name) for score in scores) for name in ("dice", "iou"))
    return _with_mean("Slides", ("slide", "pixels", "Dice", "IoU"), rows, ("", dice, iou))


def _with_mean(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], means: tuple[str, ...]) -> Table:
    """Put a last row of means below the others."""
    name = "mean +/- sd" if len(rows) > 1 else "mean"
    return Table(title, columns, (*rows, (name, *means)), tones=(*("" for _ in rows), OWN))


def class_tables(evaluation: Mapping[str, Any], most_classes: int = _MOST_CLASSES) -> tuple[Table, ...]:
    """Tabulate masks: a row for each class or label with its true pixels, Dice and IoU over all slides, and of a few
    classes which share of the true pixels was predicted as which. Nothing where there are no classes.
    """
    scores = {str(name): mapping(each) for name, each in mapping(evaluation.get("classes")).items()}
    counts = _confusion(evaluation, len(scores) if len(scores) <= most_classes else 0)
    rows = []
    for index, (name, each) in enumerate(scores.items()):
        pixels = number(each, "pixels")
        shares = (_share(count, pixels) for count in (counts[index] if counts else ()))
        rows.append((name, format_pixels(int(pixels)), *(_number(each.get(key)) for key in ("dice", "iou")), *shares))
    columns = ("class" if evaluation.get("confusion") else "label", "true pixels", "Dice", "IoU")
    predicted = tuple(f"as {name}" for name in scores) if counts else ()
    return (Table("Classes, over all slides", (*columns, *predicted), tuple(rows)),) if rows else ()


def label_tables(
    evaluation: Mapping[str, Any], wrong: Collection[str] | None = None, most_classes: int = _MOST_CLASSES
) -> tuple[Table, ...]:
    """Tabulate slides with labels: each with its scores, the measures with their intervals, and the confusion of
    classes. Nothing where there is no measure. `wrong` are the slides whose class is another one than the label's,
    where anybody knows it better than by the names.
    """
    measures = {name: mapping(each) for name, each in evaluation.items() if name != "slides"}
    measures = {name: each for name, each in measures.items() if "low" in each}
    if not measures:
        return ()
    names = evaluation.get("classes")
    names = tuple(map(str, names)) if isinstance(names, list) else ()
    slides = {str(name): mapping(each) for name, each in mapping(evaluation.get("slides")).items()}
    rows, tones = [], []
    for name, slide in slides.items():
        label, predicted = str(slide.get("label", "")), str(slide.get("predicted", ""))
        scores = mapping(slide.get("scores")).items()
        found = ", ".join(f"{column.removeprefix('probability_')} {_number(value)}" for column, value in scores)
        rows.append((name, label, predicted, found))
        is_wrong = bool(names) and label != predicted if wrong is None else name in wrong
        tones.append(WRONG if is_wrong else "")
    values = tuple((measure_name(name), _number(each.get("value")), _interval(each)) for name, each in measures.items())
    counts = _confusion(evaluation, len(names) if len(names) <= most_classes else 0)
    confusion = tuple((name, *map(str, row)) for name, row in zip(names, counts, strict=False))
    return (
        Table("Slides", ("slide", "label", "predicted", "scores"), tuple(rows), tones=tuple(tones)),
        Table("Measures", ("measure", "value", "95 % interval"), values, f"{counted(len(slides), 'slide')}, {_DRAWN}"),
        *([Table("Confusion", ("true \\ predicted", *names), confusion)] if confusion else []),
    )


def _confusion(evaluation: Mapping[str, Any], classes: int) -> list[list[Any]]:
    """Return the counts of so many classes by so many, none where that is not what there is."""
    counts = evaluation.get("confusion")
    rows = counts if isinstance(counts, list) and len(counts) == classes else []
    return rows if all(isinstance(row, list) and len(row) == classes for row in rows) else []


def _share(count: object, pixels: float) -> str:
    return f"{count / pixels:.1%}" if isinstance(count, (int, float)) and pixels else "-"


def _interval(measure: Mapping[str, Any]) -> str:
    low, high = _number(measure.get("low")), _number(measure.get("high"))
    return "-" if "-" in (low, high) else f"{low} to {high}"


def _number(value: Any) -> str:
    return f"{value:.4f}" if is_number(value) and math.isfinite(value) else "-"


def folds_table(folds: Sequence[FoldResult]) -> Table:
    """Tabulate one row per fold; below them a row of means and one of sample standard deviations over folds."""
    names = list(folds[0].scores)
    headings = ({"dice": "Dice", "iou": "IoU"}.get(name, _MEASURES.get(name, name)) for name in names)
    rows = [
        (str(fold.fold), str(fold.slides), str(fold.best_epoch), *(f"{score:.4f}" for score in fold.scores.values()))
        for fold in folds
    ]
    over = [mean_sd(fold.scores[name] for fold in folds) for name in names]
    rows += [(what, "", "", *(f"{each[i]:.4f}" for each in over)) for i, what in enumerate(("mean", "sd"))]
    tones = (*("" for _ in folds), OWN, OWN)
    return Table("Folds", ("fold", "slides", "best epoch", *headings), tuple(rows), tones=tones)


def rates_table(calibration: Calibration) -> Table:
    """Tabulate the rates of one thread, of its further threads, and of the tiers; or of a GPU, its host and tiers."""
    from gigagrad.devices.machine import Gpu

    machine = calibration.machine
    way = "direct" if calibration.direct else "through the page cache"
    call = f"{machine.seconds_per_operator * 1e6:,.0f} us"
    if isinstance(machine, Gpu):
        title, heading = f"Rates of {machine.card}", "what the GPU, or one thread beside it, does"
        rows = {
            "convolutions of 64 channels": f"{machine.flops_per_second / 1e12:,.1f} TFLOP/s",
            "convolutions of 16 channels": f"{machine.few_channels_flops_per_second / 1e12:,.1f} TFLOP/s",
            "operators of values": f"{machine.memory_bytes_per_second / 1e9:,.0f} GB/s",
            "a call of an operator, by the host": call,
            "a tile beside its calls, by the host": f"{machine.seconds_per_tile * 1e3:,.2f} ms",
            "fields to and from host memory": f"{machine.copy_bytes_per_second / 1e9:,.1f} GB/s",
        }
        rows |= {f"plain copies, {kind}": f"{rate / 1e9:,.1f} GB/s" for kind, rate in calibration.copies.items()}
    else:
        title, heading = "Rates", "what one thread does"
        rows = {
            "convolutions": f"{machine.flops_per_second / 1e9:,.0f} GFLOP/s",
            "convolutions by unfolded windows": f"{machine.unfolded_flops_per_second / 1e9:,.1f} GFLOP/s",
            "values in and out of convolutions": f"{machine.reordered_bytes_per_second / 1e9:,.1f} GB/s",
            "the same, not in the cache": f"{machine.reordered_memory_bytes_per_second / 1e9:,.1f} GB/s",
            "the same, vectors not full": f"{machine.ragged_bytes_per_second / 1e9:,.1f} GB/s",
            "means and variances": f"{machine.statistics_bytes_per_second / 1e9:,.1f} GB/s",
            "pools": f"{machine.window_bytes_per_second / 1e9:,.1f} GB/s",
            "operators, values in the cache": f"{machine.cached_bytes_per_second / 1e9:,.1f} GB/s",
            "operators, values in memory": f"{machine.memory_bytes_per_second / 1e9:,.1f} GB/s",
            "memory that is new, by all threads": f"{machine.new_bytes_per_second / 1e9:,.1f} GB/s",
            "a call of an operator": call,
            "a call by plain autograd": f"{machine.seconds_per_autograd_call * 1e6:,.0f} us",
            "a tile beside its calls": f"{machine.seconds_per_tile * 1e3:,.2f} ms",
            "a pass beside its tiles": f"{machine.seconds_per_pass * 1e3:,.2f} ms",
            "a further thread, a tile each": f"{machine.side_by_side_efficiency:.0%}",
            "a further thread, the same tile": f"{machine.shared_efficiency:.0%}",
            "copies in memory": f"{machine.copy_bytes_per_second / 1e9:,.1f} GB/s",
        }
    rows |= {
        f"disk, write ({way})": f"{machine.disk_write_bytes_per_second / 1e9:,.2f} GB/s",
        f"disk, read ({way})": f"{machine.disk_read_bytes_per_second / 1e9:,.2f} GB/s",
        "fields in files, one thread's work": f"{machine.file_bytes_per_second / 1e9:,.2f} GB/s",
        "lossless codec": f"{machine.codec_bytes_per_second / 1e9:,.2f} GB/s, {machine.codec_ratio:.2f} : 1",
    }
    return Table(title, (heading, "rate"), tuple(rows.items()), f"measured in {calibration.seconds:.0f} s")


_STYLES: Final = {GOOD: "green", COSTLY: "yellow", OWN: "bold", WRONG: "red"}
_BAR: Final = 30
"""Characters of the longest bar."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A table on a rich console, with long texts in several lines; of one that is to be `fitting` only the columns for
    which there is room.
    """

    table: Table
    fitting: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bars = [_bar(share, ascii_only=options.ascii_only) for share in self.table.bars]
        room = options.max_width - (_BAR + 2 if bars else 0)
        table = self.table.fitting(room) if self.fitting else self.table
        right = table.numeric
        before = max((i + 1 for i, numeric in enumerate(right) if numeric), default=0)  # bars stand beside numbers
        shown = RichTable(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
        for i, name in enumerate(table.columns):
            if bars and i == before:
                shown.add_column(width=_BAR)
            no_wrap = right[i] and (self.fitting or len(name) <= max(len(row[i]) for row in table.rows))
            shown.add_column(Text(name), justify="right" if right[i] else "left", no_wrap=no_wrap, overflow="fold")
        tones = table.tones or ("",) * len(table.rows)
        for i, (row, tone) in enumerate(zip(table.rows, tones, strict=True)):
            cells: list[RenderableType] = [*map(Text, row)]
            cells[before:before] = bars[i : i + 1]
            shown.add_row(*cells, style=_STYLES.get(tone, ""))
        yield Text(table.title, style="bold")  # as a title of the table it would be as narrow as that
        if table.rows:
            yield shown
        if table.note:
            yield Text(table.note)


def _bar(share: float, *, ascii_only: bool) -> Text:
    """Draw a bar of this share of the full length, in eighths of a character where the terminal has them."""
    eighths = max(1, round(8 * _BAR * share))
    if ascii_only:
        return Text("#" * -(-eighths // 8))
    return Text("\u2588" * (eighths // 8) + " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"[eighths % 8].strip())
