"""Make images of arrays and tensors, and of other images: stacked, at another size, as a network sees them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box, Span, tiles
from gigagrad.errors import ImageError
from gigagrad.images.image import Image, View
from gigagrad.images.pixels import Array, Level, Pixels, as_slice, fill_of

if TYPE_CHECKING:
    import torch

    from gigagrad.images.georeference import Georeference

_MOST_CHANNELS_OF_BYTES = 32
_ANOTHER_RESOLUTION: Final = 1.1
"""From this factor on, a picture of another size is of another resolution; below it, of another part of the slide."""
_BLOCK_PX = 2048
"""Side of the blocks in which the source is resampled, in its own pixels: a few MB each."""


class ArrayImage(Image):
    """A NumPy array (or memory map) as an image. The array is not copied: later changes to it are seen."""

    def __init__(
        self,
        array: Array,
        *,
        mpp: float | None = None,
        name: str = "array",
        georeference: Georeference | None = None,
    ) -> None:
        shape = channels_first(array.shape, array.dtype == np.uint8, name)
        if array.dtype.kind not in "buif":
            raise ImageError(f"{name} has dtype {array.dtype}; expected integers, floats or bool")
        native = array.dtype.newbyteorder("=")
        fill = fill_of(native, shape[0])
        super().__init__(shape=shape, dtype=native, name=name, fill=fill, mpp=mpp, georeference=georeference)
        self._native = native
        self._array_CHW = array.reshape(shape)

    def view(self, box: Box) -> Pixels:
        if box.empty or box != box.clamp(self.height, self.width):
            return self.read(box)
        self._require_open()
        return self._array_CHW[:, box.y0 : box.y1, box.x0 : box.x1].astype(self._native, copy=False)

    def _read_inside(self, box: Box) -> Array:
        return self._array_CHW[:, box.y0 : box.y1, box.x0 : box.x1].astype(self._native)

    def _read_channels(self, box: Box, channels: Sequence[int]) -> Array:
        return self._array_CHW[as_slice(channels), box.y0 : box.y1, box.x0 : box.x1].astype(self._native)


class TensorImage(Image):
    """A tensor as an image; `read` gives tensors of its dtype on its device, detached from any autograd graph."""

    def __init__(self, tensor: torch.Tensor, *, mpp: float | None = None, name: str = "tensor") -> None:
        of_bytes = str(tensor.dtype) == "torch.uint8"
        shape = channels_first(tuple(tensor.shape), of_bytes, name)
        fill = 255 if of_bytes and shape[0] == 3 else 0
        super().__init__(shape=shape, dtype=tensor.dtype, name=name, fill=fill, mpp=mpp)
        self._tensor_CHW = tensor.detach().reshape(shape)

    def view(self, box: Box) -> Pixels:
        if box.empty or box != box.clamp(self.height, self.width):
            return self.read(box)
        self._require_open()
        return self._tensor_CHW[:, box.y0 : box.y1, box.x0 : box.x1]

    def _read_inside(self, box: Box) -> torch.Tensor:
        return self._tensor_CHW[:, box.y0 : box.y1, box.x0 : box.x1].clone()

    def _blank(self, height: int, width: int) -> torch.Tensor:
        return self._tensor_CHW.new_full((self.channels, height, width), self.fill)


def channels_first(shape: tuple[int, ...], of_bytes: bool, name: str) -> tuple[int, int, int]:
    """Return an array's shape as `(C, H, W)`. Raises `ImageError` for other axes, or an obvious `(H, W, C)`."""
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    if len(shape) != 3:
        hint = "; drop the batch axis with x[0]" if len(shape) == 4 and shape[0] == 1 else ""
        raise ImageError(f"{name} has shape {tuple(shape)}; expected (C, H, W) or (H, W){hint}")
    if of_bytes and shape[2] in (3, 4) and shape[0] > _MOST_CHANNELS_OF_BYTES:
        raise ImageError(
            f"{name} has shape {tuple(shape)}, which looks like (H, W, C); expected (C, H, W): move the "
            "channels first, e.g. x.transpose(2, 0, 1) or x.permute(2, 0, 1)"
        )
    return shape[0], shape[1], shape[2]


class Stacked(Image):
    """The channels of all `images`, one image's after the other's: `(C1 + C2 + ..., H, W)`.

    Name and mpp are the first one's, levels those that all have. Outside it is what each image is there. Closing it
    closes them all. Raises `ImageError` for images that differ in size, at this level or at level 0, in dtype, or in
    the value of no data. `Registered` gives an image of another resolution the size of the first.
    """

    def __init__(self, images: Sequence[Image]) -> None:
        first = images[0]
        for other in images[1:]:
            if [_size(other), other.levels[0].shape] != [_size(first), first.levels[0].shape]:
                raise ImageError(
                    f"{first.name} is {_size(first)} and {other.name} {_size(other)}; images of one place must be "
                    "registered, show the same part at whatever resolution, and be of one dtype and alike where they "
                    "hold no data"
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
        masks = [image.missing(box) for image in self._images]
        gaps = [gap for gap in masks if gap is not None]
        return np.logical_and.reduce(gaps) if len(gaps) == len(masks) else None

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


class Resampled(Image):
    """`image` as `(C, height, width)`: each pixel is the one of `image` nearest to its centre.

    Where `image` shows a `part` only of what is `full` `(height, width)` large, in pixels of that, the rest is fill.
    For images whose pixels are arrays. Closing it closes `image`.
    """

    def __init__(
        self,
        image: Image,
        height: int,
        width: int,
        part: Box | None = None,
        full: tuple[int, int] = (1, 1),
        **described: Any,
    ) -> None:
        mpp = None if image.mpp is None or part is not None else image.mpp * image.height / height
        super().__init__(
            shape=(image.channels, height, width),
            dtype=image.dtype,
            name=image.name,
            fill=image.fill,
            cache_bytes=image.cache_bytes,
            thread_bytes=image.thread_bytes + image.channels * _BLOCK_PX**2,
            decode_seconds=image.decode_seconds,
            **{"mpp": mpp} | described,
        )
        self._image = image
        self._part, self._full = part or Box.whole(*full), full

    def _read_inside(self, box: Box) -> Array:
        pixels = np.asarray(self._blank(*box.shape))
        for at, source, rows, columns in self._pieces(box):
            pixels[:, *at] = np.asarray(self._image.read(source))[:, rows, columns]
        return pixels

    def _pieces(self, box: Box) -> Iterator[tuple[tuple[slice, slice], Box, _Places, _Places]]:
        """Yield what of `box` is made of which box of `image`, and of which of its rows and columns."""
        side_y = max(1, _BLOCK_PX * self.height // self._image.height)
        side_x = max(1, _BLOCK_PX * self.width // self._image.width)
        for part in tiles(*box.shape, side_y, side_x):
            rows = _nearest(part.y.shift(box.y0), self._image.height, self.height, self._part.y, self._full[0])
            columns = _nearest(part.x.shift(box.x0), self._image.width, self.width, self._part.x, self._full[1])
            # What lies outside of the source is its fill.
            source = Box(int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1)
            at = (slice(part.y0, part.y1), slice(part.x0, part.x1))
            yield at, source, rows[:, None] - source.y0, columns[None] - source.x0

    def _release(self) -> None:
        self._image.close()


class Registered(Resampled):
    """An image of the same place at another resolution, on the pixels of `levels[level]`: the nearest ones of its own
    level that is nearest in size. Closing it closes `image`.
    """

    def __init__(self, image: Image, levels: tuple[Level, ...], level: int = 0) -> None:
        height, width = levels[level].shape
        sizes = [abs(math.log(each.shape[0] / height)) for each in image.levels]
        chosen = sizes.index(min(sizes))
        self._given = image
        super().__init__(
            image if image.levels[chosen].shape == image.shape[1:] else image.at_level(chosen),
            height,
            width,
            mpp=None,
            nodata=image.nodata,
            channel_names=image.channel_names,
            levels=levels,
            level=level,
            open_level=partial(_registered_at, image, levels),
        )

    def missing(self, box: Box) -> NDArray[np.bool_] | None:
        gaps = np.zeros(box.shape, bool)
        inside = box.clamp(self.height, self.width)
        for at, source, rows, columns in self._pieces(inside) if not inside.empty else ():
            if (found := self._image.missing(source)) is not None:
                gaps[inside.y0 - box.y0 :, inside.x0 - box.x0 :][at] = found[rows, columns]
        return gaps if gaps.any() else None

    @property
    def missing_bytes(self) -> int:
        return self._image.missing_bytes

    def _release(self) -> None:
        super()._release()
        self._given.close()


def _registered_at(image: Image, levels: tuple[Level, ...], level: int) -> Image:
    return Registered(_Borrowed(image) if image._open_level is None else image.at_level(0), levels, level)


class _Borrowed(View):
    """An image that stays open when this is closed."""

    def _read_inside(self, box: Box) -> Pixels:
        return self._image.read(box)


def at_another_resolution(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether pictures of these `(height, width)` can be the same one at another resolution."""
    ratios = [of_other / of_one for of_other, of_one in zip(other, one, strict=True)]
    # The coarser of both was rounded by up to a pixel; at nearly the same size, a pixel more is another picture.
    slack = 1 / min(*one, *other)
    return abs(ratios[0] / ratios[1] - 1) <= slack and max(ratios[0], 1 / ratios[0]) >= _ANOTHER_RESOLUTION


_Places = NDArray[np.int64]


def _nearest(span: Span, source: int, size: int, part: Span, full: int) -> _Places:
    """Find the pixels of an axis of `source` pixels, which are those of `part` of `full` ones, at the centres of `span`
    of the same axis in `size` pixels."""
    twice = 2 * np.arange(span.start, span.stop, dtype=np.int64) + 1
    return (twice * full - 2 * part.start * size) * source // (2 * size * part.length)


@dataclass(frozen=True, slots=True)
class InputView:
    """The bands that are read, by name or counted from 1 as GDAL counts them, none given: all; and whether in grey."""

    grey: bool = False
    bands: tuple[int | str, ...] = ()

    def of(self, slide: Image) -> Image:
        """View `slide` as the network gets to see it, 0 where it has no data. Closing it leaves `slide` open.

        What is missing is missing in all the bands that are read. Raises `ImageError`.
        """
        seen = (slide.bands(self.bands) if self.bands else slide).filled()
        return seen.grey() if self.grey else seen

    def __str__(self) -> str:
        bands = f"bands {', '.join(map(str, self.bands))}" if self.bands else ""
        return ", ".join(filter(None, (bands, "grey, one channel" if self.grey else ""))) or "as stored"


AS_STORED = InputView()
