"""Rules of operators that work position by position: arithmetic with broadcasting, activations, casts, layers of
channels.

Output box = input box. Operands of length 1 along an axis broadcast, globals with a spatial extent (a bias per pixel,
say) are narrowed to the crop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from gigagrad.boxes import Span
from gigagrad.graphs.crops import as_stored, batched, bound_view
from gigagrad.graphs.graph import Axes, Node, Ref
from gigagrad.graphs.op_rules import (
    Affine,
    Bound,
    Call,
    Gains,
    Layout,
    NotTileable,
    OpRule,
    Pointwise,
    Saved,
    Site,
    Whole,
    aten,
    axes_without,
    common_axes,
    per_operand,
    plain,
    register,
    require_nchw,
    scaled_gains,
    single_field,
    sum_of_gains,
)
from gigagrad.graphs.statistics import normalise


class Broadcasting(Pointwise):
    """Elementwise operators whose tensor operands broadcast against each other."""

    def axes(self, call: Call, rank: int) -> Axes:
        axes = common_axes(call)
        for operand in call.operands:
            if not operand.is_field and len(operand.shape) > rank:
                raise NotTileable("a global operand has more axes than the field")
        return axes

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        size = call.node.size(axis)
        return per_operand(call, lambda operand: out if operand.size(axis) == size else Span(0, 1))

    def needs_alike(self, call: Call, axis: int) -> bool:
        return all(operand.size(axis) == call.node.size(axis) for operand in call.fields)

    def bind(self, call: Call, site: Site) -> Bound:
        run = plain(call)
        varying = [any(self._varies(call, operand, axis) for axis in (0, 1)) for operand in call.operands]
        if not any(varying):
            return run

        def run_narrowed(operands: Sequence[Any]) -> torch.Tensor:
            pairs = zip(operands, varying, strict=True)
            return run([self._narrow(call, operand, site) if varies else operand for operand, varies in pairs])

        return run_narrowed

    def form(self, call: Call, axis: int, out: Span, operands: tuple[Span | None, ...]) -> Hashable | None:
        return None if any(self._varies(call, operand, axis) for operand in call.operands) else ()

    @staticmethod
    def _varies(call: Call, operand: Node, axis: int) -> bool:
        """Tell whether a global operand varies along an axis of the image."""
        place = call.node.spatial[axis]
        return not operand.is_field and -place <= len(operand.shape) and operand.shape[place] > 1

    @staticmethod
    def _narrow(call: Call, tensor: torch.Tensor, site: Site) -> torch.Tensor:
        """Narrow a global operand to the crop, along the spatial axes that it varies along."""
        if call.node.patches is not None:
            sizes = [span.length for span in site.out]
            view = bound_view(call.node.spatial, [span.start for span in site.out], sizes, call.node.patches.size)
            return tensor if view is None else view(tensor)
        for axis, span in zip(call.node.spatial, site.out, strict=True):
            if -axis <= tensor.ndim and tensor.shape[axis] > 1:
                tensor = tensor.narrow(axis, span.start, span.length)
        return tensor


class Copy(Broadcasting):
    """Copies of the values, at most in another dtype."""

    copies = True
    saved = Saved.NOTHING
    affine = Affine.JOINTLY


class Rectifier(Broadcasting):
    """Activations whose slope is at most 1; where it is 0, so is mostly the value, and zeros are counted."""

    def error_gains(self, call: Call, read: Sequence[Gains], value: Callable[[Ref], torch.Tensor]) -> Gains | None:
        return read[0]


class Sum(Broadcasting):
    """Sums and differences."""

    saved = Saved.NOTHING
    affine = Affine.JOINTLY

    def error_gains(self, call: Call, read: Sequence[Gains], value: Callable[[Ref], torch.Tensor]) -> Gains | None:
        plain = call["alpha"] == 1 and all(field.shape == call.node.shape for field in call.fields)
        return sum_of_gains(read) if plain else None


class Product(Broadcasting):
    """Products and quotients: an operand is kept only for the gradients that need it."""

    temporaries = 2
    gradients_read: tuple[tuple[int, ...], tuple[int, ...]] = (1,), (0,)
    """Operands that the gradient of the first one needs, and those for the second."""

    def saves(self, call: Call) -> set[int]:
        if len(call.operands) != 2:
            return set()
        pairs = zip(call.operands, self.gradients_read, strict=True)
        kept = {call.operands[index] for operand, read in pairs if operand.differentiable for index in read}
        return {operand.id for operand in kept if operand.is_field}


class PerPosition(Pointwise):
    """Operators that mix channels of one position only: the axes they name must not be spatial."""

    dims: str = "dim"
    """The argument that names them."""
    removes: bool = False
    """True where the output lacks these axes unless it is asked to keep them (`keepdim`)."""

    def axes(self, call: Call, rank: int) -> Axes:
        axes, in_rank, value = common_axes(call), len(call.fields[0].shape), call[self.dims]
        if value is None or value == []:
            raise NotTileable("it works along all axes of the image")
        dims = [dim % in_rank - in_rank for dim in ([value] if isinstance(value, int) else value)]
        if not set(axes).isdisjoint(dims):
            raise NotTileable("it works along an axis of the image")
        return axes_without(dims if self.removes and not call["keepdim"] else [], axes)


class Folding(PerPosition):
    """Operators whose output has fewer channels than what they compute on the way: some copies of their input."""

    def workspace_bytes(self, call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
        return 3 * call.operands[0].bytes_per_pixel * out_pixels


class ChannelLayer(Pointwise):
    """Layers with per-channel parameters."""

    channel: int = 1
    """The axis that the parameters belong to."""

    def axes(self, call: Call, rank: int) -> Axes:
        axes = single_field(call).spatial
        if self.channel % rank - rank in axes:
            raise NotTileable("its channel axis is an axis of the image")
        return axes


class Linear(ChannelLayer):
    """A matrix product at every position: pixelwise, but not cheap."""

    channel = -1
    pixelwise = False

    def flops(self, call: Call) -> float:
        return OpRule.flops(self, call)


class BatchNormEval(ChannelLayer):
    """Batch normalisation with running statistics (evaluation mode): a scale and a shift per channel."""

    on_images = True

    def bind(self, call: Call, site: Site) -> Bound:
        eps, names = call["eps"], ("input", "running_mean", "running_var", "weight", "bias")
        order = [name for name in call.node.arguments if isinstance(call[name], Ref)]
        field, mean_at, variance_at, weight_at, bias_at = (order.index(n) if n in order else None for n in names)
        assert field is not None and mean_at is not None and variance_at is not None  # noqa: PT018

        def run(operands: Sequence[Any]) -> torch.Tensor:
            mean, scale = operands[mean_at], torch.rsqrt(operands[variance_at] + eps)
            if weight_at is not None:
                scale = scale * operands[weight_at]
            shift = None if bias_at is None else operands[bias_at]
            return normalise(operands[field], torch.stack([mean, scale]), shift)

        return run

    def error_gains(self, call: Call, read: Sequence[Gains], value: Callable[[Ref], torch.Tensor]) -> Gains | None:
        scale = (value(call["running_var"]) + call["eps"]).rsqrt()
        return scaled_gains(read[0], scale if call["weight"] is None else (scale * value(call["weight"])).abs())


class Normalise(Pointwise):
    """Pixels normalised by given statistics of their channel, which are global values."""

    def axes(self, call: Call, rank: int) -> Axes:
        field = single_field(call)
        return field.spatial if field.patches and field.spatial[0] == -rank else require_nchw(call)

    def error_gains(self, call: Call, read: Sequence[Gains], value: Callable[[Ref], torch.Tensor]) -> Gains | None:
        return scaled_gains(read[0], value(call["statistics"])[1].abs())


class Counted(Pointwise):
    """Fields that are made of places alone: random numbers and pixel numbers. They read no value of their operand."""

    saved = Saved.NOTHING
    differentiable = False

    def workspace_bytes(self, call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
        return 3 * 8 * out_pixels * (call.node.bytes_per_pixel // call.node.dtype.itemsize)

    def bind(self, call: Call, site: Site) -> Bound:
        node = call.node
        starts = [0] * len(node.stored_shape)
        for axis, span in zip(node.stored_axes, site.out, strict=True):
            starts[axis] = span.start
        run, size = plain(call, starts=starts, shape=node.stored_shape), [span.length for span in site.out]
        if node.patches is None:
            return run
        return lambda operands: batched(run([as_stored(operands[0], node, size), *operands[1:]]), node)

    def form(self, call: Call, axis: int, out: Span, operands: tuple[Span | None, ...]) -> Hashable | None:
        return None


class LayerNorm(Pointwise):
    """Layer normalisation over trailing axes none of which is spatial."""

    def axes(self, call: Call, rank: int) -> Axes:
        axes = single_field(call).spatial
        if any(-axis <= len(call["normalized_shape"]) for axis in axes):
            raise NotTileable("it normalises over the axes of the image, which is a reduction")
        return axes


class CrossEntropy(Folding):
    """Cross entropy and negative log likelihood without reduction: class axis 1 in, one value per position out."""

    def axes(self, call: Call, rank: int) -> Axes:
        scores = call.operands[0]
        if scores.axes != (-2, -1) or len(scores.shape) != 4:
            raise NotTileable("its scores are not laid out as (N, classes, H, W)")
        target = call.operands[1]
        if target.axes != (-2, -1):
            raise NotTileable("its target is not a field of the image's size")
        return -2, -1


_UNARY_INPUT = aten(
    "abs ceil clamp clamp.Tensor clamp_min clamp_max cos elu gelu hardsigmoid hardswish log log1p log2 log10 mish "
    "pow.Tensor_Scalar relu6 selu silu sin softplus softshrink celu hardshrink threshold atan asin acos log_sigmoid "
    "square erf"
)
_UNARY_OUTPUT = aten("exp expm1 sigmoid tanh")
_UNARY_OUTPUT_CHAINED = aten("rsqrt sqrt tan reciprocal")
_LINEAR = aten("add.Scalar sub.Scalar rsub.Scalar rsub.Tensor mul.Scalar div.Scalar neg positive")
_STEPS = aten("div.Scalar_mode floor round sign trunc bitwise_not logical_not isnan isinf isfinite nan_to_num")
_SHAPES = aten("zeros_like ones_like full_like")
_BINARY_INPUTS = aten(
    "div.Tensor_mode pow.Tensor_Tensor pow.Scalar maximum minimum atan2 fmod.Tensor fmod.Scalar "
    "remainder.Tensor remainder.Scalar lerp.Scalar lerp.Tensor addcmul addcdiv hypot logaddexp xlogy.Tensor"
)
_NO_GRADIENT = aten(
    "eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor "
    "ge.Scalar logical_and logical_or logical_xor bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor "
    "bitwise_or.Scalar bitwise_xor.Tensor floor_divide floor_divide.Scalar"
)
_CHOICE = aten(
    "where.self where.ScalarSelf where.ScalarOther where.Scalar masked_fill.Scalar masked_fill.Tensor fill.Scalar "
    "fill.Tensor"
)
# The losses that reduce: lowering sets their reduction to none and sums the field itself.
PIXEL_LOSSES = aten(
    "binary_cross_entropy_with_logits binary_cross_entropy mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss"
)

register(Broadcasting(temporaries=1), _UNARY_INPUT + _CHOICE)
register(Broadcasting(temporaries=2), _BINARY_INPUTS + PIXEL_LOSSES)
register(Broadcasting(saved=Saved.OUTPUT), _UNARY_OUTPUT)
register(Broadcasting(saved=Saved.OUTPUT, temporaries=2), _UNARY_OUTPUT_CHAINED)
register(Broadcasting(saved=Saved.NOTHING), _STEPS + _NO_GRADIENT)
register(Broadcasting(saved=Saved.NOTHING, differentiable=False), _SHAPES)
register(Broadcasting(saved=Saved.NOTHING, affine=Affine.JOINTLY), _LINEAR)
register(Broadcasting(saved=Saved.NOTHING), ["gigagrad.with_value.default"])
register(Rectifier(temporaries=1), aten("hardtanh leaky_relu"))
register(Rectifier(saved=Saved.OUTPUT), aten("relu"))
register(Copy(), aten("_to_copy to.dtype alias clone lift_fresh_copy"))
register(Copy(differentiable=False), aten("detach"))
register(Copy(lies=Layout.PACKED), aten("contiguous"))
register(Sum(), aten("add.Tensor sub.Tensor"))
register(Product(affine=Affine.SEPARATELY), aten("mul.Tensor"))
register(Product(affine=Affine.FIRST, gradients_read=((1,), (0, 1))), aten("div.Tensor"))
register(PerPosition(saved=Saved.OUTPUT), aten("softmax.int _softmax log_softmax.int _log_softmax"))
register(PerPosition(), aten("glu cumsum"))
register(PerPosition(saved=Saved.NOTHING, dims="dims"), aten("flip"))
register(PerPosition(removes=True, affine=Affine.JOINTLY), aten("mean.dim sum.dim_IntList"))
register(PerPosition(removes=True), aten("amax amin argmax var.dim var.correction std.correction"))
register(Whole(affine=Affine.JOINTLY), aten("mean sum"))
register(Folding(saved=Saved.OUTPUT, removes=True), aten("logsumexp linalg_vector_norm"))
register(CrossEntropy(), aten("cross_entropy_loss nll_loss_nd"))
register(Pointwise(saved=Saved.NOTHING, temporaries=2, differentiable=False), ["gigagrad.class_weights"])
register(Linear(), aten("linear"))
register(ChannelLayer(), aten("prelu"))
register(BatchNormEval(), aten("batch_norm _native_batch_norm_legit_no_training"))
register(LayerNorm(), aten("layer_norm"))
register(Normalise(), ["gigagrad.normalise"])
register(Counted(), ["gigagrad.uniform", "gigagrad.positions"])
