"""Score a cohort: a saved model whose prediction streams by, or the masks that `predict` wrote, against true masks.

Slides without a mask in the cohort file are compared with the tissue recipe's label, as they are in training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from gigagrad.cohorts import Row, find_slides
from gigagrad.errors import ConfigError, TargetError
from gigagrad.events import Events, Listener
from gigagrad.execution.engine import compile as compile_engine
from gigagrad.images import Image, label_image, open_image
from gigagrad.masks import IGNORED, ClassTable, open_mask
from gigagrad.models import load_model
from gigagrad.models.preprocess import check_intensities
from gigagrad.prediction.config import PredictConfig
from gigagrad.prediction.evaluate import Evaluation, score_each, score_logits, score_masks
from gigagrad.prediction.records import file_names, read_records
from gigagrad.prediction.sampling import require_mask
from gigagrad.prediction.scores import Confusion


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
) -> Evaluation:
    """Score the model of a run folder (or a saved model's file) on the rows of the cohort `slides`.

    `split` picks rows, None takes all; `classes` are as in `predict`, by default the training run's; `memory` and
    `scratch` are as in `compile`, `trust` as in `load_model`. Holds one tile at a time. The level is the training
    run's, and so is whether slides are read in grey. Emits the job `evaluate`, counted in slides, and the engine's
    events.

    Raises `ConfigError` for the cohort, `ModelError`, `ImageError`, `TargetError` and `BudgetError`.
    """
    config = PredictConfig(
        run=run, slides=(slides,), out=run, memory=memory, device=device, split=split, classes=tuple(classes)
    )
    entries, table = _scored(slides, split), config.resolved_table
    _, model = load_model(config.model_path, trust)
    engine = compile_engine(model, memory=memory, scratch=scratch, device=device)
    events = Events(listeners)
    engine.events.subscribe(events.emit)
    found: list[Confusion] = []

    def score(entry: Row) -> Confusion:
        with (
            open_image(entry.slide, level=config.resolved_level, mpp=entry.mpp) as slide,
            _truth(entry, slide, table) as truth,
        ):
            check_intensities(model, slide)
            seen = slide.grey() if config.resolved_grey else slide
            found.append(score_logits(engine.stream(seen), truth, ignores=table is not None and table.ignores))
            return found[-1]

    evaluation = score_each([(entry.name, partial(score, entry)) for entry in entries], events)
    if table is None and any(counts.ignored_pixels > 0 for counts in found) and not any(map(_has_foreground, found)):
        raise TargetError(
            f"the true masks hold 0 and {IGNORED} only, and {IGNORED} is ignored where there are several classes; say "
            f"--classes {IGNORED}=1 if it is the foreground"
        )
    return evaluation


def evaluate_masks(
    predictions: str | Path,
    slides: str | Path,
    *,
    split: str | None = None,
    classes: Sequence[str] = (),
    listeners: tuple[Listener, ...] = (),
) -> Evaluation:
    """Score `predictions/masks/STEM.tif` (what `predict` wrote) for the rows of the cohort `slides`.

    `classes` are as in `predict`, by default those of the predictions. Masks from elsewhere that have one value above 0
    are foreground and background, whatever the value; those with several have class ids. Emits the job `evaluate`.

    Raises `ConfigError` for the cohort or a missing prediction, `ImageError` and `TargetError`.
    """
    entries, records = _scored(slides, split), read_records(Path(predictions))
    given = ClassTable.parse(classes) if classes else None
    masks = {entry.name: Path(predictions) / file_names(entry.name)["mask"] for entry in entries}
    for mask in masks.values():
        if not mask.is_file():
            raise ConfigError(f"there is no prediction {mask}; predict the slide first")

    def score(entry: Row) -> Confusion:
        record = records.get(entry.name)
        made_with = record.made_with if record is not None else None
        table = given or (ClassTable.parse(made_with.classes) if made_with is not None and made_with.classes else None)
        count = record.classes if record is not None and record.classes else table.count if table is not None else 0
        ignored = IGNORED if count > 2 or (table is not None and table.ignores) else None
        # Level 0 for masks from elsewhere, and for those whose level was chosen by resolution.
        level = (made_with.level if made_with is not None else None) or 0
        with (
            open_image(masks[entry.name]) as predicted,
            open_image(entry.slide, level=level, mpp=entry.mpp) as slide,
            _truth(entry, slide, table) as truth,
        ):
            if count:
                return score_masks(predicted, truth, count, ignored=ignored)
            return score_masks(predicted, truth, IGNORED + 1).narrowed(IGNORED)

    return score_each([(entry.name, partial(score, entry)) for entry in entries], Events(listeners))


def _scored(slides: str | Path, split: str | None) -> tuple[Row, ...]:
    """Raises `ConfigError` for slides that have labels: there is nothing to compare pixels with."""
    rows = find_slides([slides], split)
    for row in rows:
        if row.label is not None and row.mask is None:
            raise ConfigError(f"{slides} has a label of each slide and no masks; scores of pixels need a column 'mask'")
    return rows


def _has_foreground(counts: Confusion) -> bool:
    return bool(counts.counts[1:].any())


@contextmanager
def _truth(entry: Row, slide: Image, table: ClassTable | None) -> Iterator[Image]:
    """The true mask of an open slide; its tissue label where the cohort names none."""
    with ExitStack() as opened:
        if entry.mask is None:
            yield label_image(slide)
            return
        truth = opened.enter_context(open_mask(entry.mask, slide, table))
        require_mask(truth)
        yield truth
