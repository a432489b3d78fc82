"""Capture: `loss(model(image), target)` as a `Graph`, at the image's true size, without touching its pixels.

`torch.export` traces the model on fake tensors: shapes and dtypes without storage, so a gigapixel image costs nothing
and the captured graph holds every value's true whole-image shape.
"""

from __future__ import annotations

import builtins
import dataclasses
import gc
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.utils._pytree import TreeSpec

from gigagrad.errors import CaptureError, UnsupportedOperatorError
from gigagrad.graphs import operators, ops
from gigagrad.graphs.appearance import modules_themselves
from gigagrad.graphs.builder import Builder
from gigagrad.graphs.composite import CLOSED, SOURCE, Composite
from gigagrad.graphs.constants import Asked
from gigagrad.graphs.explain import explained
from gigagrad.graphs.graph import Graph, Origin, Ref, references
from gigagrad.graphs.guard import Guard
from gigagrad.graphs.lowering import lower
from gigagrad.graphs.op_rules import NotTileable
from gigagrad.graphs.rehearsal import Effects, Rehearsal, rehearse, roots_of
from gigagrad.graphs.rewrites.common import whole_field
from gigagrad.graphs.torch_state import torch_state_kept
from gigagrad.graphs.traceable import untie
from gigagrad.graphs.walk import Walk
from gigagrad.graphs.whole import WholeCost, count_whole

assert ops.__all__, "importing the rules fills the registry"

_IGNORED = frozenset(
    {"aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_constrain_range"}
)
_MODEL, _LOSS = "model", "loss"
_HOST = torch.device("cpu")
_CAPTURING = threading.RLock()
"""Export exchanges functions of Python itself while it traces, and what a rehearsal sets back must be its own doing."""
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
_BUILTINS = (builtins, "max", builtins.max), (builtins, "min", builtins.min), (math, "pow", math.pow)


@dataclass(frozen=True, slots=True)
class InputSpec:
    """What capture needs to know of an input: its shape with the batch axis, its dtype, whether it is an image."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    field: bool
    differentiable: bool = False
    """Whether the gradient for this input is asked for."""

    @property
    def read_dtype(self) -> torch.dtype:
        """The dtype in which a run reads it: where the gradient for integers is asked for, floats of their values."""
        asked = self.differentiable and not self.dtype.is_floating_point
        return (torch.float32 if self.dtype.itemsize <= 2 else torch.float64) if asked else self.dtype


Specs = InputSpec | tuple[InputSpec, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A graph, how long it is the right one, and what one forward leaves behind in Python beside it."""

    graph: Graph
    guard: Guard
    effects: Effects
    frozen: tuple[str, ...]
    """Names of the parameters that one forward freezes."""
    left_out: tuple[str, ...]
    """Names of what forward stores for somebody to look at, and nobody will find there."""
    asked: Asked

    def holds(self, composite: Composite) -> bool:
        """Whether it is still what `trace` would find."""
        return self.guard.holds() and self.asked.holds(composite)

    def with_graph(self, graph: Graph) -> Captured:
        """The same with an equal graph that others know already."""
        return dataclasses.replace(self, graph=graph)

    def leave_effects(self) -> None:
        """After a run: Python's state as one forward leaves it."""
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
    """The graph of `loss(model(image), target)`, or of `model(image)` if there is no loss. As `trace`."""
    return trace(Composite(model, loss, precision), image, target).graph


def trace(composite: Composite, image: Specs, target: Specs | None) -> Captured:
    """The graph of a composite for inputs of these shapes.

    Several images are several arguments of the model; several targets come to the loss as a tuple. The sources are
    named `image`, `image1`, ..., `target`, `target1`, ...

    Parameter and buffer nodes are named as in the composite: `model.conv.weight`, `loss.weight`; tensors from outside
    of it that the model or the loss reads are `closed.0`, ... Neither the model nor anything else that Python can see
    is changed. One thread captures at a time.

    Raises:
        CaptureError: `torch.export` refuses the model or the loss, or the loss is not one number.
        UnsupportedOperatorError: an operator has no op rule; names module and source line.
    """
    with _CAPTURING, _without_collection(), _builtins_kept(), torch_state_kept(), _uncompiled():
        walk = Walk(roots_of(composite.model, composite.loss))
        inside = {id(tensor) for tensor in (*composite.parameters(), *composite.buffers())}
        outside = [tensor for _, tensor in walk.tensors if id(tensor) not in inside]
        program, rehearsal, whole = _exported(composite, image, target, [*outside, *walk.uncopied])
        named = _named("image", image) + _named("target", target)
        closed = {f"{CLOSED}.{index}": tensor for index, tensor in enumerate(rehearsal.closed)}
        stored = _stored_tensors(program, composite, closed, rehearsal.frozen)
        merging = rehearsal.writes.runs_again

        @cache
        def lowered(whole_pixels: int) -> Graph:
            made = _convert(program, stored, named, closed, merging, composite.loss is not None, whole_pixels)
            return dataclasses.replace(made, whole=whole)

        graph = dataclasses.replace(lowered(0), coarse_whole=lowered)
        if composite.loss is None and graph.source("image") is None:
            raise CaptureError("nothing that the model returns depends on the pixels of the image")
        roots = roots_of(composite.model, composite.loss, rehearsal.generators)
        guard = Guard(roots, rehearsal.ran, rehearsal.closed)
        asked = Asked(rehearsal.asked, closed)
        return Captured(graph, guard, rehearsal.effects, rehearsal.frozen, rehearsal.left_out, asked)


def _exported(
    composite: Composite, image: Specs, target: Specs | None, outside: list[torch.Tensor]
) -> tuple[torch.export.ExportedProgram, Rehearsal, Mapping[bool, WholeCost]]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    home = next((tensor.device for tensor in (*composite.parameters(), *composite.buffers())), torch.device("cpu"))
    with _quietly(), torch.inference_mode(False), torch.enable_grad():
        inputs = _inputs(mode, image, target, home)
        try:
            # Around the tracing, not inside the module: an exported autocast region has lost its modules' names.
            with _autocast(home, composite.autocast):
                rehearsal = rehearse(composite, mode, inputs, outside)
                whole = _whole_costs(composite, mode, _inputs(mode, image, target, _HOST), outside, rehearsal)
                # A copy of its own: a model may keep what its first forward made.
                copy = composite.fake_copy(mode, outside, rehearsal.closed)
                copy.known_writes = rehearsal.writes
                with rehearsal.undone(), modules_themselves(), fx_traceback.preserve_node_meta():
                    exported = torch.export.export(copy.composite, inputs, strict=False)
                untie(exported)
                return exported.run_decompositions({}), rehearsal, whole
        except CaptureError:
            raise
        except Exception as error:
            raise explained(error, _listed(image)[0], _listed(target)) from error


def _whole_costs(
    composite: Composite, mode: FakeTensorMode, inputs: Any, outside: list[torch.Tensor], rehearsal: Rehearsal
) -> Mapping[bool, WholeCost]:
    """What plain autograd takes for the whole image, without and with gradients, as far as it can be counted.

    On the host, whatever the model's device: a backward of fake tensors on a GPU leaves autograd without its streams.
    """
    found = dict[bool, WholeCost]()
    for backward in (False, True) if composite.loss is not None else (False,):
        copy = composite.fake_copy(mode, outside, rehearsal.closed, _HOST)
        with rehearsal.undone(), _autocast(_HOST, composite.autocast):
            cost = count_whole(copy, inputs, mode, backward=backward)
        if cost is not None:
            found[backward] = cost
    return MappingProxyType(found)


def _inputs(mode: FakeTensorMode, image: Specs, target: Specs | None, device: torch.device) -> tuple[Any, ...]:
    with mode:
        images = tuple(_empty(spec, device) for spec in _listed(image))
        goals = tuple(_empty(spec, device) for spec in _listed(target))
    return (images, goals if isinstance(target, tuple) else goals[0]) if goals else (images,)


@contextmanager
def _without_collection() -> Iterator[None]:
    """What the collection of garbage calls is nobody's forward; and there is little of it, but much to look through."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def _builtins_kept() -> Iterator[None]:
    try:
        yield
    finally:
        for holder, name, function in _BUILTINS:
            setattr(holder, name, function)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """What `torch.compile` has compiled runs as it was written."""
    config = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
    with torch.compiler.set_stance("force_eager"), config:
        yield


def _autocast(home: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    return nullcontext() if dtype is None else torch.autocast(home.type, dtype=dtype)


def _listed(specs: Specs | None) -> tuple[InputSpec, ...]:
    return () if specs is None else specs if isinstance(specs, tuple) else (specs,)


def _named(kind: str, specs: Specs | None) -> list[tuple[str, str, InputSpec]]:
    return [(kind, f"{kind}{index or ''}", spec) for index, spec in enumerate(_listed(specs))]


def _empty(spec: InputSpec, device: torch.device) -> torch.Tensor:
    asks = spec.differentiable and spec.dtype.is_floating_point
    return torch.empty(spec.shape, dtype=spec.dtype, device=device, requires_grad=asks)


@contextmanager
def _quietly() -> Iterator[None]:
    """torch.export warns about its own internals on every call, and logs the traceback of what becomes our error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _convert(
    program: torch.export.ExportedProgram,
    stored: Mapping[str, _Stored],
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
            if spec.kind is torch.export.graph_signature.InputKind.USER_INPUT:
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
    """Of floats in the place of an image's integers the operator is to make what it made of these. Raises CaptureError
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


def _note_updates(program: torch.export.ExportedProgram, values: dict[str, Any], builder: Builder) -> None:
    """New values of the buffers that the model writes while it runs."""
    for spec in program.graph_signature.output_specs:
        if spec.kind.name in ("BUFFER_MUTATION", "PARAMETER_MUTATION"):
            builder.updates[str(spec.target)] = builder.gather(values[spec.arg.name])
        elif spec.kind.name == "USER_INPUT_MUTATION":
            raise CaptureError("the model or the loss writes into its input; let it work on a clone")


_Stored = tuple[tuple[int, ...], torch.dtype, bool]
"""Shape and dtype of a parameter or buffer, and whether its gradient is asked for."""


def _stored_tensors(
    program: torch.export.ExportedProgram,
    composite: Composite,
    closed: dict[str, torch.Tensor],
    frozen: tuple[str, ...],
) -> dict[str, _Stored]:
    """Describe what the program reads of the composite and from outside, by name."""
    found = dict[str, _Stored]()
    for spec in program.graph_signature.input_specs:
        kind, name = spec.kind.name, spec.target
        if name is None or kind in ("USER_INPUT", "CONSTANT_TENSOR"):
            continue
        if name in closed:
            tensor, dtype = closed[name], closed[name].dtype
        else:
            tensor = composite.get_parameter(name) if kind == "PARAMETER" else composite.get_buffer(name)
            dtype = composite.dtype_of(tensor.dtype)
        asked = kind == "PARAMETER" and tensor.requires_grad and name not in frozen
        found[name] = tuple(tensor.shape), dtype, asked
    return found


def _stored(builder: Builder, spec: Any, program: torch.export.ExportedProgram, stored: Mapping[str, _Stored]) -> Ref:
    """A parameter, buffer or constant tensor the graph reads."""
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


def _user_of(program: torch.export.ExportedProgram, spec: Any) -> Origin:
    """Where an input of a program is read first."""
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
            values[node.args[0].name] = whole_field(builder, str(node.args[0].target), _bound(node.args[0], replace))
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
    program: torch.export.ExportedProgram, values: dict[str, Any], builder: Builder, *, has_loss: bool
) -> tuple[list[Ref], TreeSpec | None]:
    """What the loss or the model returns, and how it is nested. Notes the buffers that were replaced."""
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
