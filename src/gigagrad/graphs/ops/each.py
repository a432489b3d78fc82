"""Rules of operators that take the items of a batch apart, for fields whose patches are the batch.

A convolution, a pool, attention within a patch or a product of matrices computes every item by itself. So on a tile it
is PyTorch's operator on fewer items, whatever it does within one. Its name in a graph is `each.` and that of the
operator, which may have another rule for images.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final

import torch

from gigagrad.boxes import Span
from gigagrad.graphs.graph import EACH, Axes, Node
from gigagrad.graphs.op_rules import (
    Bound,
    Call,
    NotTileable,
    Pointwise,
    Saved,
    Site,
    Whole,
    aten,
    common_axes,
    lookup,
    plain,
    register,
)
from gigagrad.graphs.ops.resampling import RESIZING
from gigagrad.graphs.ops.windows import OfWeight, filled
from gigagrad.work import Work

Check = Callable[[Call, int], None]
"""Raises `NotTileable` unless the operator takes the items along an axis of its first operand apart."""


def batch_of(item_axes: int) -> Check:
    """Check that the axis is the first of as many as a batch of such items has."""

    def check(call: Call, axis: int) -> None:
        rank = len(call.operands[0].shape)
        if axis != -rank or rank != item_axes + 1:
            raise NotTileable("its batch is another axis than that of the patches")

    return check


def _first(call: Call, axis: int) -> None:
    if axis != -len(call.operands[0].shape):
        raise NotTileable("its batch is another axis than that of the patches")


def _padded(call: Call, axis: int) -> None:
    if len(call["pad" if "pad" in call.node.arguments else "padding"]) // 2 >= -axis:
        raise NotTileable("it pads the patches by others")


def _rolled(call: Call, axis: int) -> None:
    rank = len(call.operands[0].shape)
    if not call["dims"] or axis in [dim % rank - rank for dim in call["dims"]]:
        raise NotTileable("it moves values from patch to patch")


class Each(Pointwise):
    """Operators that read one field of patches, and numbers."""

    pixelwise = False

    def __init__(self, check: Check, **facts: Any) -> None:
        super().__init__(**facts)
        self._check = check

    def axes(self, call: Call, rank: int) -> Axes:
        axes = common_axes(call)
        if axes[0] != axes[1] or len(call.fields) != 1 or not call.operands[0].is_field:
            raise NotTileable("more than its first input depends on the patches")
        self._check(call, axes[0])
        return axes if rank == len(call.operands[0].shape) else (axes[0] + len(call.operands[0].shape) - rank,) * 2

    def bind(self, call: Call, site: Site) -> Bound:
        run = plain(call)

        def first(operands: Any) -> torch.Tensor:
            made: Any = run(operands)
            result: torch.Tensor = made[0] if isinstance(made, tuple) else made
            return result

        return first

    @property
    def takes_workspace(self) -> bool:
        return True

    def workspace_bytes(self, call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
        """Count a copy of the input and of the output, in vectors of channels."""
        return out_pixels * (_vector_bytes(call.operands[0]) + _vector_bytes(call.node))

    def flops(self, call: Call) -> float:
        return lookup(call.node.operator).flops(call)

    def work_of(self, call: Call) -> Work:
        return lookup(call.node.operator).work


class EachConvolution(OfWeight, Each):
    """Convolutions of patches."""

    def workspace_bytes(self, call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
        """Count unfolded windows in double precision; else what the library reorders."""
        if call.node.dtype != torch.float64:
            return super().workspace_bytes(call, out_pixels, operands)
        positions = max(prod(node.shape[2:]) for node in (call.operands[0], call.node))
        return 8 * out_pixels * prod(call.operands[1].shape[1:]) * positions

    def compiled_for(self, call: Call, axis: int, out: Span, operands: tuple[Span | None, ...]) -> tuple[int, ...]:
        return (out.length,)


def _vector_bytes(node: Node) -> int:
    channels = node.shape[1] if len(node.shape) > 2 else 1
    return node.bytes_per_pixel // channels * (filled(channels) if len(node.shape) > 2 else 1)


class Products(Pointwise):
    """Products of matrices: patches are the batch of both, or rows of the first one."""

    pixelwise = False

    def axes(self, call: Call, rank: int) -> Axes:
        (axis, other), operands = common_axes(call), call.operands
        if axis != other or not 2 <= len(operands) <= 3:
            raise NotTileable("it multiplies matrices of an image's pixels")
        *added, one, two = operands
        if any(operand.is_field or len(operand.shape) > 2 for operand in added):
            raise NotTileable("what it adds depends on the patches")
        if axis == -2 and one.is_field and not two.is_field and len(two.shape) <= 2:
            return axis, axis
        for operand in (one, two):
            if not operand.is_field and -axis <= len(operand.shape) and operand.shape[axis] > 1:
                raise NotTileable("a matrix for each patch comes from elsewhere")
        if axis >= -2 or rank < -axis:
            raise NotTileable("it sums over the patches")
        return axis, axis

    @property
    def takes_workspace(self) -> bool:
        return True

    def workspace_bytes(self, call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
        """Count copies of the fields it reads, laid out anew."""
        return out_pixels * sum(field.bytes_per_pixel for field in call.fields)

    def flops(self, call: Call) -> float:
        return super(Pointwise, self).flops(call)


OF_ATTENTION: Final = 2.5
"""The gradient of attention which holds no matrix of all pairs, in forwards: its scores are computed again."""


class Attention(Products):
    """Attention among the tokens of a patch (`F.scaled_dot_product_attention`)."""

    gradient_forwards = OF_ATTENTION

    def axes(self, call: Call, rank: int) -> Axes:
        axis, other = common_axes(call)
        if axis != other or axis > -3 or len(call.fields) < 3:
            raise NotTileable("it mixes patches")
        if any(not one.is_field and -axis <= len(one.shape) and one.shape[axis] > 1 for one in call.operands):
            raise NotTileable("a mask for each patch comes from elsewhere")
        if call["dropout_p"]:
            raise NotTileable("it draws random numbers")
        return axis, axis

    def saves(self, call: Call) -> set[int]:
        return {call.node.id, *super().saves(call)}

    def workspace_bytes(self, call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
        """Count the matrices of attention where PyTorch makes them: with a mask that gets a gradient."""
        query, key, *rest = call.operands
        scores = prod(query.shape[:-1]) * key.shape[-2] // (query.size(0) * query.size(1)) * query.dtype.itemsize
        made = 4 * scores if any(one.differentiable and not one.is_field for one in rest) else 0
        return out_pixels * made + super().workspace_bytes(call, out_pixels, operands)


_POOLS_2D = "max_pool2d avg_pool2d max_pool2d_with_indices adaptive_avg_pool2d adaptive_max_pool2d"
_RULES: dict[str, Each] = {
    **dict.fromkeys(aten("conv1d conv1d.padding conv_transpose1d"), EachConvolution(batch_of(2))),
    **dict.fromkeys(aten("conv2d conv2d.padding conv_transpose2d.input"), EachConvolution(batch_of(3))),
    **dict.fromkeys(aten(_POOLS_2D), Each(batch_of(3))),
    **dict.fromkeys(aten("max_pool1d avg_pool1d adaptive_avg_pool1d"), Each(batch_of(2))),
    **dict.fromkeys(aten("pixel_shuffle pixel_unshuffle im2col"), Each(batch_of(3), saved=Saved.NOTHING)),
    **dict.fromkeys(RESIZING, Each(batch_of(3), saved=Saved.NOTHING)),
    **dict.fromkeys(aten("group_norm instance_norm channel_shuffle"), Each(_first)),
    **dict.fromkeys(
        aten("constant_pad_nd pad reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d"),
        Each(_padded, saved=Saved.NOTHING),
    ),
    **dict.fromkeys(aten("roll"), Each(_rolled, saved=Saved.NOTHING)),
}


def takes_apart(op: str) -> bool:
    """Say whether an operator may have a rule for patches beside that for images."""
    return op in _RULES


for _op, _rule in _RULES.items():
    register(_rule, [f"{EACH}{_op}"])
register(Products(), aten("matmul bmm mm baddbmm addmm"))
register(Attention(), aten("scaled_dot_product_attention"))
register(Whole(gradient_forwards=OF_ATTENTION), ["gigagrad.attention"])
