"""Rewrite random operators on fields: every value's number is a function of a key and its place in the whole field.

So any tiling, any recomputation and any number of workers see the same mask; the key is drawn once a run. Random
operators on values without spatial axes (stochastic depth) run once a run as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gigagrad.graphs.builder import ON_FIELDS, STRUCTURE, Builder, Rewrite, rewrites
from gigagrad.graphs.graph import Ref
from gigagrad.graphs.op_rules import NotTileable, aten


def _uniform(builder: Builder, like: Ref) -> Ref:
    return builder.one("gigagrad.uniform", {"like": like, "seed": builder.one("gigagrad.seed", {})})


def _drawing(operators: Iterable[str]) -> Callable[[Rewrite], Rewrite]:
    """Enter a function as the one that draws for fields, from arguments of which none gets a gradient."""

    def enter(drawn: Rewrite) -> Rewrite:
        @rewrites(STRUCTURE, operators)
        def rewrite(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
            arguments = {
                name: builder.aten("detach.default", value)
                if isinstance(value, Ref) and builder.node(value).differentiable
                else value
                for name, value in arguments.items()
            }
            field = next((value for value in arguments.values() if builder.is_field(value)), None)
            if field is None:
                return builder.call(op, arguments)
            try:
                made = drawn(builder, op, arguments)
            except NotTileable:
                return builder.whole_field(op, arguments)
            return builder.to_dtype(made, arguments.get("dtype") or builder.node(field).dtype)

        return rewrite

    return enter


@rewrites(ON_FIELDS, aten("native_dropout"))
def _dropout(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
    """Rewrite dropout; it returns the mask, too, which nobody reads but its own backward."""
    field, probability = arguments["input"], arguments["p"]
    if not arguments["train"] or probability == 0:
        return [builder.aten("alias.default", field), None]
    if probability == 1:
        return [builder.aten("mul.Scalar", field, 0.0), None]
    kept = builder.aten("ge.Scalar", _uniform(builder, field), probability)
    mask = builder.aten("mul.Scalar", builder.to_dtype(kept, builder.node(field).dtype), 1 / (1 - probability))
    return [builder.aten("mul.Tensor", field, mask), None]


@_drawing(aten("bernoulli bernoulli.p bernoulli.Tensor"))
def _bernoulli(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    field, p = arguments["self"], arguments.get("p")
    p = field if p is None else p
    return builder.aten(f"lt.{_kind(p)}", _uniform(builder, field), p)


@rewrites(ON_FIELDS, aten("rand_like"))
def _rand_like(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    field: Ref = arguments["self"]
    return builder.to_dtype(_uniform(builder, field), arguments.get("dtype") or builder.node(field).dtype)


@rewrites(ON_FIELDS, aten("randn_like"))
def _randn_like(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    field: Ref = arguments["self"]
    return builder.to_dtype(_normal(builder, field), arguments.get("dtype") or builder.node(field).dtype)


@_drawing(aten("normal_functional log_normal"))
def _normal_functional(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    spread = builder.aten("mul.Scalar", _normal(builder, arguments["self"]), arguments["std"])
    normal = builder.aten("add.Scalar", spread, arguments["mean"])
    return builder.aten("exp.default", normal) if "log" in op else normal


@_drawing(aten("normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor"))
def _normal_of_fields(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    mean, std = arguments["mean"], arguments["std"]
    given = [value for value in (mean, std) if isinstance(value, Ref)]
    like = builder.aten("add.Tensor", *given) if len(given) == 2 else given[0]
    spread = builder.aten(f"mul.{_kind(std)}", _normal(builder, like), std)
    return builder.aten(f"add.{_kind(mean)}", spread, mean)


@_drawing(aten("uniform"))
def _uniform_between(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    start, stop = arguments["from"], arguments["to"]
    scaled = builder.aten("mul.Scalar", _uniform(builder, arguments["self"]), stop - start)
    return builder.aten("add.Scalar", scaled, start)


@_drawing(aten("exponential"))
def _exponential(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    return builder.aten("div.Scalar", _log(builder, arguments["self"]), -arguments["lambd"])


@_drawing(aten("geometric"))
def _geometric(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    p = arguments["p"]
    failures = builder.aten("div.Scalar", _log(builder, arguments["self"]), math.log1p(-p) if p < 1 else -math.inf)
    return builder.aten("add.Scalar", builder.aten("floor.default", failures), 1)


@_drawing(aten("cauchy"))
def _cauchy(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    half = builder.aten("mul.Scalar", _uniform(builder, arguments["self"]), math.pi)
    tangent = builder.aten("tan.default", builder.aten("add.Scalar", half, -math.pi / 2))
    return builder.aten("add.Scalar", builder.aten("mul.Scalar", tangent, arguments["sigma"]), arguments["median"])


@_drawing(aten("random.from random.to randint_like randint_like.low_dtype"))
def _integers(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    """Draw integers from a number with 53 digits; ranges that need more are drawn whole, as PyTorch does it."""
    low = arguments.get("from", arguments.get("low")) or 0
    high = arguments["to"] if "to" in arguments else arguments["high"]
    if high is None or high - low > 2**53:
        raise NotTileable("it draws from more numbers than a float64 tells apart")
    wide = builder.aten("zeros_like.default", arguments["self"], dtype=torch.float64)
    scaled = builder.aten("mul.Scalar", _uniform(builder, wide), float(high - low))
    return builder.aten("add.Scalar", builder.aten("floor.default", scaled), float(low))


def _normal(builder: Builder, field: Ref) -> Ref:
    """Make a normal number of two uniform ones (Box and Muller, 1958)."""
    first, angle = _uniform(builder, field), _uniform(builder, field)
    log = builder.aten("log1p.default", builder.aten("neg.default", first))
    radius = builder.aten("sqrt.default", builder.aten("mul.Scalar", log, -2.0))
    wave = builder.aten("cos.default", builder.aten("mul.Scalar", angle, 2 * math.pi))
    return builder.aten("mul.Tensor", radius, wave)


def _log(builder: Builder, field: Ref) -> Ref:
    """Take the logarithm of a uniform number in (0, 1): never 0, whose logarithm others take."""
    uniform = builder.aten(
        "clamp_min.default",
        _uniform(builder, field),
        2.0**-54 if builder.node(field).dtype == torch.float64 else 2.0**-25,
    )
    return builder.aten("log1p.default", builder.aten("neg.default", uniform))


def _kind(value: Any) -> str:
    return "Tensor" if isinstance(value, Ref) else "Scalar"
