"""Rewrite norms by the image's own statistics: moments, arithmetic on them, and pixels normalised by the result.

Batch normalisation (Ioffe and Szegedy, 2015), instance normalisation (Ulyanov et al., 2016), group normalisation (Wu
and He, 2018) and layer normalisation (Ba et al., 2016) differ only in the axes over which the moments are taken.
"""

from __future__ import annotations

from typing import Any

import torch

from gigagrad.graphs import operators
from gigagrad.graphs.builder import Builder
from gigagrad.graphs.graph import MOMENTS, Ref
from gigagrad.graphs.op_rules import NotTileable, Whole, aten, register
from gigagrad.graphs.rewrites.common import ON_FIELDS, mean_and_variance, require_nchw, rewrites, to_dtype


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype of statistics: float32 for half precisions, as PyTorch does."""
    return dtype if dtype == torch.float64 else torch.float32


def _normalised(
    builder: Builder, field: Ref, mean: Ref, variance: Ref, eps: float, weight: Ref | None, bias: Ref | None
) -> Ref:
    """Normalise by statistics of shape (C,) in float64, whatever the field's dtype."""
    scale = builder.aten("rsqrt.default", builder.aten("add.Scalar", variance, eps))
    if weight is not None:
        scale = builder.aten("mul.Tensor", scale, weight)
    dtype = _statistics_dtype(builder.node(field).dtype)
    mean, scale = (to_dtype(builder, value, dtype) for value in (mean, scale))
    shift = builder.aten("zeros_like.default", mean) if bias is None else to_dtype(builder, bias, dtype)
    return builder.one("gigagrad.normalise", {"field": field, "mean": mean, "scale": scale, "shift": shift})


@rewrites(ON_FIELDS, aten("batch_norm _native_batch_norm_legit.no_stats _native_batch_norm_legit_functional"))
def _batch_norm(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
    """Rewrite batch norm; in the functional form the new running mean and variance follow the outputs."""
    field, training = arguments["input"], arguments.get("training", True)
    running: tuple[Any, Any] = arguments.get("running_mean"), arguments.get("running_var")
    if not training:
        plain = {**arguments, "training": False, "cudnn_enabled": False}
        names = operators.signature("aten.batch_norm.default")
        return builder.call("aten.batch_norm.default", {name: plain[name] for name in names})
    images, _, height, width = require_nchw(builder, field)
    if images * height * width == 1:
        raise NotTileable("training-mode batch normalisation of a single value per channel")
    moments = builder.reduction(MOMENTS, field, [0, 2, 3])
    mean, variance = mean_and_variance(builder, moments)
    output = _normalised(builder, field, mean, variance, arguments["eps"], arguments["weight"], arguments["bias"])
    if op == "aten.batch_norm.default":
        assert running[0] is None, "a layer that tracks statistics is exported in its functional form"
        return output
    if running[0] is None:
        return [output, None, None]
    _, unbiased = mean_and_variance(builder, moments, correction=1)
    updated = [_blend(builder, *both, arguments["momentum"]) for both in zip(running, (mean, unbiased), strict=True)]
    return [output, None, None, *updated]


def _blend(builder: Builder, old: Ref, new: Ref, momentum: float) -> Ref:
    """Compute a running statistic after this step."""
    dtype = builder.node(old).dtype
    kept = builder.aten("mul.Scalar", to_dtype(builder, old, torch.float64), 1 - momentum)
    taken = builder.aten("mul.Scalar", builder.aten("detach.default", new), momentum)
    return to_dtype(builder, builder.aten("add.Tensor", kept, taken), dtype)


@rewrites(ON_FIELDS, aten("group_norm"))
def _group_norm(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    field, groups = arguments["input"], arguments["num_groups"]
    images, channels, *_ = require_nchw(builder, field)
    moments = builder.reduction(MOMENTS, field, [2, 3])
    apart = builder.aten("view.default", moments, [4, images, groups, channels // groups])
    together = builder.one("gigagrad.grouped", {"moments": apart})
    mean, variance = mean_and_variance(builder, builder.aten("unsqueeze.default", together, -1))
    shape = [images, groups, channels // groups]
    mean, variance = (
        builder.aten("reshape.default", builder.aten("expand.default", v, shape), [images * channels])
        for v in (mean, variance)
    )
    return _per_image(builder, field, mean, variance, arguments)


@rewrites(ON_FIELDS, aten("instance_norm"))
def _instance_norm(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    field = arguments["input"]
    images, channels, *_ = require_nchw(builder, field)
    if arguments["use_input_stats"]:
        assert arguments["running_mean"] is None, "tracing updates them itself"
        mean, variance = mean_and_variance(builder, builder.reduction(MOMENTS, field, [2, 3]))
    else:
        mean, variance = (
            builder.aten("expand.default", to_dtype(builder, arguments[name], torch.float64), [images, channels])
            for name in ("running_mean", "running_var")
        )
    mean, variance = (builder.aten("reshape.default", v, [images * channels]) for v in (mean, variance))
    return _per_image(builder, field, mean, variance, arguments)


def _per_image(builder: Builder, field: Ref, mean: Ref, variance: Ref, arguments: dict[str, Any]) -> Ref:
    """Normalise by statistics of shape (N * C,): every image has its own, so the batch becomes channels."""
    images, channels, height, width = builder.node(field).shape
    weight, bias = (
        None if value is None else builder.aten("repeat.default", value, [images]) if images > 1 else value
        for value in (arguments["weight"], arguments["bias"])
    )
    if images > 1:
        field = builder.aten("view.default", field, [1, images * channels, height, width])
    output = _normalised(builder, field, mean, variance, arguments["eps"], weight, bias)
    return builder.aten("view.default", output, [images, channels, height, width]) if images > 1 else output


@rewrites(ON_FIELDS, aten("layer_norm"))
def _layer_norm(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
    """Normalise over trailing axes: both spatial ones are a reduction, none is a row; one alone is refused."""
    field, shape = arguments["input"], arguments["normalized_shape"]
    node = builder.node(field)
    if not any(-axis <= len(shape) for axis in node.spatial):
        return builder.call(op, arguments)
    rank = len(node.shape)
    moments = builder.reduction(MOMENTS, field, list(range(rank - len(shape), rank)))
    mean, variance = mean_and_variance(builder, moments)
    scale = builder.aten("rsqrt.default", builder.aten("add.Scalar", variance, arguments["eps"]))
    kept = [*node.shape[: rank - len(shape)], *[1] * len(shape)]
    dtype = _statistics_dtype(node.dtype)
    mean, scale = (to_dtype(builder, builder.aten("view.default", value, kept), dtype) for value in (mean, scale))
    result = builder.aten("mul.Tensor", builder.aten("sub.Tensor", field, mean), scale)
    if arguments["weight"] is not None:
        result = builder.aten("mul.Tensor", result, arguments["weight"])
    if arguments["bias"] is not None:
        result = builder.aten("add.Tensor", result, arguments["bias"])
    return to_dtype(builder, result, node.dtype)


register(
    Whole(on_images=True),
    aten("_native_batch_norm_legit.no_stats _native_batch_norm_legit_functional group_norm instance_norm"),
)
