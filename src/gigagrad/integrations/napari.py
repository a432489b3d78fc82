"""napari: open slides, masks and predictions in layers that are read where one looks, and write labels as a mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from gigagrad.boxes import Box
from gigagrad.errors import GigagradError, WriteError
from gigagrad.images import Image, open_image, write_pyramid
from gigagrad.images.opening import open_ids
from gigagrad.images.pixels import Array
from gigagrad.view.pyramids import ImagePyramid

LayerData = tuple[list["LevelArray"], dict[str, Any], str]
MASKS: Final = "masks"
PROBABILITIES: Final = "probabilities"
"""Folders that `predict` writes: files in them open as labels, and as a layer for each class."""
_ROWS: Final = 512
"""Rows of labels that are looked at and written at once."""


class LevelArray:
    """Channels of a level of a pyramid, as an array whose pixels are read when a part of it is asked for.

    `shape` is `(H, W)` where `channels` is a number, and `(H, W, C)` where it is a slice.
    """

    def __init__(self, image: Image, pyramid: ImagePyramid, level: int, channels: int | slice) -> None:
        self._pyramid, self._level, self._channels = pyramid, level, channels
        counted = () if isinstance(channels, int) else (len(range(image.channels)[channels]),)
        self.shape: Final = (*pyramid.shapes[level], *counted)
        self.ndim: Final = len(self.shape)
        self.size: Final = math.prod(self.shape)
        assert isinstance(image.dtype, np.dtype), "files hold arrays"
        self.dtype: Final = image.dtype

    def __getitem__(self, index: Any) -> Array:
        """Read what NumPy's slices and whole numbers select."""
        given: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
        full = given + (slice(None),) * (self.ndim - len(given))
        ys, xs = np.arange(self.shape[0])[full[0]], np.arange(self.shape[1])[full[1]]
        if not (ys.size and xs.size):
            nothing: Array = np.broadcast_to(np.zeros((), self.dtype), self.shape)[index]
            return nothing
        box = Box(int(ys.min()), int(xs.min()), int(ys.max()) + 1, int(xs.max()) + 1)
        pixels_HWC = self._pyramid.read(self._level, box).transpose(1, 2, 0)[:, xs - box.x0][ys - box.y0]
        chosen: Array = pixels_HWC[..., self._channels][(..., *full[2:])]
        return chosen

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[:, :], dtype)


def get_reader(path: str | list[str]) -> Callable[[str], list[LayerData]] | None:
    """Return what opens a file, None for several at once and for one that cannot be read, for napari to ask others."""
    if isinstance(path, list):
        return None
    try:
        open_image(path).close()
    except GigagradError:
        return None
    return read_layers


def read_layers(path: str) -> list[LayerData]:
    """Open a file as layers of all its resolutions: colours as one, other channels one by one, those of a mask as
    labels.

    Lengths are in micrometres where the file says how large a pixel is.
    """
    folder = Path(path).parent.name
    image = open_ids(path) if folder == MASKS else open_image(path)
    pyramid = ImagePyramid(image, ids=folder == MASKS)

    def layer(name: str, channels: int | slice, kind: str, **settings: Any) -> LayerData:
        levels = [LevelArray(image, pyramid, level, channels) for level in range(len(pyramid.shapes))]
        scale = {} if image.mpp is None else {"scale": (image.mpp, image.mpp)}
        return levels, {"name": name, "multiscale": True, **scale, **settings}, kind

    bytes_ = {"contrast_limits": (0, 255)} if image.dtype == np.uint8 else {}
    if image.channels == 3 and bytes_ and folder not in (MASKS, PROBABILITIES):
        return [layer(image.name, slice(3), "image", rgb=True)]
    names = image.channel_names or [str(number) for number in range(1, image.channels + 1)]
    single = image.channels == 1
    kind, settings = ("labels", {}) if folder == MASKS else ("image", bytes_)
    return [
        layer(image.name if single else f"{image.name} {name}", number, kind, **settings)
        for number, name in enumerate(names)
    ]


def write_mask(path: str, data: Any, meta: dict[str, Any]) -> list[str]:
    """Write a layer of labels as a pyramid of class numbers, with the layer's resolution, and return its path.

    Raises `WriteError` for labels below 0 and where the file cannot be written.
    """
    labels = data[0] if isinstance(data, list | tuple) else data
    height, width = labels.shape

    def strips() -> Iterator[Array]:
        return (np.asarray(labels[row : row + _ROWS]) for row in range(0, height, _ROWS))

    least, most = min(int(strip.min()) for strip in strips()), max(int(strip.max()) for strip in strips())
    if least < 0:
        raise WriteError(f"labels are class numbers from 0 on, got {least}; renumber the layer")
    dtype, scale = np.min_scalar_type(most), float(meta.get("scale", (1.0,))[-1])
    written = write_pyramid(
        path,
        (strip.astype(dtype) for strip in strips()),
        shape=(height, width, 1),
        dtype=dtype,
        nearest=True,
        mpp=None if scale == 1 else scale,
        overwrite=True,
    )
    return [str(written)]
