"""Predict the slides of a cohort, or a share of them, here or wherever an executor has workers.

A run can be stopped and started again: slides whose files are all there are left alone. A slide that fails does not
stop the others. Each has a record of its own; `predictions.json` and the tables of scores are made of the records.

Tiles of a slide leave the engine row by row and go straight into the file (`outputs`), so the mask exists only as
strips and there are no seams. What is asked for later is made of the mask where it can be.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gigagrad.at_work import WorkFile
from gigagrad.cohorts import Row, find_slides, is_table
from gigagrad.cohorts.patches import Bags, joined
from gigagrad.cohorts.records import FILE_NAME, MadeWith, SlideResult, file_names, read_records, summary, write_record
from gigagrad.cohorts.slides import rows_of, run_job
from gigagrad.config.predict import AUTO, PredictConfig
from gigagrad.errors import ConfigError, GigagradError, ImageError, ModelError, WriteError
from gigagrad.events import Events, Listener, Notice
from gigagrad.execution.compiling import compile as compile_engine
from gigagrad.execution.engine import Engine
from gigagrad.execution.sinks import Several, Sink
from gigagrad.files import content_digest, size_of, write_agreed
from gigagrad.images import Image, open_image
from gigagrad.images.layout import plain_stem
from gigagrad.masks import find_tissue, is_annotation_file, open_mask
from gigagrad.models import load_model
from gigagrad.models.bag_names import is_bag_name
from gigagrad.models.exported import ExportedNetwork
from gigagrad.models.networks import check_intensities
from gigagrad.models.saved import ONNX
from gigagrad.prediction.attention import WithAttention, attends, write_attention
from gigagrad.prediction.classes import Channels, image_shape
from gigagrad.prediction.exported import ExportedEngine
from gigagrad.prediction.outputs import OUTPUTS, Predicted, Streaming, made_with, open_slide
from gigagrad.prediction.polygons import measured, trace
from gigagrad.prediction.scores import counts_of, score_masks
from gigagrad.prediction.slide_scores import Reading, check_table, checked_output, output_of, score_tables
from gigagrad.shares import Share
from gigagrad.units import format_seconds


class Predictor:
    """The network, its engine and the settings of a prediction. Raises `ConfigError` and `ModelError`."""

    def __init__(self, config: PredictConfig, events: Events) -> None:
        self.config, self.out, self._events = config, Path(config.out), events
        spec = self._load()
        self.table, self.loss, self.look = config.resolved_table, config.run_loss, config.resolved_input_view
        self.bags = bags_for(config, spec)
        if self.bags is not None and config.only_tissue is not None:
            raise ConfigError(_ONLY_IMAGES)
        if "attention" in config.outputs and self.bags is None:
            raise ConfigError(
                "attention is of patches, and the model reads whole slides; leave it out of --outputs ('gigagrad "
                "attribute' maps whole slides)"
            )
        if "attention" in config.outputs and self._attending is None:
            raise ConfigError(
                "the model says nothing of attention; leave it out of --outputs, or give the model's head a method "
                "attention(x) that returns (N,), as those of mil: have"
            )
        self.ids = [ids[0] for ids in self.table.regions] if self.table is not None else []
        if "labelmap" in config.outputs and not self.ids:
            raise ConfigError(
                "a label map is of classes that are regions of ids, as in --classes whole=1+2 core=2; the mask has the "
                "ids of others"
            )
        self.made_with = made_with(config, spec)
        self._tables_checked = False
        self._threshold_told = config.threshold == PredictConfig.threshold

    def _load(self) -> str:
        """Load the network, and return the name that it is made by. Raises as `load_model`."""
        spec, self.model = load_model(self.config.model_path, self.config.trust)
        # One for all slides: those of one size are captured and planned once.
        self.engine = self._compiled(self.model)
        self._attending = self._compiled(WithAttention(self.model).eval()) if attends(self.model) else None
        return spec

    def _compiled(self, model: nn.Module) -> Engine:
        config = self.config
        engine = compile_engine(model, memory=config.memory, scratch=config.scratch, device=config.device)
        engine.events.subscribe(self._events.emit)
        return engine

    def _output_shape(self, seen: Image) -> tuple[int, ...] | None:
        """Return `(1, C, H, W)` of the output for a slide, None where that is no image. Raises `ImageError`."""
        check_intensities(self.model, seen)
        return image_shape(self.engine, seen)

    def _forward(self, seen: Image, sink: Sink, within: NDArray[np.bool_] | None) -> None:
        self.engine.forward(seen, out=sink, within=within)

    def check(self, entry: Row, known: SlideResult | None) -> None:
        """Raise `ConfigError` or `WriteError` where what is there of this slide's name belongs to somebody else or to
        other settings; `known` is its record.
        """
        if known is not None and known.status == "done" and known.made_with != self.made_with:
            raise ConfigError(
                f"{self.out} holds a prediction of {entry.name} by another model, threshold, level, patches, "
                "colours, format or class names; choose another --out or pass --overwrite"
            )
        if known is not None and known.slide != str(entry.slide.absolute()):
            raise ConfigError(
                f"{self.out} holds a prediction of another slide of this name, {known.slide}; "
                "choose another --out or pass --overwrite"
            )
        for output, file in self._files(entry, known).items():
            if (self.out / file).exists() and (known is None or output not in known.files):
                raise WriteError(
                    f"{self.out / file} exists but was not predicted here; choose another --out or pass --overwrite"
                )

    def _files(self, entry: Row, known: SlideResult | None) -> dict[str, str]:
        """Return the files that a slide is to have: the mask, what was asked for, and what was made when that was."""
        asked = {"mask", *self.config.outputs, *(known.files if known is not None else ())}
        names = file_names(entry.name, self.config.format)
        of_bags = self.bags is not None
        return {output: names[output] for output in names if output in asked and OUTPUTS[output].of_bags == of_bags}

    def _missing(self, entry: Row, known: SlideResult | None) -> dict[str, str]:
        """Return the files to be made: all of them where the network has to run, or where the slide has changed."""
        files = self._files(entry, known)
        if self.config.overwrite or known is None or self._has_changed(entry, known):
            return files
        there = known.files if known.status == "done" else {}
        if known.truth != _digest(entry.masks):  # which is drawn
            there = {output: file for output, file in there.items() if output != "overlay"}
        missing = {
            output: file for output, file in files.items() if output not in there or not (self.out / file).exists()
        }
        return files if any(OUTPUTS[output].sink is not None for output in missing) else missing

    def finished(self, entry: Row, known: SlideResult | None) -> SlideResult | None:
        """Return what an earlier run made of the slide, None where files are missing or the slide has changed."""
        if self.config.overwrite or known is None or known.status != "done":
            return None
        if self._has_changed(entry, known):
            return None
        if self.bags is None and not known.scores and known.truth != _digest(entry.masks):
            return None
        if (self.bags is not None or not known.scores) and self._missing(entry, known):
            return None
        if not known.scores:
            return known
        now = {name: value for name in ("label", "case") if (value := getattr(entry, name)) is not None}
        if any(getattr(known, name) != value for name, value in now.items()):
            known = dataclasses.replace(known, **now)
            write_record(self.out, known)
        return known

    def _has_changed(self, entry: Row, known: SlideResult) -> bool:
        """Return whether the slide, or what was given of it, is another than when the record was written."""
        return (
            known.slide_bytes != _size_of(entry)
            or known.given not in (None, self._given(entry))
            or is_of_others(known, entry)
        )

    def _given(self, entry: Row) -> str:
        """Digest the resolution that is given of a slide, and the files that say where its tissue or patches are."""
        mpps = [self.config.mpp or part.mpp for part in entry.members]
        if self.bags is None:
            return _digest(self._tissue_masks(entry), *mpps)
        patches = self.bags.patches
        masks = [mask for part in entry.members for mask in part.masks] if patches.tissue == "mask" else []
        try:
            return _digest(masks, *mpps, *patches.contents(entry).values())
        except ImageError:  # one is missing, which is told when the bag is opened
            return "missing"

    def attempt(self, entry: Row) -> SlideResult:
        """Predict one slide and keep its record up to date, whatever happens."""
        known = read_records(self.out, [entry.name]).get(entry.name)
        files, missing = self._files(entry, known), self._missing(entry, known)
        result = SlideResult(
            name=entry.name,
            slide=str(entry.slide.absolute()),
            slide_bytes=_size_of(entry),
            made_with=self.made_with,
            status="running",
            files=files,
            given=self._given(entry),
            content=_digest(entry.slides),
        )
        if missing == files:  # else what was made before stays so, whatever becomes of the rest
            write_record(self.out, result)
        start = time.perf_counter()
        try:
            result = self._predict(entry, result, missing)
            result = dataclasses.replace(result, status="done", seconds=time.perf_counter() - start)
        except (GigagradError, OSError) as error:
            result = dataclasses.replace(result, status="failed", error=str(error))
        write_record(self.out, result)
        return result

    def _predict(self, entry: Row, result: SlideResult, missing: Mapping[str, str]) -> SlideResult:
        if self.bags is not None:
            return self._score_bag(self.bags, entry, result)
        with ExitStack() as opened:
            slide = opened.enter_context(open_slide(self.config, entry))
            result = dataclasses.replace(result, height=slide.height, width=slide.width, mpp=slide.mpp)
            self._events.emit(entry.begun(slide))
            seen = self.look.of(slide)
            shape = self._output_shape(seen)
            if shape is None:
                if self.config.only_tissue is not None:
                    raise ConfigError(_ONLY_IMAGES)
                return self._scored(entry, output_of(self.engine, seen), result)
            if shape[-2:] != slide.shape[1:]:
                raise ModelError(
                    f"the model's output is {shape[-2]} x {shape[-1]} px, the slide {slide.height} x {slide.width} px; "
                    "a mask needs a model whose output covers the slide pixel for pixel"
                )
            channels = Channels.of(shape[1], self.loss)
            named = channels.classes(self.table, typed=bool(self.config.classes))
            self._check_threshold(channels.planes == channels.count)
            truth = None
            if entry.masks:
                truth = opened.enter_context(open_mask(entry.masks, slide, self.table, labels=channels.planes))
            paths = {OUTPUTS[output]: self.out / file for output, file in missing.items()}
            for path in paths.values():
                path.parent.mkdir(exist_ok=True)
            streamed = [(kind.sink, path) for kind, path in paths.items() if kind.sink is not None]
            if streamed and self.config.format == "ome-zarr" and slide.georeference is not None:
                told = f"{entry.name} is somewhere on earth, and OME-Zarr cannot say where; another --format can"
                self._events.emit(Notice(told, warning=True))
            if streamed:
                within = self._tissue(entry, slide)
                streaming = Streaming(seen, channels, named, self.config.threshold, within is not None)
                sinks = Several([sink(path, streaming) for sink, path in streamed])
                self._forward(seen, sinks, within)
                if nans := sum(streaming.nans):
                    told = f"the model gave NaN for {nans} pixels of {entry.name}, which became background"
                    self._events.emit(Notice(f"{told}; see whether it was trained in another precision", warning=True))
            mask = opened.enter_context(open_image(self.out / result.files["mask"]))
            classes = [kind for kind in named if kind.id]
            traced = trace(mask, classes)
            chances = None
            if "probabilities" in result.files:
                chances = opened.enter_context(open_image(self.out / result.files["probabilities"]))
            if chances is not None or "instances" in missing:
                traced = measured(traced, mask, named, chances)
            predicted = Predicted(slide, mask, traced, classes, truth, self.ids)
            for kind, path in paths.items():
                if kind.write is not None:
                    kind.write(path, predicted)
            ignored = channels.ignored(self.table, truth)
            scored = None if truth is None else score_masks(mask, truth, counts_of(channels, ignored))
            return dataclasses.replace(
                result,
                classes=len(classes) + 1,
                ignored=ignored,
                regions=len(predicted.traced.regions),
                traced_downsample=predicted.traced.downsample,
                truth="" if truth is None else _digest(entry.masks),
                dice=None if scored is None else scored.dice,
                iou=None if scored is None else scored.iou,
            )

    def _tissue(self, entry: Row, slide: Image) -> NDArray[np.bool_] | None:
        """Find where there is tissue, in cells; None where all of a slide is to be computed."""
        if self.config.only_tissue is None:
            return None
        tissue: Path | str = AUTO
        if str(self.config.only_tissue) != AUTO:
            masks = self._tissue_masks(entry)
            if len(masks) != 1:
                raise ConfigError(
                    f"{self.config.only_tissue} has {len(masks)} masks of tissue called {entry.name}.SUFFIX; expected "
                    "one for each slide"
                )
            tissue = masks[0]
        cells, cell_px = find_tissue(slide, min(slide.levels[0].shape), tissue)
        return _spread(cells > 0, cell_px, slide.levels[0].shape)

    def _tissue_masks(self, entry: Row) -> list[Path]:
        """List the masks of tissue that are given of a slide."""
        if self.config.only_tissue is None or str(self.config.only_tissue) == AUTO:
            return []
        folder = Path(self.config.only_tissue)
        return sorted(path for path in folder.glob("*") if plain_stem(path.stem) == entry.name)

    def _score_bag(self, bags: Bags, entry: Row, result: SlideResult) -> SlideResult:
        """Score all patches of a slide or a case, and write their attention."""
        with bags.open(entry) as bag:
            self._events.emit(entry.begun())
            check_intensities(self.model, bag)
            if self._attending is None or "attention" not in result.files:
                found = self._scored(entry, output_of(self.engine, bag), result)
            else:
                output, attention = self._attending.forward(bag)
                found = self._scored(entry, checked_output(output, bag), result)
                columns = found.scores.items()
                said = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in columns)
                write_attention(self.out / result.files["attention"], entry, bag, attention, f"attention ({said})")
            return dataclasses.replace(found, files=result.files, patches=len(bag), mpp=bag.mpp)

    def _check_threshold(self, is_used: bool) -> None:
        """Tell once where a threshold was given and nothing is compared with it."""
        if not is_used and not self._threshold_told:
            self._threshold_told = True
            told = f"the threshold {self.config.threshold:g} changes nothing: this model's"
            text = f"{told} likeliest class is predicted, or a number; it is for models of one probability"
            self._events.emit(Notice(text, warning=True))

    def _scored(self, entry: Row, output_NC: torch.Tensor, result: SlideResult) -> SlideResult:
        """Read the output as scores of the whole slide."""
        if not self._tables_checked:  # from then on, a table that comes is of another share
            own = self.config.overwrite or any(each.scores for each in read_records(self.out).values())
            check_table(self.out, self.config.slides, own=own)
            self._tables_checked = True
        reading = Reading.of(output_NC.shape[1], self.loss, self.table)
        scores = reading.scores(output_NC)
        self._check_threshold(bool(reading.names) and len(reading.columns) == 1)
        return dataclasses.replace(
            result,
            files={},
            classes=len(reading.names),
            scores=scores,
            predicted=reading.predicted(scores, self.config.threshold),
            label=entry.label or "",
            case=entry.case or "",
        )


class ExportedPredictor(Predictor):
    """A network that `export` wrote, and the settings of a prediction. Raises `ConfigError` and `ModelError`."""

    def _load(self) -> str:
        config = self.config
        for name, setting in {"device": config.device != "cpu", "scratch": config.scratch is not None}.items():
            if setting:
                raise ConfigError(f"an exported network is computed in memory on the CPU; leave out --{name}")
        if config.patch_size is not None:
            raise ConfigError("an exported network reads whole slides; leave out --patch-size")
        network = ExportedNetwork.read(config.model_path)
        self._exported, self._attending = ExportedEngine(network, memory=config.memory), None
        self._exported.events.subscribe(self._events.emit)
        return network.spec

    def _output_shape(self, seen: Image) -> tuple[int, ...]:
        return self._exported.output_shape(seen)

    def _forward(self, seen: Image, sink: Sink, within: NDArray[np.bool_] | None) -> None:
        self._exported.forward(seen, out=sink, within=within)


def _spread(cells: NDArray[np.bool_], cell_px: tuple[float, float], shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Return cells of `(height, width)` px as a mask of all of an image of this shape, in which a pixel is looked up by
    its share of a side: where the last cells reach beyond the image, that is the pixel's own cell or the next one.
    """
    wanted = cells
    if cells.shape[0] * cell_px[0] > shape[0]:
        wanted = wanted | np.pad(wanted, ((1, 0), (0, 0)))[:-1]
    if cells.shape[1] * cell_px[1] > shape[1]:
        wanted = wanted | np.pad(wanted, ((0, 0), (1, 0)))[:, :-1]
    return wanted


def predictor_for(config: PredictConfig, events: Events) -> Predictor:
    """Make the predictor of what `run` names. Raises as it does."""
    kind = ExportedPredictor if config.model_path.suffix == Path(ONNX).suffix else Predictor
    return kind(config, events)


_ONLY_IMAGES: Final = (
    "only_tissue is of models that give masks of whole slides; leave it out (bags of patches take --tissue)"
)
_ONE_AT_A_TIME: Final = threading.Lock()
"""In a worker: `memory` is that of its whole process."""


class Executor(Protocol):
    """Runs calls elsewhere: `concurrent.futures`' executors, Dask's `Client`, or anything that submits as they do."""

    def submit(self, fn: Any, /, *args: Any) -> Any:
        """Run a call elsewhere, and return what will have its `result()`."""


def predict(
    config: PredictConfig | Mapping[str, Any] | str | Path,
    listeners: Iterable[Listener] = (),
    executor: Executor | None = None,
    **settings: Any,
) -> tuple[SlideResult, ...]:
    """Predict every slide of `config`, or of its share; one result per slide, in order, the failed ones included.

    `predict("runs/a", slides=["x.svs"], out="predictions")` names the run and the other `settings` of a
    `PredictConfig`; of a `config` they take the place of its own.

    With an `executor` each slide is a task of it; its workers need the same paths. A worker predicts one slide at a
    time, with one engine for all of them; `memory` is that of each worker's process.

    Emits a `predict` job counted in slides, a `Notice` for each slide that fails and, where there is no executor, the
    engine's own events.

    Raises `ConfigError`, `ModelError` or `WriteError` for what concerns all slides; nothing has been predicted then.
    """
    if isinstance(config, PredictConfig):
        config = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    config = PredictConfig.from_dict({**({"run": config} if isinstance(config, str | Path) else config), **settings})
    if executor is not None:  # workers may run in another folder
        config = config.relative_to(Path.cwd())
    share, out, events = Share.parse(config.share), Path(config.out), Events(tuple(listeners))
    cohort = find_slides(config.slides, config.split, config.run_fold)
    cohort = cohort if config.resolved_patches is None else joined(cohort)
    slides = rows_of(share, cohort)
    predictor = predictor_for(config, events)
    records = read_records(out, [entry.name for entry in slides])
    for entry in () if config.overwrite else slides:
        predictor.check(entry, records.get(entry.name))
    before = {entry: predictor.finished(entry, records.get(entry.name)) for entry in slides}
    made = _each([entry for entry in slides if before[entry] is None], predictor, executor)

    def work(entry: Row) -> tuple[SlideResult, str]:
        known = before[entry]
        result = known or next(made)
        if result.failed:
            events.emit(Notice(f"{result.name}: {result.error}", warning=True))
        return result, "done before" if known else _in_words(result)

    done = {entry for entry, known in before.items() if known}
    with WorkFile(out) as at_work, events.listening(at_work):
        results = run_job("predict", slides, share, out, events, work, done, subject=predictor.made_with.model)

    def merged() -> dict[Path, str]:
        """Make the files of all records: the cohort's in its order, then those of earlier runs by name."""
        records = read_records(out)
        names = dict.fromkeys([*(entry.name for entry in cohort), *sorted(records)])
        found = [records[name] for name in names if name in records]
        tables = score_tables(found, predictor.table, config.threshold)
        return {out / name: text for name, text in {**tables, FILE_NAME: summary(found)}.items()}

    write_agreed(merged)
    return tuple(results)


def _each(slides: Sequence[Row], predictor: Predictor, executor: Executor | None) -> Iterator[SlideResult]:
    """Predict slides one after the other; with an executor all are submitted when the first is asked for."""
    if executor is None:
        yield from map(predictor.attempt, slides)
        return
    # Of the sources a task needs those that its tables must not replace, not the paths of ten thousand slides.
    config = predictor.config
    sources = tuple(source for source in config.slides if is_table(Path(source))) or config.slides[:1]
    config = dataclasses.replace(config, slides=sources)
    futures = [executor.submit(_predict_there, config, predictor.made_with, entry) for entry in slides]
    yield from (future.result() for future in futures)


def _predict_there(config: PredictConfig, made_with: MadeWith, entry: Row) -> SlideResult:
    """Predict one slide, in a worker."""
    with _ONE_AT_A_TIME:
        return _predictor_there(config, made_with).attempt(entry)


@lru_cache(maxsize=1)
def _predictor_there(config: PredictConfig, made_with: MadeWith) -> Predictor:
    """Make the predictor of a worker; of a model that has been trained anew meanwhile, `made_with` is another."""
    return predictor_for(config, Events())


def bags_for(config: PredictConfig, model: str) -> Bags | None:
    """Return what opens bags of slides for a model, None where it reads them whole. Raises `ConfigError`."""
    patches = config.resolved_patches
    if patches is None:
        if is_bag_name(model):
            raise ConfigError(f"{model} takes patches, and {config.run} does not say which; give --patch-size, as 224")
        return None
    if config.level or config.target_mpp is not None:
        raise ConfigError("patches are read at --patch-mpp; leave out --level and --target-mpp")
    return Bags(patches, config.resolved_input_view, config.mpp)


def is_of_others(record: SlideResult, entry: Row) -> bool:
    """Return whether a prediction was made of other files than a slide's are now; those that are gone are none."""
    return record.content not in (None, now := _digest(entry.slides)) and bool(now)


def _digest(files: Iterable[Path], *values: object) -> str:
    """Digest the contents of files, and values, which are given; "" where nothing is."""
    contents = [content_digest(path, whole=is_annotation_file(path)) for path in files if path.exists()]
    if not contents and not any(values):
        return ""
    return hashlib.sha256(repr((contents, values)).encode()).hexdigest()


def _size_of(entry: Row) -> int:
    return sum(size_of(part.slide) for part in entry.members)


def _in_words(result: SlideResult) -> str:
    if result.failed:
        return "failed"
    patches = f", {result.patches} patches" if result.patches else ""
    said = f", {result.predicted}" if result.predicted else ""
    dice = "" if result.dice is None else f", Dice {result.dice:.4f}"
    return f"{format_seconds(result.seconds)}{patches}{said}{dice}"
