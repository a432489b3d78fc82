"""Builds a `Graph` node by node: shapes by running each operator on the meta device, axes by asking its row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch.utils._pytree import TreeSpec

from gigagrad.graphs import operators
from gigagrad.graphs.graph import (
    BAG_AXES,
    FIELD_SUM,
    GATHER,
    IMAGE_AXES,
    REDUCTIONS,
    SCATTER,
    Axes,
    Graph,
    Node,
    Origin,
    Patches,
    Ref,
    exactly,
    references,
    substitute,
)
from gigagrad.graphs.op_rules import Call, NoPixels, NotTileable, lookup


class Builder:
    """Appends nodes in topological order. `origin` is stamped on every node added until it is changed.

    With `merging`, what is the same operator on the same values is one node, except where it draws random numbers.
    `results` has what operators made on the meta device in other graphs of the program, and gets more of it.
    """

    def __init__(
        self,
        closed: Mapping[str, torch.Tensor] = MappingProxyType({}),
        *,
        merging: bool = False,
        results: dict[Any, Any] | None = None,
    ) -> None:
        self._results = {} if results is None else results
        self._same: dict[Any, Any] | None = {} if merging else None
        self._nodes: list[Node] = []
        self._closed = closed
        self._constants: dict[str, torch.Tensor] = {}
        self.updates: dict[str, Ref] = {}
        self._moved: dict[tuple[int, Axes | None, Patches | None], Ref] = {}
        self.origin = Origin()

    def node(self, ref: Ref) -> Node:
        return self._nodes[ref.id]

    def is_field(self, value: Any) -> bool:
        return isinstance(value, Ref) and self.node(value).is_field

    def source(
        self,
        op: str,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        field: bool,
        differentiable: bool,
        bag: bool = False,
    ) -> Ref:
        """An input of the graph: image or bag, target, parameter or buffer."""
        axes, patches = (BAG_AXES, Patches(shape[0], 1)) if bag else (IMAGE_AXES if field else None, None)
        return self._append(op, {"name": name}, operators.meta(shape, dtype), axes, differentiable, patches)

    def constant(self, name: str, value: torch.Tensor) -> Ref:
        self._constants[name] = value
        return self.source("constant", name, tuple(value.shape), value.dtype, field=False, differentiable=False)

    def nchw(self, field: Ref) -> tuple[int, ...]:
        """Return the shape of a field laid out as (N, C, H, W). Raises `NotTileable` for any other layout."""
        node = self.node(field)
        if node.axes != IMAGE_AXES or len(node.shape) != 4:
            raise NotTileable("its input is not laid out as (N, C, H, W)")
        return node.shape

    def spatial_dims(self, field: Ref, dims: Sequence[int] | None) -> tuple[list[int], int]:
        """Return the reduced axes (positive) and how many of them are spatial."""
        node = self.node(field)
        rank = len(node.shape)
        positive = list(range(rank)) if not dims else sorted({dim % rank for dim in dims})
        return positive, sum(axis + rank in positive for axis in node.spatial)

    def to_dtype(self, value: Ref, dtype: torch.dtype) -> Ref:
        return value if self.node(value).dtype == dtype else self.aten("_to_copy.default", value, dtype=dtype)

    def mean_and_variance(self, moments: Ref, correction: float = 0) -> tuple[Ref, Ref]:
        """Compute mean and variance of moments in float64; the variance by the number of values less `correction`."""
        mean = self.one("gigagrad.average", {"moments": moments})
        return mean, self.one("gigagrad.variance", {"moments": moments, "correction": correction})

    def field_sum(self, field: Ref, dims: list[int] | None = None, *, keepdim: bool = False) -> Ref:
        """The sum of a field over `dims` (default: all of its axes); `dims` must hold both spatial axes."""
        return self.reduction(FIELD_SUM, field, dims, keepdim=keepdim)

    def reduction(self, op: str, field: Ref, dims: list[int] | None = None, **settings: Any) -> Ref:
        """Reduce a field over `dims` (default: all of its axes). Raises `NotTileable` for one spatial axis only."""
        node = self.node(field)
        rank = len(node.shape)
        positive = sorted(range(rank) if dims is None else {dim % rank for dim in dims})
        if not all(axis + rank in positive for axis in node.spatial):
            raise NotTileable("it reduces one axis of the image but not the other")
        return self.one(op, {"field": field, "dims": positive, **settings})

    def gather(self, ref: Ref) -> Ref:
        """A whole field as one global value; what is global already, as it is."""
        node = self.node(ref)
        if not node.is_field:
            return ref
        if node.op == SCATTER:
            value: Ref = node.arguments["value"]
            return value
        if (ref.id, None, None) not in self._moved:
            self._moved[ref.id, None, None] = self.one(GATHER, {"field": ref})
        return self._moved[ref.id, None, None]

    def scatter(self, value: Ref, axes: Axes, patches: Patches | None = None) -> Ref:
        """A global value as a field that holds its spatial axes, or these patches, at `axes`."""
        if (value.id, axes, patches) not in self._moved:
            node = self.node(value)
            made = operators.meta(node.shape, node.dtype)
            scattered = self._append(SCATTER, {"value": value}, made, axes, node.differentiable, patches)
            self._moved[value.id, axes, patches] = scattered
        return self._moved[value.id, axes, patches]

    def whole_field(self, op: str, arguments: dict[str, Any]) -> Any:
        """Append an operator on its operands as whole tensors."""
        whole = {ref.id: self.gather(ref) for ref in references(arguments)}
        return self.call(op, {name: substitute(value, whole) for name, value in arguments.items()})

    def one(self, op: str, arguments: dict[str, Any]) -> Ref:
        """`call` of an operator with one output."""
        result = self.call(op, arguments)
        assert isinstance(result, Ref), op
        return result

    def call(self, op: str, arguments: dict[str, Any]) -> Any:
        """Append an operator whose arguments are bound by name. Raises `NotTileable` if it has no tile rule here.

        The result is a `Ref`, or a list of them for an operator of several outputs (None for those that a tile rule
        does not deliver).
        """
        if self._same is None or operators.is_random(op):
            return self._called(op, arguments)
        key = op, exactly(arguments)
        if key not in self._same:
            self._same[key] = self._called(op, arguments)
        return self._same[key]

    def _called(self, op: str, arguments: dict[str, Any]) -> Any:
        operand_nodes = tuple(self.node(ref) for ref in references(arguments))
        forms = {node.id: (node.shape, node.dtype) for node in operand_nodes}
        key = op, exactly({name: substitute(value, forms) for name, value in arguments.items()})
        if key not in self._results:
            self._results[key] = operators.on_meta(op, arguments, operand_nodes)
        result = self._results[key]
        several = isinstance(result, tuple | list)
        outputs = list(result) if several else [result]
        reads_field = op not in REDUCTIONS and op != GATHER and any(n.is_field for n in operand_nodes)
        axes, patches = _axes(op, arguments, outputs[0], operand_nodes) if reads_field else (None, None)
        differentiable = _differentiable(op, outputs[0], operand_nodes)
        base = self._append(op, arguments, outputs[0], axes, differentiable, patches)
        if not several:
            return base
        if reads_field:
            return [base, *[None for _ in outputs[1:]]]

        def item(index: int, made: torch.Tensor) -> Ref:
            named = {"outputs": base, "index": index}
            return self._append("gigagrad.item", named, made, None, _differentiable(op, made, operand_nodes))

        return [None if output is None else item(index, output) for index, output in enumerate(outputs)]

    def aten(self, op: str, *args: Any, **kwargs: Any) -> Ref:
        """Append an ATen operator called with positional and keyword arguments, e.g. `aten("div.Tensor", a, b)`."""
        name = f"aten.{op}"
        return self.one(name, operators.bind(name, args, kwargs))

    def graph(self, outputs: list[Ref], structure: TreeSpec | None, *, has_loss: bool) -> Graph:
        """The finished graph without what the outputs and the updates of buffers do not depend on, renumbered."""
        if len(outputs) > 1 or any(self.node(ref).patches for ref in outputs):
            outputs = [self.gather(ref) for ref in outputs]
        draft = Graph(tuple(self._nodes), tuple(ref.id for ref in outputs), has_loss)
        kept = draft.ancestors((*draft.outputs, *(ref.id for ref in self.updates.values())))
        image = next((node.id for node in self._nodes if node.op == "image"), None)
        if has_loss and image is not None and not any(self._nodes[i].op == "image" for i in kept):
            kept = {*kept, image}  # of a loss that reads no pixel, too, a plan is for an image of that size
        order = sorted(kept)
        renumbered = {old: Ref(new) for new, old in enumerate(order)}
        return Graph(
            tuple(_renumbered(self._nodes[old], renumbered) for old in order),
            tuple(renumbered[ref.id].id for ref in outputs),
            has_loss,
            MappingProxyType(dict(self._constants)),
            self._closed,
            MappingProxyType({name: renumbered[ref.id].id for name, ref in self.updates.items()}),
            structure,
        )

    def _append(
        self,
        op: str,
        arguments: dict[str, Any],
        made: torch.Tensor,
        axes: Axes | None,
        differentiable: bool,
        patches: Patches | None = None,
    ) -> Ref:
        """A node whose value has the shape and the dtype of `made`."""
        node_id, shape, given = len(self._nodes), tuple(made.shape), MappingProxyType(arguments)
        whole = op == GATHER or (
            axes is None and op not in REDUCTIONS and any(self.node(ref).whole for ref in references(arguments))
        )
        self._nodes.append(
            Node(node_id, op, given, shape, made.dtype, axes, self.origin, differentiable, whole, patches)
        )
        return Ref(node_id)


Rewrite = Callable[[Builder, str, dict[str, Any]], Any]
_Rewrite = TypeVar("_Rewrite", bound=Rewrite)
STRUCTURE: dict[str, Rewrite] = {}
"""Rewrites that hold for an operator wherever it stands."""
ON_FIELDS: dict[str, Rewrite] = {}
"""Rewrites that hold only where it reads a field: on values without spatial axes it is arithmetic like any other."""


def rewrites(table: dict[str, Rewrite], operators: Iterable[str]) -> Callable[[_Rewrite], _Rewrite]:
    """Enter a function into a table as the rewrite of these operators."""

    def enter(rewrite: _Rewrite) -> _Rewrite:
        table.update(dict.fromkeys(operators, rewrite))
        return rewrite

    return enter


def _renumbered(node: Node, numbers: Mapping[int, Ref]) -> Node:
    arguments = {name: substitute(value, numbers) for name, value in node.arguments.items()}
    return replace(node, id=numbers[node.id].id, arguments=MappingProxyType(arguments))


def _differentiable(op: str, made: torch.Tensor, operands: tuple[Node, ...]) -> bool:
    continuous = made.dtype.is_floating_point or made.dtype.is_complex
    return any(n.differentiable for n in operands) and continuous and lookup(op).differentiable


def _axes(
    op: str, arguments: dict[str, Any], made: torch.Tensor, operands: tuple[Node, ...]
) -> tuple[Axes, Patches | None]:
    """Ask an operator's rule for the spatial axes of its output, and its patches. Raises `NotTileable`."""
    if made.dtype.is_complex:
        raise NotTileable("fields of complex numbers have no rule")
    shape = tuple(made.shape)
    node = Node(-1, op, arguments, shape, made.dtype, None, Origin(), differentiable=False)
    call, rule = Call(node, operands), lookup(op)
    axes = rule.axes(call, len(shape))
    assert all(-len(shape) <= axis < 0 for axis in axes), (op, shape, axes)
    if 0 in shape:
        raise NoPixels(f"its output has no pixels, shape {shape}; the image is too small for this model")
    return axes, rule.patches(call) if axes[0] == axes[1] else None
