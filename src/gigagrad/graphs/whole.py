"""Count on fake tensors what the model and the loss take where PyTorch runs them by itself on the whole image.

Fake tensors have shapes and no storage, so that counting takes some 0.3 ms an operator whatever the image's size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from gigagrad.allowances import LANES, MAPPED_BYTES
from gigagrad.graphs.draws import Draw, DrawingCalls, draws
from gigagrad.graphs.sizes import CallRecorder
from gigagrad.work import Work, is_ragged, unfolded_flops

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


_READ_TWICE = frozenset({torch.ops.aten.native_batch_norm_backward})
"""Operators that go twice over the two fields that they read: to add them up, and to subtract their means."""
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
    in_place: bool = False
    """True where it writes over what it reads: its values are still in the cache."""
    ragged_bytes: int = 0
    """Bytes among those moved of channels that fill no whole vectors (`work.is_ragged`)."""


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
    draws: tuple[Draw | None, ...] | None
    """Calls that may draw random numbers, in their order, each with what it draws; None where others draw, too."""


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
            with watched or nullcontext(), meter.draws:
                result = loss_module.plainly(images, target)
            if backward and result.requires_grad:
                torch.autograd.grad(result, leaves, allow_unused=True)
    except Exception:
        return None
    return meter.cost()


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _reordered_bytes(tensor: torch.Tensor) -> int:
    """Count the bytes of a tensor in a kernel's own layout, in which channels fill whole vectors."""
    nbytes = _nbytes(tensor)
    channels = tensor.shape[1] if tensor.ndim > 2 else 0
    return nbytes * (-(-channels // LANES) * LANES) // channels if channels else nbytes


def _convolution_efforts(packet: Any, args: tuple[Any, ...], result: Any, flops: float) -> Iterator[Effort]:
    """Yield one effort for an output, or one for each gradient that is asked for."""
    if packet is torch.ops.aten.convolution:
        yield _kernel(args[0], result, args[1], args[8], transposed=args[6], of_weight=False, flops=flops)
        return
    cotangent, field, weight = args[:3]
    asked = [of_weight for of_weight in (False, True) if args[10][of_weight]]
    for of_weight in asked:
        yield _kernel(
            field, cotangent, weight, args[9], transposed=args[7], of_weight=of_weight, flops=flops / len(asked)
        )


def _kernel(
    field: torch.Tensor,
    made: torch.Tensor,
    weight: torch.Tensor,
    groups: int,
    *,
    transposed: bool,
    of_weight: bool,
    flops: float,
) -> Effort:
    """Count one kernel of a convolution, each of which has to do with its input, its output and its weight."""
    work = Work.of_convolution(weight.shape, groups, of_weight=of_weight)
    if work is Work.UNFOLDED:
        windows = field if transposed else made
        flops = unfolded_flops(prod(windows.shape) // windows.shape[1], weight.shape, groups)
    ragged = [one for one in (field, made) if is_ragged(one.shape[1], groups)]
    if groups == 1:  # products of what fills the vectors up
        flops *= prod(_reordered_bytes(one) / _nbytes(one) for one in ragged)
    moved = _nbytes(field) + _nbytes(made) + _nbytes(weight)
    return Effort(moved, flops, work, ragged_bytes=sum(map(_nbytes, ragged)))


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Add up the storages that are alive."""

    def __init__(self, recorder: CallRecorder | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._alive: dict[int, int] = {}
        self._now = self._peak = self._small = self._most_small = self._largest = self._compiled = self._large = 0
        self._operators: list[Effort] = []
        self.draws = DrawingCalls()

    def cost(self) -> WholeCost:
        return WholeCost(
            peak_bytes=self._peak,
            small_bytes=self._most_small,
            large_bytes=self._large,
            largest_bytes=self._largest,
            compiled=self._compiled,
            operators=tuple(self._operators),
            draws=self.draws.calls,
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
        moved = sum(map(_nbytes, (*given, *made)))
        reordered = sum(map(_reordered_bytes, (*given, *made)))
        packet = func._overloadpacket
        if draws(func, {**dict(zip((one.name for one in func._schema.arguments), args, strict=False)), **kwargs}):
            self.draws.met(packet.__name__, made[0])
        if packet in _REORDERING:
            self._compiled += 2 if packet is torch.ops.aten.convolution_backward else 1
        self._peak = max(self._peak, self._now + (reordered if packet in _REORDERING else 0))
        if fresh or func._schema.is_mutable:
            count = _FLOPS.get(packet)
            flops = 0 if count is None else count(*args, **kwargs, out_val=result)
            if packet in _REORDERING:
                self._operators += _convolution_efforts(packet, args, result, flops)
            else:
                moved += sum(map(_nbytes, args[:2])) if packet in _READ_TWICE else 0
                self._operators.append(Effort(moved, flops, _WORK.get(packet, Work.VALUES), in_place=not fresh))
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
