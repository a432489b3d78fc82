"""Read NumPy arrays and tensors as images: `(C, H, W)` or `(H, W)`, as everywhere in PyTorch, which need not be
there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images.image import Array, Image, as_slice, fill_of

if TYPE_CHECKING:
    import torch

    from gigagrad.images.georeference import Georeference

_MOST_CHANNELS_OF_BYTES = 32


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
