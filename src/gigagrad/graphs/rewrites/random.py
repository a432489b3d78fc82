"""Rewrite random operators on fields: every value's number is a function of a key and its place in the whole field.

So any tiling, any recomputation and any number of workers see the same mask; the key is drawn once a run. Random
operators on values without spatial axes (stochastic depth) run once a run as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gigagrad.graphs.builder import ON_FIELDS, STRUCTURE, Builder, rewrites
from gigagrad.graphs.graph import Ref
from gigagrad.graphs.op_rules import NotTileable, aten

_NOT_SETTINGS = ("dtype", "layout", "device", "pin_memory", "memory_format", "generator")


def _uniform(builder: Builder, like: Ref) -> Ref:
    return builder.one("gigagrad.uniform", {"like": like, "seed": builder.one("gigagrad.seed", {})})


@rewrites(ON_FIELDS, aten("dropout native_dropout"))
def _dropout(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
    """`native_dropout` returns the mask, too, which nobody reads but its own backward."""
    field = arguments["input"]
    probability, train = arguments["p"], arguments["train"]
    several = "native" in op
    if not train or probability == 0:
        output = builder.aten("alias.default", field)
    elif probability == 1:
        output = builder.aten("mul.Scalar", field, 0.0)
    else:
        kept = builder.aten("ge.Scalar", _uniform(builder, field), probability)
        mask = builder.aten("mul.Scalar", builder.to_dtype(kept, builder.node(field).dtype), 1 / (1 - probability))
        output = builder.aten("mul.Tensor", field, mask)
    return [output, None] if several else output


@rewrites(STRUCTURE, aten("bernoulli bernoulli.p bernoulli.Tensor"))
def _bernoulli(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
    def drawn(field: Ref, p: Any = None) -> Ref:
        p = field if p is None else p
        less = "lt.Tensor" if isinstance(p, Ref) else "lt.Scalar"
        return builder.aten(less, _uniform(builder, field), p)

    return _drawn(builder, op, arguments, drawn)


@rewrites(ON_FIELDS, aten("rand_like"))
def _rand_like(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    field: Ref = arguments["self"]
    return builder.to_dtype(_uniform(builder, field), arguments.get("dtype") or builder.node(field).dtype)


@rewrites(ON_FIELDS, aten("randn_like"))
def _randn_like(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    field: Ref = arguments["self"]
    return builder.to_dtype(_normal(builder, field), arguments.get("dtype") or builder.node(field).dtype)


@rewrites(STRUCTURE, aten("normal_functional log_normal"))
def _normal_functional(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
    def drawn(field: Ref, mean: float, std: float) -> Ref:
        normal = builder.aten("add.Scalar", builder.aten("mul.Scalar", _normal(builder, field), std), mean)
        return builder.aten("exp.default", normal) if "log" in op else normal

    return _drawn(builder, op, arguments, drawn)


@rewrites(STRUCTURE, aten("normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor"))
def _normal_of_fields(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
    def drawn(mean: Any, std: Any) -> Ref:
        given = [value for value in (mean, std) if isinstance(value, Ref)]
        like = builder.aten("add.Tensor", *given) if len(given) == 2 else given[0]
        spread = builder.aten(f"mul.{_kind(std)}", _normal(builder, like), std)
        return builder.aten(f"add.{_kind(mean)}", spread, mean)

    return _drawn(builder, op, arguments, drawn)


@rewrites(STRUCTURE, aten("uniform"))
def _uniform_between(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
    start, stop = arguments["from"], arguments["to"]

    def drawn(field: Ref, **_: float) -> Ref:
        return builder.aten("add.Scalar", builder.aten("mul.Scalar", _uniform(builder, field), stop - start), start)

    return _drawn(builder, op, arguments, drawn)


@rewrites(STRUCTURE, aten("exponential"))
def _exponential(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
    return _drawn(builder, op, arguments, lambda field, lambd: builder.aten("div.Scalar", _log(builder, field), -lambd))


@rewrites(STRUCTURE, aten("geometric"))
def _geometric(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
    def drawn(field: Ref, p: float) -> Ref:
        failures = builder.aten("div.Scalar", _log(builder, field), math.log1p(-p) if p < 1 else -math.inf)
        return builder.aten("add.Scalar", builder.aten("floor.default", failures), 1)

    return _drawn(builder, op, arguments, drawn)


@rewrites(STRUCTURE, aten("cauchy"))
def _cauchy(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
    def drawn(field: Ref, median: float, sigma: float) -> Ref:
        angle = builder.aten("add.Scalar", builder.aten("mul.Scalar", _uniform(builder, field), math.pi), -math.pi / 2)
        return builder.aten("add.Scalar", builder.aten("mul.Scalar", builder.aten("tan.default", angle), sigma), median)

    return _drawn(builder, op, arguments, drawn)


@rewrites(STRUCTURE, aten("random.from random.to randint_like randint_like.low_dtype"))
def _integers(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
    """Draw integers from a number with 53 digits; ranges that need more are drawn whole, as PyTorch does it."""
    low = arguments.get("from", arguments.get("low")) or 0
    high = arguments["to"] if "to" in arguments else arguments["high"]

    def drawn(field: Ref, **_: Any) -> Ref:
        if high is None or high - low > 2**53:
            raise NotTileable("it draws from more numbers than a float64 tells apart")
        wide = builder.aten("zeros_like.default", field, dtype=torch.float64)
        scaled = builder.aten("mul.Scalar", _uniform(builder, wide), float(high - low))
        return builder.aten("add.Scalar", builder.aten("floor.default", scaled), float(low))

    return _drawn(builder, op, arguments, drawn)


def _drawn(builder: Builder, op: str, arguments: dict[str, Any], drawn: Callable[..., Ref]) -> Any:
    """Draw by `drawn` for fields, from the operator's arguments; whatever it is made of gets no gradient."""
    arguments = {
        name: builder.aten("detach.default", value)
        if isinstance(value, Ref) and builder.node(value).differentiable
        else value
        for name, value in arguments.items()
    }
    field = next((value for value in arguments.values() if builder.is_field(value)), None)
    if field is None:
        return builder.call(op, arguments)
    settings = {name: value for name, value in arguments.items() if name not in _NOT_SETTINGS}
    if "self" in arguments:
        settings["field"] = settings.pop("self")
    try:
        return builder.to_dtype(drawn(**settings), arguments.get("dtype") or builder.node(field).dtype)
    except NotTileable:
        return builder.whole_field(op, arguments)


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
