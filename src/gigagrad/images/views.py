"""Make images of others as they are read: some channels, grey, without gaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box
from gigagrad.errors import ImageError, did_you_mean
from gigagrad.images.image import Image, Pixels, View
from gigagrad.images.nodata import is_nodata

_ROWS = 64
"""Rows that are looked at at a time, so that next to nothing is held beside the pixels."""


class BandsImage(View):
    """Some channels of an image. Use `Image.bands`."""

    def __init__(self, image: Image, numbers: Sequence[int]) -> None:
        self._channels = [number - 1 for number in numbers]
        names = tuple(image.channel_names[channel] for channel in self._channels) if image.channel_names else ()
        super().__init__(image, (len(numbers), *image.shape[1:]), channel_names=names)

    def _read_inside(self, box: Box) -> Pixels:
        self._image._require_open()
        return self._image._read_channels(box, self._channels)

    def _blank(self, height: int, width: int) -> Pixels:
        return super()._blank(height, width)[self._channels]

    def missing(self, box: Box) -> NDArray[np.bool_] | None:
        return self._image.missing(box) if self.nodata is None else super().missing(box)

    @property
    def missing_bytes(self) -> int:
        return self._image.missing_bytes if self.nodata is None else super().missing_bytes


class _Valued(View):
    """A view with other values, of which none says that there is no data: that is asked of the image."""

    def __init__(self, image: Image, channels: int, names: tuple[str, ...], **changed: Any) -> None:
        super().__init__(image, (channels, *image.shape[1:]), nodata=None, channel_names=names, **changed)

    def missing(self, box: Box) -> NDArray[np.bool_] | None:
        return self._image.missing(box)

    @property
    def missing_bytes(self) -> int:
        return self._image.missing_bytes


class GreyImage(_Valued):
    """The luma of an RGB image. Use `Image.grey`."""

    def __init__(self, image: Image) -> None:
        super().__init__(image, 1, (), decode_seconds=image._grey_seconds)

    def _read_inside(self, box: Box) -> Pixels:
        self._image._require_open()
        return self._image._read_grey(box)

    def _blank(self, height: int, width: int) -> Pixels:
        return super()._blank(height, width)[:1]


class FilledImage(_Valued):
    """An image with 0 where there is no data. Use `Image.filled`."""

    def __init__(self, image: Image) -> None:
        super().__init__(image, image.channels, image.channel_names)

    def _read_inside(self, box: Box) -> Pixels:
        nodata, pixels = self._image.nodata, np.asarray(self._image.read(box))
        assert nodata is not None
        for row in range(0, box.height, _ROWS):
            rows = pixels[:, row : row + _ROWS]
            rows[is_nodata(rows, nodata)] = 0
        return pixels


def band_number(image: Image, band: int | str) -> int:
    """Return the number of a channel, counted from 1, that is given by it or by name (488 may be one). Raises
    `ImageError`."""
    names = image.channel_names
    if isinstance(band, int) and 1 <= band <= image.channels:
        return band
    exact = [number for number, name in enumerate(names, 1) if name == str(band)]
    found = exact or [number for number, name in enumerate(names, 1) if name.casefold() == str(band).casefold()]
    if len(found) == 1:
        return found[0]
    if found:
        raise ImageError(f"{image.name} has {len(found)} bands {band}; choose one by its number: {found}")
    if isinstance(band, int):
        raise ImageError(f"{image.name} has no band {band}; choose from 1 to {image.channels}")
    named = list(filter(None, names))
    known = f"it has {', '.join(named[:20])} and the numbers" if named else "its bands have no names, but numbers from"
    raise ImageError(f"{image.name} has no band {band!r}{did_you_mean(band, named)}; {known} 1 to {image.channels}")
