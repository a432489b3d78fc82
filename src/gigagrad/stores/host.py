"""Fields in memory: the device's own, which the budget bounds, and the host's beside a device with another."""

from __future__ import annotations

import psutil
import torch

from gigagrad.allowances import FREE_SHARE, whole_pages
from gigagrad.boxes import Box
from gigagrad.devices import Machine
from gigagrad.stores.store import Store
from gigagrad.stores.tier import FieldSpec, OpenTier, Size, Tier


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


class MemoryTier(Tier):
    """The memory in which tiles are computed. It is open at any time, and its stores are closed one by one."""

    name = "memory"
    place = "memory"
    in_budget = True

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: the host, unless named."""
        self._device = device or torch.device("cpu")

    def room_bytes(self) -> int | None:
        return None

    def field_bytes(self, size: Size, pixel_bytes: int) -> int:
        return whole_pages(super().field_bytes(size, pixel_bytes))

    def open(self, needed_bytes: int, machine: Machine) -> OpenTier:
        return self

    def open_store(self, field: FieldSpec) -> Store:
        return HostStore(field.shape, field.dtype, field.axes, device=self._device, memory_format=field.layout)

    def close(self) -> None:
        """Nothing is open."""


class HostTier(MemoryTier):
    """The host's memory beside a GPU."""

    name = "host"
    place = "host memory"
    in_budget = False
    remedy = "close other programs, or raise host_memory"

    def __init__(self, room_bytes: int | None = None) -> None:
        super().__init__()
        self._room_bytes = room_bytes

    def room_bytes(self) -> int:
        free = int(psutil.virtual_memory().available * FREE_SHARE)
        return free if self._room_bytes is None else self._room_bytes

    def link_seconds(self, nbytes: float, machine: Machine) -> float:
        return nbytes / machine.copy_bytes_per_second
