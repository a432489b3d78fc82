"""Rewrite what takes the image to one value: sums, means, extremes, moments, pooling to a grid, losses that reduce,
and norms by the image's own statistics.

A mean is a sum divided by a count; a loss that reduces is the same loss without reduction, a sum and a division. A norm
is arithmetic on moments, and pixels normalised by the result: batch normalisation (Ioffe and Szegedy, 2015), instance
normalisation (Ulyanov et al., 2016), group normalisation (Wu and He, 2018) and layer normalisation (Ba et al., 2016)
differ only in the axes over which the moments are taken.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from gigagrad.graphs.builder import ON_FIELDS, Builder, rewrites
from gigagrad.graphs.graph import FIELD_BINS, FIELD_MAX, MOMENTS, Ref
from gigagrad.graphs.op_rules import NotTileable, Whole, aten, register
from gigagrad.graphs.ops.pointwise import PIXEL_LOSSES

_MOST_POOLED = 16
"""Rows of weights up to which features are added up tile by tile: each row is a pass over them."""
_NONE, _MEAN = 0, 1  # ATen's codes for a loss's reduction; 2 is the sum

register(Whole(differentiable=False), [FIELD_MAX, "gigagrad.running_mean", "gigagrad.running_variance"])
register(
    Whole(on_images=True),
    aten("_native_batch_norm_legit.no_stats _native_batch_norm_legit_functional group_norm instance_norm"),
)


@rewrites(ON_FIELDS, aten("mean mean.dim sum sum.dim_IntList"))
def _sum(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    field = arguments["self"]
    if arguments.get("dtype") is not None:
        field = builder.to_dtype(field, arguments["dtype"])
    dims, spatial = builder.spatial_dims(field, arguments.get("dim"))
    if spatial == 0:
        return builder.one(op, arguments)
    return _total(builder, field, dims, mean="mean" in op, keepdim=bool(arguments.get("keepdim")))


def _total(builder: Builder, field: Ref, dims: list[int], *, mean: bool, keepdim: bool = False) -> Ref:
    """Sum or average over `dims`: in the field's dtype, or that of sums of integers."""
    node, total = builder.node(field), builder.field_sum(field, dims, keepdim=keepdim)
    if mean:
        total = builder.aten("div.Tensor", total, math.prod(node.shape[dim] for dim in dims))
    return builder.to_dtype(total, node.dtype) if node.dtype.is_floating_point else total


@rewrites(ON_FIELDS, aten("mm"))
def weighted_sum(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    """Rewrite few rows of weights `(K, N)`, known for all patches, times their features `(N, D)`: sums over patches."""
    (weights, features), rows = arguments.values(), list[Ref]()
    node = builder.node(features)
    pools = node.patches is not None and len(node.shape) == 2 and node.spatial[0] == -2
    count = builder.node(weights).shape[0]
    if not pools or builder.is_field(weights) or len(builder.node(weights).shape) != 2 or count > _MOST_POOLED:
        return builder.one(op, arguments)
    for row in range(count):
        of_patches = builder.aten("unsqueeze.default", builder.aten("select.int", weights, 0, row), -1)
        if builder.node(of_patches).whole:
            of_patches = builder.scatter(of_patches, node.spatial, node.patches)
        rows.append(builder.field_sum(builder.aten("mul.Tensor", of_patches, features), [0], keepdim=True))
    total = rows[0] if count == 1 else builder.aten("cat.default", rows, 0)
    return builder.to_dtype(total, node.dtype)


@rewrites(ON_FIELDS, aten("var var.dim var.correction var_mean var_mean.dim var_mean.correction"))
@rewrites(ON_FIELDS, aten("std std.dim std.correction std_mean std_mean.dim std_mean.correction"))
def _spread(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
    """Rewrite variance and standard deviation, alone or with the mean."""
    field: Ref = arguments["self"]
    dims, spatial = builder.spatial_dims(field, arguments.get("dim"))
    if spatial == 0:
        return builder.call(op, arguments)
    correction = arguments.get("correction")
    if correction is None:
        correction = 1 if arguments.get("unbiased", True) else 0
    mean, result = builder.mean_and_variance(builder.reduction(MOMENTS, field, dims), correction)
    if ".std" in op:
        result = _deviation(builder, result, mean)
    shape = [1 if dim in dims else size for dim, size in enumerate(builder.node(field).shape)]
    dtype = builder.node(field).dtype
    outputs = []
    for value in (result, mean):
        if arguments.get("keepdim"):
            value = builder.aten("view.default", value, shape)
        outputs.append(builder.to_dtype(value, dtype))
    return outputs if "_mean" in op else outputs[0]


def _deviation(builder: Builder, variance: Ref, mean: Ref) -> Ref:
    """Take the root; 0 with gradient 0, as PyTorch has it, where a field is constant but for its moments' rounding.

    A variance of NaN is no constant field's. The mean is as exact as a number of twice the digits.
    """
    rounding = builder.aten(
        "mul.Scalar", builder.aten("mul.Tensor", mean, mean), 8 * torch.finfo(torch.float64).eps ** 3
    )
    constant = builder.aten("le.Tensor", variance, builder.aten("detach.default", rounding))
    varies = builder.aten("logical_not.default", constant)
    safe = builder.aten("where.self", varies, variance, builder.aten("ones_like.default", variance))
    zeros = builder.aten("zeros_like.default", variance)
    return builder.aten("where.self", varies, builder.aten("sqrt.default", safe), zeros)


@rewrites(ON_FIELDS, aten("amax amin max min"))
def _extreme(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    """Equal values share the gradient. Where NaN is the result, those of max and min go to the pixels that hold it, and
    those of amax and amin are NaN everywhere, as in PyTorch.

    Pixels are chosen, never multiplied by a mask: 0 times an infinite one would be NaN.
    """
    field: Ref = arguments["self"]
    dims, spatial = builder.spatial_dims(field, arguments.get("dim"))
    if spatial == 0:
        return builder.one(op, arguments)
    lowest = op.split(".")[1] in ("amin", "min")
    if not builder.node(field).dtype.is_floating_point:
        return _integer_extreme(builder, field, dims, lowest=lowest, keepdim=bool(arguments.get("keepdim")))
    upright = builder.aten("neg.default", field) if lowest else field
    detached = builder.aten("detach.default", upright)
    top = builder.reduction(FIELD_MAX, detached, dims, keepdim=True)
    spoiled = builder.aten("isnan.default", top)
    everywhere = op.split(".")[1] in ("amax", "amin")
    unknown = spoiled if everywhere else builder.aten("isnan.default", detached)
    equal = builder.aten("logical_or.default", builder.aten("eq.Tensor", detached, top), unknown)
    total = builder.field_sum(builder.aten("where.ScalarOther", equal, field, 0), dims, keepdim=True)
    # Counted in float64: a float32 cannot hold the number of pixels of a gigapixel image.
    count = builder.field_sum(builder.to_dtype(equal, torch.float64), dims, keepdim=True)
    if everywhere:
        count = builder.aten("where.ScalarSelf", spoiled, math.nan, count)
    mean = builder.aten("div.Tensor", builder.to_dtype(total, torch.float64), count)
    if not arguments.get("keepdim"):
        kept = [size for dim, size in enumerate(builder.node(field).shape) if dim not in dims]
        mean = builder.aten("view.default", mean, kept)
    return builder.to_dtype(mean, builder.node(field).dtype)


def _integer_extreme(builder: Builder, field: Ref, dims: list[int], *, lowest: bool, keepdim: bool) -> Ref:
    """Turn integers over bit by bit for the minimum: they are in the opposite order then, and some have no negative."""
    upright = builder.aten("bitwise_not.default", field) if lowest else field
    top = builder.reduction(FIELD_MAX, upright, dims, keepdim=keepdim)
    return builder.aten("bitwise_not.default", top) if lowest else top


@rewrites(ON_FIELDS, aten("adaptive_avg_pool2d"))
def _adaptive_average(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    """Bin o of n averages [floor(o s / n), ceil((o + 1) s / n)): two small matrices, so tiles add up."""
    field: Ref = arguments["self"]
    if list(arguments["output_size"]) == [1, 1]:
        return _sum(builder, "aten.mean.dim", {"self": field, "dim": [-2, -1], "keepdim": True, "dtype": None})
    *_, height, width = builder.nchw(field)
    weights = [
        builder.constant(f"gigagrad.bins.{count}.{size}", _bin_weights(count, size))
        for count, size in zip(arguments["output_size"], (height, width), strict=True)
    ]
    bins = builder.reduction(FIELD_BINS, field, [2, 3], weights_y=weights[0], weights_x=weights[1])
    return builder.to_dtype(bins, builder.node(field).dtype)


def _bin_weights(bins: int, size: int) -> torch.Tensor:
    weights = torch.zeros(bins, size, dtype=torch.float64)
    for index in range(bins):
        start, stop = index * size // bins, -(-(index + 1) * size // bins)
        weights[index, start:stop] = 1 / (stop - start)
    return weights


@rewrites(ON_FIELDS, aten("adaptive_max_pool2d"))
def _adaptive_maximum(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
    """Take the maximum of every channel; its gradient goes to one pixel, as in max pooling: the first that has it, or
    the last that is NaN.
    """
    field: Ref = arguments["self"]
    builder.nchw(field)
    if list(arguments["output_size"]) != [1, 1]:
        raise NotTileable(f"adaptive max pooling to {tuple(arguments['output_size'])}")
    detached, dims = builder.aten("detach.default", field), [2, 3]
    top = builder.reduction(FIELD_MAX, detached, dims, keepdim=True)
    position = builder.one("gigagrad.positions", {"like": detached})
    unknown = builder.aten("isnan.default", detached)
    later, earlier = builder.aten("add.Scalar", position, 1), builder.aten("neg.default", position)
    place = builder.aten("where.self", unknown, later, earlier)
    nowhere = builder.constant("gigagrad.nowhere", torch.tensor(-(2**62)))
    candidate = builder.aten("logical_or.default", builder.aten("eq.Tensor", detached, top), unknown)
    first = builder.reduction(FIELD_MAX, builder.aten("where.self", candidate, place, nowhere), dims, keepdim=True)
    chosen = builder.aten("where.ScalarOther", builder.aten("eq.Tensor", place, first), field, 0)
    total = builder.field_sum(chosen, dims, keepdim=True)
    return [builder.to_dtype(total, builder.node(field).dtype), None]


@rewrites(ON_FIELDS, PIXEL_LOSSES)
def _pixel_loss(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    pixels = builder.one(op, {**arguments, "reduction": _NONE})
    if arguments["reduction"] == _NONE:
        return pixels
    dims = list(range(len(builder.node(pixels).shape)))
    return _total(builder, pixels, dims, mean=arguments["reduction"] == _MEAN)


@rewrites(ON_FIELDS, aten("cross_entropy_loss nll_loss_nd"))
def _cross_entropy(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    if arguments["reduction"] != _MEAN or builder.node(arguments["target"]).dtype.is_floating_point:
        # Class probabilities as target: PyTorch's mean divides by the number of positions.
        return _pixel_loss(builder, op, arguments)
    pixels = builder.one(op, {**arguments, "reduction": _NONE})
    dtype = builder.node(pixels).dtype
    names = ("target", "weight", "ignore_index")
    weights = builder.field_sum(builder.one("gigagrad.class_weights", {name: arguments[name] for name in names}))
    kept = weights
    if arguments["weight"] is not None:
        kept = builder.field_sum(builder.aten("ne.Scalar", arguments["target"], arguments["ignore_index"]))
    # Where all pixels are ignored the loss is NaN and its gradient 0; where all weights are 0 both are NaN.
    none = builder.aten("eq.Scalar", kept, 0)
    count = builder.aten("masked_fill.Scalar", weights, none, 1)
    mean = builder.aten("div.Tensor", builder.field_sum(pixels), count)
    return builder.to_dtype(builder.aten("masked_fill.Scalar", mean, none, math.nan), dtype)


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype of statistics: float32 for half precisions, as PyTorch does."""
    return dtype if dtype == torch.float64 else torch.float32


def _normalised(builder: Builder, field: Ref, moments: Ref, eps: float, weight: Ref | None, bias: Ref | None) -> Ref:
    """Normalise by moments of shape (4, C), in float64 whatever the field's dtype."""
    dtype = _statistics_dtype(builder.node(field).dtype)
    named = {"moments": moments, "weight": weight, "eps": eps, "dtype": dtype}
    statistics = builder.one("gigagrad.mean_and_scale", named)
    shift = None if bias is None else builder.to_dtype(bias, dtype)
    return builder.one("gigagrad.normalise", {"field": field, "statistics": statistics, "shift": shift})


@rewrites(ON_FIELDS, aten("_native_batch_norm_legit.no_stats _native_batch_norm_legit_functional"))
def _batch_norm(builder: Builder, op: str, arguments: dict[str, Any]) -> Any:
    """Rewrite batch norm; in the functional form the new running mean and variance follow the outputs."""
    if not arguments["training"]:
        raise NotTileable("batch normalisation by given statistics that returns new ones")
    field = arguments["input"]
    running: tuple[Any, Any] = arguments.get("running_mean"), arguments.get("running_var")
    node = builder.node(field)
    rank = len(node.shape)
    if node.patches is None or node.spatial[0] != -rank:
        builder.nchw(field)
    if math.prod(node.shape) == node.shape[1]:
        raise NotTileable("training-mode batch normalisation of a single value per channel")
    moments = builder.reduction(MOMENTS, field, [dim for dim in range(rank) if dim != 1])
    output = _normalised(builder, field, moments, arguments["eps"], arguments["weight"], arguments["bias"])
    if running[0] is None:
        return [output, None, None]
    updated = [
        builder.one(f"gigagrad.{name}", {"old": old, "moments": moments, "momentum": arguments["momentum"]})
        for name, old in zip(("running_mean", "running_variance"), running, strict=True)
    ]
    return [output, None, None, *updated]


@rewrites(ON_FIELDS, aten("group_norm"))
def _group_norm(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    field, groups = arguments["input"], arguments["num_groups"]
    images, channels, *_ = builder.nchw(field)
    moments = builder.reduction(MOMENTS, field, [2, 3])
    apart = builder.aten("view.default", moments, [4, images, groups, channels // groups])
    together = builder.aten("unsqueeze.default", builder.one("gigagrad.grouped", {"moments": apart}), -1)
    return _per_image(
        builder, builder.aten("expand.default", together, [4, images, groups, channels // groups]), arguments
    )


@rewrites(ON_FIELDS, aten("instance_norm"))
def _instance_norm(builder: Builder, op: str, arguments: dict[str, Any]) -> Ref:
    field = arguments["input"]
    images, channels, *_ = builder.nchw(field)
    if arguments["use_input_stats"]:
        assert arguments["running_mean"] is None, "tracing updates them itself"
        return _per_image(builder, builder.reduction(MOMENTS, field, [2, 3]), arguments)
    # Moments of one value: what the model has learnt is its mean and its variance.
    mean, variance = (builder.to_dtype(arguments[name], torch.float64) for name in ("running_mean", "running_var"))
    one, none = builder.aten("ones_like.default", mean), builder.aten("zeros_like.default", mean)
    moments = builder.aten("unsqueeze.default", builder.aten("stack.default", [one, mean, none, variance]), 1)
    return _per_image(builder, builder.aten("expand.default", moments, [4, images, channels]), arguments)


def _per_image(builder: Builder, moments: Ref, arguments: dict[str, Any]) -> Ref:
    """Normalise by moments `(4, N, ...)`, C of each image: every image has its own, so the batch becomes channels."""
    field, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    images, channels, height, width = builder.node(field).shape
    moments = builder.aten("reshape.default", moments, [4, images * channels])
    if images > 1:
        field = builder.aten("view.default", field, [1, images * channels, height, width])
        weight, bias = (None if v is None else builder.aten("repeat.default", v, [images]) for v in (weight, bias))
    output = _normalised(builder, field, moments, arguments["eps"], weight, bias)
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
    mean, variance = builder.mean_and_variance(moments)
    scale = builder.aten("rsqrt.default", builder.aten("add.Scalar", variance, arguments["eps"]))
    kept = [*node.shape[: rank - len(shape)], *[1] * len(shape)]
    dtype = _statistics_dtype(node.dtype)
    mean, scale = (builder.to_dtype(builder.aten("view.default", value, kept), dtype) for value in (mean, scale))
    result = builder.aten("mul.Tensor", builder.aten("sub.Tensor", field, mean), scale)
    if arguments["weight"] is not None:
        result = builder.aten("mul.Tensor", result, arguments["weight"])
    if arguments["bias"] is not None:
        result = builder.aten("add.Tensor", result, arguments["bias"])
    return builder.to_dtype(result, node.dtype)
