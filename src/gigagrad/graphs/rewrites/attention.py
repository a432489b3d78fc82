"""Rewrite attention among very many positions as one operator that holds no matrix of all pairs.

PyTorch's fused kernels compute it in blocks (FlashAttention, Dao et al., 2022), exactly but for the order of sums. They
want four axes, one width of keys and values, and rows that lie together (`operators.attention`); models that write the
softmax between two products never reach them.
"""

from __future__ import annotations

from contextlib import suppress
from math import prod
from typing import Any

from gigagrad.graphs.builder import STRUCTURE, Builder, rewrites
from gigagrad.graphs.graph import SCATTER, Node, Ref, references
from gigagrad.graphs.op_rules import NotTileable, aten
from gigagrad.graphs.rewrites.reductions import weighted_sum

_PRODUCTS = {"aten.matmul.default": ("self", "other"), "aten.bmm.default": ("self", "mat2")}
_SOFTMAX = aten("softmax.int _softmax")
_SCALES = aten("mul.Tensor div.Tensor mul.Scalar div.Scalar")


@rewrites(STRUCTURE, _PRODUCTS)
def _product(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    """Compute `softmax(scale * query @ key) @ value` of whole fields without its scores, where these are the most; few
    rows of weights times features of patches as sums over patches.
    """
    if (tiled := _in_tiles(builder, op, arguments)) is not None:
        return tiled
    weights, value = (arguments[name] for name in _PRODUCTS[op])
    if (found := _scores(builder, weights)) is not None:
        query, key, scale = found
        attended = _attention(builder, query, builder.aten("transpose.int", key, -2, -1), value, scale)
        if attended is not None:
            return attended
    return weighted_sum(builder, op, arguments)


@rewrites(STRUCTURE, aten("scaled_dot_product_attention"))
def _kernel(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    """Compute attention of whole fields that PyTorch's own kernels would refuse, and do with a matrix of all pairs."""
    if (tiled := _in_tiles(builder, op, arguments)) is not None:
        return tiled
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if not (arguments["dropout_p"] or arguments["attn_mask"] or arguments["is_causal"]):
        scale = arguments["scale"] or builder.node(query).shape[-1] ** -0.5
        attended = _attention(builder, query, key, value, scale)
        if attended is not None:
            return attended
    return builder.one(op, arguments)


def _in_tiles(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref | None:
    """Append the operator where it has tiles: it is among the tokens of a patch."""
    with suppress(NotTileable):
        if any(map(builder.is_field, references(arguments))):
            return builder.one(op, arguments)
    return None


def _scores(builder: Builder, weights: Ref) -> tuple[Ref, Ref, float] | None:
    """Find query, key `(..., E, M)` and scale of softmax weights; None where they are something else."""
    softmax = _made_by(builder, weights)
    if softmax.op not in _SOFTMAX or softmax.arguments["dim"] not in (-1, len(softmax.shape) - 1):
        return None
    scaled, scale = _made_by(builder, softmax.arguments["self"]), 1.0
    if softmax.dtype != scaled.dtype:
        return None
    while scaled.op in _SCALES:
        other = scaled.arguments["other"]
        if isinstance(other, Ref):
            return None
        scale = scale * other if ".mul" in scaled.op else scale / other
        scaled = _made_by(builder, scaled.arguments["self"])
    if scaled.op not in _PRODUCTS:
        return None
    query, key = (scaled.arguments[name] for name in _PRODUCTS[scaled.op])
    return query, key, float(scale)


def _made_by(builder: Builder, value: Ref) -> Node:
    """Return what made a value, behind copies of it."""
    node = builder.node(value)
    while node.op in ("aten.clone.default", SCATTER):
        node = builder.node(node.arguments["value" if node.op == SCATTER else "self"])
    return node


def _uncopied(builder: Builder, value: Ref) -> Ref:
    """Return the value, transposed or not, without copies of it: nothing writes to them, and kernels read rows wherever
    they lie.
    """
    node = builder.node(value)
    if node.op not in ("aten.clone.default", "aten.transpose.int"):
        return value
    copied: Ref = node.arguments["self"]
    own = _uncopied(builder, copied)
    if node.op == "aten.clone.default" or own == copied:
        return own if node.op == "aten.clone.default" else value
    return builder.aten("transpose.int", own, node.arguments["dim0"], node.arguments["dim1"])


def _attention(builder: Builder, query: Ref, key: Ref, value: Ref, scale: float) -> Ref | None:
    """Append attention among whole values; None where it is not that, or saves nothing."""
    query, key, value = (builder.gather(_uncopied(builder, one)) for one in (query, key, value))
    nodes = [builder.node(one) for one in (query, key, value)]
    (*batch, rows, width), (*of_keys, columns, same), (*of_values, _, _) = (node.shape for node in nodes)
    if not any(node.whole for node in nodes) or not batch == of_keys == of_values or width != same:
        return None
    if prod(batch) * rows * columns <= sum(prod(node.shape) for node in nodes):
        return None
    given = {"query": query, "key": key, "value": value, "scale": scale}
    return builder.one("gigagrad.attention", given)
