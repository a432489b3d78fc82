"""A field in memory, on the device whose memory it is given."""

from __future__ import annotations

import torch

from gigagrad.boxes import Box
from gigagrad.stores.store import Store


class HostStore(Store):
    """One tensor. `memory_format` is that of the tiles, so that crops of it are read without reordering."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        axes: tuple[int, int],
        *,
        device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        super().__init__(shape, dtype, axes)
        layout = memory_format if len(shape) == 4 else torch.contiguous_format
        self._tensor = torch.empty(shape, dtype=dtype, device=device, memory_format=layout).zero_()

    def _view(self, box: Box) -> torch.Tensor:
        view = self._tensor
        for axis, span in zip(self.axes, (box.y, box.x), strict=True):
            view = view.narrow(axis, span.start, span.length)
        return view

    def read(self, box: Box) -> torch.Tensor:
        return self._view(box)

    def write(self, box: Box, crop: torch.Tensor) -> None:
        self._view(box).copy_(crop)

    def add(self, box: Box, crop: torch.Tensor) -> None:
        self._view(box).add_(crop.to(self._tensor.device))

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        self.__dict__.pop("_tensor", None)
