"""The table as a whole: names that exist, arguments that bind, one rule each."""

import pytest
import torch

from gigagrad.graphs import Affine, Call, NotTileable, OpRule, Ref, Whole, lookup, operators
from gigagrad.graphs.builder import Builder
from gigagrad.graphs.op_rules import register
from gigagrad.graphs.op_rules import registered as with_rules
from gigagrad.graphs.ops.pointwise import PerPosition


@pytest.mark.parametrize("op", with_rules())
def test_every_rule_belongs_to_an_operator_that_exists(op):
    assert callable(operators.function(op))
    assert operators.signature(op)
    assert isinstance(lookup(op), OpRule)


@pytest.mark.parametrize("op", with_rules())
def test_arguments_that_rules_name_exist(op):
    """A rule registered for an operator whose schema calls the argument otherwise would fail with a KeyError."""
    names = operators.signature(op)
    rule = lookup(op)
    if isinstance(rule, PerPosition) and type(rule).axes is PerPosition.axes:
        assert rule.dims in names
        assert not rule.removes or "keepdim" in names


def test_one_rule_per_operator():
    with pytest.raises(AssertionError, match="two rules"):
        register(lookup("aten.cat.default"), ["aten.cat.default"])


def test_binding_fills_defaults_and_orders_by_schema():
    bound = operators.bind("aten.conv2d.default", ("x", "w"), {"groups": 3})
    assert list(bound) == ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]
    assert bound["groups"] == 3
    assert bound["bias"] is None
    assert bound["stride"] == [1, 1]


def call_of(op, *arguments):
    """A use of an operator on fields and weights (`nn.Parameter`) with these values; numbers stay numbers."""
    builder, given = Builder(), []  # type: ignore[var-annotated]
    for value in arguments:
        if isinstance(value, torch.Tensor):
            weight, name = isinstance(value, torch.nn.Parameter), f"x{len(given)}"
            kind = "parameter" if weight else "image"
            shape, asks = tuple(value.shape), value.requires_grad
            value = builder.source(kind, name, shape, value.dtype, field=not weight, differentiable=asks)
        given.append(value)
    node = builder.node(builder.one(op, operators.bind(op, tuple(given), {})))
    return Call(node, tuple(builder.node(ref) for ref in given if isinstance(ref, Ref)))


def field(*, asks=True):
    return torch.rand(1, 3, 4, 5, dtype=torch.float64, requires_grad=asks)


AFFINE = {
    "aten.add.Tensor": (field(), field()),
    "aten.sub.Tensor": (field(), field()),
    "aten.rsub.Scalar": (field(), 2.0),
    "aten.neg.default": (field(),),
    "aten.mul.Scalar": (field(), 3.0),
    "aten.div.Scalar": (field(), 3.0),
    "aten.mean.dim": (field(), [1]),
    "aten.sum.dim_IntList": (field(), [1]),
    "aten.sum.default": (field(),),
    "aten.mean.default": (field(),),
    "aten.permute.default": (field(), [0, 2, 3, 1]),
    "aten.reshape.default": (field(), [1, 1, 3, 4, 5]),
    "aten.slice.Tensor": (field(), 2, 0, 3),
    "aten.select.int": (field(), 1, 0),
    "aten.clone.default": (field(),),
    "aten.mul.Tensor": (field(), field()),
    "aten.div.Tensor": (field(), field()),
    "aten.exp.default": (field(),),
    "aten.relu.default": (field() - 0.5,),
}


@pytest.mark.parametrize("op", AFFINE)
def test_affine_operators_have_gradients_that_no_value_moves(op):
    given = [a.detach().requires_grad_() if isinstance(a, torch.Tensor) else a for a in AFFINE[op]]
    leaves = [a for a in given if isinstance(a, torch.Tensor)]
    weights = torch.rand_like(operators.call(op, operators.bind(op, tuple(given), {})))

    def gradients(values):
        out = operators.call(op, operators.bind(op, tuple(values), {}))
        return torch.autograd.grad(out, [a for a in values if isinstance(a, torch.Tensor)], weights)

    def moved(which):
        """Whether gradients of the operands in `which` change with their values."""
        values = list(given)
        for i in which:
            values[i] = (1.7 * given[i].detach() - 0.3).requires_grad_()
        pairs = zip(gradients(given), gradients(values), strict=True)
        return any(not torch.allclose(one, other) for i, (one, other) in enumerate(pairs) if i in which)

    every = tuple(range(len(leaves)))
    affine = lookup(op).affine
    if affine is Affine.JOINTLY:
        assert not moved(every)
    elif affine is Affine.SEPARATELY:
        assert moved(every)
        assert not any(moved((i,)) for i in every)
    elif affine is Affine.FIRST:
        assert not moved((0,))
        assert moved((1,))
    else:
        assert moved(every)


def test_products_keep_what_the_other_factors_gradient_needs():
    one, other = field(), field(asks=False)
    for op, expected in (
        ("aten.mul.Tensor", {(True, True): {0, 1}, (True, False): {1}, (False, True): {0}}),
        ("aten.div.Tensor", {(True, True): {0, 1}, (True, False): {1}, (False, True): {0, 1}}),
        ("aten.add.Tensor", {(True, True): set()}),
    ):
        for asks, kept in expected.items():
            call = call_of(op, *(one if ask else other for ask in asks))
            assert lookup(op).saves(call) == {call.operands[i].id for i in kept}, (op, asks)
    exponential = call_of("aten.exp.default", one)
    assert lookup("aten.exp.default").saves(exponential) == {exponential.node.id}


def test_flops_are_pytorchs_or_those_of_filled_vectors():
    image, few, many = torch.rand(1, 3, 8, 9), *(torch.nn.Parameter(torch.rand(n, 3, 3, 3)) for n in (12, 32))
    op = "aten.conv2d.default"
    pixels = 6 * 7
    assert lookup(op).flops(call_of(op, image, many)) == 2 * 27 * 32 * pixels
    assert lookup(op).flops(call_of(op, image, few)) == 2 * 27 * 16 * pixels
    fewer = torch.nn.Parameter(torch.rand(5, 3, 3, 3))
    assert lookup(op).flops(call_of(op, image, fewer)) == 2 * (3 * 3 * 4) * 16 * pixels / 2  # two pixels in a vector
    assert lookup("aten.relu.default").flops(call_of("aten.relu.default", image)) == 0


def test_what_nobody_registered_runs_whole():
    rule = lookup("somebody.elses.default")
    assert isinstance(rule, Whole)
    assert (rule.affine, rule.copies, rule.pixelwise, rule.compiled) == (Affine.NO, False, False, False)
    with pytest.raises(NotTileable, match="no op rule"):
        rule.axes(call_of("aten.relu.default", field()), 4)
