"""The seam test: an operator's rule on the crops it asks for, against the plain operator on whole fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from gigagrad.boxes import Span
from gigagrad.graphs import Call, Node, Ref, Site, lookup, operators
from gigagrad.graphs.builder import Builder
from gigagrad.graphs.crops import batched
from gigagrad.graphs.graph import EACH, fill, references, substitute
from gigagrad.graphs.op_rules import per_operand


class Bench:
    """Builds nodes one by one and keeps the plain operators' values of them on whole fields."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.values: dict[int, Tensor] = {}

    def field(self, value: Tensor) -> Ref:
        return self._source("image", value, field=True)

    def bag(self, value: Tensor) -> Ref:
        return self._source("image", value, field=True, bag=True)

    def weight(self, value: Tensor) -> Ref:
        return self._source("parameter", value, field=False)

    def constant(self, value: Tensor) -> Ref:
        return self._source("buffer", value, field=False)

    def _source(self, op: str, value: Tensor, *, field: bool, bag: bool = False) -> Ref:
        floating = value.dtype.is_floating_point and op != "buffer"
        shape = tuple(value.shape)
        ref = self.builder.source(
            op, f"{op}{len(self.values)}", shape, value.dtype, field=field, differentiable=floating, bag=bag
        )
        self.values[ref.id] = value.detach().requires_grad_(floating)
        return ref

    def aten(self, op: str, *args: Any, **kwargs: Any) -> Ref:
        return self.call(f"aten.{op}", operators.bind(f"aten.{op}", args, kwargs))

    def aten_each(self, op: str, *args: Any) -> Ref:
        return self.call(f"{EACH}aten.{op}", operators.bind(f"aten.{op}", args, {}))

    def call(self, op: str, arguments: dict[str, Any]) -> Ref:
        made = self.builder.call(op, arguments)
        ref: Ref = made[0] if isinstance(made, list) else made
        known = {name: substitute(value, self.values) for name, value in arguments.items()}
        self.values[ref.id] = first(operators.call(op, known)).detach()
        return ref

    def node(self, ref: Ref) -> Node:
        return self.builder.node(ref)

    def check(
        self, ref: Ref, out: tuple[Span, Span], *, tolerance: float = 1e-12
    ) -> tuple[tuple[Span, Span] | None, ...]:
        """Compare the node's rule with the plain operator, on exactly the crops that `out` needs: value and gradients.
        What it binds for another place of the same form gives the same bits. Returns the operands' spans.
        """
        node = self.node(ref)
        operands = tuple(self.node(r) for r in references(node.arguments))
        call, rule = Call(node, operands), lookup(node.op)
        assert rule is not None
        needs = [rule.needs(call, axis, out[axis]) for axis in (0, 1)]
        spans = tuple(None if y is None or x is None else (y, x) for y, x in zip(*needs, strict=True))
        inputs, plain, crops = {}, [], []  # type: ignore[var-annotated]
        for operand, span in zip(operands, spans, strict=True):
            # One leaf per node for both runs, so that an operand read twice gathers both gradients.
            leaf = inputs.setdefault(
                operand.id, self.values[operand.id].detach().requires_grad_(operand.differentiable)
            )
            plain.append(leaf)
            if operand.is_field and span is None:
                crops.append(None)
                continue
            for axis in (0, 1) if operand.is_field else ():
                assert not span[axis].empty  # type: ignore[index]
                assert span[axis].within(Span(0, operand.size(axis)))  # type: ignore[index]
            crops.append(cropped(leaf, operand, span) if operand.is_field else leaf)  # type: ignore[arg-type]

        def arguments(values: list[Any]) -> dict[str, Any]:
            remaining = iter(values)
            return {name: fill(value, remaining) for name, value in node.arguments.items()}

        expected = cropped(first(operators.call(node.op, arguments(plain))), node, out)
        with torch.no_grad():
            elsewhere = rule.bind(call, _alike(call, Site(out, spans)))(crops)
        got = rule.bind(call, Site(out, spans))(crops)
        torch.testing.assert_close(elsewhere, got.detach(), rtol=0, atol=0, equal_nan=True)
        assert got.shape == expected.shape
        assert got.dtype == node.dtype
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        leaves = [leaf for leaf in inputs.values() if leaf.requires_grad]
        if node.differentiable and expected.requires_grad:
            weight = torch.rand(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(0))
            wanted = torch.autograd.grad((expected * weight).sum(), leaves, allow_unused=True, materialize_grads=True)
            if got.requires_grad:
                given = torch.autograd.grad((got * weight).sum(), leaves, allow_unused=True, materialize_grads=True)
            else:
                given = tuple(torch.zeros_like(leaf) for leaf in leaves)
            for a, b in zip(given, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        return spans


def first(result: Any) -> Tensor:
    """The first of an operator's outputs."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def cropped(value: Tensor, node: Node, spans: tuple[Span, Span]) -> Tensor:
    """The part of a whole field on these spans, as operators take it."""
    value = value.reshape(node.stored_shape)
    for axis, span in zip(node.stored_axes, spans, strict=True):
        value = value.narrow(axis, span.start, span.length)
    return batched(value, node)


def _alike(call: Call, site: Site) -> Site:
    """Another place at which a rule says that its function is the same, if there is one: the last along each axis."""
    rule, found, axes = lookup(call.node.op), [], []
    for axis in (0, 1):
        out, needs = site.out[axis], tuple(None if spans is None else spans[axis] for spans in site.operands)
        form = rule.form(call, axis, out, needs)
        place, there = out, needs
        for start in range(call.node.size(axis) - out.length + 1) if form is not None else ():
            other = Span(start, start + out.length)
            asked = rule.needing(call, axis)(other)
            assert asked == rule.needs(call, axis, other)
            if rule.needs_alike(call, axis):
                assert asked == per_operand(call, lambda _: other)  # noqa: B023 - called at once
            lengths = [[need and need.length for need in spans] for spans in (asked, needs)]
            if lengths[0] == lengths[1] and rule.form(call, axis, other, asked) == form:
                place, there = other, asked
        found.append(place)
        axes.append(there)
    spans = tuple(None if y is None or x is None else (y, x) for y, x in zip(*axes, strict=True))
    return Site((found[0], found[1]), spans)


@st.composite
def spans_of(draw: st.DrawFn, size: int) -> Span:
    start = draw(st.integers(0, size - 1))
    return Span(start, draw(st.integers(start + 1, size)))


@pytest.fixture(scope="session")
def bench() -> Callable[[], Bench]:
    """Makes an empty bench."""
    return Bench


@pytest.fixture(scope="session")
def some_box() -> Callable[[st.DataObject, Node], tuple[Span, Span]]:
    """Draws a box of a node's field."""
    return lambda data, node: (data.draw(spans_of(node.size(0)), "y"), data.draw(spans_of(node.size(1)), "x"))


@pytest.fixture(scope="session")
def noise() -> Callable[..., Tensor]:
    """Reproducible float64 noise of a shape."""
    return lambda *shape: torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))
