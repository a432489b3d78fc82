"""Masks as labels: several of each pixel, each there or not, as a channel of 0, 1 and `IGNORED`; and gaps in slides.

Where a slide holds no data, nothing is true of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from gigagrad.boxes import Box
from gigagrad.errors import TargetError
from gigagrad.images import Image
from gigagrad.images.image import View
from gigagrad.images.pixels import Array
from gigagrad.masks.classes import IGNORED

_SIGNED: Final = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}


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
            thread_bytes=mask.thread_bytes,
            decode_seconds=mask.decode_seconds,
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
    """A mask of class ids `(1, H, W)` as a channel for each of `regions`, which says where one of its ids is.

    Reading an id that is in none of them raises `TargetError`.
    """

    def __init__(self, mask: Image, regions: Sequence[Sequence[int]]) -> None:
        super().__init__(mask, len(regions))
        self._regions = regions

    def _read_inside(self, box: Box) -> Array:
        ids = np.asarray(self._image.read(box))[0]
        labels = np.stack([np.isin(ids, region) for region in self._regions]).astype(np.uint8)
        labels[:, ids == IGNORED] = IGNORED
        foreign = (ids != 0) & ~labels.any(axis=0)
        if foreign.any():
            largest = ids[foreign].max()
            raise TargetError(f"the mask of {self.name} holds class {largest:g}, none of its {self.channels} labels")
        return labels


class LabelMap(View):
    """Labels `(C, H, W)` as class ids `(1, H, W)`: where a label is there, its one of `ids`; a later one lies over an
    earlier one, as nnU-Net's `regions_class_order` has it. Closing it leaves the labels open.
    """

    def __init__(self, labels: Image, ids: Sequence[int]) -> None:
        super().__init__(labels, (1, *labels.shape[1:]), channel_names=())
        self._ids = ids

    def _read_inside(self, box: Box) -> Array:
        labels = np.asarray(self._image.read(box))
        ids = np.where(labels[0] == IGNORED, IGNORED, 0).astype(np.uint8)
        for label, number in zip(labels, self._ids, strict=True):
            ids[label == 1] = number
        return ids[None]


def ignoring_missing(mask: Image, slide: Image) -> Image:
    """Make `mask` `IGNORED` where `slide`, of the same size, has no data; itself where all is there.

    Closing it leaves both open.
    """
    return IgnoringMissing(mask, slide) if slide.missing_bytes else mask


class IgnoringMissing(View):
    """Use `ignoring_missing`."""

    def __init__(self, mask: Image, slide: Image) -> None:
        held = mask.thread_bytes + slide.missing_bytes
        super().__init__(mask, dtype=room_for_ignored(mask), nodata=IGNORED, thread_bytes=held)
        self._slide = slide

    def _read_inside(self, box: Box) -> Array:
        pixels = np.asarray(self._image.read(box)).astype(room_for_ignored(self), copy=False)
        if (missing := self._slide.missing(box)) is not None:
            pixels[:, missing] = IGNORED
        return pixels


def mask_dtype(mask: Image) -> np.dtype[np.generic]:
    """Return the dtype of a mask as arrays; signed and wider where PyTorch has next to no operators for it."""
    name = str(mask.dtype).removeprefix("torch.")
    return np.dtype(_SIGNED.get(name, name))


def room_for_ignored(mask: Image) -> np.dtype[np.generic]:
    """Return `mask_dtype`, or a wider one that holds `IGNORED`, too."""
    return np.promote_types(mask_dtype(mask), np.uint8)
