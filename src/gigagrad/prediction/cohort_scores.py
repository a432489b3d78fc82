"""Score a cohort: a saved model whose prediction streams by, or what `predict` wrote, against true masks or labels.

Slides without a mask in the cohort file are compared with the tissue recipe's label, as they are in training. A cohort
of labels is what scores of whole slides are compared with. With a folder for what is found of each slide, shares of the
cohort are scored side by side, and whoever ends last, or asks again, has the numbers of all: the same as one alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from gigagrad.cohorts import Row, check_cases, find_slides
from gigagrad.cohorts.patches import joined
from gigagrad.cohorts.records import mask_of, read_records
from gigagrad.cohorts.rows import masks_beside
from gigagrad.cohorts.slides import rows_of, run_job
from gigagrad.config.predict import PredictConfig
from gigagrad.errors import ConfigError, TargetError
from gigagrad.events import Events, Listener, Notice
from gigagrad.execution.compiling import compile as compile_engine
from gigagrad.files import content_digest, read_json, write_agreed, write_json
from gigagrad.images import Image, label_image
from gigagrad.images.opening import open_ids
from gigagrad.masks import IGNORED, ClassTable, is_annotation_file, open_mask, read_annotations
from gigagrad.models import load_model
from gigagrad.models.networks import check_intensities
from gigagrad.prediction.classes import Channels, image_shape, require_mask
from gigagrad.prediction.outputs import made_with, open_slide
from gigagrad.prediction.predict import bags_for, is_of_others
from gigagrad.prediction.scores import Confusion, Evaluation, counts_of, score_logits, score_masks
from gigagrad.prediction.slide_scores import Reading, SlideEvaluation, compare_labels, output_of
from gigagrad.shares import Share

NO_MASKS: Final = "{} has a label of each slide and no masks; scores of pixels need a column 'mask'"
NO_LABELS: Final = "the model scores whole slides, and {} has no labels; it needs a column 'label'"


class OfModel:
    """A saved model; the slides of the `cohort` are compared with labels or with masks. Holds one tile at a time."""

    def __init__(self, config: PredictConfig, cohort: str | Path, events: Events, *, labelled: bool) -> None:
        self.table, self.threshold = config.resolved_table, config.threshold
        self._config, self._cohort, self.labelled = config, cohort, labelled
        if config.only_tissue is not None:
            raise ConfigError("only_tissue is of predictions: predict with it, and evaluate what was predicted")
        spec, self._model = load_model(config.model_path, config.trust)
        self._bags = bags_for(config, spec)
        if self._bags is not None and not labelled:
            raise ConfigError(NO_LABELS.format(cohort))
        self._engine = compile_engine(self._model, memory=config.memory, scratch=config.scratch, device=config.device)
        self._engine.events.subscribe(events.emit)
        self._made_with = made_with(config, spec)

    def counts(self, entry: Row) -> Confusion:
        """Compare the mask of a slide with the true one. Raises `ImageError`, `TargetError` and `ModelError`."""
        with self._opened(entry) as (slide, seen, channels):
            assert channels is not None, "it was refused"
            with _truth(entry, slide, self.table, channels.planes) as truth:
                return score_logits(
                    self._engine.stream(seen), truth, channels, self.table, seen, threshold=self.threshold
                )

    def scores(self, entry: Row) -> tuple[Reading, Mapping[str, float]]:
        """Return a slide's scores and how they are read. Raises `ConfigError`, `ImageError` and `ModelError`."""
        if self._bags is not None:
            with self._bags.open(entry) as bag:
                check_intensities(self._model, bag)
                output_NC = output_of(self._engine, bag)
        else:
            with self._opened(entry) as (_, seen, _):
                output_NC = output_of(self._engine, seen)
        reading = _of_one_label(Reading.of(output_NC.shape[1], self._config.run_loss, self.table))
        return reading, reading.scores(output_NC)

    def check(self, found: Collection[Confusion]) -> None:
        """Raise `TargetError` for counts of all slides from which no score follows."""
        ignored = any(counts.planes == 1 and counts.ignored_pixels for counts in found)
        foreground = any(counts.planes == 1 and counts.foreground for counts in found)
        if self.table is None and ignored and not foreground:
            raise TargetError(
                f"the true masks hold 0 and {IGNORED} only, and {IGNORED} is ignored where there are several classes; "
                f"say --classes {IGNORED}=1 if it is the foreground"
            )

    def basis(self, entry: Row) -> Sequence[Any]:
        """Return what the two follow from: plain values and paths of files."""
        files = entry.files if self._bags is None else (*entry.files, *self._bags.patches.files(entry))
        mpp = self._config.mpp or entry.mpp
        return dataclasses.asdict(self._made_with), self._config.run_loss, self.labelled, mpp, files

    @contextmanager
    def _opened(self, entry: Row) -> Iterator[tuple[Image, Image, Channels | None]]:
        with open_slide(self._config, entry) as slide:
            seen = self._config.resolved_input_view.of(slide)
            check_intensities(self._model, seen)
            shape = image_shape(self._engine, seen)
            channels = None if shape is None else Channels.of(shape[1], self._config.run_loss)
            if channels is not None and self.labelled:
                raise ConfigError(NO_MASKS.format(self._cohort))
            if channels is None and not self.labelled:
                raise ConfigError(NO_LABELS.format(self._cohort))
            yield slide, seen, channels


class OfPredictions:
    """Scores of what `predict` wrote into the folder `out`, or of masks from elsewhere that lie as it would put them.

    Raises `ConfigError` where there is no prediction of a slide, or one of another kind than what the `cohort` has.
    """

    def __init__(
        self, out: Path, cohort: str | Path, entries: Sequence[Row], classes: Sequence[str], *, labelled: bool
    ) -> None:
        self._out, self._records, self.labelled = out, read_records(out), labelled
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
        level = (made_with.level if made_with is not None else None) or 0  # which it is for masks from elsewhere
        if record is not None and record.made_with.target_mpp is not None:
            with entry.open() as slide:
                shapes = [each.shape for each in slide.levels]
            level = next((index for index, shape in enumerate(shapes) if shape == (record.height, record.width)), 0)
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

    def check(self, found: Collection[Confusion]) -> None:
        """Raise `TargetError` for masks of one value each beside masks of several: it may be any of their classes."""
        if any(each.renumbered for each in found) and any(each.classes > 2 for each in found):
            raise TargetError(
                "the masks of some slides hold one value above 0, other than 1, and those of others several; say that "
                "these are class ids: --classes NAME=ID NAME=ID"
            )

    def scores(self, entry: Row) -> tuple[Reading, Mapping[str, float]]:
        scores = self._records[entry.name].scores
        return _of_one_label(Reading.of_columns(scores, self.table)), scores

    def basis(self, entry: Row) -> Sequence[Any]:
        record = self._records.get(entry.name)
        made = None if record is None else (dataclasses.asdict(record.made_with), record.scores, record.ignored)
        classes = self.table.entries if self.table is not None else ()
        return made, classes, entry.mpp, (self._mask(entry), *entry.files)

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


def _with_masks_beside(entries: Iterable[Row]) -> tuple[Row, ...]:
    """Name the mask that lies beside a slide of a folder, for rows that no cohort file says anything of."""
    bare = [row for row in entries if not row.line and not row.masks and row.label is None]
    beside = {folder: masks_beside(folder) for folder in {row.slide.parent for row in bare}}
    found = {row.slide: beside[row.slide.parent].get(row.slide, []) for row in bare}
    return tuple(
        replace(row, mask=found[row.slide][0]) if len(found.get(row.slide, [])) == 1 else row for row in entries
    )


FILE_NAME: Final = "evaluation.json"


def evaluate_model(
    run: str | Path,
    slides: str | Path,
    *,
    out: str | Path | None = None,
    listeners: tuple[Listener, ...] = (),
    **settings: Any,
) -> Evaluation | SlideEvaluation | None:
    """Score the model of a run folder (or a saved model's file) on the rows of the cohort `slides`.

    Pixels are scored against masks; where the cohort has labels, whole slides against these. `settings` are those of
    `PredictConfig`: of a cohort with folds the one that the run validated has the split `val`; classes, level and
    colours are by default the training run's. Holds one tile at a time. Emits the job `evaluate`, counted in slides,
    and the engine's events.

    The folder `out` gets what is found of each slide, which is not scored again, and `evaluation.json`. A `share`
    needs it; None is returned while other shares are not done.

    Raises `ConfigError` for the cohort, `ModelError`, `ImageError`, `TargetError` and `BudgetError`.
    """
    config = PredictConfig.from_dict({"run": run, "slides": slides, "out": out or run, **settings})
    events = Events(listeners)
    entries, bags = find_slides(config.slides, config.split, config.run_fold), config.resolved_patches is not None
    entries = _with_masks_beside(entries)

    def source(labelled: bool) -> OfModel:
        return OfModel(config, slides, events, labelled=labelled)

    return _evaluate(source, slides, joined(entries) if bags else entries, out, config.share, events, bags=bags)


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
    entries, records, events = find_slides([slides], split), read_records(Path(predictions)), Events(listeners)
    bags = any(record.made_with.patches for record in records.values())
    entries = _with_masks_beside(entries)
    entries = joined(entries) if bags else entries
    others = [row.name for row in entries if row.name in records and is_of_others(records[row.name], row)]
    if others:
        told = (
            f"{len(others)} of {len(entries)} predictions, that of {others[0]} for one, were made of other files than"
        )
        events.emit(Notice(f"{told} {slides} names; predict anew if slides were replaced", warning=True))

    def source(labelled: bool) -> OfPredictions:
        return OfPredictions(Path(predictions), slides, entries, classes, labelled=labelled)

    return _evaluate(source, slides, entries, out, share, events, bags=bags)


def _stamp(path: Path) -> tuple[object, ...]:
    if not path.exists():
        return (path.name,)
    if path.is_dir():  # whose time says nothing of files in folders inside
        return path.name, content_digest(path)
    state = path.stat()
    return path.name, state.st_size, state.st_mtime_ns


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of scores: how those of a slide are found, made JSON of and read again, and put in a few words."""

    score: Callable[[Row], Any]
    plain: Callable[[Any], Mapping[str, Any]]
    parsed: Callable[[Mapping[str, Any]], Any]
    phrase: Callable[[Any], str]


def _score_slides(
    kind: _Kind,
    basis: Callable[[Row], Sequence[Any]],
    entries: Sequence[Row],
    out: Path | None,
    share: Share,
    events: Events,
) -> dict[str, Any] | None:
    """Score every slide of a share that has no scores in `out/scores/NAME.json`, where shares and repetitions find
    them; return those of all by name and in order.

    `basis` is what a slide's scores follow from, plain values and paths of files, which stand for their sizes and
    times: those that follow from something else than now are none. None where the share is done and others are not,
    which is told (`Notice`). Emits the job `evaluate`, counted in slides. Raises `WriteError`, and as `kind.score` and
    `claimed` do.
    """

    def file_and_digest(entry: Row) -> tuple[Path, str]:
        assert out is not None
        text = json.dumps(basis(entry), default=_stamp)
        digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
        return out / "scores" / f"{entry.name}.json", digest

    def kept(entry: Row) -> Any:
        if out is None:
            return None
        file, digest = file_and_digest(entry)
        try:
            content = read_json(file)
            return kind.parsed(content["found"]) if content["basis"] == digest else None
        except (ValueError, KeyError, TypeError, AttributeError):  # not there, or of another version
            return None

    own = rows_of(share, entries)
    found = {entry.name: kept(entry) for entry in own}

    def work(entry: Row) -> tuple[Any, str]:
        value = found[entry.name]
        if value is None:
            value = found[entry.name] = kind.score(entry)
            if out is not None:
                file, digest = file_and_digest(entry)
                write_json(file, {"basis": digest, "found": kind.plain(value)})
        return value, kind.phrase(value)

    run_job("evaluate", own, share, out, events, work, {entry for entry in own if found[entry.name] is not None})
    every = {entry.name: found[entry.name] if entry.name in found else kept(entry) for entry in entries}
    scored = {name: value for name, value in every.items() if value is not None}
    if len(scored) == len(entries):
        return scored
    text = f"{len(scored)} of {len(entries)} slides are scored; the share that ends last tells the scores, "
    events.emit(Notice(f"{text}or this command given again"))
    return None


def _evaluate(
    make_source: Callable[[bool], OfModel | OfPredictions],
    slides: str | Path,
    entries: Sequence[Row],
    out: str | Path | None,
    share: str,
    events: Events,
    *,
    bags: bool,
) -> Evaluation | SlideEvaluation | None:
    """Evaluate all slides, once they are scored; the evaluation is written into `out`, where there is one.
    `make_source` is told whether they are scored by their labels. Masks of `bags` are of tissue.

    Raises `ConfigError` for a share without a folder, and for a slide without a label beside others.
    """
    mine, folder = Share.parse(share), None if out is None else Path(out)
    if folder is None and mine.count > 1:
        raise ConfigError("shares of a cohort meet in a folder; name it with --out")
    without = [row for row in entries if row.label is None or (row.mask is not None and not bags)]
    if without and len(without) < len(entries):
        raise ConfigError(f"{slides} has labels, but none of {without[0].name} (or a mask); give every slide a label")
    source = make_source(not without)
    if not source.labelled and (bare := sum(not row.masks for row in entries)):
        text = f"{bare} of {len(entries)} slides name no mask: they are compared with the tissue that the recipe finds"
        events.emit(Notice(text, warning=True))
    kind = _Kind(source.counts, Confusion.to_dict, Confusion.from_dict, lambda found: f"Dice {found.dice:.4f}")
    if source.labelled:
        check_cases(Path(slides), [part for entry in entries for part in entry.members])
        kind = _Kind(
            source.scores, _plain_scores, _parsed_scores, lambda found: found[0].predicted(found[1], source.threshold)
        )
    found = _score_slides(kind, source.basis, entries, folder, mine, events)
    if found is None:
        return None
    evaluation: Evaluation | SlideEvaluation
    if source.labelled:
        evaluation = compare_labels(entries, found, source.table, source.threshold)
    else:
        source.check(found.values())
        if source.table is not None and not any(each.foreground for each in found.values()):
            masks = [row.masks[0] for row in entries if len(row.masks) == 1]
            if annotated := [mask for mask in masks if is_annotation_file(mask)]:  # with other classes
                found_names = {name for mask in annotated for name in read_annotations(mask).names}
                source.table.check_any_used(found_names, str(slides))
        evaluation = Evaluation.of(found, source.table)
        for name, ids in evaluation.same_names.items():
            told = f"the classes {', '.join(map(str, ids))} are all called {name!r}; their scores have the ids behind"
            events.emit(Notice(f"{told} it, and --classes names them apart", warning=True))
    if folder is not None:
        text = json.dumps(evaluation.to_dict(), indent=2) + "\n"
        write_agreed(lambda: {folder / FILE_NAME: text})
    return evaluation


def _plain_scores(found: tuple[Reading, Mapping[str, float]]) -> dict[str, Any]:
    reading, scores = found
    return {"columns": reading.columns, "names": reading.names, "scores": scores}


def _parsed_scores(content: Mapping[str, Any]) -> tuple[Reading, Mapping[str, float]]:
    return Reading(tuple(content["columns"]), tuple(content["names"])), dict(content["scores"])
