"""Sources of scores of a cohort's slides: a model whose prediction streams by, or what `predict` wrote."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from gigagrad.cohorts import Row
from gigagrad.config.predict import PredictConfig
from gigagrad.errors import ConfigError, TargetError
from gigagrad.events import Events
from gigagrad.execution.compiling import compile as compile_engine
from gigagrad.images import Image, label_image
from gigagrad.images.opening import open_ids
from gigagrad.masks import IGNORED, ClassTable, open_mask
from gigagrad.models import load_model
from gigagrad.models.preprocess import check_intensities
from gigagrad.prediction.classes import Channels, image_shape
from gigagrad.prediction.evaluate import counts_of, score_logits, score_masks
from gigagrad.prediction.records import MadeWith, mask_of, read_records
from gigagrad.prediction.sampling import require_mask
from gigagrad.prediction.scores import Confusion
from gigagrad.prediction.slide_scores import Reading, output_of

NO_MASKS: Final = "{} has a label of each slide and no masks; scores of pixels need a column 'mask'"
NO_LABELS: Final = "the model scores whole slides, and {} has no labels; it needs a column 'label'"


class Source(ABC):
    """Scores of the slides of a cohort; `table` names their classes, where anything does."""

    table: ClassTable | None
    threshold: float

    @abstractmethod
    def counts(self, entry: Row) -> Confusion:
        """Compare the mask of a slide with the true one. Raises `ImageError`, `TargetError` and `ModelError`."""

    @abstractmethod
    def scores(self, entry: Row) -> tuple[Reading, Mapping[str, float]]:
        """Return the scores of a whole slide and how they are read: a number or probabilities of classes.

        Raises `ConfigError`, `ImageError` and `ModelError`.
        """

    def check(self, found: Collection[Confusion]) -> None:
        """Raise `TargetError` for counts of all slides from which no score follows."""

    @abstractmethod
    def basis(self, entry: Row) -> Sequence[Any]:
        """Return what the two follow from, as `Kept` takes it."""


class OfModel(Source):
    """A saved model; the slides of the `cohort` are compared with labels or with masks. Holds one tile at a time."""

    def __init__(self, config: PredictConfig, cohort: str | Path, events: Events, *, labelled: bool) -> None:
        self.table, self.threshold = config.resolved_table, config.threshold
        self._config, self._cohort, self._labelled = config, cohort, labelled
        spec, self._model = load_model(config.model_path, config.trust)
        self._engine = compile_engine(self._model, memory=config.memory, scratch=config.scratch, device=config.device)
        self._engine.events.subscribe(events.emit)
        self._made_with = MadeWith.of(config, spec)

    def counts(self, entry: Row) -> Confusion:
        with self._opened(entry) as (slide, seen, channels):
            assert channels is not None, "it was refused"
            with _truth(entry, slide, self.table, channels.planes) as truth:
                return score_logits(self._engine.stream(seen), truth, channels, self.table, seen)

    def scores(self, entry: Row) -> tuple[Reading, Mapping[str, float]]:
        with self._opened(entry) as (_, seen, _):
            output_NC = output_of(self._engine, seen)
        reading = _of_one_label(Reading.of(output_NC.shape[1], self._config.run_loss, self.table))
        return reading, reading.scores(output_NC)

    def check(self, found: Collection[Confusion]) -> None:
        ignored = any(counts.planes == 1 and counts.ignored_pixels for counts in found)
        foreground = any(counts.planes == 1 and counts.foreground for counts in found)
        if self.table is None and ignored and not foreground:
            raise TargetError(
                f"the true masks hold 0 and {IGNORED} only, and {IGNORED} is ignored where there are several classes; "
                f"say --classes {IGNORED}=1 if it is the foreground"
            )

    def basis(self, entry: Row) -> Sequence[Any]:
        files = (entry.slide, *entry.further_slides, *entry.masks)
        return dataclasses.asdict(self._made_with), self._config.run_loss, self._labelled, entry.mpp, files

    @contextmanager
    def _opened(self, entry: Row) -> Iterator[tuple[Image, Image, Channels | None]]:
        with entry.open(self._config.resolved_level) as slide:
            seen = self._config.resolved_input_view.of(slide)
            check_intensities(self._model, seen)
            shape = image_shape(self._engine, seen)
            channels = None if shape is None else Channels.of(shape[1], self._config.run_loss)
            if channels is not None and self._labelled:
                raise ConfigError(NO_MASKS.format(self._cohort))
            if channels is None and not self._labelled:
                raise ConfigError(NO_LABELS.format(self._cohort))
            yield slide, seen, channels


class OfPredictions(Source):
    """Scores of what `predict` wrote into the folder `out`, or of masks from elsewhere that lie as it would put them.

    Raises `ConfigError` where there is no prediction of a slide, or one of another kind than what the `cohort` has.
    """

    def __init__(
        self, out: Path, cohort: str | Path, entries: Sequence[Row], classes: Sequence[str], *, labelled: bool
    ) -> None:
        self._out, self._records = out, read_records(out)
        self._given = ClassTable.parse(classes) if classes else None
        for entry in entries:
            record = self._records.get(entry.name)
            if labelled and (record is None or record.status != "done"):
                raise ConfigError(f"there is no prediction of {entry.name} in {out}; predict the slide first")
            if record is not None and bool(record.scores) != labelled:
                raise ConfigError((NO_MASKS if labelled else NO_LABELS).format(cohort))
            if not labelled and not self._mask(entry).exists():
                raise ConfigError(f"there is no prediction {self._mask(entry)}; predict the slide first")
        made_with = [record.made_with for entry in entries if (record := self._records.get(entry.name)) is not None]
        named = dict.fromkeys(made.classes for made in made_with if made.classes)
        if len(named) > 1 and self._given is None:
            raise ConfigError(
                f"the predictions in {out} are of different classes: {' and '.join(map(', '.join, named))}; evaluate "
                "them apart, or say with --classes which they are"
            )
        self.table = self._given or next(map(ClassTable.parse, named), None)
        self.threshold = made_with[0].threshold if made_with else 0.5

    def counts(self, entry: Row) -> Confusion:
        record = self._records.get(entry.name)
        made_with = record.made_with if record is not None else None
        table = self._given or (ClassTable.parse(made_with.classes) if made_with and made_with.classes else None)
        count = record.classes if record is not None and record.classes else table.count if table is not None else 0
        # Level 0 for masks from elsewhere, and for those whose level was chosen by resolution.
        level = (made_with.level if made_with is not None else None) or 0
        with (
            open_ids(self._mask(entry)) as predicted,
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

    def scores(self, entry: Row) -> tuple[Reading, Mapping[str, float]]:
        scores = self._records[entry.name].scores
        return _of_one_label(Reading.of_columns(scores, self.table)), scores

    def basis(self, entry: Row) -> Sequence[Any]:
        record = self._records.get(entry.name)
        made = None if record is None else (dataclasses.asdict(record.made_with), record.scores, record.ignored)
        classes = self.table.entries if self.table is not None else ()
        return made, classes, entry.mpp, (self._mask(entry), entry.slide, *entry.further_slides, *entry.masks)

    def _mask(self, entry: Row) -> Path:
        return self._out / mask_of(entry.name, self._records.get(entry.name))


def _of_one_label(reading: Reading) -> Reading:
    """Raise `ConfigError` for several numbers, which no label is compared with."""
    if not reading.names and len(reading.columns) > 1:
        raise ConfigError(
            f"the model gives {len(reading.columns)} numbers of a slide and a label is one; use another loss"
        )
    return reading


@contextmanager
def _truth(entry: Row, slide: Image, table: ClassTable | None, planes: int) -> Iterator[Image]:
    """Open the true mask of an open slide; its tissue label where the cohort names none."""
    with ExitStack() as opened:
        if not entry.masks:
            yield label_image(slide)
            return
        truth = opened.enter_context(open_mask(entry.masks, slide, table, labels=planes))
        require_mask(truth, planes)
        yield truth
