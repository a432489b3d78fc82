"""Lower ATen operators to a graph that can be cut into tiles: rewrites by family first, the whole field otherwise.

After lowering every value is a field, a reduction of one, or global. An operator that has no tile rule, or is used in
a way its row does not cover, reads its fields whole: always exact, only hungrier. Where a later operator needs such a
value as an image again, it becomes a field and is read box by box.
"""

from __future__ import annotations

from contextlib import suppress
from math import prod
from typing import Any

from gigagrad.graphs.builder import ON_FIELDS, STRUCTURE, Builder
from gigagrad.graphs.graph import EACH, IMAGE_AXES, Axes, Patches, Ref, references
from gigagrad.graphs.op_rules import NoPixels, NotTileable, lookup
from gigagrad.graphs.ops.each import takes_apart
from gigagrad.graphs.rewrites import attention, random, reductions, structure

__all__ = ["attention", "lower", "random", "reductions", "structure"]

assert STRUCTURE.keys().isdisjoint(ON_FIELDS), "the first would keep the second from ever being asked"


def lower(builder: Builder, op: str, arguments: dict[str, Any], *, whole: bool = False) -> Any:
    """Append the operator, rewritten if it needs to be, or on `whole` fields as it is. The result is a `Ref`, or a list
    of them for split outputs.
    """
    if whole and op not in STRUCTURE:
        return builder.whole_field(op, arguments)
    arguments = _as_fields(builder, op, arguments)
    reads_field = any(builder.is_field(ref) for ref in references(arguments))
    if takes_apart(op) and any(builder.node(ref).patches for ref in references(arguments)):
        with suppress(NotTileable):
            return builder.call(f"{EACH}{op}", arguments)
    rewrite = STRUCTURE.get(op) or (ON_FIELDS.get(op) if reads_field else None)
    try:
        return builder.call(op, arguments) if rewrite is None else rewrite(builder, op, arguments)
    except NoPixels:
        raise
    except NotTileable:
        if not reads_field:
            raise
        return builder.whole_field(op, arguments)


def _as_fields(builder: Builder, op: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Turn values of whole-field operators into fields where this operator works on images or beside fields."""
    field = next((builder.node(ref) for ref in references(arguments) if builder.is_field(ref)), None)
    if field is None:
        first = next(iter(arguments.values()), None)
        if lookup(op).on_images and isinstance(first, Ref) and len(builder.node(first).shape) == 4:
            return {**arguments, next(iter(arguments)): _scattered(builder, first, IMAGE_AXES, None, least=2)}
        return arguments
    axes, patches = field.spatial, field.patches
    return {name: _scattered(builder, value, axes, patches, least=1) for name, value in arguments.items()}


def _scattered(builder: Builder, value: Any, axes: Axes, patches: Patches | None, *, least: int) -> Any:
    """Turn whole values that are longer than one along at least `least` of the two axes into fields."""
    if isinstance(value, list | tuple):
        return [_scattered(builder, item, axes, patches, least=least) for item in value]
    if not isinstance(value, Ref) or not builder.node(value).whole:
        return value
    shape = builder.node(value).shape
    long = sum(-axis <= len(shape) and shape[axis] > 1 for axis in axes)
    fits = long >= least and -min(axes) <= len(shape) and (patches is None or prod(patches) == shape[axes[0]])
    return builder.scatter(value, axes, patches) if fits else value
