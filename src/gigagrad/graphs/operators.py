"""From an operator's name to the function that runs it and to its argument names.

ATen operators are resolved through `torch.ops`; the few of our own (made by lowering) are defined here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def class_weights(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    """The weight of every position's class, 0 where it is ignored: what cross entropy's mean divides by.

    `target` holds class ids; the result has its shape and is float64, so that a count of pixels stays exact.
    """
    kept = target != ignore_index
    if weight is None:
        return kept.to(torch.float64)
    weight = weight.to(torch.float64)
    return torch.where(kept, weight[torch.where(kept, target, 0)], weight.new_zeros(()))


def field_sum(field: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """The sum of a field (or of a crop: a partial sum) over `dims`, which include both spatial axes."""
    return torch.sum(field, dim=dims, keepdim=keepdim)


_OWN: dict[str, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    "gigagrad.class_weights": (class_weights, ("target", "weight", "ignore_index")),
    "gigagrad.field_sum": (field_sum, ("field", "dims", "keepdim")),
}


@cache
def function(op: str) -> Callable[..., Any]:
    """The callable behind an operator's name, e.g. `aten.conv2d.default`."""
    if op in _OWN:
        return _OWN[op][0]
    namespace, name, overload = op.split(".", 2)
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return found


@cache
def signature(op: str) -> tuple[tuple[str, bool, Any], ...]:
    """`(name, keyword-only, default)` of every argument, in order."""
    if op in _OWN:
        return tuple((name, False, None) for name in _OWN[op][1])
    schema = function(op)._schema  # type: ignore[attr-defined]
    return tuple((a.name, a.kwarg_only, a.default_value if a.has_default_value() else None) for a in schema.arguments)


def bind(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional and keyword arguments as one ordered mapping by name, defaults filled in."""
    names = signature(op)
    assert len(args) <= len(names), op
    bound = {name: default for name, _, default in names}
    bound.update({name: value for (name, _, _), value in zip(names, args, strict=False)})
    bound.update(kwargs)
    return bound


def call(op: str, arguments: dict[str, Any]) -> Any:
    """Run an operator on arguments bound by name."""
    positional = []
    keywords = {}
    for name, keyword_only, _ in signature(op):
        if keyword_only:
            keywords[name] = arguments[name]
        else:
            positional.append(arguments[name])
    return function(op)(*positional, **keywords)
