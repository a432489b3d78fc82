"""Several labels of each pixel, each there or not: a channel for each, of 0, 1 and `IGNORED`."""

from __future__ import annotations

import numpy as np

from gigagrad.boxes import Box
from gigagrad.errors import TargetError
from gigagrad.images import Image
from gigagrad.images.image import Array
from gigagrad.masks.classes import IGNORED


class Labels(Image):
    """A mask `(C, H, W)` whose channels are labels: what is above 0 is 1, and what holds no data is `IGNORED`.

    Closing it closes the mask.
    """

    def __init__(self, mask: Image, labels: int | None = None) -> None:
        super().__init__(
            shape=(labels or mask.channels, *mask.shape[1:]),
            dtype=np.dtype(np.uint8),
            name=mask.name,
            mpp=mask.mpp,
            cache_bytes=mask.cache_bytes,
        )
        self._image = mask

    def _read_inside(self, box: Box) -> Array:
        pixels = np.asarray(self._image.read(box))
        labels = (pixels > 0).astype(np.uint8)
        if self._image.nodata is not None:
            labels[pixels == self._image.nodata] = IGNORED
        return labels

    def _release(self) -> None:
        self._image.close()


class LabelOfIds(Labels):
    """A mask of class ids `(1, H, W)` as `labels` channels: channel `k` says where the class `k + 1` is.

    Reading an id that is none of them raises `TargetError`.
    """

    def _read_inside(self, box: Box) -> Array:
        ids = np.asarray(self._image.read(box))
        ignored = ids == IGNORED
        if (largest := int(ids.max(where=~ignored, initial=0))) > self.channels:
            raise TargetError(f"the mask of {self.name} holds class {largest}; the model has {self.channels} labels")
        labels: Array = (ids == np.arange(1, self.channels + 1)[:, None, None]).astype(np.uint8)
        labels[:, ignored[0]] = IGNORED
        return labels
