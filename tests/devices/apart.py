"""A device whose memory is its own, simulated: what a GPU refuses is refused here, too.

Its tensors hold their numbers where PyTorch's operators on the host don't find them. An operator that is given one of
them and a tensor of the host raises, as CUDA's do, unless it copies from one to the other or the host's is one number.
It has streams (tests/devices/streams.py), so that a use of what has not arrived raises, too, which on CUDA would be
wrong numbers. Made with PyTorch's hook for backends in Python (`PrivateUse1`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from gigagrad.devices import Device, Machine, MemoryGuard, register_device
from tests.devices.streams import SimulatedStreams

NAME = "apart"
STREAMS = SimulatedStreams()
_HERE = torch.device("cpu")
_COPIES = frozenset({"aten::_to_copy", "aten::copy_"})


class ApartTensor(torch.Tensor):
    """Looks like a tensor of the device; `numbers` has what it holds."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> ApartTensor:
        made: ApartTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        made.numbers = inner
        return made

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    name = func._schema.name
    strangers = [one for one in given if not isinstance(one, ApartTensor) and one.ndim]
    if strangers and name == "aten::_foreach_copy_":  # between devices PyTorch takes them one by one
        for target, source in zip(*args[:2], strict=True):
            target.copy_(source)
        return None
    if strangers and name not in _COPIES:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {NAME}:0 and cpu")
    device = kwargs.get("device")
    stays = device is None or torch.device(device).type == NAME
    kwargs = {**kwargs, "device": _HERE} if device is not None else kwargs
    inner_args, inner_kwargs = tree_map_only(ApartTensor, lambda one: one.numbers, (args, kwargs))
    ours = [one.numbers for one in given if isinstance(one, ApartTensor)]
    if name == "aten::copy_" and (strangers or not isinstance(args[0], ApartTensor)):
        up, non_blocking = isinstance(args[0], ApartTensor), len(args) > 2 and bool(args[2])
        target, source = inner_args[:2]
        STREAMS.ran([] if up else ours, ours if up else [], [])
        if not STREAMS.copies(source, target, up=up, non_blocking=non_blocking):
            func(*inner_args, **inner_kwargs)
        return args[0]
    found = func(*inner_args, **inner_kwargs)
    shared = {one.untyped_storage().data_ptr() for one in ours}
    made = [one for one in tree_leaves(found) if isinstance(one, torch.Tensor) and stays]
    made = [one for one in made if one.untyped_storage().data_ptr() not in shared]
    STREAMS.ran(ours, _written(func, inner_args, inner_kwargs, ours), made)
    if (name == "aten::_to_copy" and not stays) or name == "aten::_local_scalar_dense":
        STREAMS.waits(f"{name} of {tuple(given[0].shape)}")
    known = {id(one.numbers): one for one in given if isinstance(one, ApartTensor)}

    def outside(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        if id(one) in known:
            return known[id(one)]
        return ApartTensor(one) if stays else one

    return tree_map(outside, found)


def _written(func: Any, args: Any, kwargs: Any, ours: list[torch.Tensor]) -> list[torch.Tensor]:
    """The numbers of the device's tensors that an operator writes to."""
    schema = func._schema.arguments
    named = {**dict(zip((argument.name for argument in schema), args, strict=False)), **kwargs}
    changed = [named.get(one.name) for one in schema if one.alias_info is not None and one.alias_info.is_write]
    return [one for one in tree_leaves(changed) if any(one is own for own in ours)]


@register_device
class Apart(Device):
    """Counts nothing: its memory is the host's in truth."""

    kind = NAME

    def held_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def trim(self) -> None:
        """There is nothing to give back."""

    def streams(self) -> SimulatedStreams:
        return STREAMS

    def memory_guard(self, peak_bytes: int, budget_bytes: int | None) -> MemoryGuard:
        return _InLoop()

    def machine(self, say: object = None) -> Machine:
        return Machine(flops_per_second=1e12)


class _InLoop(MemoryGuard):
    """Tells the streams when a tile loop runs."""

    @contextmanager
    def computing_tiles(self) -> Iterator[None]:
        with STREAMS.in_loop():
            yield


_setup_privateuseone_for_python_backend(NAME)
getattr(torch, NAME).get_amp_supported_dtype = list  # checkpoints ask every backend
_library = torch.library.Library("aten", "IMPL")


def _new(inner: torch.Tensor) -> ApartTensor:
    STREAMS.ran([], [], [inner])
    return ApartTensor(inner)


def _empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    return _new(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> torch.Tensor:
    return _new(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> torch.Tensor:
    return _run(torch.ops.aten.copy_.default, (target, source, non_blocking), {})


_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
