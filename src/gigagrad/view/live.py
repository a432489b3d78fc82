"""Predict what is in view: a network's output over a slide as layers whose tiles are computed when they are asked for.

They hold the bytes that `predict` would write of the whole slide: `Engine.at` computes the same tiles. Where its plan
computes for long before the first of them, as those of deep networks do, another plan shows them at once, and may round
in the last digits otherwise; the page says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch

from gigagrad.at_work import Work
from gigagrad.boxes import Box
from gigagrad.cohorts import Row
from gigagrad.config.predict import PredictConfig
from gigagrad.errors import ConfigError, ModelError
from gigagrad.events import Events, SlideBegun
from gigagrad.images import Image
from gigagrad.images.image import View
from gigagrad.images.pixels import Array
from gigagrad.models.networks import check_intensities
from gigagrad.prediction.classes import Channels, image_shape
from gigagrad.prediction.outputs import probability_bytes
from gigagrad.prediction.predict import Predictor
from gigagrad.view.layers import Layer
from gigagrad.view.plans import on_slide
from gigagrad.view.pyramids import ImagePyramid

Result = TypeVar("Result")

_COARSEST: Final = 2
"""Halvings up to which what is in view is predicted: 16 pixels for each one of the screen."""

_MOST_BEFORE_SECONDS: Final = 10.0
"""The most that a plan may compute before the first tile is there, by the cost model: whatever else runs here now."""


class Live:
    """A network that predicts what somebody looks at, in a thread of its own: those that read slides are many, and
    belong to a pool. Raises `ConfigError` and `ModelError` as `predict` does.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        memory: str | None = None,
        device: str = "cpu",
        classes: Sequence[str] = (),
        trust: Sequence[str] = (),
        name: str = "",
    ) -> None:
        """`name` is what it is called where several networks predict; the rest is as for `predict`."""
        config = PredictConfig(
            run=model,
            slides=("in view",),
            out=Path(),
            memory=memory,
            device=device,
            classes=tuple(classes),
            trust=tuple(trust),
        )
        self.name = name
        self.work = Work()
        """The slide and the tiles that it computes now."""
        self._config, self._predictor = config, Predictor(config, Events((self.work,)))
        if self._predictor.bags is not None:
            raise ConfigError(f"{model} reads patches and scores slides; a page can show what predicts an image only")
        self._thread = ThreadPoolExecutor(1, "gigagrad-network")

    def call(self, work: Callable[[], Result]) -> Result:
        """Do work in the network's thread."""
        return self._thread.submit(work).result()

    def layers(self, slide: Image, row: Row, held: ExitStack) -> tuple[tuple[Layer, ...], dict[str, Any]]:
        """Make the layers of an open slide, and say where the tiles of the plan lie, in pixels of level 0; what they
        hold is closed with `held`. Raises as `predict` of the slide.
        """
        predictor = self._predictor
        level = self._config.resolved_level
        own = held.enter_context(slide.at_level(level)) if level else slide
        seen = predictor.look.of(own)
        check_intensities(predictor.model, seen)
        shape = self.call(lambda: image_shape(predictor.engine, seen))
        if shape is None or shape[-2:] != own.shape[1:]:
            raise ModelError(
                f"the model's output over {slide.name} is no image of its size; a page shows what predicts pixels"
            )
        channels = Channels.of(shape[1], predictor.loss)
        named = channels.classes(predictor.table, typed=bool(self._config.classes))
        whole = self.call(lambda: predictor.engine.plan(seen))
        seconds = sum(segment.forward_seconds for segment in whole.segments[:-1])
        logits = self.call(lambda: predictor.engine.at(seen, at_once=seconds > _MOST_BEFORE_SECONDS))
        plan = logits.plan
        held.callback(self.call, logits.close)
        computed = _Computed(logits, self, row.begun(own))
        # What comes before the first tile, while nobody waits for it.
        self._thread.submit(computed.read_here, Box.whole(1, 1))
        classes = tuple(kind for kind in named if kind.id)
        ids = ImagePyramid(_Ids(computed, channels, self._config.threshold), ids=True, coarsest=_COARSEST)
        shares = ImagePyramid(_Probabilities(computed, channels), coarsest=_COARSEST)
        layers = (
            Layer("Prediction now", "classes", ids, classes, live=True, of=self.name),
            Layer("Probabilities now", "probabilities", shares, named, live=True, of=self.name),
        )
        full, exact = slide.levels[0].shape, seconds <= _MOST_BEFORE_SECONDS
        segments = [on_slide(each.tile, each.shape, each.crop, each.read_shape, full) for each in plan.segments]
        return layers, {"of": self.name, "shape": own.shape[1:], "segments": segments, "exact": exact}


class _Computed(View):
    """The output of the network, read in its thread."""

    def __init__(self, logits: Image, live: Live, slide: SlideBegun) -> None:
        super().__init__(logits)
        self._live, self._slide = live, slide

    def _read_inside(self, box: Box) -> Array:
        return self._live.call(lambda: self.read_here(box))

    def read_here(self, box: Box) -> Array:
        """Read in the network's thread, and say so meanwhile."""
        with self._live.work.on(self._slide):
            return np.asarray(self._image.read(box))


class _Probabilities(View):
    """Probabilities in bytes, 255 is 1, a channel each."""

    def __init__(self, logits: Image, channels: Channels) -> None:
        super().__init__(logits, dtype=np.dtype(np.uint8))
        self._channels = channels

    def _read_inside(self, box: Box) -> Array:
        return probability_bytes(self._channels, torch.from_numpy(np.asarray(self._image.read(box)))[None])


class _Ids(View):
    """Class ids; where labels may overlap, those of the last one that is there."""

    def __init__(self, logits: Image, channels: Channels, threshold: float) -> None:
        super().__init__(logits, (1, *logits.shape[1:]), dtype=np.dtype(np.uint8))
        self._channels, self._threshold = channels, threshold

    def _read_inside(self, box: Box) -> Array:
        mask = self._channels.mask(torch.from_numpy(np.asarray(self._image.read(box)))[None], self._threshold)
        if self._channels.labels:
            numbers = np.arange(1, len(mask) + 1, dtype=np.uint8)[:, None, None]
            mask = (mask * numbers).max(axis=0, keepdims=True)
        return mask
