"""Convert an exported program into a `Graph`: sources, operators lowered one by one, updates of buffers, outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import TreeSpec

from gigagrad.errors import CaptureError, UnsupportedOperatorError
from gigagrad.graphs import operators, ops
from gigagrad.graphs.builder import Builder
from gigagrad.graphs.capture.loss_module import SOURCE, LossModule
from gigagrad.graphs.graph import Graph, InputSpec, Origin, Ref, references
from gigagrad.graphs.op_rules import NotTileable
from gigagrad.graphs.rewrites import lower

assert ops.__all__, "importing the rules fills the registry"

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
) -> Graph:
    """Lower a program, with fields of at most so many pixels as whole tensors."""
    builder = Builder(closed, merging=merging)
    values: dict[str, Any] = {}
    inputs, floats = iter(named), any(spec.read_dtype != spec.dtype for _, _, spec in named)
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = specs[node.name]
            if spec.kind is InputKind.USER_INPUT:
                op, name, given = next(inputs)
                values[node.name] = builder.source(
                    op, name, given.shape, given.read_dtype, field=given.field, differentiable=given.differentiable
                )
            else:
                values[node.name] = _stored(builder, spec, program, stored)
                traced, real = tuple(node.meta["val"].shape), builder.node(values[node.name]).shape
                if traced != real:
                    raise CaptureError(
                        f"'{spec.target}' has shape {real}, but the model gave it shape {traced} while it was traced; "
                        "run the model once on an image of this size, or make the tensor in every forward"
                    )
        elif node.op == "call_function":
            values[node.name] = _call(builder, node, values, whole_pixels)
            if floats:
                _check_floats(builder, node, values[node.name])
        else:
            assert node.op == "output", node.op
    _note_updates(program, values, builder)
    return builder.graph(*_outputs(program, values, builder, has_loss=has_loss), has_loss=has_loss)


def _check_floats(builder: Builder, node: torch.fx.Node, made: Any) -> None:
    """Check that an operator makes of floats what it makes of an image's integers in their place. Raises CaptureError
    where it need not: integers wrap around, and halves hold fewer digits.
    """
    traced = node.meta.get("val")
    if not isinstance(made, Ref) or not isinstance(traced, torch.Tensor) or str(node.target) in _MOVING:
        return
    if traced.dtype != builder.node(made).dtype:
        raise CaptureError(
            f"the gradient of an image of integers is asked for, and {node.target} computes {traced.dtype} of them"
            f"{_line(_origin(node))}; begin the model with x.float(), or with Preprocess or Normalise"
        )


def _line(origin: Origin) -> str:
    return f" at {origin.source}" if origin.source else ""


def _note_updates(program: ExportedProgram, values: dict[str, Any], builder: Builder) -> None:
    """Note the new values of the buffers that the model writes while it runs."""
    for spec in program.graph_signature.output_specs:
        if spec.kind.name in ("BUFFER_MUTATION", "PARAMETER_MUTATION"):
            builder.updates[str(spec.target)] = builder.gather(values[spec.arg.name])
        elif spec.kind.name == "USER_INPUT_MUTATION":
            raise CaptureError("the model or the loss writes into its input; let it work on a clone")


def stored_tensors(
    program: ExportedProgram,
    loss_module: LossModule,
    closed: dict[str, torch.Tensor],
    frozen: tuple[str, ...],
) -> dict[str, Stored]:
    """Describe what the program reads of the loss module and from outside, by name."""
    found = dict[str, Stored]()
    for spec in program.graph_signature.input_specs:
        kind, name = spec.kind.name, spec.target
        if name is None or kind in ("USER_INPUT", "CONSTANT_TENSOR"):
            continue
        if name in closed:
            tensor, dtype = closed[name], closed[name].dtype
        else:
            tensor = loss_module.get_parameter(name) if kind == "PARAMETER" else loss_module.get_buffer(name)
            dtype = loss_module.dtype_of(tensor.dtype)
        asked = kind == "PARAMETER" and tensor.requires_grad and name not in frozen
        found[name] = tuple(tensor.shape), dtype, asked
    return found


def _stored(builder: Builder, spec: Any, program: ExportedProgram, stored: Mapping[str, Stored]) -> Ref:
    """Append a parameter, buffer or constant tensor that the graph reads."""
    kind = spec.kind.name
    if kind == "CONSTANT_TENSOR":
        value = program.constants[spec.target]
        if value.requires_grad:
            raise CaptureError(
                f"the model or the loss uses a tensor of shape {tuple(value.shape)}{_line(_user_of(program, spec))} "
                "that asks for a gradient but is no parameter of a module; make it an nn.Parameter of the model or of "
                "a loss module, or detach it"
            )
        return builder.constant(spec.target, value)
    shape, dtype, asked = stored[spec.target]
    return builder.source(kind.lower(), spec.target, shape, dtype, field=False, differentiable=asked)


def _user_of(program: ExportedProgram, spec: Any) -> Origin:
    """Find where an input of a program is read first."""
    node = next(node for node in program.graph.nodes if node.name == spec.arg.name)
    return _origin(next(iter(node.users), node))


def _call(builder: Builder, node: torch.fx.Node, values: dict[str, Any], whole_pixels: int) -> Any:
    def replace(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return values[value.name]
        if isinstance(value, list | tuple):
            return [replace(item) for item in value]
        return value

    target = node.target
    if getattr(target, "__name__", "") == "getitem":
        source, index = replace(node.args[0]), node.args[1]
        assert isinstance(index, int), node
        if not isinstance(source, list):
            assert index == 0, node
            return source
        if source[index] is None:
            # An output that no tile rule delivers, such as the indices of max pooling: the operator again, whole.
            assert isinstance(node.args[0], torch.fx.Node)
            builder.origin = _origin(node.args[0])
            values[node.args[0].name] = builder.whole_field(str(node.args[0].target), _bound(node.args[0], replace))
            return values[node.args[0].name][index]
        return source[index]
    op = str(target)
    if op in _IGNORED:
        return None
    builder.origin = _origin(node)
    try:
        arguments = _bound(node, replace)
        return lower(builder, op, arguments, whole=_is_coarse(builder, node, arguments, whole_pixels))
    except (NotTileable, NotImplementedError) as refused:
        where, told = builder.origin, str(refused)
        if isinstance(refused, NotImplementedError):
            told = "PyTorch has no rule for what shape comes out of it; write it with other operators, on dense tensors"
        raise UnsupportedOperatorError(op, where.module_path, where.source, told) from None


def _is_coarse(builder: Builder, node: torch.fx.Node, arguments: dict[str, Any], most_pixels: int) -> bool:
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


def _bound(node: torch.fx.Node, replace: Callable[[Any], Any]) -> dict[str, Any]:
    kwargs = {name: replace(value) for name, value in node.kwargs.items()}
    return operators.bind(str(node.target), tuple(replace(value) for value in node.args), kwargs)


def _origin(node: torch.fx.Node) -> Origin:
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
