"""Capture `loss(model(image), target)` as a `Graph`, at the image's true size, without touching its pixels.

`torch.export` traces the model on fake tensors: shapes and dtypes without storage, so a gigapixel image costs nothing
and the captured graph holds every value's true whole-image shape.
"""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx import traceback as fx_traceback
from torch.utils._pytree import TreeSpec

from gigagrad.errors import CaptureError, UnsupportedOperatorError
from gigagrad.graphs import operators, ops
from gigagrad.graphs.builder import Builder
from gigagrad.graphs.capture.constants import Asked
from gigagrad.graphs.capture.dry_run import DryRun, Effects, roots_of, run_dry
from gigagrad.graphs.capture.explain import explained
from gigagrad.graphs.capture.functional import functional, written_out, written_tensor
from gigagrad.graphs.capture.guard import Guard
from gigagrad.graphs.capture.loss_module import CLOSED, SOURCE, FakeCopy, LossModule
from gigagrad.graphs.capture.stand_ins import ids_of, modules_themselves, quietly, state_kept
from gigagrad.graphs.capture.traversal import Traversal
from gigagrad.graphs.capture.writes import at
from gigagrad.graphs.graph import Graph, InputSpec, Origin, Ref, references
from gigagrad.graphs.op_rules import NotTileable
from gigagrad.graphs.rewrites import lower
from gigagrad.graphs.whole import WholeCost, count_whole

assert ops.__all__, "importing the rules fills the registry"

_HOST = torch.device("cpu")
_LOWERED = 2
"""Graphs kept of one program beside the first, by the pixels that fields may have to be whole."""
_CAPTURING = threading.RLock()
"""Export exchanges functions of Python itself while it traces, and a dry run may undo no other thread's changes."""
Specs = InputSpec | tuple[InputSpec, ...]
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


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A graph, how long it is the right one, and the Python state that one forward leaves behind beside it."""

    graph: Graph
    guard: Guard
    effects: Effects
    frozen: tuple[str, ...]
    """Names of the parameters that one forward freezes."""
    left_out: tuple[str, ...]
    """Names of attributes that forward stores for somebody to look at, and nobody will find there."""
    asked: Asked

    def holds(self, loss_module: LossModule) -> bool:
        """Tell whether `trace` would find the same."""
        return self.guard.holds() and self.asked.holds(loss_module)

    def leave_effects(self) -> None:
        """Leave Python's state after a run as one forward leaves it."""
        if self.effects:
            self.effects.apply()
            if self.effects.steady:
                self.guard.renew()


def capture(
    model: nn.Module,
    loss: Callable[..., Any] | None,
    image: Specs,
    target: Specs | None,
    precision: torch.dtype | None = None,
) -> Graph:
    """Return the graph of `loss(model(image), target)`, or of `model(image)` without a loss. Raises as `trace`."""
    return trace(LossModule(model, loss, precision), image, target).graph


def trace(loss_module: LossModule, image: Specs, target: Specs | None) -> Captured:
    """Capture the graph of a loss module for inputs of these shapes.

    The module is left as it was; nothing of it is changed. One thread captures at a time.

    Raises:
        CaptureError: `torch.export` refuses the model or the loss, or the loss is not one number.
        UnsupportedOperatorError: an operator has no op rule; names module and source line.
    """
    with _CAPTURING, state_kept():
        images, targets = _listed(image), _listed(target)
        reached = Traversal(roots_of(loss_module.model, loss_module.loss))
        inside = {id(tensor) for tensor in loss_module.tensors()}
        outside = [tensor for _, tensor in reached.tensors if id(tensor) not in inside]
        program, dry_run, whole = _exported(loss_module, image, target, [*outside, *reached.uncopied])
        closed = {f"{CLOSED}.{index}": tensor for index, tensor in enumerate(dry_run.closed)}
        given = ("image", images), ("target", targets)
        named = [(op, f"{op}{index or ''}", spec) for op, specs in given for index, spec in enumerate(specs)]
        stored = stored_tensors(program, loss_module, closed, dry_run.frozen)
        merging, has_loss = dry_run.writes.runs_again, loss_module.loss is not None

        @lru_cache(maxsize=_LOWERED)
        def lowered(whole_pixels: int) -> Graph:
            made = convert(program, stored, named, closed, merging, has_loss, whole_pixels)
            return dataclasses.replace(made, whole=whole)

        graph = dataclasses.replace(lowered(0), coarse_whole=lowered)
        if loss_module.loss is None and graph.source("image") is None:
            raise CaptureError("nothing that the model returns depends on the pixels of the image")
        guard = Guard(
            roots_of(loss_module.model, loss_module.loss, dry_run.generators), dry_run.executed, dry_run.closed
        )
        asked = Asked(dry_run.asked, closed)
        return Captured(graph, guard, dry_run.effects, dry_run.frozen, dry_run.left_out, asked)


def _exported(
    loss_module: LossModule, image: Specs, target: Specs | None, outside: list[torch.Tensor]
) -> tuple[ExportedProgram, DryRun, Mapping[bool, WholeCost]]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    home = next((tensor.device for tensor in loss_module.tensors()), _HOST)
    with quietly(), torch.inference_mode(False), torch.enable_grad():
        inputs = _inputs(mode, image, target, home)
        try:
            # Around the tracing, not inside the module: an exported autocast region has lost its modules' names.
            with _autocast(home, loss_module.autocast):
                dry_run = run_dry(loss_module, mode, inputs, outside)
                whole = _whole_costs(loss_module, mode, _inputs(mode, image, target, _HOST), outside, dry_run)
                # A copy of its own: a model may keep what its first forward made.
                copy = FakeCopy(loss_module, mode, outside, dry_run.closed)
                copy.known_writes = dry_run.writes
                with dry_run.undone(), modules_themselves(), fx_traceback.preserve_node_meta():
                    exported = torch.export.export(copy.module, inputs, strict=False)
                return functional(exported), dry_run, whole
        except CaptureError:
            raise
        except Exception as error:
            raise explained(error, _listed(image)[0], _listed(target)) from error


def _whole_costs(
    loss_module: LossModule, mode: FakeTensorMode, inputs: Any, outside: list[torch.Tensor], dry_run: DryRun
) -> Mapping[bool, WholeCost]:
    """Count what plain autograd takes for the whole image, without and with gradients, as far as it can be counted.

    On the host, whatever the model's device: a backward of fake tensors on a GPU leaves autograd without its streams.
    """
    found = dict[bool, WholeCost]()
    for backward in (False, True) if loss_module.loss is not None else (False,):
        copy = FakeCopy(loss_module, mode, outside, dry_run.closed, _HOST)
        with dry_run.undone(), _autocast(_HOST, loss_module.autocast), ids_of(copy.ids), copy.replacing():
            cost = count_whole(copy.module, inputs, mode, backward=backward)
        if cost is not None:
            found[backward] = cost
    return MappingProxyType(found)


def _inputs(mode: FakeTensorMode, image: Specs, target: Specs | None, device: torch.device) -> tuple[Any, ...]:
    with mode:
        images = tuple(_empty(spec, device) for spec in _listed(image))
        goals = tuple(_empty(spec, device) for spec in _listed(target))
    return (images, goals if isinstance(target, tuple) else goals[0]) if goals else (images,)


def _empty(spec: InputSpec, device: torch.device) -> torch.Tensor:
    asks = spec.differentiable and spec.dtype.is_floating_point
    return torch.empty(spec.shape, dtype=spec.dtype, device=device, requires_grad=asks)


def _autocast(home: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    return nullcontext() if dtype is None else torch.autocast(home.type, dtype=dtype)


def _listed(specs: Specs | None) -> tuple[InputSpec, ...]:
    return () if specs is None else specs if isinstance(specs, tuple) else (specs,)


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
