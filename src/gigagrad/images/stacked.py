"""Stack several images of one place to one: stains of a section, bands in files of their own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images.image import Image, Pixels


class Stacked(Image):
    """The channels of all `images`, one image's after the other's: `(C1 + C2 + ..., H, W)`.

    Name and mpp are the first one's, levels those that all have. Outside it is what each image is there. Closing it
    closes them all. Raises `ImageError` for images that differ in size, at this level or at level 0, in dtype, or in
    the value of no data.
    """

    def __init__(self, images: Sequence[Image]) -> None:
        first = images[0]
        for other in images[1:]:
            if [_size(other), other.levels[0].shape] != [_size(first), first.levels[0].shape]:
                raise ImageError(
                    f"{first.name} is {_size(first)} and {other.name} {_size(other)}; images of one place must be "
                    "registered, of one size and dtype and alike where they hold no data"
                )
        levels = tuple(level for level in first.levels if all(_at(image, level.shape) is not None for image in images))
        names = tuple(name for image in images for name in image.channel_names or ("",) * image.channels)
        chosen = [level.shape for level in levels].index(first.shape[1:])
        self._images = tuple(images)
        super().__init__(
            shape=(sum(image.channels for image in images), *first.shape[1:]),
            dtype=first.dtype,
            name=first.name,
            fill=first.fill,
            mpp=None if first.mpp is None else first.mpp / levels[chosen].downsample,
            levels=levels,
            level=chosen,
            georeference=first.georeference and first.georeference.resized(first.shape[1:], levels[0].shape),
            bounds=first.bounds,
            nodata=first.nodata,
            channel_names=names if any(names) else (),
            open_level=partial(_stacked_at, self._images, tuple(level.shape for level in levels)),
            cache_bytes=sum(image.cache_bytes for image in images),
            thread_bytes=max(image.thread_bytes for image in images),
            decode_seconds=sum(image.decode_seconds for image in images),
        )

    def _read_inside(self, box: Box) -> Pixels:
        return _joined([image.read(box) for image in self._images])

    def _blank(self, height: int, width: int) -> Pixels:
        return _joined([image._blank(height, width) for image in self._images])

    def missing(self, box: Box) -> NDArray[np.bool_] | None:
        found = [image.missing(box) for image in self._images]
        gaps = [gap for gap in found if gap is not None]
        return np.logical_and.reduce(gaps) if len(gaps) == len(found) else None

    @property
    def missing_bytes(self) -> int:
        return sum(image.missing_bytes for image in self._images)

    def _release(self) -> None:
        for image in self._images:
            image.close()


def _stacked_at(images: Sequence[Image], shapes: Sequence[tuple[int, int]], level: int) -> Image:
    return Stacked([image.at_level(_at(image, shapes[level]) or 0) for image in images])


def _size(image: Image) -> str:
    gaps = "" if image.nodata is None else f", no data being {image.nodata}"
    return f"{image.height} x {image.width} px of {image.dtype}{gaps}"


def _at(image: Image, shape: tuple[int, int]) -> int | None:
    """Return the level of this `(height, width)`."""
    return next((index for index, level in enumerate(image.levels) if level.shape == shape), None)


def _joined(pieces: Sequence[Pixels]) -> Pixels:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(pieces[0], torch.Tensor):
        joined: Pixels = torch.cat(list(pieces))
        return joined
    return np.concatenate([np.asarray(piece) for piece in pieces])
