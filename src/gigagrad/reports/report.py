"""A run as one HTML file that needs nothing else: the page of `gigagrad view` with what it draws inside.

What a run folder and a prediction folder hold is read as it is: what is missing or damaged is simply absent. A run
writes its events line by line, and they come back here as the same records. The page draws the JSON that is gathered
here (`web/src/report.ts`): nothing that a file says is read as HTML.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar, get_type_hints

import yaml

from gigagrad.cohorts.records import SlideResult, read_records
from gigagrad.config.fit import FitConfig
from gigagrad.errors import ConfigError
from gigagrad.events import StepMeasured
from gigagrad.files import digest_of, write_text
from gigagrad.models.saved import SAFETENSORS, run_inside
from gigagrad.plans import Plan
from gigagrad.plans.description import Table, describe
from gigagrad.prediction.scores import mean_sd
from gigagrad.reports.pictures import slides_of
from gigagrad.reports.tables import class_tables, counted, is_number, label_tables, mapping, measure_name, number
from gigagrad.training.folder import RunFolder
from gigagrad.units import format_bytes, format_pixels, format_seconds
from gigagrad.view.page import read_page

Found = TypeVar("Found")

_PLAIN = str, int, float, type(None)


@dataclass(frozen=True, slots=True)
class RunData:
    """All a report can draw on; empty containers stand for files that are not there."""

    metrics: Sequence[Mapping[str, Any]]
    """Logged numbers, as the file has them."""
    steps: Sequence[StepMeasured]
    dice: Mapping[str, float]
    evaluation: Mapping[str, Any]
    """Scores of test slides with labels, as `SlideEvaluation.to_dict` has them."""
    config: Mapping[str, Any]
    predictions: Sequence[SlideResult]

    def series(self, split: str, name: str) -> list[tuple[int, float]]:
        """Return `(step, value)` of one number of one split, in the order it was logged; NaN for what is no number."""
        found = [(each, mapping(each.get("values"))) for each in self.metrics if each.get("split") == split]
        return [
            (int(number(each, "step")), float(values[name]) if is_number(values[name]) else math.nan)
            for each, values in found
            if name in values
        ]

    @property
    def accumulated(self) -> int:
        """Return how many slides (or patients) make a step; metrics are counted in them."""
        return max(1, int(number(self.config, "accumulate")))

    @property
    def epochs(self) -> list[int]:
        """Return the last step of training in each epoch."""
        last: dict[int, int] = {}
        for metric in self.metrics:
            if metric.get("split") == "train":
                epoch = int(number(metric, "epoch"))
                last[epoch] = max(int(number(metric, "step")), last.get(epoch, 0))
        return sorted(last.values())


def read_run(folder: RunFolder, predictions: Sequence[SlideResult] = ()) -> RunData:
    """Read what a run has measured. Raises nothing for missing or damaged files."""
    # The last line may have been cut off by whatever stopped the run.
    records = [mapping(_parsed(line)) for line in _text(folder.metrics).splitlines()]
    summary = mapping(_json(folder.summary))
    return RunData(
        metrics=[record for record in records if record.get("event") == "metrics"],
        steps=[_step(record) for record in records if record.get("event") == "step"],
        dice={str(name): value for name, value in mapping(summary.get("dice")).items() if is_number(value)},
        evaluation=mapping(summary.get("evaluation")),
        config=_settings(folder.config),
        predictions=predictions,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _json(path: Path) -> Any:
    return _parsed(_text(path))


def _parsed(text: str) -> Any:
    """Read JSON, None where it is none; of a number that is not finite the text."""
    try:
        found = json.loads(text, parse_int=_number, parse_float=_number, parse_constant=str)
        # Half a character, as in a file name of another encoding, can stand on no page.
        return json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return None


def _number(digits: str) -> float | str:
    """Read a number of JSON; integers that no machine number holds become floats."""
    value = float(digits)
    if not math.isfinite(value):
        return digits
    return int(digits) if len(digits) < 19 and digits.lstrip("-").isdigit() else value


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


def _step(record: Mapping[str, Any]) -> StepMeasured:
    """Make a record of the texts and numbers of a JSON object, empty and 0 where they are missing."""
    known: dict[str, Any] = {
        name: str(record.get(name, "")) if kind is str else kind(number(record, name))
        for name, kind in get_type_hints(StepMeasured).items()
    }
    return StepMeasured(**known)


def _records(folder: Path) -> tuple[tuple[SlideResult, ...], list[str]]:
    """Read what `predict` wrote of each slide, or say why that cannot be read."""
    try:
        found = tuple(read_records(folder).values())
        if not found:
            return (), [f"{folder} holds no predictions."]
        for each in found:
            numbers = each.dice or 0.0, each.seconds, each.height, each.width, each.regions, each.patches
            if not (
                isinstance(each.slide, str) and all(is_number(value) and math.isfinite(value) for value in numbers)
            ):
                raise ConfigError(f"what {folder} says of {each.name} is damaged; predict again")
    except (ConfigError, OSError, RecursionError) as error:
        return (), [f"The predictions cannot be read: {error}"]
    return found, []


_MOST_ROWS: Final = 500
"""Longer tables are cut: a browser likes no more."""

_MOST_POINTS: Final = 2000
"""Longer curves are drawn by means of neighbours."""

_PUBLISHED_PIXELS: Final = 16000 * 64000
_PUBLISHED_SECONDS: Final = 81
_PUBLISHED_BYTES: Final = 103_610_000_000
"""Remedios et al., MIDL 2023: one training step, validation included, and the peak over the first eight steps."""


Card = tuple[str, str, str]
"""One number at the top of the page: its label, the number, and a note."""


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
        predictions_dir: what `predict` wrote, for the pictures. Slides are read where they were predicted.
        step: the numbers of one large step, as the gigapixel benchmark prints them: `pixels`, `seconds_per_step`,
            `peak_rss_bytes`, `budget_bytes`, `predicted_peak_bytes`, `loss`, and `height` and `width` if known.

    Raises `ConfigError` if there is no such run folder or folder of predictions, where the page is not built, or for
    the name of a PDF, and `WriteError` if the file cannot be written.
    """
    page, out_path = read_page(), Path(out_path)
    if out_path.suffix.lower() == ".pdf":
        raise ConfigError(f"cannot write {out_path}: a report is HTML; name it so, open it, and print it as PDF")
    write_text(out_path, embedded(page, gather(run_dir, predictions_dir, step)))
    return out_path


def embedded(page: Mapping[str, bytes], record: Mapping[str, Any]) -> str:
    """Put what the page draws, its script and its style into its HTML: `page` has the built files by name.

    The policy lets only this script and this style work, and loads nothing.
    """
    style, script = page["page.css"].decode(), page["page.js"].decode().replace("</script", "<\\/script")
    sources = {"style-src": style, "script-src": script}
    hashes = {name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for name, text in sources.items()}
    policy = "; ".join(f"{name} 'sha256-{found}'" for name, found in hashes.items())
    policy = f"default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; {policy}"
    data = json.dumps({**record, "licences": page["licences.txt"].decode()}, allow_nan=False).replace("<", "\\u003c")
    html = page["index.html"].decode()
    for tag, inside in {
        '<link rel="icon" href="icon.svg" type="image/svg+xml">': (
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<link rel="icon" href="data:,">'
        ),
        '<link rel="stylesheet" href="page.css">': f"<style>{style}</style>",
        '<script src="page.js" defer></script>\n': "",
        "</body>": (
            f'<script type="application/json" id="report-data">{data}</script>\n<script>{script}</script>\n</body>'
        ),
    }.items():
        before, found, after = html.partition(tag)
        assert found, f"{tag} is not in the page"
        html = before + inside + after
    return html


def gather(
    run_dir: str | Path, predictions_dir: str | Path | None = None, step: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return everything that a report shows as plain types for JSON, all numbers finite (see `write_report`).

    Raises `ConfigError` if there is no such run folder or folder of predictions, or where runs lie in the former.
    """
    run_dir, folder = Path(run_dir), None if predictions_dir is None else Path(predictions_dir)
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run folder {run_dir}; name the folder that a training run wrote")
    files = RunFolder(run_dir)
    if not files.config.exists() and (inside := run_inside(run_dir)) is not None:
        raise ConfigError(f"{run_dir} holds runs and is none itself; name one of them, such as {inside}")
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"there is no folder of predictions {folder}; name the --out of 'gigagrad predict'")
    predictions, problems = _records(folder) if folder is not None else ((), [])
    run = read_run(files, predictions)
    slides, more, lost = slides_of(run_dir, folder, predictions) if folder is not None else ([], 0, [])
    dice = {name: value for name, value in _dice(run).items() if math.isfinite(value)}
    return {
        "name": run_dir.resolve().name,
        "model": str(run.config.get("model", "")),
        "cards": list(_cards(run)),
        "step_cards": list(_step_cards(step or {})),
        "notes": [
            *_notes(run),
            *_of_others(files, predictions),
            *problems,
            *(f"A picture of {name} cannot be read." for name in lost),
        ],
        "accumulated": run.accumulated,
        "loss": {split: _points(run.series(split, "loss")) for split in ("train", "val")},
        "dice": dice,
        "memory": _memory(run.steps),
        "classes": [_tabled(table) for table in class_tables(run.evaluation)],
        "labelled": [_tabled(table) for table in label_tables(run.evaluation)],
        "slides": slides,
        "attended": any("attention" in entry.files for entry in predictions),
        "not_shown": more,
        "plan": _plan(mapping(_json(files.plan_data))),
        "plan_text": _text(files.plan_text),
        "settings": run.config,
        "environment": mapping(_json(files.environment)),
    }


def _tabled(table: Table) -> dict[str, Any]:
    """Return a table for the page, without the rows that are too many for one."""
    cut = replace(table, rows=table.rows[:_MOST_ROWS], tones=table.tones[:_MOST_ROWS], bars=table.bars[:_MOST_ROWS])
    return {**dataclasses.asdict(cut), "numeric": cut.numeric}


def _neighbours(values: Sequence[Found]) -> Iterator[Sequence[Found]]:
    """Divide very many values into groups, as many as are drawn, else into single ones."""
    size = max(1, -(-len(values) // _MOST_POINTS))
    return (values[start : start + size] for start in range(0, len(values), size))


def _points(series: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the finite points of a curve; of very many, means of neighbours."""
    groups = _neighbours([(step, value) for step, value in series if math.isfinite(value)])
    return [(group[-1][0], sum(value / len(group) for _, value in group)) for group in groups]


def own_peaks(steps: Sequence[StepMeasured]) -> list[int | None]:
    """Return the peak of each step. A process tells the highest that it has been at: a step that stayed below one
    before it has a peak that nobody knows, here None.
    """
    found: list[int | None] = []
    most = 0
    for step in steps:
        found.append(step.peak_bytes if step.peak_bytes > (step.earlier_peak_bytes or most) else None)
        most = max(most, step.peak_bytes)
    return found


def _memory(steps: Sequence[StepMeasured]) -> dict[str, Any]:
    """Return bytes of every step, or of very many the most of each few: measured, predicted and the budget."""

    def most(values: Sequence[int | None]) -> list[int | None]:
        return [max((value for value in group if value is not None), default=None) for group in _neighbours(values)]

    return {
        "step": len(next(_neighbours(steps), [0])),
        "measured": most(own_peaks(steps)),
        "predicted": most([step.predicted_peak_bytes for step in steps]),
        "budget": most([step.budget_bytes or None for step in steps]),
    }


def _plan(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Describe the plan; None where the file is missing or no plan's, such as that of another version."""
    try:
        plan = Plan.from_dict(dict(record))
        described = describe(plan)
        str(described)  # a word that is no text would fail later
        parts = [size for _, size in plan.memory_parts()]
        sizes = (plan.budget_bytes or 0, *parts, *(amount.size_bytes for amount in plan.elsewhere))
        if not all(map(math.isfinite, sizes)):
            return None
        return {"title": described.title, "facts": described.facts, "tables": [*map(_tabled, described.tables)]}
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
        return None


def _dice(run: RunData) -> Mapping[str, float]:
    """Return the test scores of the run; where it has none, those of the predictions."""
    return run.dice or {entry.name: entry.dice for entry in run.predictions if entry.dice is not None}


def _cards(run: RunData) -> Iterator[Card]:
    dice = [value for value in _dice(run).values() if math.isfinite(value)]
    if dice:
        mean, sd = mean_sd(dice)
        spread = f"± {sd:.4f} " if len(dice) > 1 else ""
        yield ("Dice", f"{mean:.4f}", f"{spread}over {counted(len(dice), 'slide')}")
    for name in ("accuracy", "auc", "c_index", "mae"):
        value = mapping(run.evaluation.get(name)).get("value")
        if isinstance(value, (int, float)) and math.isfinite(value):
            label, count = measure_name(name), len(mapping(run.evaluation.get("slides")))
            yield (label[0].upper() + label[1:], f"{value:.4f}", f"over {counted(count, 'slide')}")
    val = [(value, at) for at, value in run.series("val", "loss") if math.isfinite(value)]
    if val:
        best, at = min(val)
        after = f"after {at:,} slides" if run.accumulated > 1 else f"after step {at}"
        yield ("Best validation loss", f"{best:.4g}", after)
    train = run.series("train", "loss")
    if train:
        slides = f"of {run.accumulated} slides, " if run.accumulated > 1 else ""
        # Each epoch ends with what is left of its slides.
        steps = sum(-(-(end - begin) // run.accumulated) for begin, end in pairwise([0, *run.epochs]))
        yield ("Training steps", f"{steps:,}", f"{slides}in {counted(len(run.epochs), 'epoch')}")
    backward = [s for s in run.steps if s.phase == "backward"] or list(run.steps)
    if backward:
        seconds = sorted(s.seconds for s in backward)[len(backward) // 2]
        most = format_pixels(max(s.pixels for s in backward))
        what = "slide" if run.accumulated > 1 else "step"
        yield (f"Time per {what}", format_seconds(seconds), f"median, up to {most}")
    peaks = zip(own_peaks(run.steps), run.steps, strict=True)
    if own := [(peak, step.budget_bytes) for peak, step in peaks if peak is not None]:
        highest, budget = max(own)
        yield ("Peak memory", format_bytes(highest), f"budget {format_bytes(budget)}" if budget else "no budget set")
    errors = sorted(s.gradient_error for s in run.steps if s.gradient_error)
    if errors:
        yield ("Gradient error", f"{errors[len(errors) // 2]:.2%}", "expected, of lossy storage; median")


def _step_cards(step: Mapping[str, Any]) -> Iterator[Card]:
    """Return the large step's numbers, the published ones beside them where the size is the same."""
    published, budget = step.get("pixels") == _PUBLISHED_PIXELS, step.get("budget_bytes")
    size = f"{step['height']} x {step['width']} px" if step.get("height") and step.get("width") else "one slide"
    published_peak = f"published: {_PUBLISHED_BYTES / 1e9:.2f} GB"
    for label, name, worded, note in (
        ("Pixels", "pixels", format_pixels, size),
        ("Time", "seconds_per_step", format_seconds, f"published: {_PUBLISHED_SECONDS} s" if published else ""),
        ("Peak memory", "peak_rss_bytes", format_bytes, published_peak if published else "the whole process"),
        ("Predicted peak", "predicted_peak_bytes", format_bytes, f"budget {format_bytes(budget)}" if budget else ""),
        ("Loss", "loss", "{:.6g}".format, "exact, over every pixel"),
    ):
        if step.get(name) is not None:
            yield (label, worded(step[name]), note)


def _of_others(files: RunFolder, predictions: Sequence[SlideResult]) -> Iterator[str]:
    """Tell of predictions that were not made with the weights that the run has now; of nobody's where it has none."""
    own = {digest_of(path) for path in (files.best, files.model / SAFETENSORS) if path.is_file()}
    done = [entry for entry in predictions if entry.status == "done"]
    if others := [entry.made_with.model for entry in done if entry.made_with.model_sha256 not in own] if own else []:
        told = "All predictions" if len(others) == len(done) else f"{len(others)} of {len(done)} predictions"
        networks = ", ".join(sorted(set(others)))
        yield f"{told} are by another file of weights ({networks}) than this run's {files.best.name}."


def _notes(run: RunData) -> Iterator[str]:
    """Yield what a reader must know before the numbers: what is missing and what went wrong."""
    train, unit = run.series("train", "loss"), "slide" if run.accumulated > 1 else "step"
    broken = [at for at, value in train if not math.isfinite(value)]
    if broken:
        yield (
            f"The training loss was not a finite number in {len(broken)} of {counted(len(train), unit)}, "
            f"first at {unit} {broken[0]}."
        )
    if not run.metrics:
        yield "No metrics were recorded: the run has not finished a step, or metrics.jsonl is missing."
    elif not run.dice and not run.evaluation:
        yield "There are no test scores: the run has not finished, or its cohort has no test slides."
    for entry in run.predictions:
        if entry.status == "failed":
            yield f"The prediction of {entry.name} failed: {entry.error}"
