"""Predict what is in view: a network's output over a slide as layers whose tiles are computed when they are asked for.

They hold the bytes that `predict` would write of the whole slide: `Engine.at` computes the same tiles. Where its plan
computes for long before the first of them, as those of deep networks do, another plan shows them at once, and may round
in the last digits otherwise; the page says so. The page predicts as far out as a screen stays within a second: by the
plan's seconds of a tile, and by what the last tiles took here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from math import log2, prod
from pathlib import Path
from time import perf_counter
from typing import Any, Final, TypeVar

import numpy as np
import torch

from gigagrad.at_work import Work
from gigagrad.boxes import Box
from gigagrad.cohorts import Row
from gigagrad.config.predict import PredictConfig
from gigagrad.errors import ConfigError, ModelError
from gigagrad.events import Events, SlideBegun
from gigagrad.execution import Engine
from gigagrad.execution.predictions import PredictedImage
from gigagrad.images import Image, InputView
from gigagrad.images.image import View
from gigagrad.images.pixels import Array
from gigagrad.masks import IGNORED, ClassTable
from gigagrad.models.networks import check_intensities
from gigagrad.prediction.classes import Channels
from gigagrad.prediction.outputs import probability_bytes
from gigagrad.prediction.predict import Predictor
from gigagrad.view.layers import LEFT, Layer
from gigagrad.view.pyramids import TILE, ImagePyramid

Result = TypeVar("Result")

_MOST_TILE_SECONDS: Final = 10.0
"""The most that a tile of the page's coarsest level takes, by the cost model."""
_FORGOTTEN: Final = 0.1
"""The part of what earlier reads took that each read forgets."""

_MOST_BEFORE_SECONDS: Final = 10.0
"""The most that a plan may compute before the first tile is there, by the cost model: whatever else runs here now."""


class Live:
    """A network that predicts what somebody looks at, in a thread of its own: those that read slides are many, and
    belong to a pool. Raises `ConfigError` and `ModelError` as `predict` does.
    """

    def __init__(
        self,
        model: str | Path | Engine,
        *,
        memory: str | None = None,
        device: str | None = None,
        classes: Sequence[str] = (),
        trust: Sequence[str] = (),
        name: str = "",
    ) -> None:
        """Load a network, or take an engine's. `name` is what it is called where several networks predict; the rest is
        as for `predict`, and no engine takes it."""
        self.name = name
        self.work = Work()
        """The slide and the tiles that it computes now."""
        self._typed = bool(classes)
        self._took = self._foretold = 1.0
        if isinstance(model, Engine):
            if memory is not None or device is not None or trust:
                raise ConfigError("an engine has its memory, device and model already; leave memory, device, trust out")
            self._engine, self._look, self._loss = model, InputView(), ""
            self._table = ClassTable.parse(classes) if classes else None
            self._level, self._threshold = 0, PredictConfig.threshold
        else:
            config = PredictConfig(
                run=model,
                slides=("in view",),
                out=Path(),
                memory=memory,
                device=device or PredictConfig.device,
                classes=tuple(classes),
                trust=tuple(trust),
            )
            predictor = Predictor(config, Events())
            if predictor.bags is not None:
                raise ConfigError(f"{model} reads patches and scores slides; a page can show what predicts an image")
            self._engine, self._look, self._loss = predictor.engine, predictor.look, predictor.loss
            self._table = predictor.table
            self._level, self._threshold = config.resolved_level, config.threshold
        self._thread = ThreadPoolExecutor(1, "gigagrad-network")

    @property
    def pace(self) -> float:
        """Seconds that the last tiles took for each that the cost model foretold."""
        return self._took / self._foretold

    def measured(self, took: float, foretold: float) -> None:
        """Learn from seconds that tiles took, of which so many were foretold."""
        self._took = (1 - _FORGOTTEN) * self._took + took
        self._foretold = (1 - _FORGOTTEN) * self._foretold + foretold

    @contextmanager
    def working_on(self, slide: SlideBegun) -> Iterator[None]:
        """Say in the block what the engine computes of a slide."""
        with self.work.on(slide), self._engine.events.listening(self.work):
            yield

    def call(self, work: Callable[[], Result]) -> Result:
        """Do work in the network's thread."""
        return self._thread.submit(work).result()

    def layers(self, slide: Image, row: Row, held: ExitStack) -> tuple[tuple[Layer, ...], Callable[[], dict[str, Any]]]:
        """Make the layers of an open slide, and what says where the tiles of the plan lie, in pixels of level 0, and
        how many seconds one takes; what they hold is closed with `held`. Raises as `predict` of the slide.
        """
        engine = self._engine
        own = held.enter_context(slide.at_level(self._level)) if self._level else slide
        seen = self._look.of(own)
        check_intensities(engine.model, seen)
        logits, exact = self.call(lambda: self._prediction(seen))
        held.callback(self.call, logits.close)
        plan = logits.plan
        if logits.shape[1:] != own.shape[1:]:
            raise ModelError(
                f"the model's output over {slide.name} is no image of its size; a page shows what predicts pixels"
            )
        channels = Channels.of(logits.channels, self._loss)
        named = channels.classes(self._table, typed=self._typed)
        last = next(reversed(plan.segments), None)
        seconds = 0.0 if last is None else last.forward_seconds / last.tile_count
        computed = _Computed(logits, self, row.begun(own), seconds)
        # What comes before the first tile, while nobody waits for it.
        self._thread.submit(computed.read_here, Box.whole(1, 1), measured=False)
        classes = tuple(kind for kind in named if kind.id)
        finest = 0.0 if last is None else last.forward_seconds * TILE**2 / prod(own.shape[1:])
        coarsest = int(max(0, log2(_MOST_TILE_SECONDS / finest) // 2)) if finest else None
        most = IGNORED - 1 if seen.missing_bytes else IGNORED  # as in files, whose largest byte is no data then
        make_ids, make_shares = (
            partial(_ids, channels, self._threshold),
            partial(probability_bytes, channels, most=most),
        )
        ids = ImagePyramid(_Made(computed, 1, make_ids, seen, IGNORED), ids=True, coarsest=coarsest)
        shares = ImagePyramid(_Made(computed, logits.channels, make_shares, seen, 0), coarsest=coarsest)
        layers = (
            Layer("Prediction now", "classes", ids, classes, live=True, of=self.name),
            Layer("Probabilities now", "probabilities", shares, named, live=True, of=self.name),
        )
        segments = [
            {"tile": each.tile, "shape": each.shape, "crop": each.crop, "read_shape": each.read_shape}
            for each in plan.segments
        ]
        told = {"of": self.name, "shape": own.shape[1:], "segments": segments, "exact": exact}
        return layers, lambda: {**told, "seconds": seconds * self.pace}

    def _prediction(self, seen: Image) -> tuple[PredictedImage, bool]:
        """Open the prediction of an image, and say whether its bits are those of a whole one."""
        logits = self._engine.at(seen)
        if sum(segment.forward_seconds for segment in logits.plan.segments[:-1]) <= _MOST_BEFORE_SECONDS:
            return logits, True
        logits.close()
        return self._engine.at(seen, at_once=True), False


class _Computed(View):
    """The output of the network, read in its thread; `seconds` are those of a tile by the cost model."""

    def __init__(self, logits: PredictedImage, live: Live, slide: SlideBegun, seconds: float) -> None:
        super().__init__(logits)
        self._logits, self._live, self._slide, self._seconds = logits, live, slide, seconds

    def _read_inside(self, box: Box) -> Array:
        """Read, unless whoever asked has left before it begins: then it raises `CancelledError`."""
        left = LEFT.get()

        def wanted() -> Array:
            if left is not None and left.is_set():
                raise CancelledError
            return self.read_here(box)

        return self._live.call(wanted)

    def read_here(self, box: Box, *, measured: bool = True) -> Array:
        """Read in the network's thread, and say so meanwhile; learn from what it took if `measured`."""
        before, start = self._logits.computed, perf_counter()
        with self._live.working_on(self._slide):
            pixels = np.asarray(self._logits.read(box))
        if measured and (tiles := self._logits.computed - before):
            self._live.measured(perf_counter() - start, tiles * self._seconds)
        return pixels


class _Made(View):
    """Bytes that are made of the network's output `(1, C, h, w)`, in so many channels; `gap` where what it has `seen`
    holds no data."""

    def __init__(
        self, logits: Image, channels: int, make: Callable[[torch.Tensor], Array], seen: Image, gap: int
    ) -> None:
        super().__init__(logits, (channels, *logits.shape[1:]), dtype=np.dtype(np.uint8))
        self._make, self._seen, self._gap = make, seen, gap

    def _read_inside(self, box: Box) -> Array:
        pixels = self._make(torch.from_numpy(np.asarray(self._image.read(box)))[None])
        if (missing := self._seen.missing(box)) is not None:
            pixels[:, missing] = self._gap
        return pixels


def _ids(channels: Channels, threshold: float, logits: torch.Tensor) -> Array:
    """Return class ids; where labels may overlap, those of the last one that is there."""
    mask = channels.mask(logits, threshold)
    if channels.labels:
        numbers = np.arange(1, len(mask) + 1, dtype=np.uint8)[:, None, None]
        mask = (mask * numbers).max(axis=0, keepdims=True)
    return mask
