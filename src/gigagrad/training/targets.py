"""Targets that the loss can take, and one clear line where it cannot.

A mask is checked twice, neither time with a pass of its own: a handful of places before training begins, so that a
cohort of the wrong kind fails at once, and every pixel as it passes by when the slide is first trained on.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gigagrad.boxes import Box, spread
from gigagrad.cohorts import survival_of
from gigagrad.errors import TargetError
from gigagrad.execution.compiling import compile as compile_engine
from gigagrad.images import Image
from gigagrad.images.image import Pixels, View
from gigagrad.losses import Loss
from gigagrad.masks import IGNORED


@dataclass(frozen=True, slots=True)
class TargetRule:
    """A rule of what targets may hold: `loss` decides, `channels` is the number of output channels of the model.

    `ignores`: pixels of value `IGNORED` are left out, of a binary mask too.
    """

    loss: Loss
    channels: int
    ignores: bool = False

    @property
    def labels(self) -> int:
        """Return how many labels a pixel may have at once: with a binary loss as many as the model has channels."""
        return self.channels if self.loss.binary else 1

    def check_channels(self, channels: int, named: bool) -> None:
        """Raise `TargetError` for a mask of so many channels; `named`: somebody named it, and no recipe made it."""
        if not named and self.labels > 1:
            raise TargetError(f"the mask is empty, and the tissue recipe makes one label of {self.labels}; name a mask")
        if channels in (1, self.labels) or not (self.loss.binary or self.loss.class_ids):
            return
        raise TargetError(
            f"the mask has {channels} channels, and the model {self.channels} output channels; the loss takes one "
            f"channel of class ids{f', or {self.labels}, one for each label' if self.labels > 1 else ''}"
        )

    def label(self, value: float, name: str) -> Tensor:
        """Read a slide's number as the loss wants it: `(1,)` int64 class id, else `(1, 1)` float32. Raises
        `TargetError`.
        """
        if not self.loss.class_ids:
            if self.loss.binary and value not in (0, 1):
                raise TargetError(f"the label of {name} is {value:g}; a binary loss takes 0 or 1")
            return torch.tensor([[value]], dtype=torch.float32)
        if value != int(value) or not 0 <= value < self.channels:
            raise TargetError(
                f"the label of {name} is {value:g}; ce takes a class from 0 to {self.channels - 1} with this model"
            )
        return torch.tensor([int(value)], dtype=torch.int64)

    def survival(self, text: str, name: str) -> Tensor:
        """Read a survival time as the loss wants it: `(1, 2)` float32, the time and whether the event came.

        Raises `TargetError`.
        """
        found = survival_of(text)
        if found is None:
            raise TargetError(
                f"the label of {name} is {text!r}; cox takes a time and an event: columns 'time' and 'event', or a "
                "label like 12.5, with a plus behind it where there was no event until then"
            )
        return torch.tensor([found], dtype=torch.float32)

    def foreign(self, pixels: np.ndarray[Any, np.dtype[Any]], foreground: float | None) -> str | None:
        """Say what is wrong with these pixels, in a few words; None if nothing is. Cheap: a maximum and a comparison.

        `foreground` is the value beside 0 that a binary mask has shown so far.
        """
        largest = pixels.max()
        if pixels.dtype.kind == "f" and not np.isfinite(pixels).all():
            return "NaN or infinite values"
        if self.loss.binary:
            if self.ignores:
                pixels = pixels[pixels != IGNORED]
                largest = pixels.max(initial=0)
            known = largest if foreground is None or largest == 0 else foreground
            wrong = pixels[(pixels != 0) & (pixels != known)] if largest else pixels[pixels != 0]
            if wrong.size:
                return f"the values {wrong[0]:g} and {known:g}; a binary loss takes 0 and one other value"
        if self.loss.class_ids:
            if pixels.dtype.kind not in "uib":
                return f"{pixels.dtype} values; ce takes whole numbers, which are class ids"
            if pixels.dtype.kind == "i" and (smallest := pixels.min()) < 0:
                return f"class {smallest}; ce takes 0 to {self.channels - 1} with this model"
            if largest >= self.channels:
                wrong = pixels[(pixels >= self.channels) & (pixels != IGNORED)]
                if wrong.size:
                    return f"class {wrong.max()}; ce takes 0 to {self.channels - 1} with this model ({IGNORED}: ignore)"
        return None


class CheckedMask(View):
    """`mask` as it is, except that reading values which break `rule` raises `TargetError`."""

    def __init__(self, mask: Image, rule: TargetRule) -> None:
        super().__init__(mask)
        self._rule = rule
        self._foreground: float | None = None
        self._lock = Lock()

    def _read_inside(self, box: Box) -> Pixels:
        pixels = self._image.read(box)
        values = np.asarray(pixels)
        with self._lock:
            problem = self._rule.foreign(values, self._foreground)
            if problem is None and self._foreground is None and self._rule.loss.binary:
                counted = values[values != IGNORED] if self._rule.ignores else values
                self._foreground = float(counted.max(initial=0)) or None
        if problem is not None:
            raise TargetError(f"the mask of {self.name} holds {problem}; renumber it or choose another --loss")
        return pixels


def sample_mask(mask: Image, rule: TargetRule) -> set[int]:
    """Check small boxes spread over `mask`, and return the whole numbers in them. Raises `TargetError`."""
    checked = CheckedMask(mask, rule)
    seen: set[int] = set()
    for box in spread(mask.height, mask.width):
        seen |= {int(value) for value in np.unique(np.asarray(checked.read(box)))}
    return seen


def output_channels(model: nn.Module, shape: tuple[int, int, int], dtype: torch.dtype = torch.uint8) -> int:
    """Return the size of the model's channel axis for an image of this `(C, H, W)`, found without computing a pixel.

    Raises `CaptureError` for a model that does not take such an image.
    """
    try:
        with torch.no_grad():
            output = copy.deepcopy(model).to("meta")(torch.empty((1, *shape), dtype=dtype, device="meta"))
        return int(output.shape[1])
    except Exception:  # of any model's own; capture can do more, and says in our words what is wrong
        graph = compile_engine(model).problem(torch.zeros((), dtype=dtype).expand(shape)).graph
        return graph[graph.output].shape[1]
