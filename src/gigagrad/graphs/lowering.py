"""Rewrites of ATen operators into local operators, field sums and global arithmetic.

A mean over the image is a field sum divided by a count; a loss that reduces is the same loss without reduction, a field
sum and a division. After lowering, `gigagrad.field_sum` is the only reduction there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gigagrad.graphs.builder import Builder
from gigagrad.graphs.graph import Ref, references
from gigagrad.graphs.rows.pointwise import PIXEL_LOSSES
from gigagrad.graphs.rows.resampling import RESIZING
from gigagrad.graphs.table import Refused

Lowering = Callable[[Builder, str, dict[str, Any]], Any]
_NONE, _MEAN = 0, 1  # ATen's codes for a loss's reduction; 2 is the sum


def lower(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
    """Append the operator, rewritten if it needs to be. The result is a `Ref`, or a list of them for split outputs."""
    reads_field = any(builder.is_field(ref) for ref in references(arguments))
    if reads_field and op in _REFUSALS:
        raise Refused(_REFUSALS[op])
    rewrite = _STRUCTURE.get(op) or (_REDUCTIONS.get(op) if reads_field else None)
    return builder.call(op, arguments) if rewrite is None else rewrite(builder, op, arguments)


def _spatial_dims(builder: Builder, field: Ref, dims: list[int] | None) -> tuple[list[int], int]:
    """The reduced axes (positive) and how many of them are spatial."""
    node = builder.node(field)
    rank = len(node.shape)
    positive = list(range(rank)) if not dims else [dim % rank for dim in dims]
    assert node.axes is not None
    return positive, sum(axis + rank in positive for axis in node.axes)


def _sum(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    field = arguments["self"]
    if arguments.get("dtype") is not None:
        field = builder.aten("_to_copy.default", field, dtype=arguments["dtype"])
    dims, spatial = _spatial_dims(builder, field, arguments.get("dim"))
    if spatial == 0:
        return builder.call(op, arguments)
    total = builder.field_sum(field, dims, keepdim=bool(arguments.get("keepdim")))
    if "mean" not in op:
        return total
    return builder.aten("div.Tensor", total, math.prod(builder.node(field).shape[dim] for dim in dims))


def _global_average(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    if list(arguments["output_size"]) != [1, 1]:
        raise Refused(f"adaptive pooling to {tuple(arguments['output_size'])}; only (1, 1) has a rule")
    arguments = {"self": arguments["self"], "dim": [-2, -1], "keepdim": True, "dtype": None}
    return _sum(builder, "aten.mean.dim", arguments)


def _reduced(builder: Builder, pixels: Ref, reduction: int) -> Ref:
    total = builder.field_sum(pixels)
    if reduction != _MEAN:
        return total
    return builder.aten("div.Tensor", total, math.prod(builder.node(pixels).shape))


def _pixel_loss(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    pixels = builder.call(op, {**arguments, "reduction": _NONE})
    return pixels if arguments["reduction"] == _NONE else _reduced(builder, pixels, arguments["reduction"])


def _cross_entropy(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    pixels = builder.call(op, {**arguments, "reduction": _NONE})
    if arguments["reduction"] == _NONE:
        return pixels
    target = arguments["target"]
    if arguments["reduction"] != _MEAN or builder.node(target).dtype.is_floating_point:
        # Class probabilities as target: PyTorch's mean divides by the number of positions.
        return _reduced(builder, pixels, arguments["reduction"])
    total = builder.field_sum(pixels)
    weights = builder.call(
        "gigagrad.class_weights",
        {"target": target, "weight": arguments["weight"], "ignore_index": arguments["ignore_index"]},
    )
    mean = builder.aten("div.Tensor", total, builder.field_sum(weights))
    return builder.aten("_to_copy.default", mean, dtype=builder.node(pixels).dtype)


def _split(builder: Builder, op: str, arguments: dict[str, Any]) -> list[Ref]:
    field, dim = arguments["self"], arguments["dim"]
    size = builder.node(field).shape[dim]
    if op == "aten.unbind.int":
        return [builder.aten("select.int", field, dim, index) for index in range(size)]
    sizes = arguments.get("split_sizes") or arguments.get("split_size")
    if isinstance(sizes, int):
        sizes = [min(sizes, size - start) for start in range(0, size, sizes)]
    if op == "aten.chunk.default":
        step = -(-size // arguments["chunks"])
        sizes = [min(step, size - start) for start in range(0, size, step)]
    assert isinstance(sizes, list | tuple)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        builder.aten("slice.Tensor", field, dim, start, start + length, 1)
        for start, length in zip(starts, sizes, strict=True)
    ]


def _stack(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    parts = [builder.aten("unsqueeze.default", part, arguments["dim"]) for part in arguments["tensors"]]
    return builder.aten("cat.default", parts, arguments["dim"])


def _cat(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    """Joined to fields, a value without spatial axes (DeepLab's image pooling) becomes a field of constants."""
    parts: list[Ref] = arguments["tensors"]
    field = next((part for part in parts if builder.is_field(part)), None)
    rank = len(builder.node(parts[0]).shape)
    if field is None or all(builder.is_field(part) for part in parts) or arguments["dim"] % rank != 1:
        return builder.call(op, arguments)
    plane = builder.aten("slice.Tensor", field, 1, 0, 1, 1)

    def spread(part: Ref) -> Ref:
        node = builder.node(part)
        if node.is_field:
            return part
        zeros = builder.aten("zeros_like.default", plane, dtype=node.dtype)
        return builder.aten("add.Tensor", zeros, node.arguments["self"] if node.op == "aten.expand.default" else part)

    return builder.call(op, {**arguments, "tensors": [spread(part) for part in parts]})


def _upsample(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    """One pixel, resized: the same value everywhere, which as a view takes no memory."""
    node = builder.node(arguments["input"])
    resized = builder.call(op, arguments)
    if node.is_field or node.shape[-2:] != (1, 1):
        return resized
    return builder.aten("expand.default", arguments["input"], list(builder.node(resized).shape))


def _broadcast(builder: Builder, op: str, arguments: dict[str, Any]) -> list[Ref]:
    shape = tuple(torch.broadcast_shapes(*(builder.node(part).shape for part in arguments["tensors"])))  # type: ignore[no-untyped-call]
    return [
        part if builder.node(part).shape == shape else builder.aten("expand.default", part, list(shape))
        for part in arguments["tensors"]
    ]


def _pool_with_indices(builder: Builder, op: str, arguments: dict[str, Any]) -> list[Ref]:
    return [builder.call("aten.max_pool2d.default", arguments)]


def _batch_norm(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
    if arguments.get("training"):
        raise Refused(_BATCH_STATISTICS)
    return builder.call(op, arguments)


def _copy(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    """`x[...] = y` after functionalisation: y in the place, shape and dtype of x, whose own values are not read.

    ATen's own operator has no derivative outside of autograd's in-place form.
    """
    place: Ref = arguments["self"]
    value: Ref = arguments["src"]
    dtype = builder.node(place).dtype
    if builder.node(value).dtype != dtype:
        value = builder.aten("_to_copy.default", value, dtype=dtype)
    if builder.node(value).shape == builder.node(place).shape and builder.is_field(value) == builder.is_field(place):
        return value
    return builder.aten("add.Tensor", builder.aten("zeros_like.default", place), value)


_BATCH_STATISTICS = (
    "batch normalisation with the statistics of the image itself has no row yet; "
    "call model.eval() before, or freeze the layer"
)
_REFUSALS = {
    **{
        f"aten.{name}": _BATCH_STATISTICS
        for name in ("_native_batch_norm_legit_functional.default", "_native_batch_norm_legit.no_stats")
    },
    "aten.native_dropout.default": "random operators have no row yet; call model.eval() before, or set p to 0",
    "aten.group_norm.default": "group normalisation over the image's own pixels has no row yet",
    "aten.instance_norm.default": "instance normalisation over the image's own pixels has no row yet",
}
"""Operators that many networks have and that need more than a row: why, and what to do until they are here."""

_STRUCTURE: dict[str, Lowering] = {
    "aten.batch_norm.default": _batch_norm,
    "aten.broadcast_tensors.default": _broadcast,
    "aten.cat.default": _cat,
    "aten.chunk.default": _split,
    "aten.copy.default": _copy,
    "aten.max_pool2d_with_indices.default": _pool_with_indices,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.stack.default": _stack,
    "aten.unbind.int": _split,
    **dict.fromkeys(RESIZING, _upsample),
}
"""Rewritten wherever they stand: several outputs become several nodes."""

_REDUCTIONS: dict[str, Lowering] = {
    **{f"aten.{name}.default": _pixel_loss for name in PIXEL_LOSSES},
    "aten.adaptive_avg_pool2d.default": _global_average,
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten.mean.default": _sum,
    "aten.mean.dim": _sum,
    "aten.nll_loss_nd.default": _cross_entropy,
    "aten.sum.default": _sum,
    "aten.sum.dim_IntList": _sum,
}
"""Rewritten where they read a field; on values without spatial axes they are arithmetic like any other."""
