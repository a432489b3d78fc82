"""Position by position: activations, arithmetic with broadcasting, channel-wise layers, losses without reduction."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.boxes import Span
from gigagrad.graphs import operators
from gigagrad.graphs.op_rules import NotTileable
from gigagrad.graphs.ops.pointwise import (
    _BINARY_INPUTS,
    _LINEAR,
    _NO_GRADIENT,
    _UNARY_INPUT,
    _UNARY_OUTPUT,
    _UNARY_OUTPUT_CHAINED,
)

BOX = Span(2, 6), Span(3, 5)
SETTINGS = {
    "clamp.default": (-0.5, 0.5),
    "clamp_min.default": (0.1,),
    "clamp_max.default": (0.1,),
    "pow.Tensor_Scalar": (2,),
    "threshold.default": (0.1, 3.0),
    "full_like.default": (2.0,),
    "to.dtype": (torch.float64,),
    "celu.default": (),
}


def tensors_of(op: str) -> list[str]:
    return [a.name for a in operators.function(f"aten.{op}")._schema.arguments if str(a.type) == "Tensor"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "name", sorted({*_UNARY_INPUT, *_UNARY_OUTPUT, *_UNARY_OUTPUT_CHAINED, *_LINEAR, *_BINARY_INPUTS, *_NO_GRADIENT})
)
def test_elementwise(bench, noise, name):
    """Every operator of the family, all its tensors fields; what it saves is another matter (tests/plans)."""
    op, b = name.removeprefix("aten."), bench()
    arguments = []
    for number, argument in enumerate(operators.function(f"aten.{op}")._schema.arguments):  # type: ignore[attr-defined]
        if argument.kwarg_only:
            break
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            value = noise(1, 2, 8, 7).roll(number, -1).sigmoid()
            if "bitwise" in op or "logical" in op:
                value = value > 0.4
            elif "floor_divide" in op:
                value = (100 * value).to(torch.int64)
            arguments.append(b.field(value))
        elif op in SETTINGS:
            arguments += SETTINGS[op]
            break
        elif not argument.has_default_value():
            arguments.append(b.field(noise(1, 2, 8, 7)) if kind == "Tensor" else 1 if "bitwise" in op else 0.7)
    keywords = {"rounding_mode": "floor"} if op.endswith("_mode") else {}
    y = b.aten(op, *arguments, **keywords)
    b.check(y, BOX)


@given(st.data())
def test_broadcasting_of_fields_and_globals(bench, some_box, noise, data):
    """Any mix of a field with operands of length 1, of fewer axes, or global with an extent of the image's size."""
    b = bench()
    x = b.field(noise(1, 3, 6, 5))
    shape = data.draw(
        st.sampled_from([(), (1,), (3, 1, 1), (1, 3, 1, 1), (5,), (6, 1), (3, 6, 5), (1, 1, 6, 1), (1, 1, 6, 5)])
    )
    other = b.weight(noise(*shape))
    first, second = (x, other) if data.draw(st.booleans()) else (other, x)
    y = b.aten(data.draw(st.sampled_from(["add.Tensor", "mul.Tensor", "div.Tensor", "maximum.default"])), first, second)
    b.check(y, some_box(data, b.node(y)), tolerance=1e-11)


def test_a_field_of_one_row_is_broadcast_over_all(bench, noise):
    b = bench()
    row, column = b.field(noise(1, 2, 1, 7)), b.field(noise(1, 1, 8, 1))
    y = b.aten("mul.Tensor", row, column)
    spans = b.check(y, BOX)
    assert spans == ((Span(0, 1), BOX[1]), (BOX[0], Span(0, 1)))


def test_choices(bench, noise):
    b = bench()
    x = b.field(noise(1, 2, 8, 7))
    mask = b.aten("gt.Scalar", x, 0.0)
    b.check(b.aten("where.self", mask, x, b.weight(noise(7))), BOX)
    b.check(b.aten("masked_fill.Scalar", x, mask, 3.0), BOX)
    b.check(b.aten("masked_fill.Tensor", x, mask, b.weight(noise())), BOX)
    b.check(b.aten("fill.Scalar", x, 3.0), BOX)


CHANNELS = {
    "softmax.int": (1,),
    "log_softmax.int": (1,),
    "_softmax.default": (1, False),
    "_log_softmax.default": (-3, False),
    "glu.default": (1,),
    "cumsum.default": (1,),
    "flip.default": ([1],),
    "mean.dim": ([1],),
    "sum.dim_IntList": ([1], True),
    "amax.default": ([1],),
    "amin.default": ([1], True),
    "argmax.default": (1,),
    "logsumexp.default": ([1],),
    "linalg_vector_norm.default": (2, [1], True),
}


@pytest.mark.parametrize("op", CHANNELS)
def test_along_the_channels(bench, noise, op):
    b = bench()
    b.check(b.aten(op, b.field(noise(1, 4, 8, 7)), *CHANNELS[op]), BOX)


@pytest.mark.parametrize("op", CHANNELS)
@pytest.mark.parametrize("dim", [2, -1])
def test_along_an_axis_of_the_image_is_refused(bench, noise, op, dim):
    arguments = [[dim] if value == [1] else dim if value in (1, -3) else value for value in CHANNELS[op]]
    b = bench()
    with pytest.raises(NotTileable, match="along an axis of the image"):
        b.aten(op, b.field(noise(1, 4, 8, 8)), *arguments)


@pytest.mark.parametrize("op", ["amax.default", "amin.default"])
def test_over_everything_is_refused(bench, noise, op):
    b = bench()
    with pytest.raises(NotTileable, match="all axes"):
        b.aten(op, b.field(noise(1, 4, 8, 8)), [])


def test_layers(bench, noise):
    b = bench()
    x = b.field(noise(1, 4, 8, 7))
    mean, var = b.constant(noise(4)), b.constant(noise(4).abs() + 0.5)
    b.check(b.aten("batch_norm.default", x, mean, mean, mean, var, False, 0.1, 1e-5, False), BOX, tolerance=1e-11)
    b.check(b.aten("prelu.default", x, b.weight(noise(4))), BOX)
    b.check(b.aten("prelu.default", x, b.weight(noise(1))), BOX)
    last = b.aten("permute.default", x, [0, 2, 3, 1])
    b.check(b.aten("linear.default", last, b.weight(noise(3, 4)), b.weight(noise(3))), BOX)
    b.check(b.aten("layer_norm.default", last, [4], mean, mean), BOX, tolerance=1e-11)
    with pytest.raises(NotTileable, match="an axis of the image"):
        b.aten("linear.default", x, b.weight(noise(3, 7)))
    with pytest.raises(NotTileable, match="which is a reduction"):
        b.aten("layer_norm.default", x, [4, 8, 7])


def test_losses_without_reduction(bench, noise):
    b = bench()
    scores = b.field(noise(1, 3, 8, 7))
    classes = b.field(torch.randint(0, 3, (1, 8, 7)))
    weight = b.constant(noise(3).abs())
    b.check(b.aten("cross_entropy_loss.default", scores, classes, weight, 0, 1, 0.1), BOX, tolerance=1e-11)
    logs = b.aten("log_softmax.int", scores, 1)
    b.check(b.aten("nll_loss_nd.default", logs, classes, None, 0, 2), BOX)
    b.check(b.call("gigagrad.class_weights", {"target": classes, "weight": weight, "ignore_index": 1}), BOX)
    with pytest.raises(NotTileable, match="not a field"):
        b.aten("cross_entropy_loss.default", scores, b.weight(torch.zeros(1, 8, 7, dtype=torch.int64)), None, 0)
    probabilities = b.field(noise(1, 3, 8, 7).softmax(1))
    b.check(b.aten("cross_entropy_loss.default", scores, probabilities, None, 0), BOX, tolerance=1e-11)
    pos_weight = b.constant(noise(3, 1, 1).abs())
    b.check(b.aten("binary_cross_entropy_with_logits.default", scores, probabilities, None, pos_weight, 0), BOX)


def test_complex_fields_are_refused(bench, noise):
    b = bench()
    with pytest.raises(NotTileable, match="complex"):
        b.aten("mul.Tensor", b.field(noise(1, 1, 4, 4)), b.weight(torch.ones((), dtype=torch.complex128)))


@given(st.integers(0, 2**40), st.data())
def test_numbers_by_place(bench, some_box, noise, key, data):
    """Random numbers and numbers of pixels are those of the whole field, whichever crop they are made for."""
    b = bench()
    field = b.field(noise(1, 2, 9, 11))
    seed = b.constant(torch.tensor(key))
    for made in (
        b.call("gigagrad.uniform", {"like": field, "seed": seed}),
        b.call("gigagrad.positions", {"like": field}),
    ):
        b.check(made, some_box(data, b.node(made)))
