"""Predict whole slides: a mask as pyramidal TIFF, its regions as GeoJSON and a picture of both, slide by slide; or, of
a model whose output is no image, scores of every slide in one table (`slide_scores`).

Tiles leave the engine row by row and go straight into the file, so the mask exists only as strips and there are no
seams. A run can be stopped and started again: slides whose files are all there are left alone. A slide that fails
does not stop the others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from gigagrad.cohorts import Row, find_slides
from gigagrad.errors import ConfigError, GigagradError, ModelError, WriteError
from gigagrad.events import Events, Listener, Notice
from gigagrad.execution.engine import compile as compile_engine
from gigagrad.execution.sinks import OutputField, Pieces, Pyramid
from gigagrad.images import Image, open_image
from gigagrad.images.resolution import level_near
from gigagrad.masks import ClassTable, open_mask
from gigagrad.models import load_model
from gigagrad.models.preprocess import check_intensities
from gigagrad.prediction.classes import MaskClass, class_ids, foreground_count, ignored_value, mask_classes
from gigagrad.prediction.config import PredictConfig
from gigagrad.prediction.evaluate import score_masks
from gigagrad.prediction.overlay import draw_overlay, layers, write_overlay
from gigagrad.prediction.polygons import trace, write_geojson
from gigagrad.prediction.records import MadeWith, SlideResult, file_names, read_records, write_records
from gigagrad.prediction.slide_scores import Reading, check_table, gives_image, output_of, write_table
from gigagrad.units import format_seconds


def predict(config: PredictConfig | Mapping[str, Any], listeners: Iterable[Listener] = ()) -> tuple[SlideResult, ...]:
    """Predict every slide of `config`; one result per slide, in order, the failed ones included.

    Emits a `predict` job counted in slides, the engine's own events, and a `Notice` for each slide that fails.

    Raises `ConfigError`, `ModelError` or `WriteError` for what concerns all slides; nothing has been predicted then.
    """
    config = config if isinstance(config, PredictConfig) else PredictConfig.from_dict(config)
    run = _Run(config, Events(tuple(listeners)))
    results: list[SlideResult] = []
    with run.events.job("predict", len(run.slides), run.made_with.model) as advance:
        for done, entry in enumerate(run.slides, 1):
            known = None if config.overwrite else run.finished(entry)
            results.append(known or run.attempt(entry))
            advance(done, f"{entry.name}: done before" if known else _summary(results[-1]))
    run.write_table()
    return tuple(results)


class _Run:
    """What is the same for all slides, and the record of those that are done."""

    def __init__(self, config: PredictConfig, events: Events) -> None:
        self.config, self.events, self.out = config, events, Path(config.out)
        self.slides = find_slides(config.slides, config.split)
        spec, self.model = load_model(config.model_path, config.trust)
        # One for all slides: those of one size are captured and planned once.
        self.engine = compile_engine(self.model, memory=config.memory, scratch=config.scratch, device=config.device)
        self.engine.events.subscribe(events.emit)
        with config.model_path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        level = config.resolved_level if config.target_mpp is None else None
        self.table, self.loss = config.resolved_table, config.run_loss
        classes = self.table.entries if self.table is not None else ()
        self.look = config.resolved_look
        self.made_with = MadeWith(
            spec, digest, config.threshold, classes, level, config.target_mpp, self.look.grey, self.look.bands
        )
        self.records = read_records(self.out)
        for entry in () if config.overwrite else self.slides:
            self._check_own(entry)
        self.own_table = config.overwrite or any(result.scores for result in self.records.values())
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError(f"cannot make folders in {self.out}: {error.strerror}; choose another --out") from error

    def _check_own(self, entry: Row) -> None:
        """Refuse what is there of this slide's name and belongs to somebody else or to other settings."""
        known = self.records.get(entry.name)
        if known is not None and known.status == "done" and known.made_with != self.made_with:
            raise ConfigError(
                f"{self.out} holds a prediction of {entry.name} by another model, threshold, level, colours or "
                "class names; choose another --out or pass --overwrite"
            )
        if known is not None and known.slide != str(entry.slide.absolute()):
            raise ConfigError(
                f"{self.out} holds a prediction of another slide of this name, {known.slide}; "
                "choose another --out or pass --overwrite"
            )
        mask = self.out / file_names(entry.name)["mask"]
        if known is None and mask.exists():
            raise WriteError(f"{mask} exists but was not predicted here; choose another --out or pass --overwrite")

    def finished(self, entry: Row) -> SlideResult | None:
        """What an earlier run made of the slide, None where its files are not all there or the slide has changed."""
        known = self.records.get(entry.name)
        same = known is not None and known.complete_in(self.out) and known.slide_bytes == _bytes_of(entry.slide)
        if known is None or not same:
            return None
        if known.scores and entry.label is not None and known.label != entry.label:
            known = dataclasses.replace(known, label=entry.label)
            self._record(known)
        return known

    def attempt(self, entry: Row) -> SlideResult:
        """Predict one slide and keep the record up to date, whatever happens."""
        slide, size = str(entry.slide.absolute()), _bytes_of(entry.slide)
        result = SlideResult(name=entry.name, slide=slide, slide_bytes=size, made_with=self.made_with, status="running")
        self._record(result)
        start = time.perf_counter()
        try:
            result = self._predict(entry, result)
            result = dataclasses.replace(result, status="done", seconds=time.perf_counter() - start)
        except (GigagradError, OSError) as error:
            result = dataclasses.replace(result, status="failed", error=str(error))
            self.events.emit(Notice(f"{entry.name}: {error}", warning=True))
        self._record(result)
        return result

    def _record(self, result: SlideResult) -> None:
        self.records[result.name] = result
        write_records(self.out, self.records)
        if result.scores:
            self.write_table()

    def write_table(self) -> None:
        """`slides.csv` anew from the record, where that has scores."""
        if any(result.scores for result in self.records.values()):
            write_table(self.out, self.records.values(), self.table, self.config.threshold)
            self.own_table = True

    def _predict(self, entry: Row, result: SlideResult) -> SlideResult:
        config, files = self.config, file_names(entry.name)
        with ExitStack() as opened:
            level = self._level_of(entry)
            slide = opened.enter_context(open_image(entry.slide, level=level, mpp=config.mpp or entry.mpp))
            seen = self.look.of(slide)
            check_intensities(self.model, seen)
            if not gives_image(self.engine, seen):
                return self._score(entry, seen, result)
            truth = None if entry.mask is None else opened.enter_context(open_mask(entry.mask, slide, self.table))
            for written in files.values():
                (self.out / written).parent.mkdir(exist_ok=True)
            written_mask = _MaskFile(self.out / files["mask"], slide, config, self.table)
            self.engine.forward(seen, out=written_mask)
            classes = written_mask.classes
            mask = opened.enter_context(open_image(self.out / files["mask"]))
            traced = trace(mask, classes)
            full = slide.levels[0].shape
            scale = (full[0] / slide.shape[1], full[1] / slide.shape[2])
            write_geojson(self.out / files["geojson"], traced, entry.name, scale)
            write_overlay(self.out / files["overlay"], draw_overlay(slide, layers(mask, classes, truth)))
            ignored = written_mask.ignored
            scored = None if truth is None else score_masks(mask, truth, len(classes) + 1, ignored=ignored)
            return dataclasses.replace(
                result,
                mask=files["mask"],
                geojson=files["geojson"],
                overlay=files["overlay"],
                height=slide.shape[1],
                width=slide.shape[2],
                mpp=slide.mpp,
                classes=len(classes) + 1,
                ignored=ignored,
                regions=len(traced.regions),
                traced_downsample=traced.downsample,
                dice=None if scored is None else scored.dice,
                iou=None if scored is None else scored.iou,
            )

    def _level_of(self, entry: Row) -> int:
        """Raises `ImageError` where the slide's resolution decides and is unknown."""
        if self.config.target_mpp is None:
            return self.config.resolved_level
        with open_image(entry.slide, mpp=self.config.mpp or entry.mpp) as slide:
            return level_near(slide, self.config.target_mpp)

    def _score(self, entry: Row, slide: Image, result: SlideResult) -> SlideResult:
        """Scores of the whole slide."""
        check_table(self.out, self.config.slides, own=self.own_table)
        output_NC = output_of(self.engine, slide)
        reading = Reading.of(output_NC.shape[1], self.loss, self.table)
        scores = reading.scores(output_NC)
        return dataclasses.replace(
            result,
            height=slide.shape[1],
            width=slide.shape[2],
            mpp=slide.mpp,
            classes=len(reading.names),
            scores=scores,
            predicted=reading.predicted(scores, self.config.threshold),
            label=entry.label or "",
            bag=entry.bag or "",
        )


class _MaskFile(Pyramid):
    """The mask of one slide; its foreground classes are known once it is written."""

    def __init__(self, path: Path, slide: Image, config: PredictConfig, table: ClassTable | None) -> None:
        super().__init__(
            path,
            dtype=np.uint8,
            channels=1,
            pixels=lambda logits: class_ids(logits, config.threshold),
            nearest=True,
            overwrite=True,
            description="gigagrad mask: class ids, 0 is background",
        )
        self._table = table
        self.ignored: int | None = None
        self._names, self._size = table.foreground if table is not None else (), slide.shape[1:]
        self._typed = bool(config.classes)
        self.classes: tuple[MaskClass, ...] = ()

    def take(self, pieces: Pieces, field: OutputField) -> Path:
        if field.shape[-2:] != self._size:
            raise ModelError(
                f"the model's output is {field.shape[-2]} x {field.shape[-1]} px, the slide {self._size[0]} x "
                f"{self._size[1]} px; a mask needs a model whose output covers the slide pixel for pixel"
            )
        count = foreground_count(field.shape[1])
        self.ignored = ignored_value(field.shape[1], self._table)
        # A network may tell more classes apart than it was shown; names that were typed are to fit.
        further = () if self._typed else tuple(f"Class {number}" for number in range(len(self._names) + 1, count + 1))
        # Refuses wrong names before the first tile is written.
        self.classes = mask_classes(count, (*self._names, *further) if self._names else ())
        return super().take(pieces, field)


def _bytes_of(slide: Path) -> int:
    try:
        return slide.stat().st_size
    except OSError:
        return 0


def _summary(result: SlideResult) -> str:
    if result.failed:
        return f"{result.name}: failed"
    said = f", {result.predicted}" if result.predicted else ""
    dice = "" if result.dice is None else f", Dice {result.dice:.4f}"
    return f"{result.name}: {format_seconds(result.seconds)}{said}{dice}"
