"""Rewrite operators with several outputs or inputs as several plain ones."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch

from gigagrad.graphs.builder import STRUCTURE, Builder, rewrites
from gigagrad.graphs.graph import Ref
from gigagrad.graphs.op_rules import Whole, aten, register
from gigagrad.graphs.ops.resampling import RESIZING


@rewrites(STRUCTURE, aten("chunk split.Tensor split_with_sizes unbind.int"))
def _split(builder: Builder, op: str, arguments: dict[str, Any]) -> list[Ref]:
    field, dim = arguments["self"], arguments["dim"]
    size = builder.node(field).shape[dim]
    if op == "aten.unbind.int":
        return [builder.aten("select.int", field, dim, index) for index in range(size)]
    sizes = arguments.get("split_sizes") or arguments.get("split_size") or -(-size // arguments["chunks"])
    if isinstance(sizes, int):
        sizes = [min(sizes, size - start) for start in range(0, size, sizes)]
    edges = pairwise(accumulate(sizes, initial=0))
    return [builder.aten("slice.Tensor", field, dim, start, stop, 1) for start, stop in edges]


@rewrites(STRUCTURE, aten("to.dtype"))
def _cast(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    """Cast: `x.to(dtype)` of an exported program, which shares memory where x has that dtype."""
    return builder.to_dtype(arguments["self"], arguments["dtype"])


@rewrites(STRUCTURE, aten("clone lift_fresh_copy"))
def _clone(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    """Leave out copies of fields that lie as these do, such as dropout that drops nothing: nothing writes to either."""
    value: Ref = arguments["self"]
    node, layout = builder.node(value), arguments.get("memory_format")
    if node.is_field and not node.is_source and layout in (None, torch.preserve_format):
        return value
    return builder.aten("clone.default", value, memory_format=layout)


@rewrites(STRUCTURE, aten("stack"))
def _stack(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    parts = [builder.aten("unsqueeze.default", part, arguments["dim"]) for part in arguments["tensors"]]
    return builder.aten("cat.default", parts, arguments["dim"])


@rewrites(STRUCTURE, aten("cat"))
def _cat(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    """Join fields; a value without spatial axes among them (DeepLab's image pooling) becomes a field of constants."""
    # Some encoders hand over a level of no channels.
    parts: list[Ref] = [part for part in arguments["tensors"] if 0 not in builder.node(part).shape]
    if not parts:
        return builder.one(op, arguments)
    arguments = {**arguments, "tensors": parts}
    field = next((part for part in parts if builder.is_field(part)), None)
    rank = len(builder.node(parts[0]).shape)
    if field is None or all(builder.is_field(part) for part in parts) or arguments["dim"] % rank != 1:
        return builder.one(op, arguments)
    plane = builder.aten("slice.Tensor", field, 1, 0, 1, 1)

    def spread(part: Ref) -> Ref:
        node = builder.node(part)
        if node.is_field:
            return part
        zeros = builder.aten("zeros_like.default", plane, dtype=node.dtype)
        small: Ref = node.arguments["self"] if node.op == "aten.expand.default" else part
        return builder.aten("add.Tensor", zeros, small)

    return builder.one(op, {**arguments, "tensors": [spread(part) for part in parts]})


@rewrites(STRUCTURE, RESIZING)
def _upsample(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    """Resize; one pixel becomes the same value everywhere, which as a view takes no memory."""
    node = builder.node(arguments["input"])
    resized = builder.one(op, arguments)
    if node.is_field or node.shape[-2:] != (1, 1):
        return resized
    pixel: Ref = arguments["input"]
    return builder.aten("expand.default", pixel, list(builder.node(resized).shape))


@rewrites(STRUCTURE, aten("broadcast_tensors"))
def _broadcast(builder: Builder, op: str, arguments: dict[str, Any]) -> list[Ref]:
    shape = tuple(torch.broadcast_shapes(*(builder.node(part).shape for part in arguments["tensors"])))  # type: ignore[no-untyped-call]
    return [
        part if builder.node(part).shape == shape else builder.aten("expand.default", part, list(shape))
        for part in arguments["tensors"]
    ]


@rewrites(STRUCTURE, aten("max_pool2d_with_indices"))
def _pool_with_indices(builder: Builder, op: str, arguments: dict[str, Any]) -> list[Ref | None]:
    return [builder.one("aten.max_pool2d.default", arguments), None]


@rewrites(STRUCTURE, aten("copy"))
def _copy(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    """Rewrite `x[...] = y` after functionalisation: y in the shape and dtype of x, whose own values are not read.

    ATen's own operator has no derivative outside of autograd's in-place form.
    """
    place: Ref = arguments["self"]
    value: Ref = arguments["src"]
    value = builder.to_dtype(value, builder.node(place).dtype)
    if builder.node(value).shape == builder.node(place).shape and builder.is_field(value) == builder.is_field(place):
        return value
    return builder.aten("add.Tensor", builder.aten("zeros_like.default", place), value)


@rewrites(STRUCTURE, ["gigagrad.with_value.default"])
def _with_value(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    """Take a value whose gradient goes to another one: the value alone where that has none."""
    value: Ref = arguments["value"]
    if not builder.node(arguments["tracked"]).differentiable:
        return builder.aten("detach.default", value) if builder.node(value).differentiable else value
    return builder.one(op, arguments)


@rewrites(STRUCTURE, aten("new_empty new_zeros new_ones new_full"))
def _zeros_of_size(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    """Rewrite `x.new_zeros(size)` and its kin, which take nothing from x but dtype and device."""
    node = builder.node(arguments["self"])
    value = {"new_ones": 1, "new_full": arguments.get("fill_value")}.get(op.split(".")[1], 0)
    dtype = arguments.get("dtype") or node.dtype
    if node.is_field and tuple(arguments["size"]) == node.shape:
        return builder.aten("full_like.default", arguments["self"], value, dtype=dtype)
    return builder.aten("full.default", list(arguments["size"]), value, dtype=dtype, device=torch.device("cpu"))


@rewrites(STRUCTURE, aten("empty_like"))
def _empty_like(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    return builder.aten("zeros_like.default", arguments["self"], dtype=arguments.get("dtype"))


register(Whole(on_images=True), aten("max_pool2d_with_indices"))
