"""Count and bound the memory of a GPU through CUDA (or ROCm): what PyTorch's caching allocator has reserved."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from weakref import WeakSet

import torch

from gigagrad.allowances import FREE_SHARE, LATER_RUNTIME_BYTES, UNNOTICED_BYTES
from gigagrad.devices.device import Device, MemoryGuard, Recording, Say, register_device
from gigagrad.devices.machine import Gpu, Machine
from gigagrad.devices.streams import CudaStreams, Streams
from gigagrad.errors import ConfigError

_STEP_BYTES = LATER_RUNTIME_BYTES + UNNOTICED_BYTES
"""The workspaces of cuBLAS."""


@register_device
class Cuda(Device):
    kind = "cuda"
    records = True
    _recordings: ClassVar[WeakSet[_Recording]] = WeakSet()
    """Those of all engines: whoever runs next has their memory."""

    def __init__(self, name: str) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "device 'cuda' was asked for, but PyTorch finds no CUDA device here; use the device cpu, or install a "
                "PyTorch that was built for your GPU ('gigagrad doctor' says what is there)"
            )
        super().__init__(name)

    def held_bytes(self) -> int:
        return self._current("reserved_bytes") - sum(one.held_bytes for one in self._recorded())

    def used_bytes(self, enough: int = 0) -> int:
        return self._current("allocated_bytes") - sum(one.used_bytes for one in self._recorded())

    def record(self, work: Callable[[Sequence[torch.Tensor]], Any], inputs: Sequence[torch.Tensor]) -> Recording:
        recording = _Recording(self, work, inputs)
        self._recordings.add(recording)
        return recording

    def _recorded(self) -> list[_Recording]:
        return [one for one in self._recordings if one.index == self._index]

    @property
    def _index(self) -> int:
        index = self.torch_device.index
        return torch.cuda.current_device() if index is None else index

    def _current(self, amount: str, which: str = "current") -> int:
        """Read one amount: `memory_reserved` writes all statistics into a flat list first, which takes 0.3 ms."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        found: int = stats[amount]["all"][which] if stats else 0
        return found

    def peak_bytes(self) -> int:
        return self._current("reserved_bytes", "peak")

    def free_bytes(self, enough: int = sys.maxsize) -> int | None:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return int((free + sum(one.held_bytes for one in self._recorded())) * FREE_SHARE)

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def streams(self) -> Streams:
        return CudaStreams.of(self.torch_device)

    def step_bytes(self) -> int:
        return _STEP_BYTES

    def memory_guard(self, peak_bytes: int, budget_bytes: int | None) -> MemoryGuard:
        return _Bound(self, peak_bytes)

    @contextmanager
    def bounded(self, peak_bytes: int) -> Iterator[None]:
        here = self._index
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
        return Gpu.detected(torch.cuda.get_device_name(self.torch_device), say)


@contextmanager
def _growing_segments() -> Iterator[None]:
    """Have the allocator take memory in segments that grow, in the block: next to none is lost between blocks of other
    sizes (PyTorch's notes on CUDA, "expandable_segments").
    """
    settle = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # no version of PyTorch promises it
    if settle is None or any(name in os.environ for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        yield
        return
    settle("expandable_segments:True")
    try:
        yield
    finally:
        settle("expandable_segments:False")


class PlannedCuda(Device):
    """A GPU to plan for that need not be here: nothing is held on it."""

    kind = Cuda.kind
    records = True

    def __init__(self, machine: Gpu | None = None) -> None:
        """Plan by the rates of `machine`, by default of a GPU of which nothing is known."""
        super().__init__(self.kind)
        self._machine = machine or Gpu.typical("")

    def held_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def trim(self) -> None:
        pass

    def step_bytes(self) -> int:
        return _STEP_BYTES

    def machine(self, say: Say = lambda text: None) -> Machine:
        return self._machine


class _Bound(MemoryGuard):
    """Hold PyTorch's allocator to the plan while the run lasts: where its cache would grow over it, it is emptied, and
    what still does not fit raises `torch.OutOfMemoryError`.
    """

    def __init__(self, device: Device, peak_bytes: int) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(device.bounded(peak_bytes))

    def close(self, *, keeps: bool = False) -> None:
        self._stack.close()


class _Recording:
    """A CUDA graph of some work, with memory of its own."""

    def __init__(
        self, device: Cuda, work: Callable[[Sequence[torch.Tensor]], Any], inputs: Sequence[torch.Tensor]
    ) -> None:
        self.index = device._index
        device.trim()  # while it is recorded, nothing can be given back
        held, used = device.held_bytes(), device.used_bytes()
        self.inputs = [torch.empty_like(one, device=device.torch_device) for one in inputs]
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on reading.
        with _growing_segments(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.result = work(self.inputs)
        self.replay = graph.replay
        self.held_bytes, self.used_bytes = device.held_bytes() - held, device.used_bytes() - used
