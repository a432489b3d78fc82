"""From nothing to a report: a cohort, its labels, a trained network, its test, predictions, and one gigapixel step.

The experiment is the founding one in small (Remedios et al., MIDL 2023): the paper's network learns the tissue recipe's
labels from whole slides. Each part is finished before the next begins and is found finished by a demo that is
started again, so that an interrupted one goes on from where it stopped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gigagrad.cohorts import Row, find_slides
from gigagrad.cohorts.slides import label_slides
from gigagrad.demo.step import measured_step
from gigagrad.errors import ConfigError
from gigagrad.events import Events, Listener, Notice
from gigagrad.files import read_json, write_csv, write_json
from gigagrad.images import make_cohort, make_slide
from gigagrad.prediction import Evaluation, PredictConfig, evaluate, predict
from gigagrad.prediction.scores import spread
from gigagrad.reports.report import write_report
from gigagrad.training import FitConfig, FitResult, fit
from gigagrad.units import format_bytes, format_seconds
from gigagrad.view.page import read_page

_PARTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The size of a demo. Sizes in pixels; `slides` are made and split into training, validation and test."""

    slides: int
    height: int
    width: int
    epochs: int
    learning_rate: float
    large_height: int
    large_width: int
    seed: int = 0


# docs/decisions/0010-demo-training.md has the runs that these numbers were chosen by.
FULL = Scale(slides=20, height=1536, width=2048, epochs=90, learning_rate=3e-3, large_height=16000, large_width=64000)
QUICK = Scale(slides=5, height=512, width=768, epochs=4, learning_rate=3e-3, large_height=2000, large_width=8000)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Results of a demo. `exact`: scores against the true outlines of synthetic slides, None for real ones; `report`:
    None where the page is not built.
    """

    report: Path | None
    fit: FitResult
    exact: Evaluation | None
    step: Mapping[str, Any]

    def __str__(self) -> str:
        """Write a few lines for a person, the report's path last if there is one."""
        step = self.step
        count = len(self.fit.scores)
        lines = [f"test Dice {spread(self.fit.scores.values())} over {count} slide{'s' if count > 1 else ''}"]
        if self.exact is not None:
            lines.append(f"against the exact outlines {spread(score.dice for score in self.exact.scores)}")
        lines.append(
            f"one exact training step on {step['height']} x {step['width']} px: "
            f"{format_seconds(step['seconds_per_step'])}, peak {format_bytes(step['peak_rss_bytes'])} "
            f"(predicted {format_bytes(step['predicted_peak_bytes'])}, budget {format_bytes(step['budget_bytes'])})"
        )
        return "\n".join([*lines, *([str(self.report)] if self.report else [])])


def run_demo(
    out: str | Path,
    scale: Scale,
    *,
    slides: Path | None = None,
    memory: str = "1GiB",
    listeners: Iterable[Listener] = (),
) -> DemoResult:
    """Run whatever of the demo is not finished in the folder `out`.

    `slides` is a folder of real slides, labelled by the recipe, to test on in the place of synthetic ones; training
    stays on synthetic slides. `memory` is the budget of training, prediction and the large step. Emits a `Notice` per
    part and the events of the parts.

    Raises `ConfigError` if `out` holds a demo of another kind, and what the parts raise.
    """
    out, events = Path(out), Events(tuple(listeners))
    real = find_slides([slides]) if slides else ()
    _claim(out, {**dataclasses.asdict(scale), "slides_dir": None if slides is None else str(slides.absolute())})

    _begin(events, 1, f"a cohort of {scale.slides} synthetic slides, {scale.height} x {scale.width} px")
    made = out / "cohort" / "cohort.csv"
    if not made.exists():  # written last
        make_cohort(made.parent, scale.slides, height=scale.height, width=scale.width, seed=scale.seed, overwrite=True)

    _begin(events, 2, "tissue labels by the recipe")
    cohort = _label(out, made, real, events)

    _begin(events, 3, "training on whole slides")
    config = FitConfig(
        slides=str(cohort),
        out=str(out / "run"),
        memory=memory,
        epochs=scale.epochs,
        learning_rate=scale.learning_rate,
        seed=scale.seed,
        grey=True,  # as the paper's network does itself, and as its slides were
    )
    trained = fit(config, (events.emit,))

    _begin(events, 4, "predictions of the test slides")
    predictions, exact = _predict(out, cohort, None if slides else made.parent / "masks", memory, events)

    _begin(events, 5, f"one training step on {scale.large_height} x {scale.large_width} px")
    step = _large_step(out / "large", scale, trained.best, memory, events)

    _begin(events, 6, "the report")
    try:
        read_page()
    except ConfigError as error:
        events.emit(Notice(f"no report: {error}"))
        return DemoResult(None, trained, exact, step)
    report = write_report(out / "run", out / "report.html", predictions_dir=predictions, step=step)
    return DemoResult(report, trained, exact, step)


def _begin(events: Events, part: int, text: str) -> None:
    events.emit(Notice(f"[{part}/{_PARTS}] {text}"))


def _claim(out: Path, settings: Mapping[str, Any]) -> None:
    """Write down what this demo is, or see that the folder's demo is the same."""
    path = out / "demo.json"
    if path.exists():
        try:
            before = read_json(path)
        except ValueError as error:
            raise ConfigError(f"{path} is damaged ({error}); remove the folder or choose another --out") from error
        if before != dict(settings):
            raise ConfigError(f"{out} holds a demo with other settings; remove it or choose another --out")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and holds no demo; choose another --out")
    write_json(path, settings)


def _label(out: Path, made: Path, real: Sequence[Row], events: Events) -> Path:
    """Label all slides and write the cohort file of the experiment; `real` slides are the test split, if any."""
    rows = [(slide, split) for split in ("train", "val") for slide in find_slides([made], split)]
    rows += [(slide, "test") for slide in real or find_slides([made], "test")]
    masks = label_slides([slide.slide for slide, _ in rows], out / "labels", listeners=(events.emit,))
    labelled = [
        (slide.slide.absolute(), mask.absolute(), split) for (slide, split), mask in zip(rows, masks, strict=True)
    ]
    cohort = out / "cohort.csv"
    write_csv(cohort, [("slide", "mask", "split"), *labelled])
    return cohort


def _predict(
    out: Path, cohort: Path, outlines: Path | None, memory: str, events: Events
) -> tuple[Path, Evaluation | None]:
    """Predict the test slides; score them against the exact masks in `outlines` too, if there are any."""
    folder = out / "predictions"
    config = PredictConfig(run=out / "run", slides=(cohort,), out=folder, memory=memory, split="test")
    results = predict(config, (events.emit,))
    for result in results:
        if result.failed:
            raise ConfigError(f"{result.name}: {result.error}")
    if outlines is None:
        return folder, None
    pairs = [(result.name, folder / result.files["mask"], outlines / f"{result.name}.tif") for result in results]
    return folder, evaluate(pairs)


def _numbers(path: Path) -> Mapping[str, Any]:
    """Read the numbers of a step taken before. Raises `ConfigError` where the file holds something else."""
    try:
        found = read_json(path)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); remove it to take the step again") from error
    if not isinstance(found, dict) or not all(isinstance(value, (int, float, type(None))) for value in found.values()):
        raise ConfigError(f"{path} holds no numbers of a step; remove it to take the step again")
    return found


def _large_step(folder: Path, scale: Scale, model: Path, memory: str, events: Events) -> Mapping[str, Any]:
    """Return the numbers of a step on a slide of the founding experiment's size; make both unless they exist."""
    slide, mask, numbers = folder / "slide.tif", folder / "mask.tif", folder / "step.json"
    if numbers.exists():
        return _numbers(numbers)
    if not slide.exists():  # written after its mask
        events.emit(Notice("making the slide, a JPEG BigTIFF"))
        folder.mkdir(parents=True, exist_ok=True)
        make_slide(
            slide, height=scale.large_height, width=scale.large_width, seed=scale.seed, mask_path=mask, overwrite=True
        )
    step = measured_step(slide, mask, model, memory, events)
    write_json(numbers, step)
    return step
