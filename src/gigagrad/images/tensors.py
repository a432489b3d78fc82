"""Tensors as images: `(C, H, W)` or `(H, W)`. Apart from arrays.py because it is what needs PyTorch."""

from __future__ import annotations

import torch

from gigagrad.boxes import Box
from gigagrad.images.arrays import channels_first
from gigagrad.images.image import Image


class TensorImage(Image):
    """A tensor as an image; `read` gives tensors of its dtype on its device, detached from any autograd graph."""

    def __init__(self, tensor: torch.Tensor, *, mpp: float | None = None, name: str = "tensor") -> None:
        shape = channels_first(tuple(tensor.shape), tensor.dtype == torch.uint8, name)
        colour = tensor.dtype == torch.uint8 and shape[0] == 3
        super().__init__(shape=shape, dtype=tensor.dtype, name=name, fill=255 if colour else 0, mpp=mpp)
        self._tensor_CHW = tensor.detach().reshape(shape)

    def _read_inside(self, box: Box) -> torch.Tensor:
        return self._tensor_CHW[:, box.y0 : box.y1, box.x0 : box.x1].clone()

    def _blank(self, height: int, width: int) -> torch.Tensor:
        like = self._tensor_CHW
        return torch.full((self.channels, height, width), self.fill, dtype=like.dtype, device=like.device)
