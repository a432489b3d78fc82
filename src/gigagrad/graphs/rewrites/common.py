"""Hold the tables of the rewrites, and functions that several of them call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from gigagrad.graphs.builder import Builder
from gigagrad.graphs.graph import IMAGE_AXES, Ref, references, substitute
from gigagrad.graphs.op_rules import NotTileable

Rewrite = Callable[[Builder, str, dict[str, Any]], Any]
_Rewrite = TypeVar("_Rewrite", bound=Rewrite)
STRUCTURE: dict[str, Rewrite] = {}
"""Rewrites that hold for an operator wherever it stands."""
ON_FIELDS: dict[str, Rewrite] = {}
"""Rewrites that hold only where it reads a field: on values without spatial axes it is arithmetic like any other."""


def rewrites(table: dict[str, Rewrite], operators: Iterable[str]) -> Callable[[_Rewrite], _Rewrite]:
    """Enter a function into a table as the rewrite of these operators."""

    def enter(rewrite: _Rewrite) -> _Rewrite:
        table.update(dict.fromkeys(operators, rewrite))
        return rewrite

    return enter


def spatial_dims(builder: Builder, field: Ref, dims: Sequence[int] | int | None) -> tuple[list[int], int]:
    """Return the reduced axes (positive) and how many of them are spatial."""
    node = builder.node(field)
    rank = len(node.shape)
    if isinstance(dims, int):
        dims = [dims]
    positive = list(range(rank)) if not dims else sorted({dim % rank for dim in dims})
    return positive, sum(axis + rank in positive for axis in node.spatial)


def require_nchw(builder: Builder, field: Ref) -> tuple[int, ...]:
    """Return the shape of a field laid out as (N, C, H, W). Raises `NotTileable` for any other layout."""
    node = builder.node(field)
    if node.axes != IMAGE_AXES or len(node.shape) != 4:
        raise NotTileable("its input is not laid out as (N, C, H, W)")
    return node.shape


def mean_and_variance(builder: Builder, moments: Ref, correction: float = 0) -> tuple[Ref, Ref]:
    """Compute mean and variance of moments in float64; the variance by the number of values less `correction`."""
    mean = builder.one("gigagrad.average", {"moments": moments})
    return mean, builder.one("gigagrad.variance", {"moments": moments, "correction": correction})


def to_dtype(builder: Builder, value: Ref, dtype: torch.dtype) -> Ref:
    return value if builder.node(value).dtype == dtype else builder.aten("_to_copy.default", value, dtype=dtype)


def whole_field(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
    """Append the operator on its operands as whole tensors."""
    whole = {ref.id: builder.gather(ref) for ref in references(arguments)}
    return builder.call(op, {name: substitute(value, whole) for name, value in arguments.items()})
