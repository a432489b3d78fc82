"""Define the interface of a device, and the registry in which kinds of them are found by name."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch

from gigagrad.devices.buffer_pool import BufferPool
from gigagrad.devices.machine import Machine
from gigagrad.devices.streams import Streams
from gigagrad.errors import ConfigError

Say = Callable[[str], None]
"""A callable that gets one sentence for a person."""


class Recording(Protocol):
    """The kernels of some work, recorded to be asked for all at once."""

    inputs: list[torch.Tensor]
    """The tensors that they read."""
    result: Any
    """The tensors that they write, nested as the work returned them."""
    held_bytes: int
    """Bytes that it keeps from being given back."""
    used_bytes: int
    """Bytes of these in tensors."""

    def replay(self) -> None:
        """Ask for the kernels."""


class MemoryGuard:
    """Guard what a device holds while one run computes tiles. This one trusts the plan; devices have their own."""

    def begin_pass(self, tile_bytes: int, beside_bytes: int, largest_bytes: int = 0) -> None:
        """Expect the tiles computed at a time to take `tile_bytes` from now on, in blocks of up to `largest_bytes`;
        beside them `beside_bytes` come and go.
        """

    @contextmanager
    def computing_tiles(self) -> Iterator[None]:
        """Expect blocks of tiles in the block; what is taken at other times lives long."""
        yield

    @contextmanager
    def computing_whole(self) -> Iterator[None]:
        """Expect the blocks of a whole network in the block: nobody announces them."""
        yield

    def reserve(self, nbytes: int, *, for_tile: bool = False) -> None:
        """Give back memory, if need be, before so many bytes are taken at once, or by a tile in whatever thread."""

    def tile_done(self) -> None:
        """Note that a tile is computed, in whatever thread."""

    def is_short(self, tile_bytes: int, at_a_time: int) -> bool:
        """Return whether the budget has room for none of the further tiles that are computed at a time."""
        return False

    def close(self, *, keeps: bool = False) -> None:
        """End the run; `keeps`: what it freed stays with the process for the next one."""


class Device(ABC):
    """A device, by PyTorch's name for it. `memory` of `compile` bounds what `held_bytes` says.

    A kind of device is a subclass with a line in the registry (`register_device`).
    """

    kind: ClassVar[str]
    """The name in `device="cuda"`, also with an index: `"cuda:1"`."""
    is_host: ClassVar[bool] = False
    """True where its memory is the host's own, so that there is no other to keep fields in."""
    sum_dtype: ClassVar[torch.dtype] = torch.float64
    """The dtype of sums over tiles."""
    records: ClassVar[bool] = False
    """True where asking for kernels takes so long that a step is recorded once, and replayed."""

    def __init__(self, name: str, torch_device: str | None = None) -> None:
        """`torch_device`: where tensors lie, if that is not the same name. Raises ConfigError if there is none."""
        self._name, self.torch_device = name, torch.device(torch_device or name)

    def __str__(self) -> str:
        return self._name

    @abstractmethod
    def held_bytes(self) -> int:
        """Return the bytes that are held now, freed blocks included."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the most bytes that were ever held."""

    @abstractmethod
    def trim(self) -> None:
        """Give back what was freed."""

    def give_back(self, nbytes: int) -> None:
        """Give back so many bytes of what was freed, or all of it where there is no choice."""
        self.trim()

    def buffer_pool(self) -> BufferPool | None:
        """Return the pool in which memory of fields that are gone waits for the next ones until `trim`; None where that
        is the business of the device's own allocator.
        """
        return None

    def record(self, work: Callable[[Sequence[torch.Tensor]], Any], inputs: Sequence[torch.Tensor]) -> Recording:
        """Record what `work` asks for, given tensors like these; nothing is computed. Its memory is not in what is held
        or used. Raises RuntimeError where the work waits for the device.
        """
        raise NotImplementedError(f"{self} does not record")

    def streams(self) -> Streams | None:
        """Return the streams on which crops are copied beside the computation; None where copies are waited for, and on
        the host, where there are none.
        """
        return None

    def used_bytes(self, enough: int = 0) -> int | None:
        """Return the bytes held less those freed, None if unknown; what is held where that is at most `enough`."""
        return None

    def free_bytes(self, enough: int = sys.maxsize) -> int | None:
        """Return how many bytes it may give beside what is held, or at least `enough` of them; None where that is not
        known.
        """
        return None

    def step_bytes(self) -> int:
        """Estimate the bytes that a step adds beside tensors and compiled convolutions."""
        return 0

    def compiled_bytes(self, count: int, dtypes: Collection[torch.dtype]) -> int:
        """Estimate the bytes that so many convolutions in these dtypes add when all their shapes are compiled."""
        return 0

    def note_compiled(self, compiled: int) -> None:
        """Note that a plan ran for the first time: so many convolutions are compiled, and no step adds that again."""

    def tried(self, nbytes: int) -> None:
        """Note that a trial has left so many bytes of what a first step would add."""

    def let_go(self) -> None:
        """Give back what an earlier run left with the process for the next one, before a run that has no use for it."""

    def memory_guard(self, peak_bytes: int, budget_bytes: int | None) -> MemoryGuard:
        """Make the guard of one run of a plan with this peak."""
        return MemoryGuard()

    @contextmanager
    def bounded(self, peak_bytes: int) -> Iterator[None]:
        """Hold the allocator to so many bytes in the block, where it can be: more raises `torch.OutOfMemoryError`."""
        yield

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Let random operators draw from this seed in the block; every generator is as before when it is over."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed all devices
            yield

    def synchronize(self) -> None:
        """Wait for what was asked of the device."""

    @abstractmethod
    def machine(self, say: Say = lambda text: None) -> Machine:
        """Return its rates: measured ones where there are some. `say` gets a sentence if they cannot be used."""


_KINDS: dict[str, type[Device]] = {}


def register_device(kind: type[Device]) -> type[Device]:
    """Make a kind of device known by its name; usable as a decorator. A later one replaces an earlier one."""
    _KINDS[kind.kind] = kind
    return kind


def device_for(device: str | torch.device | Device) -> Device:
    """Return the device of PyTorch's name for it, or a registered kind's. Raises ConfigError for an unknown one."""
    if isinstance(device, Device):
        return device
    kind, _, index = str(device).partition(":")
    if kind not in _KINDS or (index and not index.isdigit()):
        raise ConfigError(f"unknown device {str(device)!r}; use {' or '.join(map(repr, _KINDS))}")
    return _KINDS[kind](str(device))
