"""Make a `Graph` of an exported program: operator by operator, each lowered as `graphs/rewrites/` says."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.utils._pytree import TreeSpec

from gigagrad.errors import CaptureError, UnsupportedOperatorError
from gigagrad.graphs import operators
from gigagrad.graphs.builder import Builder
from gigagrad.graphs.capture.functional import casts_nothing, written_out, written_tensor
from gigagrad.graphs.capture.loss_module import SOURCE, LossModule
from gigagrad.graphs.capture.writes import at
from gigagrad.graphs.graph import Graph, InputSpec, Origin, Ref, references
from gigagrad.graphs.op_rules import NotTileable
from gigagrad.graphs.rewrites import lower

_IGNORED = frozenset(
    {"aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_constrain_range"}
)
Stored = tuple[tuple[int, ...], torch.dtype, bool]
"""Shape and dtype of a parameter or buffer, and whether its gradient is asked for."""
_MODEL, _LOSS = "model", "loss"
_MOVING = frozenset(
    f"aten.{name}"
    for name in (
        *("alias.default", "cat.default", "clone.default", "constant_pad_nd.default", "expand.default", "flip.default"),
        "index.Tensor",
        *("permute.default", "pixel_unshuffle.default", "roll.default", "select.int", "slice.Tensor"),
        *("squeeze.dim", "squeeze.dims", "unsqueeze.default", "view.default"),
    )
)
"""Operators on integers that compute nothing: of the floats in their place they make the same."""


def convert(
    program: ExportedProgram,
    stored: Mapping[str, Stored],
    named: list[tuple[str, str, InputSpec]],
    closed: dict[str, torch.Tensor],
    merging: bool,
    has_loss: bool,
    whole_pixels: int,
    results: dict[Any, Any],
) -> Graph:
    """Lower a program, with fields of at most so many pixels as whole tensors; `results`: see `Builder`."""
    builder = Builder(closed, merging=merging, results=results)
    values: dict[str, Any] = {}
    inputs, floats = iter(named), any(spec.read_dtype != spec.dtype for _, _, spec in named)
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = specs[node.name]
            if spec.kind is InputKind.USER_INPUT:
                op, name, given = next(inputs)
                values[node.name] = builder.source(
                    op,
                    name,
                    given.shape,
                    given.read_dtype,
                    field=given.field,
                    differentiable=given.differentiable,
                    bag=given.bag,
                )
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                values[node.name] = builder.constant(spec.target, program.constants[spec.target])
            else:
                shape, dtype, asked = stored[spec.target]
                op = spec.kind.name.lower()
                values[node.name] = builder.source(op, spec.target, shape, dtype, field=False, differentiable=asked)
        elif node.op == "call_function":
            values[node.name] = _call(builder, node, values, whole_pixels)
            if floats:
                _check_floats(builder, node, values[node.name])
        else:
            assert node.op == "output", node.op
    _note_updates(program, values, builder)
    return builder.graph(*_outputs(program, values, builder, has_loss=has_loss), has_loss=has_loss)


def _check_floats(builder: Builder, node: Node, made: Any) -> None:
    """Check that an operator makes of floats what it makes of an image's integers in their place. Raises CaptureError
    where it need not: integers wrap around, and halves hold fewer digits.
    """
    traced, op = node.meta.get("val"), str(written_out(node)[0])
    if not isinstance(made, Ref) or not isinstance(traced, torch.Tensor) or op in _MOVING:
        return
    if traced.dtype != builder.node(made).dtype:
        raise CaptureError(
            f"the gradient of an image of integers is asked for, and {op} computes {traced.dtype} of them"
            f"{at(_origin(node).source)}; begin the model with x.float(), or with Preprocess or Normalise"
        )


def _note_updates(program: ExportedProgram, values: dict[str, Any], builder: Builder) -> None:
    """Note the new values of the buffers that the model writes while it runs."""
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.BUFFER and builder.node(values[spec.arg.name]).op != "buffer":
            builder.updates[str(spec.target)] = builder.gather(values[spec.arg.name])
    for spec in program.graph_signature.output_specs:
        if spec.kind.name in ("BUFFER_MUTATION", "PARAMETER_MUTATION"):
            builder.updates[str(spec.target)] = builder.gather(values[spec.arg.name])
        elif spec.kind.name == "USER_INPUT_MUTATION":
            raise CaptureError("the model or the loss writes into its input; let it work on a clone")


def stored_tensors(
    program: ExportedProgram, loss_module: LossModule, closed: dict[str, torch.Tensor], frozen: tuple[str, ...]
) -> dict[str, Stored]:
    """Describe what the program reads of the loss module and from outside, by name. Raises CaptureError for tensors
    that ask for a gradient nobody would find, and those that have another shape than while they were traced.
    """
    found = dict[str, Stored]()
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    for spec in program.graph_signature.input_specs:
        kind, name, node = spec.kind, spec.target, nodes[spec.arg.name]
        if kind is InputKind.CONSTANT_TENSOR and program.constants[name].requires_grad:
            raise CaptureError(
                f"the model or the loss uses a tensor of shape {tuple(program.constants[name].shape)}"
                f"{at(_origin(next(iter(node.users), node)).source)} that asks for a gradient but is no parameter of a "
                "module; make it an nn.Parameter of the model or of a loss module, or detach it"
            )
        if name is None or kind not in (InputKind.PARAMETER, InputKind.BUFFER):
            continue
        if name in closed:
            tensor, dtype = closed[name], closed[name].dtype
        else:
            of_module = loss_module.get_parameter if kind is InputKind.PARAMETER else loss_module.get_buffer
            tensor = of_module(name)
            dtype = loss_module.dtype_of(tensor.dtype)
        traced, real = tuple(node.meta["val"].shape), tuple(tensor.shape)
        if traced != real:
            raise CaptureError(
                f"'{name}' has shape {real}, but the model gave it shape {traced} while it was traced; "
                "run the model once on an image of this size, or make the tensor in every forward"
            )
        found[name] = real, dtype, kind is InputKind.PARAMETER and tensor.requires_grad and name not in frozen
    return found


def _call(builder: Builder, node: Node, values: dict[str, Any], whole_pixels: int) -> Any:
    def replace(value: Any) -> Any:
        if isinstance(value, Node):
            return values[written_tensor(value).name]
        if isinstance(value, list | tuple):
            return [replace(item) for item in value]
        return value

    if node.target is operator.getitem:
        source, index = replace(node.args[0]), node.args[1]
        assert isinstance(index, int), node
        if source[index] is None:
            # An output that no tile rule delivers, such as the indices of max pooling: the operator again, whole.
            assert isinstance(node.args[0], Node)
            builder.origin = _origin(node.args[0])
            values[node.args[0].name] = builder.whole_field(*_bound(node.args[0], replace)[:2])
            return values[node.args[0].name][index]
        return source[index]
    if str(node.target) in _IGNORED:
        return None
    if casts_nothing(node):
        return replace(node)
    builder.origin = _origin(node)
    op, arguments, written = _bound(node, replace)
    try:
        made = lower(builder, op, arguments, whole=_is_coarse(builder, node, arguments, whole_pixels))
    except (NotTileable, NotImplementedError) as refused:
        where, told = builder.origin, str(refused)
        if isinstance(refused, NotImplementedError):
            told = "PyTorch has no rule for what shape comes out of it; write it with other operators, on dense tensors"
        raise UnsupportedOperatorError(op, where.module_path, where.source, told) from None
    for index, tensor in written.items():
        values[tensor] = made[index] if isinstance(made, list) else made
    return made[0] if isinstance(made, list) and isinstance(node.meta.get("val"), torch.Tensor) else made


def _is_coarse(builder: Builder, node: Node, arguments: dict[str, Any], most_pixels: int) -> bool:
    """Say whether an operator makes images of at most so many pixels, and of no larger ones: what pools a large field,
    or reduces it to numbers, has tiles.
    """
    made = node.meta.get("val")
    made = made[0] if isinstance(made, tuple | list) and made else made
    if not most_pixels or not isinstance(made, torch.Tensor) or made.ndim != 4:
        return False
    read = [builder.node(ref) for ref in references(arguments)]
    pixels = [made.shape[-1] * made.shape[-2], *(one.size(0) * one.size(1) for one in read if one.is_field)]
    return max(pixels) <= most_pixels and any(one.is_field or one.whole for one in read)


def _bound(node: Node, replace: Callable[[Any], Any]) -> tuple[str, dict[str, Any], dict[int, str]]:
    """Return a node's operator without writes, its arguments by name, and by the indices of its results the tensors
    whose new values they are.
    """
    op, args, written = written_out(node)
    kwargs = {name: replace(value) for name, value in node.kwargs.items()}
    arguments = operators.bind(str(op), tuple(replace(value) for value in args), kwargs)
    return str(op), arguments, {index: written_tensor(args[index]).name for index in written}


def _origin(node: Node) -> Origin:
    stack = node.meta.get("nn_module_stack") or {}
    path = next((path for path, _ in reversed(list(stack.values())) if path), "")
    path = "" if path == _LOSS else path.removeprefix(f"{_MODEL}.") if path != _MODEL else "model"
    return Origin(path, (node.meta.get("custom") or {}).get(SOURCE, ""))


def _outputs(
    program: ExportedProgram, values: dict[str, Any], builder: Builder, *, has_loss: bool
) -> tuple[list[Ref], TreeSpec | None]:
    """Return the outputs of the loss or the model, and how they are nested; note the buffers that were replaced."""
    specs = [s for s in program.graph_signature.output_specs if s.kind.name == "USER_OUTPUT"]
    structure = program.call_spec.out_spec
    # PyTorch 2.9 has no method for it, later versions no attribute.
    returned, replaced = structure.children() if hasattr(structure, "children") else structure.children_specs
    for name, spec in zip(replaced.context, specs[returned.num_leaves :], strict=True):
        builder.updates[name] = builder.gather(values[spec.arg.name])
    found = [values.get(getattr(spec.arg, "name", "")) for spec in specs[: returned.num_leaves]]
    outputs = [value for value in found if isinstance(value, Ref)]
    if has_loss:
        if len(found) != 1 or not outputs:
            raise CaptureError(
                f"the loss must return one tensor, got {f'{len(found)} values' if outputs else 'something else'}; "
                "return the one number that is to be minimised, a tensor without axes"
            )
        node = builder.node(outputs[0])
        if node.is_field or len(node.shape) > 0:
            raise CaptureError(
                f"the loss must return a scalar, got a tensor of shape {node.shape}; reduce it with .mean() or .sum()"
            )
    if not outputs or len(outputs) != len(found):
        raise CaptureError(
            "the model must return tensors that are computed, got something else beside them; leave numbers, texts and "
            "None out of what forward returns"
        )
    return outputs, None if returned.is_leaf() else returned
