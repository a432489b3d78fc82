"""Builds a `Graph` node by node: shapes by running each operator on the meta device, axes by asking its row."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from gigagrad.errors import UnsupportedOperatorError
from gigagrad.graphs import operators
from gigagrad.graphs.graph import FIELD_SUM, IMAGE_AXES, Axes, Graph, Node, Origin, Ref, references, substitute
from gigagrad.graphs.table import Call, Refused, lookup

_NO_GRADIENT = frozenset({"aten.detach.default", "gigagrad.class_weights"})


class Builder:
    """Appends nodes in topological order. `origin` is stamped on every node added until it is changed."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._constants: dict[str, torch.Tensor] = {}
        self.origin = Origin()

    def node(self, ref: Ref) -> Node:
        return self._nodes[ref.id]

    def is_field(self, value: Any) -> bool:
        return isinstance(value, Ref) and self.node(value).is_field

    def source(
        self, op: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, field: bool, differentiable: bool
    ) -> Ref:
        """An input of the graph: image, target, parameter or buffer."""
        axes = IMAGE_AXES if field else None
        return self._append(op, {"name": name}, shape, dtype, axes, differentiable)

    def constant(self, name: str, value: torch.Tensor) -> Ref:
        self._constants[name] = value
        return self.source("constant", name, tuple(value.shape), value.dtype, field=False, differentiable=False)

    def field_sum(self, field: Ref, dims: list[int] | None = None, *, keepdim: bool = False) -> Ref:
        """The reduction of a field over `dims` (default: all of its axes); `dims` must hold both spatial axes."""
        node = self.node(field)
        rank = len(node.shape)
        positive = sorted(range(rank) if dims is None else {dim % rank for dim in dims})
        assert node.axes is not None
        inside = [axis + rank in positive for axis in node.axes]
        if not all(inside):
            raise Refused("it sums over one axis of the image but not over the other")
        return self.call(FIELD_SUM, {"field": field, "dims": positive, "keepdim": keepdim})

    def call(self, op: str, arguments: dict[str, Any]) -> Ref:
        """Append an operator whose arguments are bound by name. Raises `Refused` if it has no tile rule here."""
        operand_nodes = tuple(self.node(ref) for ref in references(arguments))
        metas = {n.id: torch.empty(n.shape, dtype=n.dtype, device="meta") for n in operand_nodes}
        meta_arguments = {name: substitute(value, metas) for name, value in arguments.items()}
        if meta_arguments.get("device") is not None:
            meta_arguments["device"] = torch.device("meta")
        result = operators.call(op, meta_arguments)
        if isinstance(result, tuple):  # batch normalisation in evaluation mode: only the first output is data
            result = result[0]
        shape, dtype = tuple(result.shape), result.dtype
        differentiable = (
            any(n.differentiable for n in operand_nodes)
            and (dtype.is_floating_point or dtype.is_complex)
            and op not in _NO_GRADIENT
        )
        axes = None
        if op != FIELD_SUM and any(n.is_field for n in operand_nodes):
            axes = self._axes(op, arguments, shape, dtype, operand_nodes)
        return self._append(op, arguments, shape, dtype, axes, differentiable)

    def aten(self, op: str, *args: Any, **kwargs: Any) -> Ref:
        """Append an ATen operator called with positional and keyword arguments, e.g. `aten("div.Tensor", a, b)`."""
        name = f"aten.{op}"
        return self.call(name, operators.bind(name, args, kwargs))

    def graph(self, output: Ref, *, has_loss: bool) -> Graph:
        """The finished graph without what the output does not depend on, renumbered."""
        draft = Graph(tuple(self._nodes), output.id, has_loss)
        kept = sorted(draft.ancestors((output.id,)))
        renumbered = {old: Ref(new) for new, old in enumerate(kept)}
        nodes = tuple(
            Node(
                renumbered[node.id].id,
                node.op,
                MappingProxyType({name: substitute(value, renumbered) for name, value in node.arguments.items()}),
                node.shape,
                node.dtype,
                node.axes,
                node.origin,
                node.differentiable,
            )
            for node in (self._nodes[old] for old in kept)
        )
        return Graph(nodes, renumbered[output.id].id, has_loss, MappingProxyType(dict(self._constants)))

    def _axes(
        self, op: str, arguments: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, operands: tuple[Node, ...]
    ) -> Axes:
        row = lookup(op)
        if row is None:
            raise Refused("it has no row in the operator table")
        if dtype.is_complex:
            raise Refused("fields of complex numbers have no rule")
        node = Node(-1, op, arguments, shape, dtype, None, self.origin, differentiable=False)
        axes = row.axes(Call(node, operands), len(shape))
        assert all(-len(shape) <= axis < 0 for axis in axes), (op, shape, axes)
        if 0 in shape:
            raise Refused(f"its output has no pixels, shape {shape}; the image is too small for this model")
        return axes

    def _append(
        self,
        op: str,
        arguments: dict[str, Any],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        axes: Axes | None,
        differentiable: bool,
    ) -> Ref:
        node_id = len(self._nodes)
        self._nodes.append(
            Node(node_id, op, MappingProxyType(arguments), shape, dtype, axes, self.origin, differentiable)
        )
        return Ref(node_id)

    def unsupported(self, op: str, refused: Refused) -> UnsupportedOperatorError:
        return UnsupportedOperatorError(op, self.origin.module_path, self.origin.source, str(refused))
