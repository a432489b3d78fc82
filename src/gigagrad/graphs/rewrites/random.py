"""Random operators on fields: every value's number is a function of a key and of its place in the whole field.

So any tiling, any recomputation and any number of workers see the same mask; the key is drawn once a run. Random
operators on values without spatial axes (stochastic depth) run once a run as they are.
"""

from __future__ import annotations

from typing import Any

from gigagrad.graphs.builder import Builder
from gigagrad.graphs.graph import Ref
from gigagrad.graphs.rewrites.common import ON_FIELDS, rewrites, to_dtype
from gigagrad.graphs.table import aten


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
        mask = builder.aten("mul.Scalar", to_dtype(builder, kept, builder.node(field).dtype), 1 / (1 - probability))
        output = builder.aten("mul.Tensor", field, mask)
    return [output, None] if several else output


@rewrites(ON_FIELDS, aten("bernoulli bernoulli.p"))
def _bernoulli(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    field: Ref = arguments["self"]
    less, probability = ("lt.Scalar", arguments["p"]) if "p" in arguments else ("lt.Tensor", field)
    return to_dtype(builder, builder.aten(less, _uniform(builder, field), probability), builder.node(field).dtype)


@rewrites(ON_FIELDS, aten("rand_like"))
def _rand_like(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    field: Ref = arguments["self"]
    return to_dtype(builder, _uniform(builder, field), arguments.get("dtype") or builder.node(field).dtype)


@rewrites(ON_FIELDS, aten("randn_like"))
def _randn_like(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    """Two uniform numbers make a normal one (Box and Muller, 1958)."""
    field: Ref = arguments["self"]
    first, angle = _uniform(builder, field), _uniform(builder, field)
    log = builder.aten("log1p.default", builder.aten("neg.default", first))
    radius = builder.aten("sqrt.default", builder.aten("mul.Scalar", log, -2.0))
    wave = builder.aten("cos.default", builder.aten("mul.Scalar", angle, 6.283185307179586))
    normal = builder.aten("mul.Tensor", radius, wave)
    return to_dtype(builder, normal, arguments.get("dtype") or builder.node(field).dtype)
