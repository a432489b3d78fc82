"""A run as one HTML file that needs nothing else: no network, no other files, any browser, light, dark or on paper.

What a run folder and a prediction folder hold is read as it is: what is missing or damaged is simply absent. A run
writes its events line by line, and they come back here as the same records.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar, get_type_hints

import yaml

from gigagrad.cohorts.records import FILE_NAME, FOLDER
from gigagrad.config.fit import FitConfig
from gigagrad.errors import ConfigError, extra
from gigagrad.events import MetricsLogged, StepMeasured
from gigagrad.files import write_text
from gigagrad.plans import Plan
from gigagrad.plans.description import Table, describe
from gigagrad.prediction.scores import mean_sd
from gigagrad.reports.charts import dice_chart, loss_chart, memory_chart, own_peaks
from gigagrad.reports.tables import class_tables, is_number, label_tables, mapping, measure_name, number
from gigagrad.training.folder import RunFolder
from gigagrad.units import format_bytes, format_pixels, format_seconds

with extra("report"):
    import jinja2
    from markupsafe import Markup

_Record = TypeVar("_Record")
_PLAIN = str, int, float, type(None)


@dataclass(frozen=True, slots=True)
class Predicted:
    """One slide of a prediction folder. `overlay` is None where there is no picture; `attention` are those of a bag, of
    `patches` patches: each slide's, and the patches with most and least.
    """

    name: str
    status: str
    error: str
    dice: float | None
    height: int
    width: int
    seconds: float
    """0 where nobody knows."""
    regions: int
    overlay: Path | None
    patches: int
    attention: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class RunData:
    """All a report can draw on; empty containers stand for files that are not there."""

    name: str
    metrics: tuple[MetricsLogged, ...]
    steps: tuple[StepMeasured, ...]
    dice: Mapping[str, float]
    evaluation: Mapping[str, Any]
    """Scores of test slides with labels, as `SlideEvaluation.to_dict` has them."""
    plan: Mapping[str, Any]
    plan_text: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    predictions: tuple[Predicted, ...]

    def series(self, split: str, name: str) -> list[tuple[int, float]]:
        """Return `(step, value)` of one number of one split, in the order it was logged; NaN included."""
        return [(m.step, m.values[name]) for m in self.metrics if m.split == split and name in m.values]

    @property
    def accumulated(self) -> int:
        """Return how many slides (or patients) make a step; metrics are counted in them."""
        return max(1, int(number(self.config, "accumulate")))

    @property
    def training_steps(self) -> int:
        """Count the steps of training: each epoch ends with what is left of its slides."""
        last: dict[int, int] = {}
        for metric in self.metrics:
            if metric.split == "train":
                last[metric.epoch] = max(metric.step, last.get(metric.epoch, 0))
        ends = sorted(last.values())
        return sum(-(-(end - begin) // self.accumulated) for begin, end in pairwise([0, *ends]))


def read_run(run_dir: Path, predictions_dir: Path | None = None) -> RunData:
    """Read both folders. Raises nothing for missing or damaged files."""
    folder = RunFolder(run_dir)
    # The last line may have been cut off by whatever stopped the run.
    records = [mapping(_parsed(line)) for line in _text(folder.metrics).splitlines()]
    summary = mapping(_json(folder.summary))
    return RunData(
        name=run_dir.resolve().name,
        metrics=tuple(_metric(record) for record in records if record.get("event") == "metrics"),
        steps=tuple(_filled(StepMeasured, record) for record in records if record.get("event") == "step"),
        dice={str(name): value for name, value in mapping(summary.get("dice")).items() if is_number(value)},
        evaluation=mapping(summary.get("evaluation")),
        plan=mapping(_json(folder.plan_data)),
        plan_text=_text(folder.plan_text),
        config=_settings(folder.config),
        environment=mapping(_json(folder.environment)),
        predictions=() if predictions_dir is None else tuple(_predictions(predictions_dir)),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _json(path: Path) -> Any:
    return _parsed(_text(path))


def _parsed(text: str) -> Any:
    """Read JSON, None where it is none; integers that no machine number holds become floats."""
    try:
        found = json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits))
        # Half a character, as in a file name of another encoding, can stand on no page.
        return json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return None


def _settings(path: Path) -> Mapping[str, Any]:
    """Return the settings of a run's configuration: each is a word or a number, or a list of these. A list of aliases
    of lists of aliases would be short in the file and endless on the page, and so would a long one under many names.
    """
    known = {field.name for field in dataclasses.fields(FitConfig)}
    try:
        found = mapping(yaml.safe_load(_text(path))).items()
        lists = {str(key): value for key, value in found if key in known and isinstance(value, list)}
        listed = {key: value for key, value in lists.items() if all(isinstance(item, _PLAIN) for item in value)}
        plain = {str(key): value for key, value in found if isinstance(value, _PLAIN)} | listed
        return mapping(_parsed(json.dumps(plain)))
    except (ValueError, OverflowError, RecursionError, yaml.YAMLError):
        return {}


def _metric(record: Mapping[str, Any]) -> MetricsLogged:
    """Read a logged number; one that is not finite is JSON `null` or NaN, by whoever wrote it, and NaN here."""
    logged = mapping(record.get("values"))
    values = {str(name): float(value) if is_number(value) else math.nan for name, value in logged.items()}
    return _filled(MetricsLogged, record, values=values)


def _filled(cls: type[_Record], record: Mapping[str, Any], **known: Any) -> _Record:
    """Make a record of the texts and numbers of a JSON object, empty and 0 where they are missing, and of `known`."""
    values = {
        name: str(record.get(name, "")) if kind is str else kind(number(record, name))
        for name, kind in get_type_hints(cls).items()
        if name not in known
    }
    return cls(**values, **known)


def _predictions(folder: Path) -> Iterator[Predicted]:
    entries = mapping(_json(folder / FILE_NAME)).get("slides")
    for record in map(mapping, entries if isinstance(entries, list) else []):
        files = mapping(record.get("files", record))  # earlier records have them on the outside
        overlay = _inside(folder, str(files.get("overlay") or "overlays/none"))
        dice = number(record, "dice") if is_number(record.get("dice")) else None
        own = _inside(folder, f"{FOLDER}/{record.get('name')}.json")
        seconds = number(record if own is None else mapping(_json(own)), "seconds")
        attention = tuple(_attention(folder, str(files.get("attention") or "")))
        yield _filled(Predicted, record, dice=dice, overlay=overlay, seconds=seconds, attention=attention)


def _attention(folder: Path, name: str) -> Iterator[Path]:
    """Yield the pictures in the folder of that name, if it is in `folder`."""
    try:
        names = sorted(path.name for path in (folder / name).glob("*.png")) if name else []
    except (OSError, ValueError, RuntimeError):
        return
    yield from filter(None, (_inside(folder, f"{name}/{each}") for each in names))


def _inside(folder: Path, name: str) -> Path | None:
    """Return the file of that name, None if there is none or it is not in the folder."""
    path = folder / name
    try:
        return path if path.is_file() and path.resolve().is_relative_to(folder.resolve()) else None
    except (OSError, RuntimeError):  # a name that is too long, links in a circle
        return None


_MOST_OVERLAYS: Final = 16
"""More pictures would make a page that no browser likes; the worst ones by Dice are the ones to look at."""

_MOST_OVERLAY_PX: Final = 8192
"""The longer side of a picture that is shown; `predict` draws smaller ones."""

_MOST_ROWS: Final = 500
"""Longer tables are cut: a browser likes no more."""

_PUBLISHED_PIXELS: Final = 16000 * 64000
_PUBLISHED_SECONDS: Final = 81
_PUBLISHED_BYTES: Final = 103_610_000_000
"""Remedios et al., MIDL 2023: one training step, validation included, and the peak over the first eight steps."""


@dataclass(frozen=True, slots=True)
class Card:
    """One number at the top of the page."""

    label: str
    value: str
    note: str = ""


def write_report(
    run_dir: str | Path,
    out_path: str | Path,
    *,
    predictions_dir: str | Path | None = None,
    step: Mapping[str, Any] | None = None,
) -> Path:
    """Write the report of a run folder to `out_path` and return that path.

    Args:
        run_dir: what `fit` wrote; whatever is missing there is left out of the report, which says so.
        predictions_dir: what `predict` wrote, for the overlays.
        step: the numbers of one large step, as the gigapixel benchmark prints them: `pixels`, `seconds_per_step`,
            `peak_rss_bytes`, `budget_bytes`, `predicted_peak_bytes`, `loss`, and `height` and `width` if known.

    Raises `ConfigError` if there is no such run folder, `WriteError` if the file cannot be written.
    """
    run_dir, out_path = Path(run_dir), Path(out_path)
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run folder {run_dir}; name the folder that a training run wrote")
    run = read_run(run_dir, None if predictions_dir is None else Path(predictions_dir))
    template = jinja2.Environment(
        loader=jinja2.PackageLoader("gigagrad.reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("report.html.j2")
    write_text(out_path, template.render(_context(run, step or {})))
    return out_path


def _context(run: RunData, step: Mapping[str, Any]) -> dict[str, Any]:
    plan, dice = _plan(run.plan), _dice(run)
    pictured = [entry for entry in run.predictions if entry.overlay is not None or entry.attention]
    shown = sorted(pictured, key=lambda entry: 2.0 if entry.dice is None else entry.dice)[:_MOST_OVERLAYS]
    charts = {
        "loss": loss_chart(run),
        "dice": dice_chart(dice),
        "memory": memory_chart(run.steps),
    }
    return {
        "run": run,
        "model": str(run.config.get("model", "")),
        "cards": list(_cards(run)),
        "step_cards": list(_step_cards(step)),
        "notes": list(_notes(run)),
        "charts": {name: Markup(svg) if svg else None for name, svg in charts.items()},  # noqa: S704 - our own drawing
        "labelled": [_short(table) for table in label_tables(run.evaluation)],
        "classes": class_tables(run.evaluation),
        "dice_table": _short(Table("", ("slide", "Dice"), tuple((name, f"{dice[name]:.4f}") for name in sorted(dice)))),
        "pictures": [picture for entry in shown for picture in _pictures(entry)],
        "attended": any(entry.attention for entry in shown),
        "not_shown": len(pictured) - len(shown),
        "plan": None if plan is None else describe(plan),
        "config": [(key, _shown(key, value)) for key, value in run.config.items()],
        "environment": _environment(run),
    }


def _plan(record: Mapping[str, Any]) -> Plan | None:
    """Read the plan; None where the file is missing or no plan's, such as that of another version."""
    try:
        plan = Plan.from_dict(dict(record))
        str(describe(plan))  # a word that is no text would fail later
        parts = [size for _, size in plan.memory_parts()]
        sizes = (plan.budget_bytes or 0, *parts, *(amount.size_bytes for amount in plan.elsewhere))
        return plan if all(map(math.isfinite, sizes)) else None
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
        return None


def _short(table: Table) -> Table:
    """Leave out rows that are too many for a page."""
    return replace(table, rows=table.rows[:_MOST_ROWS], tones=table.tones[:_MOST_ROWS])


def _dice(run: RunData) -> Mapping[str, float]:
    """Return the test scores of the run; where it has none, those of the predictions."""
    return run.dice or {entry.name: entry.dice for entry in run.predictions if entry.dice is not None}


def _cards(run: RunData) -> Iterator[Card]:
    dice = [value for value in _dice(run).values() if math.isfinite(value)]
    if dice:
        mean, sd = mean_sd(dice)
        spread = f"± {sd:.4f} " if len(dice) > 1 else ""
        yield Card("Dice", f"{mean:.4f}", f"{spread}over {_count(len(dice), 'slide')}")
    for name in ("accuracy", "auc", "c_index", "mae"):
        value = mapping(run.evaluation.get(name)).get("value")
        if isinstance(value, (int, float)) and math.isfinite(value):
            label, count = measure_name(name), len(mapping(run.evaluation.get("slides")))
            yield Card(label[0].upper() + label[1:], f"{value:.4f}", f"over {_count(count, 'slide')}")
    val = [(value, at) for at, value in run.series("val", "loss") if math.isfinite(value)]
    if val:
        best, at = min(val)
        after = f"after {at:,} slides" if run.accumulated > 1 else f"after step {at}"
        yield Card("Best validation loss", f"{best:.4g}", after)
    train = run.series("train", "loss")
    if train:
        epochs = len({metric.epoch for metric in run.metrics if metric.split == "train"})
        slides = f"of {run.accumulated} slides, " if run.accumulated > 1 else ""
        yield Card("Training steps", f"{run.training_steps:,}", f"{slides}in {_count(epochs, 'epoch')}")
    backward = [s for s in run.steps if s.phase == "backward"] or list(run.steps)
    if backward:
        seconds = sorted(s.seconds for s in backward)[len(backward) // 2]
        most = format_pixels(max(s.pixels for s in backward))
        what = "slide" if run.accumulated > 1 else "step"
        yield Card(f"Time per {what}", format_seconds(seconds), f"median, up to {most}")
    peaks = zip(own_peaks(run.steps), run.steps, strict=True)
    if own := [(peak, step.budget_bytes) for peak, step in peaks if peak is not None]:
        highest, budget = max(own)
        yield Card(
            "Peak memory", format_bytes(highest), f"budget {format_bytes(budget)}" if budget else "no budget set"
        )
    errors = sorted(s.gradient_error for s in run.steps if s.gradient_error)
    if errors:
        yield Card("Gradient error", f"{errors[len(errors) // 2]:.2%}", "expected, of lossy storage; median")


def _step_cards(step: Mapping[str, Any]) -> Iterator[Card]:
    """Return the large step's numbers, the published ones beside them where the size is the same."""
    pixels = step.get("pixels")
    published = pixels == _PUBLISHED_PIXELS
    if pixels:
        size = f"{step['height']} x {step['width']} px" if step.get("height") and step.get("width") else "one slide"
        yield Card("Pixels", format_pixels(int(pixels)), size)
    if seconds := step.get("seconds_per_step"):
        yield Card("Time", format_seconds(seconds), f"published: {_PUBLISHED_SECONDS} s" if published else "")
    if peak := step.get("peak_rss_bytes"):
        note = f"published: {_PUBLISHED_BYTES / 1e9:.2f} GB" if published else "the whole process"
        yield Card("Peak memory", format_bytes(int(peak)), note)
    if predicted := step.get("predicted_peak_bytes"):
        budget = step.get("budget_bytes")
        note = f"budget {format_bytes(int(budget))}" if budget else ""
        yield Card("Predicted peak", format_bytes(int(predicted)), note)
    if step.get("loss") is not None:
        yield Card("Loss", f"{step['loss']:.6g}", "exact, over every pixel")


def _notes(run: RunData) -> Iterator[str]:
    """Yield what a reader must know before the numbers: what is missing and what went wrong."""
    train, unit = run.series("train", "loss"), "slide" if run.accumulated > 1 else "step"
    broken = [at for at, value in train if not math.isfinite(value)]
    if broken:
        yield (
            f"The training loss was not a finite number in {len(broken)} of {_count(len(train), unit)}, "
            f"first at {unit} {broken[0]}."
        )
    if not run.metrics:
        yield "No metrics were recorded: the run has not finished a step, or metrics.jsonl is missing."
    elif not run.dice and not run.evaluation:
        yield "There are no test scores: the run has not finished, or its cohort has no test slides."
    for entry in run.predictions:
        if entry.status == "failed":
            yield f"The prediction of {entry.name} failed: {entry.error}"


def _pictures(entry: Predicted) -> Iterator[dict[str, str | None]]:
    """Yield pictures of a slide, or of a bag; `uri` is the whole picture as a data URI, None where there is none."""
    if entry.attention:
        known = f", {_count(entry.patches, 'patch', 'patches')}"
        for path in entry.attention:
            what = "most and least attention" if path.name == "patches.png" else f"attention in {path.stem}"
            yield {"name": entry.name, "caption": what + known, "uri": _data_uri(path), "alt": f"{what}, {entry.name}"}
        return
    facts = [f"{entry.height} x {entry.width} px", _count(entry.regions, "region")]
    if entry.seconds:
        facts.append(format_seconds(entry.seconds))
    if entry.dice is not None:
        facts.insert(0, f"Dice {entry.dice:.4f}")
    uri = _data_uri(entry.overlay) if entry.overlay else None
    yield {"name": entry.name, "caption": ", ".join(facts), "uri": uri, "alt": f"Outlines on {entry.name}"}


def _data_uri(path: Path) -> str | None:
    """Encode the picture as WebP, a tenth of the PNG's size with outlines as sharp; None if it cannot be read."""
    from PIL import Image as Pillow

    buffer = io.BytesIO()
    try:
        with Pillow.open(path, formats=("PNG",)) as picture:
            if max(picture.size) > _MOST_OVERLAY_PX:
                return None
            picture.convert("RGB").save(buffer, format="WEBP", quality=88, method=4)
    except (OSError, SyntaxError, ValueError, Pillow.DecompressionBombError):  # Pillow's words for a broken PNG
        return None
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _environment(run: RunData) -> list[tuple[str, str]]:
    try:
        return list(_flattened(run.environment))
    except RecursionError:
        return []


def _flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{key}: ")
        else:
            yield f"{prefix}{key}", _shown(str(key), value)


def _shown(name: str, value: Any) -> str:
    """Write `value` in the unit that its name's last word states."""
    if value is None or value == [] or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_shown(name, item) for item in value)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return str(value)
    unit = name.rpartition("_")[2]
    if unit == "bytes":
        return format_bytes(int(value))
    if unit == "seconds":
        return format_seconds(value)
    return f"{value:,}".replace(",", "\u202f") if isinstance(value, int) else f"{value:.4g}"


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
