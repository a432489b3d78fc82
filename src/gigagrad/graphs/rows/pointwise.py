"""Operators that work position by position: arithmetic with broadcasting, activations, casts, channel-wise layers.

Output box = input box. Operands of length 1 along an axis broadcast, globals with a spatial extent (a bias per pixel,
say) are narrowed to the crop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gigagrad.boxes import Span
from gigagrad.graphs import operators
from gigagrad.graphs.graph import Axes, Node, Ref
from gigagrad.graphs.statistics import normalise
from gigagrad.graphs.table import (
    Affine,
    Call,
    Gains,
    Layout,
    Refused,
    Row,
    Saved,
    Site,
    Unmoved,
    Whole,
    common_axes,
    per_operand,
    register,
    scaled_gains,
    sum_of_gains,
)


def _size_at(shape: tuple[int, ...], axis: int) -> int:
    """Length of a shape at a negative axis; 1 where broadcasting would add the axis."""
    return shape[axis] if -axis <= len(shape) else 1


class Broadcasting(Unmoved):
    """Elementwise operators whose tensor operands broadcast against each other.

    `temporaries`: how many results of the output's size their derivative formulas hold between the first and the last.
    """

    def __init__(
        self, saved: Saved, temporaries: int = 0, *, affine: Affine = Affine.NO, differentiable: bool = True
    ) -> None:
        self.saved, self.affine, self.differentiable = saved, affine, differentiable
        self._temporaries = temporaries

    def workspace_bytes(self, call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
        return self._temporaries * call.node.bytes_per_pixel * out_pixels

    def axes(self, call: Call, rank: int) -> Axes:
        axes = common_axes(call)
        for operand in call.operands:
            if not operand.is_field and len(operand.shape) > rank:
                raise Refused("a global operand has more axes than the field")
        return axes

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        size = call.node.size(axis)
        return per_operand(call, lambda operand: out if operand.size(axis) == size else Span(0, 1))

    def run(self, call: Call, arguments: dict[str, Any], site: Site) -> torch.Tensor:
        wide = {operand.id for operand in call.operands if self._extends(call, operand)}
        if wide:
            arguments = {
                name: self._narrow(call, arguments[name], site)
                if isinstance(value, Ref) and value.id in wide
                else arguments[name]
                for name, value in call.node.arguments.items()
            }
        return super().run(call, arguments, site)

    @staticmethod
    def _extends(call: Call, operand: Node) -> bool:
        """Whether a global operand varies along a spatial axis of the field and must be narrowed to the crop."""
        assert call.node.axes is not None
        return not operand.is_field and any(_size_at(operand.shape, axis) > 1 for axis in call.node.axes)

    @staticmethod
    def _narrow(call: Call, tensor: torch.Tensor, site: Site) -> torch.Tensor:
        assert call.node.axes is not None
        for axis, span in zip(call.node.axes, site.out, strict=True):
            if _size_at(tuple(tensor.shape), axis) > 1:
                tensor = tensor.narrow(axis, span.start, span.length)
        return tensor


class Copy(Broadcasting):
    """The same values, at most in another dtype."""

    copies = True

    def __init__(self, *, differentiable: bool = True) -> None:
        super().__init__(Saved.NOTHING, affine=Affine.JOINTLY, differentiable=differentiable)


class Contiguous(Copy):
    """The same values in order in memory."""

    def layout(self, call: Call) -> Layout:
        return Layout.PACKED


class Rectifier(Broadcasting):
    """Activations whose slope is at most 1; where it is 0, so is mostly the value, and zeros are counted."""

    def error_gains(self, call: Call, read: Sequence[Gains], value: Callable[[Ref], torch.Tensor]) -> Gains | None:
        return read[0]


class Sum(Broadcasting):
    """Sums and differences."""

    def __init__(self) -> None:
        super().__init__(Saved.NOTHING, affine=Affine.JOINTLY)

    def error_gains(self, call: Call, read: Sequence[Gains], value: Callable[[Ref], torch.Tensor]) -> Gains | None:
        plain = call["alpha"] == 1 and all(field.shape == call.node.shape for field in call.fields)
        return sum_of_gains(read) if plain else None


class Product(Broadcasting):
    """A factor is kept only for the gradient of the other one."""

    def __init__(self) -> None:
        super().__init__(Saved.INPUTS, 2, affine=Affine.SEPARATELY)

    def saves(self, call: Call) -> set[int]:
        pairs = zip(call.operands, reversed(call.operands), strict=True)
        return {one.id for one, other in pairs if len(call.operands) == 2 and one.is_field and other.differentiable}


class Quotient(Broadcasting):
    """The denominator is kept for the gradient of the numerator, and both for its own."""

    def __init__(self) -> None:
        super().__init__(Saved.INPUTS, 2, affine=Affine.FIRST)

    def saves(self, call: Call) -> set[int]:
        if len(call.operands) != 2:
            return set()
        above, below = call.operands
        kept = call.operands if below.differentiable else (below,) if above.differentiable else ()
        return {operand.id for operand in kept if operand.is_field}


class PerPosition(Unmoved):
    """Operators that mix channels of one position only: the axes they name must not be spatial."""

    def __init__(
        self, saved: Saved, dims: str | None = None, keeps: str | None = None, *, affine: Affine = Affine.NO
    ) -> None:
        self.saved, self.affine = saved, affine
        self._dims = dims
        self._keepdim = keeps

    def axes(self, call: Call, rank: int) -> Axes:
        axes = common_axes(call)
        field = call.fields[0]
        dims = self._named_dims(call, len(field.shape))
        positive = [axis + len(field.shape) for axis in axes]
        if any(dim in positive for dim in dims):
            raise Refused("it works along an axis of the image")
        removed = dims if self._keepdim is not None and not call[self._keepdim] else []
        kept = [dim for dim in range(len(field.shape)) if dim not in removed]
        y, x = (kept.index(axis) - len(kept) for axis in positive)
        return y, x

    def _named_dims(self, call: Call, rank: int) -> list[int]:
        if self._dims is None:
            return []
        value = call[self._dims]
        if value is None or value == []:
            raise Refused("it works along all axes of the image")
        return [dim % rank for dim in ([value] if isinstance(value, int) else value)]


class Folding(PerPosition):
    """Operators whose output has fewer channels than what they compute on the way: some copies of their input."""

    def workspace_bytes(self, call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
        return 3 * call.operands[0].bytes_per_pixel * out_pixels


class ChannelLayer(PerPosition):
    """Layers with per-channel parameters; `channel` is the axis their parameters belong to."""

    def __init__(self, channel: int) -> None:
        super().__init__(Saved.INPUTS)
        self._channel = channel

    def axes(self, call: Call, rank: int) -> Axes:
        axes = common_axes(call)
        if len(call.fields) > 1:
            raise Refused("its parameters depend on the image's pixels")
        if self._channel % rank in (axes[0] + rank, axes[1] + rank):
            raise Refused("its channel axis is an axis of the image")
        return axes


class Linear(ChannelLayer):
    """A matrix product at every position: pixelwise, but not cheap."""

    pixelwise = False

    def flops(self, call: Call) -> float:
        return Row.flops(self, call)


class BatchNormEval(ChannelLayer):
    """Batch normalisation with running statistics (evaluation mode): a scale and a shift per channel."""

    on_images = True

    def run(self, call: Call, arguments: dict[str, Any], site: Site) -> torch.Tensor:
        mean, scale = arguments["running_mean"], torch.rsqrt(arguments["running_var"] + arguments["eps"])
        if arguments["weight"] is not None:
            scale = scale * arguments["weight"]
        shift = torch.zeros_like(mean) if arguments["bias"] is None else arguments["bias"]
        return normalise(arguments["input"], mean, scale, shift)

    def error_gains(self, call: Call, read: Sequence[Gains], value: Callable[[Ref], torch.Tensor]) -> Gains | None:
        scale = (value(call["running_var"]) + call["eps"]).rsqrt()
        return scaled_gains(read[0], scale if call["weight"] is None else (scale * value(call["weight"])).abs())


class Normalise(ChannelLayer):
    """Pixels normalised by given statistics of their channel, which are global values."""

    def axes(self, call: Call, rank: int) -> Axes:
        if call.operands[0].axes != (-2, -1) or len(call.fields) > 1:
            raise Refused("its input is not laid out as (N, C, H, W)")
        return -2, -1

    def error_gains(self, call: Call, read: Sequence[Gains], value: Callable[[Ref], torch.Tensor]) -> Gains | None:
        return scaled_gains(read[0], value(call["scale"]).abs())


class Counted(Row):
    """Fields that are made of places alone: random numbers and pixel numbers. They read no value of their operand."""

    saved = Saved.NOTHING
    pixelwise = True
    differentiable = False

    def __init__(self, strides: Callable[[Sequence[int]], list[int]]) -> None:
        self._strides = strides

    def axes(self, call: Call, rank: int) -> Axes:
        return common_axes(call)

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        return per_operand(call, lambda _: out)

    def workspace_bytes(self, call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
        return 3 * 8 * out_pixels * (call.node.bytes_per_pixel // call.node.dtype.itemsize)

    def run(self, call: Call, arguments: dict[str, Any], site: Site) -> torch.Tensor:
        like: torch.Tensor = arguments["like"]
        assert call.node.axes is not None
        starts = [0] * like.ndim
        for axis, span in zip(call.node.axes, site.out, strict=True):
            starts[axis] = span.start
        arguments = {**arguments, "starts": starts, "strides": self._strides(call.node.shape)}
        result: torch.Tensor = operators.function(call.node.op)(**arguments)
        return result


class LayerNorm(PerPosition):
    """Layer normalisation over trailing axes none of which is spatial."""

    def axes(self, call: Call, rank: int) -> Axes:
        axes = common_axes(call)
        if len(call.fields) > 1:
            raise Refused("its parameters depend on the image's pixels")
        if any(-axis <= len(call["normalized_shape"]) for axis in axes):
            raise Refused("it normalises over the axes of the image, which is a reduction")
        return axes


class ClassWeights(PerPosition):
    """The weight of every position's class: looked up in a global table, as wide as there are classes."""

    differentiable = False

    def workspace_bytes(self, call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
        return 2 * call.node.bytes_per_pixel * out_pixels


class CrossEntropy(Folding):
    """Cross entropy and negative log likelihood without reduction: class axis 1 in, one value per position out."""

    def axes(self, call: Call, rank: int) -> Axes:
        scores = call.operands[0]
        if scores.axes != (-2, -1) or len(scores.shape) != 4:
            raise Refused("its scores are not laid out as (N, classes, H, W)")
        target = call.operands[1]
        if target.axes != (-2, -1):
            raise Refused("its target is not a field of the image's size")
        return -2, -1


_UNARY_INPUT = (
    "abs ceil clamp.default clamp.Tensor clamp_min.default clamp_max.default cos elu gelu hardsigmoid hardswish "
    "log log1p log2 log10 mish pow.Tensor_Scalar relu6 selu silu sin softplus softshrink celu "
    "hardshrink threshold atan asin acos log_sigmoid square erf"
).split()
_UNARY_OUTPUT = "exp expm1 sigmoid tanh".split()
_UNARY_OUTPUT_CHAINED = "rsqrt sqrt tan reciprocal".split()
_LINEAR = "add.Scalar sub.Scalar rsub.Scalar rsub.Tensor mul.Scalar div.Scalar neg positive".split()
_STEPS = (
    "div.Scalar_mode floor round sign trunc zeros_like ones_like full_like bitwise_not logical_not isnan isinf "
    "isfinite nan_to_num"
).split()
_BINARY_INPUTS = (
    "div.Tensor_mode pow.Tensor_Tensor pow.Scalar maximum minimum atan2 fmod.Tensor fmod.Scalar "
    "remainder.Tensor remainder.Scalar lerp.Scalar lerp.Tensor addcmul addcdiv hypot logaddexp xlogy.Tensor"
).split()
_NO_GRADIENT = (
    "eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor "
    "ge.Scalar logical_and logical_or logical_xor bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor "
    "bitwise_or.Scalar bitwise_xor.Tensor floor_divide floor_divide.Scalar"
).split()
_CHOICE = (
    "where.self where.ScalarSelf where.ScalarOther where.Scalar masked_fill.Scalar masked_fill.Tensor fill.Scalar "
    "fill.Tensor"
).split()
# The losses that reduce: lowering sets their reduction to none and sums the field itself.
PIXEL_LOSSES = (
    "binary_cross_entropy_with_logits binary_cross_entropy mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss"
).split()


def _names(words: list[str]) -> list[str]:
    return [f"aten.{word}" if "." in word else f"aten.{word}.default" for word in words]


register(Broadcasting(Saved.INPUTS, 1), _names(_UNARY_INPUT + _CHOICE))
register(Broadcasting(Saved.INPUTS, 2), _names(_BINARY_INPUTS + PIXEL_LOSSES))
register(Broadcasting(Saved.OUTPUT), _names(_UNARY_OUTPUT))
register(Broadcasting(Saved.OUTPUT, 2), _names(_UNARY_OUTPUT_CHAINED))
register(Rectifier(Saved.INPUTS, 1), _names(["hardtanh", "leaky_relu"]))
register(Rectifier(Saved.OUTPUT), _names(["relu"]))
register(Broadcasting(Saved.NOTHING), _names(_STEPS + _NO_GRADIENT))
register(Broadcasting(Saved.NOTHING, affine=Affine.JOINTLY), _names(_LINEAR))
register(Copy(), _names("_to_copy to.dtype alias clone lift_fresh_copy".split()))
register(Contiguous(), _names(["contiguous"]))
register(Copy(differentiable=False), _names(["detach"]))
register(Sum(), _names(["add.Tensor", "sub.Tensor"]))
register(Product(), _names(["mul.Tensor"]))
register(Quotient(), _names(["div.Tensor"]))
register(PerPosition(Saved.OUTPUT, "dim"), ["aten.softmax.int", "aten._softmax.default"])
register(PerPosition(Saved.OUTPUT, "dim"), ["aten.log_softmax.int", "aten._log_softmax.default"])
register(PerPosition(Saved.INPUTS, "dim"), ["aten.glu.default", "aten.cumsum.default"])
register(PerPosition(Saved.NOTHING, "dims"), ["aten.flip.default"])
register(PerPosition(Saved.INPUTS, "dim", "keepdim", affine=Affine.JOINTLY), ["aten.mean.dim", "aten.sum.dim_IntList"])
register(PerPosition(Saved.INPUTS, "dim", "keepdim"), ["aten.amax.default", "aten.amin.default", "aten.argmax.default"])
register(Whole(affine=Affine.JOINTLY), ["aten.mean.default", "aten.sum.default"])
register(Folding(Saved.OUTPUT, "dim", "keepdim"), ["aten.logsumexp.default", "aten.linalg_vector_norm.default"])
register(Linear(-1), ["aten.linear.default"])
register(ChannelLayer(1), ["aten.prelu.default"])
register(BatchNormEval(1), ["aten.batch_norm.default", "aten._native_batch_norm_legit_no_training.default"])
register(LayerNorm(Saved.INPUTS), ["aten.layer_norm.default"])
register(CrossEntropy(Saved.INPUTS), ["aten.cross_entropy_loss.default", "aten.nll_loss_nd.default"])
register(ClassWeights(Saved.NOTHING), ["gigagrad.class_weights"])
register(Normalise(1), ["gigagrad.normalise"])
register(Counted(operators.contiguous_strides), ["gigagrad.uniform"])
register(Counted(lambda shape: [*[0] * (len(shape) - 2), shape[-1], 1]), ["gigagrad.positions"])
register(
    PerPosition(Saved.INPUTS, "dim", "keepdim"), [f"aten.{n}" for n in ("var.dim", "var.correction", "std.correction")]
)
