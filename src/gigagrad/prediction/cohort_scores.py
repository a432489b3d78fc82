"""Score a cohort: a saved model whose prediction streams by, or the masks that `predict` wrote, against true masks.

Slides without a mask in the cohort file are compared with the tissue recipe's label, as they are in training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from gigagrad.cohorts import Row, find_slides
from gigagrad.errors import ConfigError
from gigagrad.events import Events, Listener
from gigagrad.execution.engine import compile as compile_engine
from gigagrad.images import Image, label_image, open_image
from gigagrad.models import load_model
from gigagrad.prediction.config import PredictConfig
from gigagrad.prediction.evaluate import Evaluation, check_size, score_each, score_logits, score_masks
from gigagrad.prediction.records import file_names, read_records
from gigagrad.prediction.sampling import require_mask
from gigagrad.prediction.scores import Confusion


def evaluate_model(
    run: str | Path,
    slides: str | Path,
    *,
    split: str | None = None,
    memory: str | None = None,
    scratch: str | Path | None = None,
    device: str = "cpu",
    trust: Collection[str] = (),
    listeners: tuple[Listener, ...] = (),
) -> Evaluation:
    """Score the model of a run folder (or a saved model's file) on the rows of the cohort file `slides`.

    `split` picks rows, None takes all; `memory` and `scratch` are as in `compile`, `trust` as in `load_model`. Holds
    one tile at a time. The level is the training run's, and so is whether slides are read in grey. Emits the job
    `evaluate`, counted in slides, and the engine's events.

    Raises `ConfigError` for the cohort file, `ModelError`, `ImageError`, `TargetError` and `BudgetError`.
    """
    config = PredictConfig(run=run, slides=(slides,), out=run, memory=memory, device=device, split=split)
    entries = find_slides(config.slides, split)
    _, model = load_model(config.model_path, trust)
    engine = compile_engine(model, memory=memory, scratch=scratch, device=device)
    events = Events(listeners)
    engine.events.subscribe(events.emit)

    def score(entry: Row) -> Confusion:
        level = config.resolved_level
        with open_image(entry.slide, level=level, mpp=entry.mpp) as slide, _truth(entry, level, slide) as truth:
            # What training skips in a mask of several classes is skipped here too.
            return score_logits(engine.stream(slide.grey() if config.resolved_grey else slide), truth, ignored_from=3)

    return score_each([(entry.name, partial(score, entry)) for entry in entries], events)


def evaluate_masks(
    predictions: str | Path,
    slides: str | Path,
    *,
    split: str | None = None,
    classes: int = 2,
    listeners: tuple[Listener, ...] = (),
) -> Evaluation:
    """Score `predictions/masks/STEM.tif` (what `predict` wrote) for the rows of the cohort file `slides`.

    `classes` counts the background; with two, every value above 0 is foreground. Emits the job `evaluate`.

    Raises `ConfigError` for the cohort file or a missing prediction, `ImageError` and `TargetError`.
    """
    entries, records = find_slides([slides], split), read_records(Path(predictions))
    masks = {entry.name: Path(predictions) / file_names(entry.name)["mask"] for entry in entries}
    for mask in masks.values():
        if not mask.is_file():
            raise ConfigError(f"there is no prediction {mask}; predict the slide first")

    def score(entry: Row) -> Confusion:
        # Level 0 for masks from elsewhere, and for those whose level was chosen by resolution.
        level = records[entry.name].made_with.level if entry.name in records else None
        with open_image(masks[entry.name]) as predicted, _truth(entry, level or 0) as truth:
            return score_masks(predicted, truth, classes)

    return score_each([(entry.name, partial(score, entry)) for entry in entries], Events(listeners))


@contextmanager
def _truth(entry: Row, level: int, slide: Image | None = None) -> Iterator[Image]:
    """The true mask of a slide; its tissue label where the cohort file names none. `slide` if it is open already."""
    with ExitStack() as opened:
        if entry.mask is None:
            slide = slide or opened.enter_context(open_image(entry.slide, level=level, mpp=entry.mpp))
            yield label_image(slide)
            return
        truth = opened.enter_context(open_image(entry.mask, level=level))
        require_mask(truth)
        if slide is not None:
            check_size(truth, entry.mask, slide)
        yield truth
