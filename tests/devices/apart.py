"""A device whose memory is its own, simulated: what a GPU refuses is refused here, too.

Its tensors hold their numbers where PyTorch's operators on the host don't find them. An operator that is given one of
them and a tensor of the host raises, as CUDA's do, unless it copies from one to the other or the host's is one number.
Made with PyTorch's hook for backends in Python (`PrivateUse1`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from gigagrad.devices import Device, Machine, register_device

NAME = "apart"
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

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    name = func._schema.name
    strangers = [one for one in given if not isinstance(one, ApartTensor) and one.ndim]
    if strangers and name not in _COPIES:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {NAME}:0 and cpu")
    device = kwargs.get("device")
    stays = device is None or torch.device(device).type == NAME
    kwargs = {**kwargs, "device": _HERE} if device is not None else kwargs
    inner_args, inner_kwargs = tree_map_only(ApartTensor, lambda one: one.numbers, (args, kwargs))
    found = func(*inner_args, **inner_kwargs)
    known = {id(one.numbers): one for one in given if isinstance(one, ApartTensor)}

    def outside(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        if id(one) in known:
            return known[id(one)]
        return ApartTensor(one) if stays else one

    if name == "aten::copy_":  # its target may be the host's
        return args[0]
    return tree_map(outside, found)


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

    def machine(self, say: object = None) -> Machine:
        return Machine(flops_per_second=1e12)


_setup_privateuseone_for_python_backend(NAME)
getattr(torch, NAME).get_amp_supported_dtype = list  # checkpoints ask every backend
_library = torch.library.Library("aten", "IMPL")


def _empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    return ApartTensor(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> torch.Tensor:
    return ApartTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> torch.Tensor:
    return _run(torch.ops.aten.copy_.default, (target, source), {})


_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
