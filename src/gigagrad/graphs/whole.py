"""Count on fake tensors what the model and the loss take where PyTorch runs them by itself on the whole image.

Fake tensors have shapes and no storage, so that counting takes some 0.3 ms an operator whatever the image's size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from gigagrad.allowances import LANES, MAPPED_BYTES
from gigagrad.graphs.sizes import CallRecorder
from gigagrad.work import Work

_REORDERING = frozenset({torch.ops.aten.convolution, torch.ops.aten.convolution_backward})
"""Operators whose kernels copy what they read and write into a layout of their own."""


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward(
    cotangent: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    found = sdpa_backward_flop_count(cotangent.shape, query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
    return int(found)


def _convolution_backward(
    cotangent: torch.Tensor, field: torch.Tensor, weight: torch.Tensor, *rest: Any, **__: Any
) -> int:
    """Count the gradients that are asked for; PyTorch's own count takes groups for products of all channels."""
    transposed, asked = rest[4], rest[-1]
    pixels = (field if transposed else cotangent).numel()
    return 2 * pixels * weight[0].numel() * (int(asked[0]) + int(asked[1]))


_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten.convolution_backward: _convolution_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""Floating point operations by operator: PyTorch's own counts leave out the attention that processors compute."""
_WORK: dict[Any, Work] = {
    **dict.fromkeys(
        (
            torch.ops.aten.upsample_nearest2d,
            torch.ops.aten.upsample_nearest2d_backward,
            torch.ops.aten.upsample_bilinear2d,
            torch.ops.aten.upsample_bilinear2d_backward,
        ),
        Work.REORDERED,
    ),
    torch.ops.aten.native_batch_norm: Work.STATISTICS,
    **dict.fromkeys(
        (torch.ops.aten.max_pool2d_with_indices, torch.ops.aten.avg_pool2d, torch.ops.aten.avg_pool2d_backward),
        Work.WINDOWS,
    ),
}
"""The work of kernels that autograd calls, where it is not by values."""


class Effort(NamedTuple):
    """One call of a kernel, as far as its time depends on it."""

    moved_bytes: int
    """Bytes read and written."""
    flops: float
    """Floating point operations."""
    work: Work
    in_place: bool
    """True where it writes over what it reads: its values are still in the cache."""


@dataclass(frozen=True, slots=True)
class WholeCost:
    """One forward, or forward and backward, of the whole image by plain autograd."""

    peak_bytes: int
    """Most bytes of tensors alive at a time beside parameters, buffers and images, gradients included."""
    small_bytes: int
    """Most bytes alive at a time in tensors below `MAPPED_BYTES`."""
    large_bytes: int
    """Bytes of all larger tensors, one after the other: pages that are new each time where these blocks are mapped."""
    largest_bytes: int
    """Bytes of the largest tensor."""
    compiled: int
    """Convolutions, each gradient of one counted, too."""
    operators: tuple[Effort, ...]
    """One for every operator that computes."""


def count_whole(
    loss_module: Any,
    inputs: Any,
    mode: FakeTensorMode,
    *,
    backward: bool,
    grad: bool | None = None,
    recorder: CallRecorder | None = None,
    watched: AbstractContextManager[object] | None = None,
) -> WholeCost | None:
    """Count what a loss module of fake tensors takes for fake inputs; None where these cannot follow it. With
    `grad` the forward is one that a backward may follow. A `recorder` writes down all operators, and the forward runs
    `watched`.
    """
    images, target = inputs[0], inputs[1] if len(inputs) > 1 else None
    leaves = [tensor for tensor in (*loss_module.parameters(), *tree_leaves(inputs)) if tensor.requires_grad]
    meter = _Meter(recorder)
    try:
        with mode, meter, torch.set_grad_enabled(backward if grad is None else grad):
            with watched or nullcontext():
                result = loss_module.plainly(images, target)
            if backward and result.requires_grad:
                torch.autograd.grad(result, leaves, allow_unused=True)
    except Exception:
        return None
    return meter.cost()


def _reordered_bytes(tensor: torch.Tensor) -> int:
    """Count the bytes of a tensor in a kernel's own layout, in which channels fill whole vectors."""
    nbytes = tensor.numel() * tensor.element_size()
    channels = tensor.shape[1] if tensor.ndim > 2 else 0
    return nbytes * (-(-channels // LANES) * LANES) // channels if channels else nbytes


def _work(packet: Any, args: tuple[Any, ...]) -> Work:
    if packet is torch.ops.aten.convolution:
        return Work.of_convolution(args[1].shape[1], args[8])
    if packet is torch.ops.aten.convolution_backward:
        return Work.of_convolution(args[2].shape[1], args[9])
    return _WORK.get(packet, Work.VALUES)


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Add up the storages that are alive."""

    def __init__(self, recorder: CallRecorder | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._alive: dict[int, int] = {}
        self._now = self._peak = self._small = self._most_small = self._largest = self._compiled = self._large = 0
        self._operators: list[Effort] = []

    def cost(self) -> WholeCost:
        return WholeCost(
            self._peak, self._most_small, self._large, self._largest, self._compiled, tuple(self._operators)
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._recorder is not None:
            self._recorder.note(str(func), args, kwargs)
        result = func(*args, **kwargs)
        given, made = (
            [value for value in tree_leaves(nest) if isinstance(value, torch.Tensor)]
            for nest in ((args, kwargs), result)
        )
        known = {tensor.untyped_storage()._cdata for tensor in given}
        fresh = [tensor for tensor in made if tensor.untyped_storage()._cdata not in known]
        for tensor in fresh:
            self._take(tensor)
        if self._recorder is not None:
            self._recorder.note(result)
        moved = sum(tensor.numel() * tensor.element_size() for tensor in (*given, *made))
        reordered = sum(map(_reordered_bytes, (*given, *made)))
        packet = func._overloadpacket
        if packet in _REORDERING:
            self._compiled += 2 if packet is torch.ops.aten.convolution_backward else 1
        self._peak = max(self._peak, self._now + (reordered if packet in _REORDERING else 0))
        if fresh or func._schema.is_mutable:
            count = _FLOPS.get(packet)
            flops = 0 if count is None else count(*args, **kwargs, out_val=result)
            self._operators.append(Effort(moved, flops, _work(packet, args), in_place=not fresh))
        return result

    def _take(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive[key] = nbytes
        if self._recorder is not None:
            self._recorder.made(tensor)
        self._add(nbytes)
        self._large += nbytes if nbytes >= MAPPED_BYTES else 0
        self._largest, self._most_small = max(self._largest, nbytes), max(self._most_small, self._small)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._add(-self._alive.pop(key))
        if self._recorder is not None:
            self._recorder.freed(key)

    def _add(self, nbytes: int) -> None:
        self._now += nbytes
        if abs(nbytes) < MAPPED_BYTES:
            self._small += nbytes
