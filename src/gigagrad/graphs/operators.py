"""Find the function that runs an operator, and its argument names, by the operator's name.

ATen operators are resolved through `torch.ops`; the few of our own (made by lowering) are defined here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from gigagrad.graphs.draws import draws
from gigagrad.graphs.graph import EACH, FIELD_MAX, FIELD_SUM, MOMENTS, Node, substitute
from gigagrad.graphs.statistics import (
    average,
    grouped,
    mean_and_scale,
    merged,
    moments,
    normalise,
    running_mean,
    running_variance,
    variance,
)

_HALVES: Final = frozenset({torch.float16, torch.bfloat16})
_AT_ONCE: Final = 2**20
"""Values of a half precision that are copied at once where they are summed in float32."""
_DRAWN_AT_ONCE: Final = 2**15
"""Random numbers that are drawn at once: 8 bytes of bits for each."""


def class_weights(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    """Return the weight of every position's class, 0 where it is ignored: cross entropy's mean divides by their sum.

    `target` holds class ids; the result has its shape and is float64, so that a count of pixels stays exact.
    """
    kept = target != ignore_index
    if weight is None:
        return kept.to(torch.float64)
    weight = weight.to(torch.float64)
    return torch.where(kept, weight[torch.where(kept, target, 0)], weight.new_zeros(()))


def field_sum(field: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """Sum a field (or a crop: a partial sum) over `dims`, which include both spatial axes.

    Half precisions are summed in float32: the sum of a gigapixel has more digits, and in float16 more range, than its
    pixels.
    """
    if field.dtype not in _HALVES:
        return torch.sum(field, dim=dims, keepdim=keepdim)
    total: torch.Tensor = _WideSum.apply(field, dims)  # type: ignore[no-untyped-call]
    return total if keepdim else total.squeeze(dims)


class _WideSum(torch.autograd.Function):
    """Sums of half precisions in float32, the summed axes kept."""

    @staticmethod
    def forward(ctx: Any, field: torch.Tensor, dims: list[int]) -> torch.Tensor:
        ctx.shape, ctx.dtype = field.shape, field.dtype
        if field.device.type == "meta":
            return torch.sum(field, dims, keepdim=True, dtype=torch.float32)
        return _wide_sum(field, dims)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:
        return cotangents[0].to(ctx.dtype).expand(ctx.shape), None


def _wide_sum(field: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Sum a part at a time, as PyTorch copies what it sums in another dtype."""
    longest = max(dims, key=field.size)
    at_once = max(1, _AT_ONCE * field.size(longest) // max(field.numel(), 1))
    parts = torch.split(field, at_once, longest)
    return torch.stack([torch.sum(part, dims, keepdim=True, dtype=torch.float32) for part in parts]).sum(0)


def field_max(field: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """Return the largest value of a field (or of a crop) over `dims`, which include both spatial axes."""
    return torch.amax(field, dim=dims, keepdim=keepdim)


def field_bins(field: torch.Tensor, dims: list[int], weights_y: torch.Tensor, weights_x: torch.Tensor) -> torch.Tensor:
    """Sum over the bins of a grid: `(..., h, w)` with weights `(bins, h)` and `(bins, w)`.

    Every bin is a span of pixels, and what has no weight there is left out: 0 times an infinite value would be NaN.
    """
    rows: torch.Tensor = _Bins.apply(field, weights_y, -2)  # type: ignore[no-untyped-call]
    bins: torch.Tensor = _Bins.apply(rows, weights_x, -1)  # type: ignore[no-untyped-call]
    return bins


class _Bins(torch.autograd.Function):
    """Sums along one axis with weights `(bins, length)`, each bin's equal on one span and 0 elsewhere.

    Of half precisions in float32.
    """

    @staticmethod
    def forward(ctx: Any, field: torch.Tensor, weights: torch.Tensor, axis: int) -> torch.Tensor:
        shape = [len(weights) if dim - field.ndim == axis else n for dim, n in enumerate(field.shape)]
        wide = field.dtype in _HALVES
        result = field.new_zeros(shape, dtype=torch.float32 if wide else field.dtype)
        if field.device.type == "meta":
            return result
        ctx.length, ctx.axis, ctx.dtype = field.shape[axis], axis, field.dtype
        ctx.spans = []
        for bin_, row in enumerate(weights.cpu()):
            inside = row.nonzero()
            if len(inside):
                start, weight = int(inside[0]), float(row[inside[0]])
                ctx.spans.append((bin_, start, len(inside), weight))
                span = field.narrow(axis, start, len(inside))
                total = _wide_sum(span, [axis % field.ndim]).squeeze(axis) if wide else span.sum(axis)
                result.select(axis, bin_).copy_(total).mul_(weight)
        return result

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        given, axis = cotangents[0].to(ctx.dtype), ctx.axis
        shape = [ctx.length if dim - given.ndim == axis else size for dim, size in enumerate(given.shape)]
        gradient = given.new_zeros(shape)
        for bin_, start, length, weight in ctx.spans:
            gradient.narrow(axis, start, length).add_(given.narrow(axis, bin_, 1), alpha=weight)
        return gradient, None, None


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute `softmax(scale * query @ key^T) @ value` of `(..., N, E)`, `(..., M, E)` and `(..., M, F)`.

    PyTorch's kernels that hold no `(N, M)` take four axes, one width, and rows that lie together: axes of 1 go in
    front, and zeros behind what is narrower, which add nothing.
    """
    shape, width = (*query.shape[:-1], value.shape[-1]), max(query.shape[-1], value.shape[-1])

    def as_kernels_take(one: torch.Tensor) -> torch.Tensor:
        one = one.reshape(*[1] * (4 - one.ndim), *one.shape) if one.ndim < 4 else one.flatten(0, one.ndim - 4)
        if one.shape[-1] < width:
            return F.pad(one, (0, width - one.shape[-1]))
        return one if one.stride(-1) == 1 else one.contiguous()

    query, key, value = map(as_kernels_take, (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, scale=scale)[..., : shape[-1]].reshape(shape)


def gather(field: torch.Tensor) -> torch.Tensor:
    """Return the whole field as it is."""
    return field


def item(outputs: Any, index: int) -> Any:
    """Return one output of an operator that has several."""
    return outputs[index]


def numbered(like: torch.Tensor, starts: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """`sum((start + index) * stride)` over all axes: numbers for the values of a crop at `starts`; int64."""
    number = torch.zeros((), dtype=torch.int64, device=like.device)
    for start, size, stride in zip(starts or [0] * like.ndim, like.shape, strides, strict=True):
        number = number[..., None] + torch.arange(start, start + size, device=like.device) * stride
    return number


def positions(like: torch.Tensor, starts: Sequence[int] = (), shape: Sequence[int] = ()) -> torch.Tensor:
    """Number every value's pixel, row by row over the whole field; int64. The crop lies as in `uniform`."""
    return numbered(like, starts, (*[0] * (like.ndim - 2), (shape or like.shape)[-1], 1))


def seed() -> torch.Tensor:
    """Draw a key for `uniform` from PyTorch's generator: one for each random operator and run."""
    return torch.randint(0, 2**62, ())


def scrambled(counter: torch.Tensor, key: torch.Tensor | int) -> torch.Tensor:
    """Make 64 random-looking bits of every number of `counter` (int64): SplitMix64 (Steele, Lea and Flood, 2014).

    In place on one new tensor: a value costs a dozen integer operations, and fresh memory would cost more than those.
    """
    bits = (counter + 1).mul_(_int64(0x9E3779B97F4A7C15)).add_(key)
    high = torch.empty_like(bits)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None)):
        torch.bitwise_right_shift(bits, shift, out=high)
        high &= (1 << (64 - shift)) - 1  # the shift copies the sign
        bits ^= high
        if factor:
            bits *= _int64(factor)
    return bits


def uniform(
    like: torch.Tensor, seed: torch.Tensor, starts: Sequence[int] = (), shape: Sequence[int] = ()
) -> torch.Tensor:
    """Draw uniform numbers in [0, 1) for a field or for a crop at `starts` of one of this shape.

    Each is a function of the key and of the value's place in the whole field. float64 for float64 fields, else float32.
    """
    strides = meta(shape or like.shape, like.dtype).stride()  # of a contiguous tensor
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    drawn = torch.empty(like.shape, dtype=dtype, device=like.device)
    _fill(drawn, seed.to(like.device), starts or [0] * like.ndim, strides)
    return drawn


def _fill(drawn: torch.Tensor, seed: torch.Tensor, starts: Sequence[int], strides: Sequence[int]) -> None:
    """Fill a crop with uniform numbers: on a processor part by part, each of which stays in the cache."""
    if drawn.numel() > _DRAWN_AT_ONCE and drawn.device.type == "cpu":
        axis = next(axis for axis, size in enumerate(drawn.shape) if size > 1)
        half = drawn.shape[axis] // 2
        for start, part in zip((0, half), drawn.tensor_split([half], axis), strict=True):
            _fill(part, seed, [at + start * (i == axis) for i, at in enumerate(starts)], strides)
        return
    bits = scrambled(numbered(drawn, starts, strides), seed)
    digits = 53 if drawn.dtype == torch.float64 else 24
    drawn.copy_(bits.bitwise_right_shift_(64 - digits).bitwise_and_((1 << digits) - 1)).mul_(2.0**-digits)


def _int64(value: int) -> int:
    """Return the signed number with the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(class_weights, field_sum, field_max, field_bins, moments, grouped, average, variance, mean_and_scale),
    *(running_mean, running_variance, normalise),
    *(attention, gather, item, positions, seed, uniform),
)
_OWN = {f"gigagrad.{own.__name__}": own for own in _FUNCTIONS}
"""Their arguments are those that have no default: the others say where a crop lies, which only a row knows."""


Merge = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_MERGES: Final[Mapping[str, Merge]] = {FIELD_MAX: torch.maximum, MOMENTS: merged}


def merge_of(node: Node) -> Merge | None:
    """Return how two partial results of a reduction become one, or None if they are added up as floating point.

    Sums of integers stay integers: in float64 they would lose digits above 2^53.
    """
    if node.op == FIELD_SUM and not (node.dtype.is_floating_point or node.dtype.is_complex):
        return torch.add
    return _MERGES.get(node.op)


@cache
def function(op: str) -> Callable[..., Any]:
    """Return the callable behind an operator's name, e.g. `aten.conv2d.default`."""
    if op in _OWN:
        return _OWN[op]
    op = op.removeprefix(EACH)
    # A view asks for strides that crops and whole fields in another layout need not have.
    op = "aten.reshape.default" if op in ("aten.view.default", "aten._unsafe_view.default") else op
    namespace, name, overload = op.split(".", 2)
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return found


@cache
def signature(op: str) -> Mapping[str, Any]:
    """Return the names of all arguments, in order, and their defaults: None for those that have none."""
    if op in _OWN:
        parameters = inspect.signature(_OWN[op]).parameters.values()
        return {parameter.name: None for parameter in parameters if parameter.default is inspect.Parameter.empty}
    arguments = function(op)._schema.arguments  # type: ignore[attr-defined]
    return {a.name: a.default_value if a.has_default_value() else None for a in arguments}


@cache
def positional(op: str) -> tuple[str, ...]:
    """Return the names of the arguments that need not be given by name."""
    if op in _OWN:
        return tuple(signature(op))
    return tuple(a.name for a in function(op)._schema.arguments if not a.kwarg_only)  # type: ignore[attr-defined]


@cache
def is_view(op: str) -> bool:
    """Tell whether an operator's output shares its input's memory, as its schema declares it."""
    if op in _OWN or not op.removeprefix(EACH).startswith("aten."):
        return False
    returns = function(op)._schema.returns  # type: ignore[attr-defined]
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@cache
def is_random(op: str) -> bool:
    """Tell whether an operator draws random numbers."""
    if op in _OWN:
        return op == "gigagrad.seed"
    return draws(function(op), {})


def meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor without values."""
    return torch.empty(shape, dtype=dtype, device="meta")


def on_meta(op: str, arguments: Mapping[str, Any], operands: Iterable[Node]) -> Any:
    """Run an operator on tensors that have shapes only, in the places of the nodes that it reads."""
    metas = {node.id: meta(node.shape, node.dtype) for node in operands}
    given = {name: substitute(value, metas) for name, value in arguments.items()}
    if given.get("device") is not None:
        given["device"] = torch.device("meta")
    return call(op, given)


def flops(op: str, arguments: Mapping[str, Any], operands: Iterable[Node]) -> float:
    """Count multiplications and additions of an operator with PyTorch's counter."""
    with FlopCounterMode(display=False) as counter:
        on_meta(op, arguments, operands)
    return float(counter.get_total_flops())


def bind(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Bind positional and keyword arguments to one ordered mapping by name, defaults filled in."""
    names = signature(op)
    assert len(args) <= len(names), op
    return {**names, **dict(zip(names, args, strict=False)), **kwargs}


def call(op: str, arguments: dict[str, Any]) -> Any:
    """Run an operator on arguments bound by name."""
    return function(op)(**arguments)
