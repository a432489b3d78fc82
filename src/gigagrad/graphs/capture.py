"""Capture: `loss(model(image), target)` as a `Graph`, at the image's true size, without touching its pixels.

`torch.export` traces the model on fake tensors: shapes and dtypes without storage, so a gigapixel image costs nothing
and the captured graph holds every value's true whole-image shape.
"""

from __future__ import annotations

import copy
import logging
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map_only

from gigagrad.errors import CaptureError
from gigagrad.graphs import operators, rows
from gigagrad.graphs.builder import Builder
from gigagrad.graphs.graph import Graph, Origin, Ref
from gigagrad.graphs.lowering import lower, whole_field
from gigagrad.graphs.table import Refused
from gigagrad.graphs.traceable import instance_norm, make_traceable

assert rows.__all__, "importing the rows fills the operator table"

_IGNORED = frozenset(
    {"aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_constrain_range"}
)
_MODEL, _LOSS = "model", "loss"
_SOURCE = "gigagrad source"
_REGISTERED = "GeneratedBackwardFor_"  # how PyTorch names the backward of an operator registered with it
_STANDARD_LIBRARY = sysconfig.get_path("stdlib").replace("\\", "/")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """What capture needs to know of an input: its shape with the batch axis, its dtype, whether it is an image."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    field: bool
    differentiable: bool = False
    """Whether the gradient for this input is asked for."""


Specs = InputSpec | tuple[InputSpec, ...]


class _Observed(TorchFunctionMode):
    """Writes into the traced graph what export would leave out.

    - The user's line of every call: export keeps frames of functions named `forward` only.
    - `torch.no_grad` and `torch.inference_mode` regions: what they compute is detached. An exported graph has no
      regions, and gradients would flow where autograd stops them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = instance_norm if func is F.instance_norm else func
        with fx_traceback.annotate({_SOURCE: _user_line(sys._getframe(1))}):
            result = func(*args, **(kwargs or {}))
            if torch.is_grad_enabled():
                return result
            return tree_map_only(torch.Tensor, lambda made: made.detach() if made.is_floating_point() else made, result)


class Composite(nn.Module):
    """`loss(model(*images), target)` as one module, so that parameters of a loss module are found too.

    `precision` is the dtype that the model and the loss run in: a half precision as autocast would, a full one as if
    the parameters, buffers and images were cast; None: as they are.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None, precision: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.precision = precision
        self.training = model.training

    def forward(self, images: tuple[torch.Tensor, ...], target: Any = None) -> tuple[Any, dict[str, torch.Tensor]]:
        """What the loss or the model returns, and the buffers that were replaced by new tensors on the way."""
        before = dict(self.named_buffers())
        with _Observed():
            output = self.model(*images)
            result = output if self.loss is None else self.loss(output, target)
        return result, {name: now for name, now in self.named_buffers() if now is not before.get(name)}

    @property
    def autocast(self) -> torch.dtype | None:
        return self.precision if self.precision in (torch.bfloat16, torch.float16) else None

    def dtype_of(self, given: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter, a buffer or an image of the given one takes part."""
        full = self.precision is not None and self.autocast is None and given.is_floating_point
        return self.precision if full and self.precision is not None else given


def capture(
    model: nn.Module,
    loss: Callable[..., Any] | None,
    image: Specs,
    target: Specs | None,
    precision: torch.dtype | None = None,
) -> Graph:
    """The graph of `loss(model(image), target)`, or of `model(image)` if there is no loss.

    Several images are several arguments of the model; several targets come to the loss as a tuple. The sources are
    named `image`, `image1`, ..., `target`, `target1`, ...

    Parameter and buffer nodes are named as in `Composite(model, loss)`: `model.conv.weight`, `loss.weight`.

    Raises:
        CaptureError: `torch.export` refuses the model or the loss, or the loss is not one number.
        UnsupportedOperatorError: an operator has no row in the operator table; names module and source line.
    """
    composite = Composite(model, loss, precision)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    home = next((tensor.device for tensor in _tensors(composite)), torch.device("cpu"))
    with _quietly(), fx_traceback.preserve_node_meta(), torch.inference_mode(False), torch.enable_grad():
        with mode:
            images = tuple(_empty(spec, home) for spec in _listed(image))
            goals = tuple(_empty(spec, home) for spec in _listed(target))
            inputs = (images, goals if isinstance(target, tuple) else goals[0]) if goals else (images,)
        try:
            # A copy of its own: a model may keep what its first forward made.
            first, fake = _fake_copy(composite, mode), _fake_copy(composite, mode)
            with mode:
                _refuse_own_gradients(first(*inputs))
            # Around the tracing, not inside the module: an exported autocast region has lost its modules' names.
            with _autocast(home, composite.autocast):
                program = torch.export.export(fake, inputs, strict=False).run_decompositions({})
        except CaptureError:
            raise
        except Exception as error:
            raise _explain(error) from error
    named = _named("image", image) + _named("target", target)
    return _convert(program, composite, named, has_loss=loss is not None)


def _autocast(home: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    return nullcontext() if dtype is None else torch.autocast(home.type, dtype=dtype)


def _listed(specs: Specs | None) -> tuple[InputSpec, ...]:
    return () if specs is None else specs if isinstance(specs, tuple) else (specs,)


def _named(kind: str, specs: Specs | None) -> list[tuple[str, str, InputSpec]]:
    return [(kind, f"{kind}{index or ''}", spec) for index, spec in enumerate(_listed(specs))]


def _empty(spec: InputSpec, device: torch.device) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device=device)


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


def _fake_copy(module: Composite, mode: FakeTensorMode) -> nn.Module:
    """A copy whose parameters and buffers are fake: the memo keeps deepcopy from ever copying a real tensor."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        fake = mode.from_tensor(parameter.detach()).to(module.dtype_of(parameter.dtype))
        memo[id(parameter)] = nn.Parameter(fake, parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = mode.from_tensor(buffer).to(module.dtype_of(buffer.dtype))
    made = copy.deepcopy(module, memo)
    make_traceable(made)
    return made


def _refuse_own_gradients(output: Any) -> None:
    """Tracing follows the forward of an `autograd.Function` and never learns of its backward.

    Operators registered with PyTorch (`torch.library.custom_op`) stay operators, whose backward goes with them.
    """
    stack = [tensor.grad_fn for tensor in tree_leaves(output) if isinstance(tensor, torch.Tensor)]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = type(node).__name__.removesuffix("Backward")
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not name.startswith(_REGISTERED):
            raise CaptureError(
                f"the model or the loss uses the autograd.Function '{name}', whose own backward cannot be captured; "
                "write it with PyTorch's operators (a straight-through estimator is x + (y - x).detach())"
            )
        stack.extend(follower for follower, _ in node.next_functions)


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _explain(error: Exception) -> CaptureError:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_user_code(f.filename)]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CaptureError(f"cannot capture the model or the loss{where}: {type(error).__name__}: {reason}")


def _user_line(frame: FrameType | None) -> str:
    """`file:line` of the innermost frame that is the user's."""
    while frame is not None and not _is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _is_user_code(filename: str) -> bool:
    slashed = filename.replace("\\", "/")
    standard = slashed.startswith(_STANDARD_LIBRARY) and "site-packages" not in slashed
    ours = slashed.endswith("gigagrad/graphs/capture.py")
    return not standard and not ours and "/torch/" not in slashed and "<" not in slashed


def _convert(
    program: torch.export.ExportedProgram,
    composite: Composite,
    named: list[tuple[str, str, InputSpec]],
    *,
    has_loss: bool,
) -> Graph:
    builder = Builder()
    values: dict[str, Any] = {}
    inputs = iter(named)
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = specs[node.name]
            if spec.kind is torch.export.graph_signature.InputKind.USER_INPUT:
                op, name, given = next(inputs)
                values[node.name] = builder.source(
                    op, name, given.shape, given.dtype, field=given.field, differentiable=given.differentiable
                )
            else:
                values[node.name] = _stored(builder, spec, program, composite)
                traced, real = tuple(node.meta["val"].shape), builder.node(values[node.name]).shape
                if traced != real:
                    raise CaptureError(
                        f"'{spec.target}' has shape {real}, but the model gave it shape {traced} while it was traced; "
                        "run the model once on an image of this size, or make the tensor in every forward"
                    )
        elif node.op == "call_function":
            values[node.name] = _call(builder, node, values)
        else:
            assert node.op == "output", node.op
    _note_updates(program, values, builder)
    return builder.graph(*_outputs(program, values, builder, has_loss=has_loss), has_loss=has_loss)


def _note_updates(program: torch.export.ExportedProgram, values: dict[str, Any], builder: Builder) -> None:
    """New values of the buffers that the model writes while it runs."""
    for spec in program.graph_signature.output_specs:
        if spec.kind.name == "BUFFER_MUTATION":
            _note_update(builder, str(spec.target), values[spec.arg.name])
        elif spec.kind.name == "USER_INPUT_MUTATION":
            raise CaptureError("the model or the loss writes into its input; let it work on a clone")


def _note_update(builder: Builder, name: str, value: Ref) -> None:
    builder.updates[name] = builder.gather(value) if builder.is_field(value) else value


def _stored(builder: Builder, spec: Any, program: torch.export.ExportedProgram, composite: Composite) -> Ref:
    """A parameter, buffer or constant tensor the graph reads."""
    kind = spec.kind.name
    if kind == "CONSTANT_TENSOR":
        value = program.constants[spec.target]
        if value.requires_grad:
            raise CaptureError(
                f"the model or the loss uses a tensor of shape {tuple(value.shape)} that asks for a gradient but is no "
                "parameter of a module; make it an nn.Parameter of the model or of a loss module, or detach it"
            )
        return builder.constant(spec.target, value)
    tensor = composite.get_parameter(spec.target) if kind == "PARAMETER" else composite.get_buffer(spec.target)
    return builder.source(
        kind.lower(),
        spec.target,
        tuple(tensor.shape),
        composite.dtype_of(tensor.dtype),
        field=False,
        differentiable=kind == "PARAMETER" and tensor.requires_grad,
    )


def _call(builder: Builder, node: torch.fx.Node, values: dict[str, Any]) -> Any:
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
        return lower(builder, op, _bound(node, replace))
    except Refused as refused:
        raise builder.unsupported(op, refused) from None


def _bound(node: torch.fx.Node, replace: Callable[[Any], Any]) -> dict[str, Any]:
    kwargs = {name: replace(value) for name, value in node.kwargs.items()}
    return operators.bind(str(node.target), tuple(replace(value) for value in node.args), kwargs)


def _origin(node: torch.fx.Node) -> Origin:
    stack = node.meta.get("nn_module_stack") or {}
    path = next((path for path, _ in reversed(list(stack.values())) if path), "")
    path = "" if path == _LOSS else path.removeprefix(f"{_MODEL}.") if path != _MODEL else "model"
    return Origin(path, (node.meta.get("custom") or {}).get(_SOURCE, ""))


def _outputs(
    program: torch.export.ExportedProgram, values: dict[str, Any], builder: Builder, *, has_loss: bool
) -> tuple[list[Ref], TreeSpec | None]:
    """What the loss or the model returns, and how it is nested. Notes the buffers that were replaced."""
    specs = [s for s in program.graph_signature.output_specs if s.kind.name == "USER_OUTPUT"]
    returned, replaced = program.call_spec.out_spec.children()
    for name, spec in zip(replaced.context, specs[returned.num_leaves :], strict=True):
        _note_update(builder, name, values[spec.arg.name])
    found = [values.get(getattr(spec.arg, "name", "")) for spec in specs[: returned.num_leaves]]
    outputs = [value for value in found if isinstance(value, Ref)]
    if has_loss:
        if len(found) != 1 or not outputs:
            raise CaptureError(f"the loss must return one tensor, got {len(found)} values")
        node = builder.node(outputs[0])
        if node.is_field or len(node.shape) > 0:
            raise CaptureError(
                f"the loss must return a scalar, got a tensor of shape {node.shape}; reduce it with .mean() or .sum()"
            )
    if not outputs or len(outputs) != len(found):
        raise CaptureError("the model must return tensors, got something else beside them")
    return outputs, None if returned.is_leaf() else returned
