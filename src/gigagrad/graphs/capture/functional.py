"""Turn an exported program into one whose operators write into no tensor.

`ExportedProgram.run_decompositions({})` does so by tracing the program again. That takes longer than all else of a
small network's capture: PyTorch looks through all operators there are for composite ones, and registers a kernel for
each of them that keeps it whole. A program of operators that tracing leaves as they are needs none of this, nor does
one whose only writes are into tensors without views (activations in place, batch norms); every other needs the list of
composite operators only once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn
from torch._decomp import _should_decompose_because_unsafe_op
from torch._ops import OpOverload
from torch.export import ExportedProgram, exported_program
from torch.export.graph_signature import InputKind
from torch.fx import Node

from gigagrad.graphs.capture.stand_ins import exchanged

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_ATEN = torch.ops.aten
_CAST = _ATEN.to.dtype
_RESHAPING = {_ATEN.flatten.using_ints, _ATEN.reshape.default}
_SPLITTING = _ATEN.unflatten.int
_DROPOUT = _ATEN.dropout.default
_NORM = _ATEN.batch_norm.default
_TRAINED_NORM = _ATEN._native_batch_norm_legit_functional.default
_FIXED_NORM = _ATEN._native_batch_norm_legit_no_training.default
_OUT_OF_PLACE = {
    getattr(_ATEN, f"{name}_").default: getattr(_ATEN, name).default
    for name in ("relu", "silu", "leaky_relu", "hardswish", "hardsigmoid", "elu", "sigmoid", "tanh")
} | {getattr(_ATEN, f"{name}_").Tensor: getattr(_ATEN, name).Tensor for name in ("add", "sub", "mul", "div")}
"""Operators that write into their first argument, and those that return the same values instead."""


def functional(program: ExportedProgram) -> ExportedProgram:
    """Return the program with functional operators, those that are composite kept whole where PyTorch can, and such
    others as `written_out` makes functional.
    """
    tensors = _without_views(program)
    casts = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))  # which only a second trace puts in
    if not casts and all(_stays(node, tensors) for node in program.graph.nodes):
        return program
    _untie(program)
    with _composites_remembered():
        found: ExportedProgram = program.run_decompositions({})
    return found


def written_out(node: Node) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    """Return the operator and the arguments of a node without writes, and the arguments that it would write: their new
    values are the results of the same indices.
    """
    op, given = node.target, cast(Any, node.args)
    if op in _OUT_OF_PLACE:
        return _OUT_OF_PLACE[op], given, (0,)
    if op is _DROPOUT:
        _, probability, training = given
        if training and probability:
            return _ATEN.native_dropout.default, given, ()
        return _ATEN.clone.default, given[:1], ()
    if op in _RESHAPING or op is _SPLITTING:
        return _ATEN.view.default, (given[0], list(node.meta["val"].shape)), ()
    if op is _NORM:
        *arguments, training, momentum, eps, _ = given
        if training:
            return _TRAINED_NORM, (*arguments, True, momentum, eps), (3, 4)
        return _FIXED_NORM, (*arguments, momentum, eps), ()
    return op, given, ()


def written_tensor(node: Node) -> Node:
    """Return the node that made a tensor: of operators that write in place, or cast it to its own dtype, that of the
    tensor which they are given.
    """
    while node.target in _OUT_OF_PLACE or casts_nothing(node):
        node = cast(Node, node.args[0])
    return node


def casts_nothing(node: Node) -> bool:
    """Tell whether a node casts a tensor to the dtype that it has."""
    return node.target is _CAST and bool(node.all_input_nodes[0].meta["val"].dtype == node.meta["val"].dtype)


def _without_views(program: ExportedProgram) -> set[Node]:
    """Return the nodes that make tensors of which there are no views."""
    buffers = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.BUFFER}
    made, viewed = set[Node](), set[Node]()
    for node in program.graph.nodes:
        op = node.target
        if node.name in buffers or (isinstance(op, OpOverload) and not _has_aliases(op)):
            made.add(node)
        elif op not in _OUT_OF_PLACE:
            viewed.update(map(written_tensor, node.all_input_nodes))
    return made - viewed


def _stays(node: Node, tensors: set[Node]) -> bool:
    """Tell whether tracing a node again would leave it as it is, or `written_out` makes of it what that would."""
    op = node.target
    if node.op in ("placeholder", "output") or op is operator.getitem:
        return True
    if op is _CAST:
        return len(node.args) == 2 and not node.kwargs
    if op is _SPLITTING or op is _DROPOUT:
        return True
    if op in _RESHAPING:
        given, made = node.all_input_nodes[0].meta["val"], node.meta["val"]
        return bool(given.is_contiguous() and given.shape != made.shape)
    if op in _OUT_OF_PLACE:
        dtypes = {read.meta["val"].dtype for read in node.all_input_nodes}
        return written_tensor(node) in tensors and len(dtypes) == 1 and _is_kept(_OUT_OF_PLACE[op])
    if op is _NORM:
        running, training = cast(Any, node.args[3:5]), node.args[5]
        return None not in running and (not training or {written_tensor(one) for one in running} <= tensors)
    return isinstance(op, OpOverload) and _is_kept(op)


def _has_aliases(op: OpOverload) -> bool:
    return any(argument.alias_info is not None for argument in op._schema.arguments)


def _is_kept(op: OpOverload) -> bool:
    if op._schema.is_mutable:
        return False
    if op.has_kernel_for_dispatch_key(_COMPOSITE):
        return not (_has_aliases(op) or _should_decompose_because_unsafe_op(op))
    return op.py_kernels.keys() <= {torch._C.DispatchKey.Meta}  # one of Python's may be made of other operators


def _untie(program: ExportedProgram) -> None:
    """Give the second name of a parameter or buffer a tensor of its own: the traced code reads it by one name only."""
    state, seen = program.state_dict, set[int]()
    read = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    used = {spec.target for spec in program.graph_signature.input_specs if spec.arg.name in read}
    for name, tensor in sorted(state.items(), key=lambda item: item[0] not in used):
        if id(tensor) in seen and name not in used:
            own = tensor.detach().clone()
            state[name] = nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own
        seen.add(id(tensor))


def _composites_remembered() -> AbstractContextManager[None]:
    """Have PyTorch collect the composite operators once, and again only after others were registered."""
    collect: Callable[[], set[Any]] = exported_program._collect_all_valid_cia_ops  # type: ignore[attr-defined]

    def remembered() -> set[Any]:
        registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        return _collected(collect, len(torch.ops._dir), len(registered))

    return exchanged(exported_program, _collect_all_valid_cia_ops=remembered)


@lru_cache(maxsize=1)
def _collected(collect: Callable[[], set[Any]], *_registered: int) -> set[Any]:
    return collect()
