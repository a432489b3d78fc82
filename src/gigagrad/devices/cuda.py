"""Count and bound the memory of a GPU through CUDA (or ROCm): what PyTorch's caching allocator has reserved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gigagrad.allowances import FREE_SHARE, LATER_RUNTIME_BYTES, UNNOTICED_BYTES
from gigagrad.devices.device import Device, MemoryGuard, Say, register_device
from gigagrad.devices.machine import Machine
from gigagrad.errors import ConfigError

_STEP_BYTES = LATER_RUNTIME_BYTES + UNNOTICED_BYTES
"""The workspaces of cuBLAS."""


@register_device
class Cuda(Device):
    kind = "cuda"

    def __init__(self, name: str) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "device 'cuda' was asked for, but PyTorch finds no CUDA device here; use the device cpu, or install a "
                "PyTorch that was built for your GPU ('gigagrad doctor' says what is there)"
            )
        super().__init__(name)

    def held_bytes(self) -> int:
        return self._current("reserved_bytes")

    def used_bytes(self, enough: int = 0) -> int | None:
        return self._current("allocated_bytes")

    def _current(self, amount: str) -> int:
        """Read one amount: `memory_reserved` writes all statistics into a flat list first, which takes 0.3 ms."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        current: int = stats[amount]["all"]["current"] if stats else 0
        return current

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.torch_device)

    def free_bytes(self) -> int | None:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return int(free * FREE_SHARE)

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def step_bytes(self) -> int:
        return _STEP_BYTES

    def memory_guard(self, peak_bytes: int, budget_bytes: int | None) -> MemoryGuard:
        return _CacheGuard(self, peak_bytes)

    @contextmanager
    def bounded(self, peak_bytes: int) -> Iterator[None]:
        index = self.torch_device.index
        here = torch.cuda.current_device() if index is None else index
        total = torch.cuda.get_device_properties(here).total_memory
        before = torch.cuda.get_per_process_memory_fraction(here)
        torch.cuda.set_per_process_memory_fraction(min(before, peak_bytes / total), here)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, here)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        here = self.torch_device
        with super().seeded(seed), torch.random.fork_rng(devices=[here], device_type="cuda"), torch.cuda.device(here):
            torch.cuda.manual_seed(seed)
            yield

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def machine(self, say: Say = lambda text: None) -> Machine:
        return Machine.typical_gpu()


class PlannedCuda(Device):
    """A GPU to plan for that need not be here: nothing is held on it, and nobody has measured it."""

    kind = Cuda.kind

    def __init__(self) -> None:
        super().__init__(self.kind)

    def held_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def trim(self) -> None:
        pass

    def step_bytes(self) -> int:
        return _STEP_BYTES

    def machine(self, say: Say = lambda text: None) -> Machine:
        return Machine.typical_gpu()


class _CacheGuard(MemoryGuard):
    """Empty the cache between tiles where it would grow over the plan."""

    def __init__(self, device: Device, peak_bytes: int) -> None:
        self._device, self._peak_bytes, self._tile_bytes = device, peak_bytes, 0

    def begin_pass(self, tile_bytes: int, beside_bytes: int, largest_bytes: int = 0) -> None:
        self._tile_bytes = tile_bytes
        self.reserve(0)

    def reserve(self, nbytes: int, *, for_tile: bool = False) -> None:
        """Empty the cache where what is free in it does not serve; blocks of tiles are the allocator's own business."""
        if for_tile:
            return
        used, held = self._device.used_bytes() or 0, self._device.held_bytes()
        if max(held, used + nbytes) > self._peak_bytes - self._tile_bytes and held > used:
            self._device.trim()

    def tile_done(self) -> None:
        self.reserve(0)
