"""Predict whole slides: a mask as pyramidal TIFF, its regions as GeoJSON and a picture of both, slide by slide.

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
from torch import nn

from gigagrad.cohorts import Row, find_slides
from gigagrad.errors import ConfigError, GigagradError, ModelError, WriteError
from gigagrad.events import Events, Listener, Notice
from gigagrad.execution.engine import compile as compile_engine
from gigagrad.execution.sinks import OutputField, Pieces, Pyramid
from gigagrad.images import Image, open_image
from gigagrad.images.resolution import level_near
from gigagrad.models import load_model
from gigagrad.prediction.classes import class_ids, foreground_count, mask_classes
from gigagrad.prediction.config import PredictConfig
from gigagrad.prediction.evaluate import check_size, score_masks
from gigagrad.prediction.overlay import draw_overlay, layers, write_overlay
from gigagrad.prediction.polygons import trace, write_geojson
from gigagrad.prediction.records import MadeWith, SlideResult, file_names, read_records, write_records
from gigagrad.units import format_seconds


def predict(config: PredictConfig | Mapping[str, Any], listeners: Iterable[Listener] = ()) -> tuple[SlideResult, ...]:
    """Predict every slide of `config`; one result per slide, in order, the failed ones included.

    Emits a `predict` job counted in slides, the engine's own events, and a `Notice` for each slide that fails.

    Raises `ConfigError`, `ModelError` or `WriteError` for what concerns all slides; nothing has been predicted then.
    """
    config = config if isinstance(config, PredictConfig) else PredictConfig.from_dict(config)
    slides = find_slides(config.slides, config.split)
    spec, model = load_model(config.model_path, config.trust)
    with config.model_path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    level = config.resolved_level if config.target_mpp is None else None
    made_with = MadeWith(spec, digest, config.threshold, config.classes, level, config.target_mpp)
    out = Path(config.out)
    records = read_records(out)
    _prepare(out, slides, records, made_with, config.overwrite)

    events = Events(tuple(listeners))
    results: list[SlideResult] = []
    with events.job("predict", len(slides), spec) as advance:
        for done, entry in enumerate(slides, 1):
            known = records.get(entry.name)
            done_before = known is not None and known.complete_in(out) and known.slide_bytes == _bytes_of(entry.slide)
            if known is not None and done_before and not config.overwrite:
                results.append(known)
                advance(done, f"{entry.name}: done before")
            else:
                results.append(_attempt(entry, model, config, made_with, records, events))
                advance(done, _summary(results[-1]))
    return tuple(results)


def _prepare(
    out: Path, slides: tuple[Row, ...], records: Mapping[str, SlideResult], made_with: MadeWith, overwrite: bool
) -> None:
    """Make the folders, after checking that nothing there belongs to somebody else or to other settings."""
    for entry in () if overwrite else slides:
        known = records.get(entry.name)
        if known is not None and known.status == "done" and known.made_with != made_with:
            raise ConfigError(
                f"{out} holds a prediction of {entry.name} by another model, threshold, level or class names; "
                "choose another --out or pass --overwrite"
            )
        if known is not None and known.slide != str(entry.slide.absolute()):
            raise ConfigError(
                f"{out} holds a prediction of another slide of this name, {known.slide}; "
                "choose another --out or pass --overwrite"
            )
        mask = out / "masks" / f"{entry.name}.tif"
        if known is None and mask.exists():
            raise WriteError(f"{mask} exists but was not predicted here; choose another --out or pass --overwrite")
    try:
        for folder in ("masks", "geojson", "overlays"):
            (out / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"cannot make folders in {out}: {error.strerror}; choose another --out") from error


def _attempt(
    entry: Row,
    model: nn.Module,
    config: PredictConfig,
    made_with: MadeWith,
    records: dict[str, SlideResult],
    events: Events,
) -> SlideResult:
    """Predict one slide and keep the record up to date, whatever happens."""
    out = Path(config.out)
    slide, size = str(entry.slide.absolute()), _bytes_of(entry.slide)
    result = SlideResult(name=entry.name, slide=slide, slide_bytes=size, made_with=made_with, status="running")
    records[entry.name] = result
    write_records(out, records)
    start = time.perf_counter()
    try:
        result = _predict_one(entry, model, config, result, events)
        result = dataclasses.replace(result, status="done", seconds=time.perf_counter() - start)
    except (GigagradError, OSError) as error:
        result = dataclasses.replace(result, status="failed", error=str(error))
        events.emit(Notice(f"{entry.name}: {error}", warning=True))
    records[entry.name] = result
    write_records(out, records)
    return result


def _predict_one(
    entry: Row, model: nn.Module, config: PredictConfig, result: SlideResult, events: Events
) -> SlideResult:
    out = Path(config.out)
    files = file_names(entry.name)
    with ExitStack() as opened:
        level = _level_of(entry, config)
        slide = opened.enter_context(open_image(entry.slide, level=level, mpp=config.mpp or entry.mpp))
        truth = None if entry.mask is None else opened.enter_context(open_image(entry.mask, level=level))
        if truth is not None and entry.mask is not None:
            check_size(truth, entry.mask, slide)
        foreground = _write_mask(slide, model, config, out / files["mask"], events)
        classes = mask_classes(foreground, config.classes)
        mask = opened.enter_context(open_image(out / files["mask"]))
        traced = trace(mask, classes)
        full = slide.levels[0].shape
        scale = (full[0] / slide.shape[1], full[1] / slide.shape[2])
        write_geojson(out / files["geojson"], traced, entry.name, scale)
        write_overlay(out / files["overlay"], draw_overlay(slide, layers(mask, classes, truth)))
        scored = None if truth is None else score_masks(mask, truth, foreground + 1)
        return dataclasses.replace(
            result,
            mask=files["mask"],
            geojson=files["geojson"],
            overlay=files["overlay"],
            height=slide.shape[1],
            width=slide.shape[2],
            mpp=slide.mpp,
            regions=len(traced.regions),
            traced_downsample=traced.downsample,
            dice=None if scored is None else scored.dice,
            iou=None if scored is None else scored.iou,
        )


def _level_of(entry: Row, config: PredictConfig) -> int:
    """Raises `ImageError` where the slide's resolution decides and is unknown."""
    if config.target_mpp is None:
        return config.resolved_level
    with open_image(entry.slide, mpp=config.mpp or entry.mpp) as slide:
        return level_near(slide, config.target_mpp)


class _MaskFile(Pyramid):
    """The mask of one slide; `foreground`, the number of foreground classes, is known once it is written."""

    def __init__(self, path: Path, slide: Image, config: PredictConfig) -> None:
        super().__init__(
            path,
            dtype=np.uint8,
            channels=1,
            pixels=lambda logits: class_ids(logits, config.threshold),
            nearest=True,
            overwrite=True,
            description="gigagrad mask: class ids, 0 is background",
        )
        self._classes, self._size = config.classes, slide.shape[1:]
        self.foreground = 0

    def take(self, pieces: Pieces, field: OutputField) -> Path:
        if field.shape[-2:] != self._size:
            raise ModelError(
                f"the model's output is {field.shape[-2]} x {field.shape[-1]} px, the slide {self._size[0]} x "
                f"{self._size[1]} px; a mask needs a model whose output covers the slide pixel for pixel"
            )
        self.foreground = foreground_count(field.shape[1])
        mask_classes(self.foreground, self._classes)  # refuses wrong names before the first tile is written
        return super().take(pieces, field)


def _write_mask(slide: Image, model: nn.Module, config: PredictConfig, path: Path, events: Events) -> int:
    """Write the mask of `slide` tile by tile and return the number of foreground classes."""
    engine = compile_engine(model, memory=config.memory, scratch=config.scratch, device=config.device)
    engine.events.subscribe(events.emit)
    mask = _MaskFile(path, slide, config)
    engine.forward(slide, out=mask)
    return mask.foreground


def _bytes_of(slide: Path) -> int:
    try:
        return slide.stat().st_size
    except OSError:
        return 0


def _summary(result: SlideResult) -> str:
    if result.failed:
        return f"{result.name}: failed"
    dice = "" if result.dice is None else f", Dice {result.dice:.4f}"
    return f"{result.name}: {format_seconds(result.seconds)}{dice}"
