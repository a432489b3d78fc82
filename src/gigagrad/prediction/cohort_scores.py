"""Score a cohort: a saved model whose prediction streams by, or what `predict` wrote, against true masks or labels.

Slides without a mask in the cohort file are compared with the tissue recipe's label, as they are in training. A cohort
of labels is what scores of whole slides are compared with. With a folder for what is found of each slide, shares of the
cohort are scored side by side, and whoever ends last, or asks again, has the numbers of all: the same as one alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from gigagrad.cohorts import Row, bags_of, check_bags, find_slides
from gigagrad.errors import ConfigError
from gigagrad.events import Events, Listener, Notice
from gigagrad.files import write_agreed
from gigagrad.masks import ClassTable, is_annotation_file, read_annotations
from gigagrad.prediction.config import PredictConfig
from gigagrad.prediction.evaluate import Evaluation
from gigagrad.prediction.kept_scores import Kept, Kind, score_slides
from gigagrad.prediction.score_sources import OfModel, OfPredictions, Source
from gigagrad.prediction.scores import Counts, counts_from
from gigagrad.prediction.slide_metrics import (
    SlideEvaluation,
    SlideScore,
    evaluate_classes,
    evaluate_numbers,
    evaluate_survival,
)
from gigagrad.prediction.slide_scores import Reading, label_time, label_value
from gigagrad.shares import Share

FILE_NAME: Final = "evaluation.json"


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
    out: str | Path | None = None,
    share: str = "1/1",
    listeners: tuple[Listener, ...] = (),
) -> Evaluation | SlideEvaluation | None:
    """Score the model of a run folder (or a saved model's file) on the rows of the cohort `slides`.

    Pixels are scored against masks; where the cohort has labels, whole slides against these. `split` picks rows, None
    takes all, and of a cohort with folds the one that the run validated is `val`; `classes` are as in `predict`, by
    default the training run's; `memory` and `scratch` are as in `compile`, `trust` as in `load_model`. Holds one
    tile at a time. The level is the training run's, and so is whether slides are read in grey. Emits the job
    `evaluate`, counted in slides, and the engine's events.

    The folder `out` gets what is found of each slide, which is not scored again, and `evaluation.json`. A `share` as in
    `PredictConfig` needs it; None is returned while other shares are not done.

    Raises `ConfigError` for the cohort, `ModelError`, `ImageError`, `TargetError` and `BudgetError`.
    """
    place = _place(out, share)
    config = PredictConfig(
        run=run,
        slides=(slides,),
        out=out or run,
        memory=memory,
        scratch=scratch,
        device=device,
        split=split,
        classes=tuple(classes),
        trust=tuple(trust),
    )
    entries = find_slides([slides], split, config.run_fold)
    labelled, events = _labelled(slides, entries), Events(listeners)
    source = OfModel(config, slides, events, labelled=labelled)
    return _evaluate(source, slides, entries, *place, events, labelled=labelled)


def evaluate_masks(
    predictions: str | Path,
    slides: str | Path,
    *,
    split: str | None = None,
    classes: Sequence[str] = (),
    out: str | Path | None = None,
    share: str = "1/1",
    listeners: tuple[Listener, ...] = (),
) -> Evaluation | SlideEvaluation | None:
    """Score `predictions/masks/STEM.tif` (what `predict` wrote) for the rows of the cohort `slides`; where that has
    labels, the scores in the records there.

    `classes` are as in `predict`, by default those of the predictions. Masks from elsewhere that have one value above 0
    are foreground and background, whatever the value; those with several have class ids. Emits the job `evaluate`.
    `out` and `share` are as in `evaluate_model`.

    Raises `ConfigError` for the cohort or a missing prediction, `ImageError` and `TargetError`.
    """
    place, entries = _place(out, share), find_slides([slides], split)
    labelled = _labelled(slides, entries)
    source = OfPredictions(Path(predictions), slides, entries, classes, labelled=labelled)
    return _evaluate(source, slides, entries, *place, Events(listeners), labelled=labelled)


def _place(out: str | Path | None, share: str) -> tuple[Path | None, Share]:
    """Where scores are kept, and whose slides are scored. Raises `ConfigError` for a share without a folder."""
    mine = Share.parse(share)
    if out is None and mine.count > 1:
        raise ConfigError("shares of a cohort meet in a folder; name it with --out")
    return None if out is None else Path(out), mine


def _labelled(slides: str | Path, rows: Sequence[Row]) -> bool:
    """Whether slides are scored by their labels. Raises `ConfigError` for a slide without one beside others."""
    without = [row for row in rows if row.label is None or row.mask is not None]
    if without and len(without) < len(rows):
        raise ConfigError(f"{slides} has labels, but none of {without[0].name} (or a mask); give every slide a label")
    return not without


def _evaluate(
    source: Source,
    slides: str | Path,
    entries: Sequence[Row],
    out: Path | None,
    share: Share,
    events: Events,
    *,
    labelled: bool,
) -> Evaluation | SlideEvaluation | None:
    """The evaluation of all slides, once they are scored; written into `out`, where there is one."""
    evaluation: Evaluation | SlideEvaluation
    if labelled:
        check_bags(Path(slides), entries)
        of_slides = Kind(partial(_told_of_scores, source.threshold), _plain_scores, _scores_of_plain)
        kept = None if out is None else Kept(out, of_slides, source.basis)
        scores = score_slides(entries, source.scores, of_slides, kept, share, events)
        if scores is None:
            return None
        evaluation = compare_labels(entries, scores, source.table, source.threshold)
    else:
        of_pixels: Kind[Counts] = Kind(
            lambda counts: f"Dice {counts.dice:.4f}", lambda counts: counts.to_dict(), counts_from
        )
        kept_counts = None if out is None else Kept(out, of_pixels, source.basis)
        counts = score_slides(entries, source.counts, of_pixels, kept_counts, share, events)
        if counts is None:
            return None
        source.check(counts.values())
        if source.table is not None and not any(each.foreground for each in counts.values()):
            _check_named(entries, source.table, str(slides))
        evaluation = Evaluation.of(counts, source.table)
        for name, ids in evaluation.alike.items():
            told = (
                f"the classes {', '.join(map(str, ids))} are all called {name!r}; their scores have the ids behind it"
            )
            events.emit(Notice(f"{told}, and --classes names them apart", warning=True))
    if out is not None:
        text = json.dumps(evaluation.to_dict(), indent=2) + "\n"
        write_agreed(lambda: {out / FILE_NAME: text})
    return evaluation


def _check_named(entries: Sequence[Row], table: ClassTable, where: str) -> None:
    """Raises `ConfigError` where nothing is foreground because annotations have other classes."""
    annotated = [mask for row in entries if len(row.masks) == 1 for mask in row.masks if is_annotation_file(mask)]
    if annotated:
        table.check_any_used({name for mask in annotated for name in read_annotations(mask).names}, where)


def _told_of_scores(threshold: float, found: tuple[Reading, Mapping[str, float]]) -> str:
    reading, scores = found
    return reading.predicted(scores, threshold)


def _plain_scores(found: tuple[Reading, Mapping[str, float]]) -> dict[str, Any]:
    reading, scores = found
    return {"columns": reading.columns, "names": reading.names, "scores": scores}


def _scores_of_plain(content: Mapping[str, Any]) -> tuple[Reading, Mapping[str, float]]:
    return Reading(tuple(content["columns"]), tuple(content["names"])), dict(content["scores"])


def compare_labels(
    entries: Sequence[Row],
    found: Mapping[str, tuple[Reading, Mapping[str, float]]],
    table: ClassTable | None,
    threshold: float,
) -> SlideEvaluation:
    """Compare the scores of slides by name, or of bags of them, with their labels.

    Raises `ConfigError` for slides whose scores are not alike, and `TargetError` for labels that are not what the
    scores are of.
    """
    reading, _ = found[entries[0].name]
    for name, (other, _) in found.items():
        if other != reading:
            raise ConfigError(f"{name} has scores of {other.columns}, others of {reading.columns}; predict anew")
    of_bags = [
        _compared(bag, [found[row.name][1] for row in bag], reading, table, threshold) for bag in bags_of(entries)
    ]
    if reading.survival:
        return evaluate_survival(of_bags)
    return evaluate_classes(of_bags, reading.names) if reading.names else evaluate_numbers(of_bags)


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
