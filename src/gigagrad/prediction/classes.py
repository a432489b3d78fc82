"""From a network's output to a mask, and what the classes are called: shared by prediction, scores and training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box
from gigagrad.errors import ImageError, ModelError
from gigagrad.images import Image, MaskClass
from gigagrad.losses import kind_of
from gigagrad.masks import IGNORED, ClassTable
from gigagrad.masks.classes import class_names, mask_classes

if TYPE_CHECKING:
    import torch

    from gigagrad.execution.engine import Engine
    from gigagrad.images.bag import Bag

_GREY = (128, 128, 128)


def image_shape(engine: Engine, slide: Image | Bag) -> tuple[int, ...] | None:
    """Return `(1, C, H, W)` of the model's output for this slide by capturing it, None where that is no image."""
    graph = engine.problem(slide).graph
    output = graph[graph.output]
    return output.shape if output.is_field else None


@dataclass(frozen=True, slots=True)
class Channels:
    """The meaning of a segmentation model's output channels.

    One is the logit of the foreground. Several are logits of the background and the classes, of which the largest wins;
    or each is the logit of a label, which is there or not whatever the others are.
    """

    count: int
    labels: bool = False

    @classmethod
    def of(cls, count: int, loss: str) -> Self:
        """Read `count` channels as training with `loss`, or a sum of losses; "" where nobody knows which."""
        return cls(count, labels=count > 1 and bool(loss) and kind_of(loss) == "binary")

    @property
    def foreground(self) -> int:
        """Return the number of classes or labels that are told apart."""
        return self.count if self.labels else max(1, self.count - 1)

    @property
    def planes(self) -> int:
        """Return the number of a mask's channels: one of class ids, or one of 0 and 1 for each label."""
        return self.count if self.labels else 1

    def ignored(self, table: ClassTable | None, truth: Image | None = None) -> int | None:
        """Return the value in true masks that no score looks at, None where all count.

        As in training: of several channels, where the table has anything to ignore, and where `truth` says that it is
        no data.
        """
        says_so = truth is not None and truth.nodata == IGNORED
        return IGNORED if self.count > 1 or says_so or (table is not None and table.ignores) else None

    def classes(self, table: ClassTable | None, *, typed: bool = False) -> tuple[MaskClass, ...]:
        """Return the class of each channel: the one foreground class; the background and the others; or labels.

        A network may tell more classes apart than it was shown; but names that were `typed` are to fit. Raises
        `ConfigError` where they do not.
        """
        named = table.foreground if table is not None else ()
        further = () if typed else tuple(f"Class {number}" for number in range(len(named) + 1, self.foreground + 1))
        classes = mask_classes(self.foreground, (*named, *further) if named else ())
        return classes if len(classes) == self.count else (MaskClass(0, class_names(1, table)[0], _GREY), *classes)

    def probabilities(self, logits_NCHW: torch.Tensor) -> torch.Tensor:
        """Return probabilities of `(1, C, h, w)` logits in float32: softmax of classes, sigmoid of labels, 0 of NaN."""
        logits_NCHW = logits_NCHW.float()
        found = logits_NCHW.sigmoid() if self.planes == self.count else logits_NCHW.softmax(1)
        return found.nan_to_num_(0)

    def mask(self, logits_NCHW: torch.Tensor, threshold: float = 0.5) -> NDArray[np.uint8]:
        """Convert `(1, C, h, w)` logits to `(planes, h, w)` uint8.

        A channel by itself is 1 where `sigmoid(logit) > threshold`, compared on the logit's side, `logit > ln(t / (1 -
        t))`, because the sigmoid rounds to exactly 0 or 1 far from its middle. Of several classes the largest wins,
        channel 0 is the background. A NaN logit never wins. `threshold` lies strictly between 0 and 1.

        Raises `ModelError` for an output without image axes, a batch above 1, or more classes than a byte can hold.
        """
        if logits_NCHW.ndim != 4 or logits_NCHW.shape[0] != 1:
            raise ModelError(
                f"the model's output is {tuple(logits_NCHW.shape)}, expected (1, classes, height, width); "
                "prediction needs a segmentation model"
            )
        if self.count > 256:
            raise ModelError(f"the model has {self.count} output channels; a mask of bytes holds at most 256 classes")
        if self.planes == self.count:
            mask = logits_NCHW[0] > math.log(threshold / (1 - threshold))
        else:
            mask = logits_NCHW[0].nan_to_num(nan=-math.inf).argmax(0, keepdim=True)
        return mask.byte().cpu().numpy()


def require_mask(mask: Image, planes: int = 1) -> None:
    """Raise `ImageError` unless `mask` has so many channels of integers or booleans."""
    probe = np.asarray(mask.read(Box.whole(1, 1)))
    if mask.shape[0] != planes or probe.dtype.kind not in "bui":
        expected = "one channel of class ids" if planes == 1 else f"{planes} channels, one of each label"
        raise ImageError(f"{mask.name} is no mask: {mask.shape[0]} channels of {mask.dtype}; expected {expected}")
