"""Score a cohort: a saved model whose prediction streams by, or what `predict` wrote, against true masks or labels.

Slides without a mask in the cohort file are compared with the tissue recipe's label, as they are in training. A cohort
of labels is what scores of whole slides are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from gigagrad.cohorts import Row, bags_of, check_bags, find_slides
from gigagrad.errors import ConfigError, TargetError
from gigagrad.events import Events, Listener
from gigagrad.execution.engine import compile as compile_engine
from gigagrad.images import Image, label_image, open_image
from gigagrad.masks import IGNORED, ClassTable, open_mask
from gigagrad.models import load_model
from gigagrad.models.preprocess import check_intensities
from gigagrad.prediction.classes import Channels, image_shape
from gigagrad.prediction.config import PredictConfig
from gigagrad.prediction.evaluate import Evaluation, counts_of, score_each, score_logits, score_masks
from gigagrad.prediction.records import SlideResult, mask_of, read_records
from gigagrad.prediction.sampling import require_mask
from gigagrad.prediction.scores import Confusion, Counts
from gigagrad.prediction.slide_metrics import (
    SlideEvaluation,
    SlideScore,
    evaluate_classes,
    evaluate_numbers,
    evaluate_survival,
)
from gigagrad.prediction.slide_scores import Reading, label_time, label_value, output_of

_NO_MASKS = "{} has a label of each slide and no masks; scores of pixels need a column 'mask'"
_NO_LABELS = "the model scores whole slides, and {} has no labels; it needs a column 'label'"


def evaluate_model(
    run: str | Path,
    slides: str | Path,
    *,
    split: str | None = None,
    classes: Sequence[str] = (),
    memory: str | None = None,
    scratch: str | Path | None = None,
    device: str = "cpu",
    trust: Collection[str] = (),
    listeners: tuple[Listener, ...] = (),
) -> Evaluation | SlideEvaluation:
    """Score the model of a run folder (or a saved model's file) on the rows of the cohort `slides`.

    Pixels are scored against masks; where the cohort has labels, whole slides against these. `split` picks rows, None
    takes all, and of a cohort with folds the one that the run validated is `val`; `classes` are as in `predict`, by
    default the training run's; `memory` and `scratch` are as in `compile`, `trust` as in `load_model`. Holds one
    tile at a time. The level is the training run's, and so is whether slides are read in grey. Emits the job
    `evaluate`, counted in slides, and the engine's events.

    Raises `ConfigError` for the cohort, `ModelError`, `ImageError`, `TargetError` and `BudgetError`.
    """
    config = PredictConfig(
        run=run, slides=(slides,), out=run, memory=memory, device=device, split=split, classes=tuple(classes)
    )
    entries, table = find_slides([slides], split, config.run_fold), config.resolved_table
    labelled = _labelled(slides, entries)
    _, model = load_model(config.model_path, trust)
    engine = compile_engine(model, memory=memory, scratch=scratch, device=device)
    events = Events(listeners)
    engine.events.subscribe(events.emit)
    found: list[Counts] = []

    @contextmanager
    def opened(entry: Row) -> Iterator[tuple[Image, Image, Channels | None]]:
        with entry.open(config.resolved_level) as slide:
            seen = config.resolved_look.of(slide)
            check_intensities(model, seen)
            shape = image_shape(engine, seen)
            channels = None if shape is None else Channels.of(shape[1], config.run_loss)
            if channels is not None and labelled:
                raise ConfigError(_NO_MASKS.format(slides))
            if channels is None and not labelled:
                raise ConfigError(_NO_LABELS.format(slides))
            yield slide, seen, channels

    def score_slide(entry: Row) -> tuple[Reading, dict[str, float]]:
        with opened(entry) as (_, seen, _):
            output_NC = output_of(engine, seen)
        reading = Reading.of(output_NC.shape[1], config.run_loss, table)
        return reading, reading.scores(output_NC)

    if labelled:
        check_bags(Path(slides), entries)
        return score_labels(entries, score_slide, table, config.threshold, events)

    def score(entry: Row) -> Counts:
        with opened(entry) as (slide, seen, channels):
            assert channels is not None, "it was refused"
            with _truth(entry, slide, table, channels.planes) as truth:
                found.append(score_logits(engine.stream(seen), truth, channels, table, seen))
        return found[-1]

    evaluation = score_each([(entry.name, partial(score, entry)) for entry in entries], events, table)
    if table is None:
        _check_foreground([counts for counts in found if isinstance(counts, Confusion)])
    return evaluation


def _check_foreground(found: Sequence[Confusion]) -> None:
    """Raises `TargetError` where pixels were ignored and there is no foreground, which is what they may be."""
    if any(counts.ignored_pixels > 0 for counts in found) and not any(counts.counts[1:].any() for counts in found):
        raise TargetError(
            f"the true masks hold 0 and {IGNORED} only, and {IGNORED} is ignored where there are several classes; say "
            f"--classes {IGNORED}=1 if it is the foreground"
        )


def evaluate_masks(
    predictions: str | Path,
    slides: str | Path,
    *,
    split: str | None = None,
    classes: Sequence[str] = (),
    listeners: tuple[Listener, ...] = (),
) -> Evaluation | SlideEvaluation:
    """Score `predictions/masks/STEM.tif` (what `predict` wrote) for the rows of the cohort `slides`; where that has
    labels, the scores in `predictions/predictions.json`.

    `classes` are as in `predict`, by default those of the predictions. Masks from elsewhere that have one value above 0
    are foreground and background, whatever the value; those with several have class ids. Emits the job `evaluate`.

    Raises `ConfigError` for the cohort or a missing prediction, `ImageError` and `TargetError`.
    """
    entries, records = find_slides([slides], split), read_records(Path(predictions))
    given = ClassTable.parse(classes) if classes else None
    if _labelled(slides, entries):
        return _records_against_labels(Path(predictions), slides, entries, records, given, Events(listeners))
    if any(entry.name in records and records[entry.name].scores for entry in entries):
        raise ConfigError(_NO_LABELS.format(slides))
    masks = {entry.name: Path(predictions) / mask_of(entry.name, records.get(entry.name)) for entry in entries}
    for mask in masks.values():
        if not mask.exists():
            raise ConfigError(f"there is no prediction {mask}; predict the slide first")

    def score(entry: Row) -> Counts:
        record = records.get(entry.name)
        made_with = record.made_with if record is not None else None
        table = given or (ClassTable.parse(made_with.classes) if made_with is not None and made_with.classes else None)
        count = record.classes if record is not None and record.classes else table.count if table is not None else 0
        # Level 0 for masks from elsewhere, and for those whose level was chosen by resolution.
        level = (made_with.level if made_with is not None else None) or 0
        with (
            open_image(masks[entry.name]) as predicted,
            entry.open(level) as slide,
            _truth(entry, slide, table, predicted.channels) as truth,
        ):
            ignored = Channels(count - 1).ignored(table, truth)
            if ignored is None and record is not None:
                ignored = record.ignored
            if predicted.channels > 1:
                return score_masks(predicted, truth, counts_of(Channels(predicted.channels, labels=True), ignored))
            if count:
                return score_masks(predicted, truth, Confusion(count, ignored))
            return score_masks(predicted, truth, Confusion(IGNORED + 1)).narrowed(IGNORED)

    made_with = [record.made_with for entry in entries if (record := records.get(entry.name)) is not None]
    named = given or next((ClassTable.parse(made.classes) for made in made_with if made.classes), None)
    return score_each([(entry.name, partial(score, entry)) for entry in entries], Events(listeners), named)


def _labelled(slides: str | Path, rows: Sequence[Row]) -> bool:
    """Whether slides are scored by their labels. Raises `ConfigError` for a slide without one beside others."""
    without = [row for row in rows if row.label is None or row.mask is not None]
    if without and len(without) < len(rows):
        raise ConfigError(f"{slides} has labels, but none of {without[0].name} (or a mask); give every slide a label")
    return not without


def _records_against_labels(
    predictions: Path,
    slides: str | Path,
    entries: Sequence[Row],
    records: Mapping[str, SlideResult],
    given: ClassTable | None,
    events: Events,
) -> SlideEvaluation:
    found = {entry.name: records.get(entry.name) for entry in entries}
    done = {name: record for name, record in found.items() if record is not None and record.status == "done"}
    for name in found:
        if name not in done:
            raise ConfigError(f"there is no prediction of {name} in {predictions}; predict the slide first")
        if not done[name].scores:
            raise ConfigError(_NO_MASKS.format(slides))
    check_bags(Path(slides), entries)
    made_with = done[entries[0].name].made_with
    table = given or (ClassTable.parse(made_with.classes) if made_with.classes else None)

    def score(entry: Row) -> tuple[Reading, dict[str, float]]:
        scores = done[entry.name].scores
        return Reading.of_columns(scores, table), scores

    return score_labels(entries, score, table, made_with.threshold, events)


def score_labels(
    entries: Sequence[Row],
    score: Callable[[Row], tuple[Reading, dict[str, float]]],
    table: ClassTable | None,
    threshold: float,
    events: Events,
) -> SlideEvaluation:
    """Compare the scores of slides, or of bags, with their labels. Emits the job `evaluate`.

    Raises `ConfigError` for slides whose scores are not alike or are several numbers, and `TargetError` for labels that
    are not what the scores are of.
    """
    scores: dict[str, dict[str, float]] = {}
    first: Reading | None = None
    with events.job("evaluate", len(entries)) as advance:
        for entry in entries:
            reading, scores[entry.name] = score(entry)
            first = first or reading
            if reading != first:
                raise ConfigError(
                    f"{entry.name} has scores of {reading.columns}, others of {first.columns}; predict anew"
                )
            if not reading.names and len(reading.columns) > 1:
                raise ConfigError(
                    f"the model gives {len(reading.columns)} numbers of a slide and a label is one; use another loss"
                )
            advance(len(scores), f"{entry.name}: {reading.predicted(scores[entry.name], threshold)}")
    assert first is not None, "find_slides finds one"
    found = [_compared(bag, [scores[row.name] for row in bag], first, table, threshold) for bag in bags_of(entries)]
    if first.survival:
        return evaluate_survival(found)
    return evaluate_classes(found, first.names) if first.names else evaluate_numbers(found)


def _compared(
    bag: Sequence[Row],
    of_slides: Sequence[Mapping[str, float]],
    reading: Reading,
    table: ClassTable | None,
    threshold: float,
) -> SlideScore:
    """A bag's scores beside its label; of a single slide they are its own."""
    row = bag[0]
    scores = reading.pooled(of_slides) if len(bag) > 1 else dict(of_slides[0])
    truth, event = label_time(row) if reading.survival else (label_value(row, reading, table), True)
    said = reading.predicted(scores, threshold)
    return SlideScore(row.bag or row.name, scores, reading.outputs(scores), said, row.label or "", truth, event)


@contextmanager
def _truth(entry: Row, slide: Image, table: ClassTable | None, planes: int) -> Iterator[Image]:
    """The true mask of an open slide; its tissue label where the cohort names none."""
    with ExitStack() as opened:
        if not entry.masks:
            yield label_image(slide)
            return
        truth = opened.enter_context(open_mask(entry.masks, slide, table, labels=planes))
        require_mask(truth, planes)
        yield truth
