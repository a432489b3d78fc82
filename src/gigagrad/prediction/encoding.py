"""Compute an encoder's features of all patches of a bag, in a memory budget.

Batches of patches are computed side by side, each by one thread that reads it and computes it: so the decoding of one
batch is beside the computation of others without threads of its own, and no operator waits for a team of threads. How
large batches are, and why no engine runs them, is in docs/decisions/0062-batches-of-features.md. A GPU computes one
batch at a time, while other threads read.

An encoder is in eval mode, and sees each patch by itself.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from math import prod
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from gigagrad.allowances import ALLOCATOR_FRAGMENTATION, ROOM_BYTES
from gigagrad.devices import Device, device_for
from gigagrad.errors import BudgetError, ConfigError, GigagradError, ModelError
from gigagrad.execution.compiling import bytes_or_none
from gigagrad.execution.executor import ahead
from gigagrad.execution.sources import torch_dtype
from gigagrad.graphs import WholeCost
from gigagrad.graphs.whole import count_whole
from gigagrad.images.bag import Bag
from gigagrad.plans.whole import unseen_bytes
from gigagrad.ranks.ranks import as_bytes
from gigagrad.threads import SideThreads, operator_threads

Features = NDArray[np.floating[Any]]

_BATCH: Final = {"cpu": 16, "cuda": 128}
"""Patches of a batch where memory allows, by kind of device."""
_HALF: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Batches:
    """Patches of a batch and batches side by side, and what they are predicted to take: of the whole process, or of a
    GPU.
    """

    size: int
    workers: int
    predicted_peak_bytes: int
    tile_bytes: int
    """Bytes of all batches that are computed at a time."""
    largest_bytes: int
    """Bytes that one large block may add before anybody looks."""


class Encoder:
    """A frozen network that makes features `(N, D)` of patches, on its device, for as many bags as there are."""

    def __init__(
        self,
        network: nn.Module,
        *,
        memory: str | int | None = None,
        device: str | Device = "cpu",
        precision: str | None = None,
    ) -> None:
        """Move the network to the device, in eval mode, its weights as convolutions of channels-last patches read them.

        `memory` is the peak of the process, or on a GPU of the device; `precision` is "bfloat16" or "float16", as
        autocast would, or None for the network's own. Raises `ConfigError` for what is neither, and for an unknown
        device.
        """
        if precision not in (None, *_HALF):
            raise ConfigError(f"unknown precision {precision!r}; use one of {', '.join(_HALF)}, or None")
        self.device, self._budget_bytes = device_for(device), bytes_or_none(memory)
        here = self.device.torch_device
        network = network.eval().requires_grad_(False).to(here)
        self.network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.precision = precision
        self._by_onednn = self.device.is_host and precision is None and onednn_is_faster()
        self._lock: AbstractContextManager[Any] = nullcontext() if self.device.is_host else threading.Lock()
        self._counted: dict[object, tuple[WholeCost, int]] = {}

    @cached_property
    def digest(self) -> str:
        """Digest what features follow from beside the patches: weights, buffers, and the plain settings and functions
        of modules, as they are when it is first asked for.
        """
        digest = hashlib.sha256(repr(self.precision).encode())
        for name, module in self.network.named_modules():
            kind = type(module)
            settings = sorted(
                (key, text) for key, value in vars(module).items() if (text := _text_of(value)) is not None
            )
            digest.update(repr((name, kind.__module__, kind.__qualname__, settings)).encode())
        for name, tensor in _tensors(self.network):
            digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
            digest.update(as_bytes(tensor).numpy())
        return digest.hexdigest()

    def length(self, bag: Bag) -> int:
        """Return the number of features of a patch. Raises `ModelError` where they are no row for each patch."""
        return self._count(bag, 1)[1]

    def batches(self, bag: Bag) -> Batches:
        """Choose the largest batches that fit, up to 16 patches (128 on a GPU), as many side by side as there are
        threads. Raises `BudgetError` where one patch at a time does not fit, and `ModelError` as `length` does.
        """
        if self._budget_bytes is not None:
            self.device.trim()
        threads, largest = torch.get_num_threads(), _BATCH.get(self.device.kind, _BATCH["cuda"])
        room = self._budget_bytes
        if room is None and (free := self.device.free_bytes()) is not None:
            room = self.device.held_bytes() + free
        sizes = [largest >> halvings for halvings in range(largest.bit_length())]
        tried = [(size, threads) for size in sizes] + [(1, workers) for workers in range(threads - 1, 0, -1)]
        for size, workers in tried:
            found = self._predicted(bag, size, workers)
            if room is None or found.predicted_peak_bytes <= room:
                return found
        if self._budget_bytes is None:
            return found
        needed = found.predicted_peak_bytes
        raise BudgetError(
            f"patches of {bag.name} cannot be encoded one by one",
            budget_bytes=self._budget_bytes,
            needed_bytes=needed,
            smallest_bytes=needed + ROOM_BYTES,
        )

    def features(self, bag: Bag, batches: Batches | None = None) -> Generator[tuple[int, Features], None, None]:
        """Yield the features of each batch in order, with the number of its first patch.

        Raises as `batches` does, `ImageError` where the bag cannot be read, and whatever the network raises.
        """
        batches = self.batches(bag) if batches is None else batches
        self.device.let_go()
        guard = self.device.memory_guard(batches.predicted_peak_bytes, self._budget_bytes)
        guard.begin_pass(batches.tile_bytes, 0, batches.largest_bytes)

        def compute(start: int) -> tuple[int, Features]:
            found = self._compute(bag, start, min(start + batches.size, len(bag)))
            guard.tile_done()
            return start, found

        try:
            with (
                SideThreads(batches.workers, "gigagrad-encode") as threads,
                operator_threads(1),
                guard.computing_whole(),
            ):
                yield from ahead(range(0, len(bag), batches.size), compute, threads, batches.workers)
        finally:
            guard.close()

    def _compute(self, bag: Bag, start: int, stop: int) -> Features:
        patches = read_tensor(bag, start, stop)
        linear = LinearByOneDnn() if self._by_onednn else nullcontext()
        with self._lock, torch.no_grad(), self._autocast(self.device.torch_device.type), linear:
            here = patches.to(self.device.torch_device).contiguous(memory_format=torch.channels_last)
            features = self.network(here)
            features = features.to(torch.promote_types(features.dtype, torch.float32))  # NumPy has no bfloat16
        found: Features = features.cpu().numpy()
        return found

    def _autocast(self, device: str) -> AbstractContextManager[Any]:
        return nullcontext() if self.precision is None else torch.autocast(device, dtype=_HALF[self.precision])

    def _predicted(self, bag: Bag, size: int, workers: int) -> Batches:
        """Predict what batches take: of a GPU one is computed at a time, and readers take the host's memory."""
        cost, length = self._count(bag, size)
        at_a_time = workers if self.device.is_host else 1
        pixel_bytes = size * prod(bag.shape[1:]) * torch_dtype(bag.dtype).itemsize
        batch_bytes = 2 * pixel_bytes + cost.peak_bytes  # as they are read, and channels last
        linear = [module.weight for module in self.network.modules() if isinstance(module, nn.Linear)]
        linear = linear if self._by_onednn else []
        batch_bytes += max((weight.nbytes for weight in linear), default=0)  # in the order that oneDNN likes
        tile_bytes = at_a_time * int(batch_bytes * (1 + ALLOCATOR_FRAGMENTATION))
        readers_bytes = bag.cache_bytes + workers * bag.thread_bytes if self.device.is_host else 0
        dtypes = [torch.float32 if self.precision is None else _HALF[self.precision]]
        fixed = (
            self.device.held_bytes()
            + self.device.step_bytes()
            + self.device.compiled_bytes(2 * (cost.compiled + len(linear)), dtypes)  # of whole batches, and of the last
            + 2 * workers * size * length * 4  # waiting for their turn
        )
        largest = unseen_bytes(cost)
        return Batches(size, workers, fixed + readers_bytes + tile_bytes + largest, tile_bytes, largest)

    def _count(self, bag: Bag, size: int) -> tuple[WholeCost, int]:
        """Count what a batch takes, on fake tensors, and the features of a patch."""
        key = size, bag.shape[1:], bag.dtype
        if key not in self._counted:
            self._counted[key] = self._on_fakes(bag, size)
        return self._counted[key]

    def _on_fakes(self, bag: Bag, size: int) -> tuple[WholeCost, int]:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            fakes = {name: _like(tensor) for name, tensor in _tensors(self.network)}
            patches = torch.empty((size, *bag.shape[1:]), dtype=torch_dtype(bag.dtype))
            patches = patches.contiguous(memory_format=torch.channels_last)

        def run(images: tuple[torch.Tensor, ...], target: None = None) -> Any:
            with self._autocast("cpu"):
                return functional_call(self.network, fakes, images)

        try:
            with mode, torch.no_grad():
                found = run((patches,))
        except GigagradError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise ModelError(f"the encoder does not take patches {tuple(bag.shape[1:])}: {reason}") from error
        if not isinstance(found, torch.Tensor) or found.ndim != 2 or len(found) != size:
            shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ModelError(
                f"the encoder makes {shape} of {size} patches; expected one row for each, (N, D): pool over pixels or "
                "tokens, and return a tensor"
            )
        cost = count_whole(SimpleNamespace(plainly=run, parameters=tuple), ((patches,),), mode, backward=False)
        assert cost is not None  # it has just run
        return cost, found.shape[1]


def read_tensor(bag: Bag, start: int, stop: int) -> torch.Tensor:
    """Read patches of a bag as a tensor. Raises as `Bag.read` does."""
    patches = bag.read(start, stop)
    if isinstance(patches, torch.Tensor):
        return patches
    return torch.from_numpy(patches if patches.flags.writeable else patches.copy())


def _tensors(network: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(network.named_parameters(), network.named_buffers())


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _text_of(value: object) -> str | None:
    """Write a setting of a module, a function by its name, as it is in every process; None where that is not known."""
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value) if _is_plain(value) else None


def _is_plain(value: object) -> bool:
    """Say whether a value is written the same in every process."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


_CPUINFO: Final = Path("/proc/cpuinfo")


@cache
def onednn_is_faster() -> bool:
    """Say whether this is a processor of AMD with AVX-512, and PyTorch has oneDNN."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    capable = has_onednn and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return capable and hasattr(torch.ops.mkldnn, "_linear_pointwise") and "AuthenticAMD" in _cpuinfo()


def _cpuinfo() -> str:
    try:
        return _CPUINFO.read_text()
    except OSError:
        return ""


class LinearByOneDnn(TorchFunctionMode):
    """A context in which this thread's `F.linear` of float32 tensors on the CPU is oneDNN's, without gradients.

    Sums are rounded in another order than MKL's, to which PyTorch gives them. That takes vectors of 32 bytes on AMD's
    processors, whose AVX-512 has 64: of a core of an EPYC (Zen 5) a linear layer reaches 108 GFLOP/s, by oneDNN 240.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not kwargs:
            x, weight, bias = (*args, None)[:3]
            alike = all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in (x, weight))
            if alike and weight.ndim == 2:
                return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return func(*args, **(kwargs or {}))
