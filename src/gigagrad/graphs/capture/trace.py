"""Capture `loss(model(image), target)` as a `Graph`, at the image's true size, without touching its pixels.

`torch.export` traces the model on fake tensors: shapes and dtypes without storage, so a gigapixel image costs nothing
and the captured graph holds every value's true whole-image shape. Of a bag, another number of patches is
written into a traced program.
"""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx import traceback as fx_traceback

from gigagrad.errors import CaptureError
from gigagrad.graphs import ops
from gigagrad.graphs.capture.constants import Asked, tensors_in
from gigagrad.graphs.capture.convert import Stored, convert, stored_tensors
from gigagrad.graphs.capture.dry_run import DryRun, Effects, roots_of, run_dry
from gigagrad.graphs.capture.explain import explained
from gigagrad.graphs.capture.functional import functional
from gigagrad.graphs.capture.guard import Guard
from gigagrad.graphs.capture.loss_module import CLOSED, FakeCopy, LossModule
from gigagrad.graphs.capture.stand_ins import ids_of, modules_themselves, quietly, state_kept
from gigagrad.graphs.capture.traversal import Traversal
from gigagrad.graphs.graph import Graph, InputSpec, same_bits
from gigagrad.graphs.sizes import CallRecorder, Lines, Record, Recorder, is_number
from gigagrad.graphs.whole import WholeCost, count_whole

assert ops.__all__, "importing the rules fills the registry"

_HOST = torch.device("cpu")
_LOWERED = 2
"""Graphs kept of one program beside the first, by the pixels that fields may have to be whole."""
_CAPTURING = threading.RLock()
"""Export exchanges functions of Python itself while it traces, and a dry run may undo no other thread's changes."""
_PROGRAM, _AS_TRACED = "program", "as traced"
Specs = InputSpec | tuple[InputSpec, ...]
Way = bool | str
"""A way to run a model: without a backward pass or with one, on the host; or forward alone, as it is traced."""
Counted = tuple[WholeCost, Record | None]
"""The cost of running a model, and the operators that ran."""


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
    traced: Traced | None = None
    """The program, where it may serve bags of other numbers of patches."""

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
        recorded, outside = any(spec.bag for spec in images), _outside(loss_module)
        program, dry_run, counted = _exported(loss_module, image, target, outside, recorded)
        closed = {f"{CLOSED}.{index}": tensor for index, tensor in enumerate(dry_run.closed)}
        stored = stored_tensors(program, loss_module, closed, dry_run.frozen)
        records = {way: record for way, (_, record) in counted.items()}
        records[_PROGRAM] = program_record(program) if recorded else None
        has_loss = loss_module.loss is not None
        traced = Traced(program, stored, closed, dry_run, has_loss, records, _ways(loss_module, recorded))
        graph = traced.graph(images, targets, records[_PROGRAM], _costs(counted))
        if loss_module.loss is None and graph.source("image") is None:
            raise CaptureError("nothing that the model returns depends on the pixels of the image")
        guard = Guard(
            roots_of(loss_module.model, loss_module.loss, dry_run.generators), dry_run.executed, dry_run.closed
        )
        asked = Asked(dry_run.asked, closed)
        found = dry_run.effects, dry_run.frozen, dry_run.left_out
        return Captured(graph, guard, *found, asked, traced if traced.is_complete else None)


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A traced program, with all that its graphs need."""

    program: ExportedProgram
    stored: Mapping[str, Stored]
    closed: dict[str, torch.Tensor]
    dry_run: DryRun
    has_loss: bool
    records: Mapping[bool | str, Record | None]
    """Records of the program, and of the operators that PyTorch runs in all `ways`."""
    ways: tuple[Way, ...]

    @property
    def is_complete(self) -> bool:
        """Tell whether all of it is recorded, and a forward leaves nothing behind that is not."""
        behind = (self.dry_run.effects, self.dry_run.frozen, self.dry_run.left_out, self.dry_run.asked)
        return not any(behind) and all(self.records.get(name) is not None for name in (*self.ways, _PROGRAM))

    def graph(
        self,
        images: tuple[InputSpec, ...],
        targets: tuple[InputSpec, ...],
        record: Record | None,
        costs: Mapping[bool, WholeCost],
    ) -> Graph:
        """Make the graph for inputs of these shapes, with the numbers of a record if there is one."""
        given = ("image", images), ("target", targets)
        named = [(op, f"{op}{index or ''}", spec) for op, specs in given for index, spec in enumerate(specs)]
        merging, whole, results = self.dry_run.writes.runs_again, MappingProxyType(costs), dict[Any, Any]()

        @lru_cache(maxsize=_LOWERED)
        def lowered(whole_pixels: int) -> Graph:
            with _CAPTURING:
                if record is not None:
                    write(self.program, record)
                asked = merging, self.has_loss, whole_pixels, results
                made = convert(self.program, self.stored, named, self.closed, *asked)
            return dataclasses.replace(made, whole=whole)

        return dataclasses.replace(lowered(0), coarse_whole=lowered)


def lines_through(one: Captured, size: int, two: Captured, other: int) -> Lines | None:
    """Return what the graphs of one model for bags of two sizes have in common, for `trace_again`; None where others do
    not follow from them.
    """
    if one.traced is None or two.traced is None:
        return None
    closed = [list(each.graph.closed.values()) for each in (one, two)]
    same_closed = len(closed[0]) == len(closed[1]) and all(map(operator.is_, *closed))
    if not (same_closed and same_bits(one.graph.constants, two.graph.constants)):
        return None
    return Lines.through(one.traced.records, size, two.traced.records, other)


def trace_again(
    loss_module: LossModule, image: Specs, target: Specs | None, known: Captured, lines: Lines, size: int
) -> Captured | None:
    """Return what `trace` would find for a bag of another size than those of `known` and of the other graph that the
    lines go through, both of which hold; None where only that can tell.

    The model runs as it is, on fake tensors, in all ways in which it will: the operators that it calls, in their order,
    and all numbers that they are given have to be those on the lines, and the user's code that runs the same.
    """
    traced, found = known.traced, dict[Way, Counted]()
    assert traced is not None
    with _CAPTURING, state_kept(), _tracing():
        mode, outside = FakeTensorMode(allow_non_fake_inputs=True), _outside(loss_module)
        for way in traced.ways:
            home = _home(loss_module) if way == _AS_TRACED else _HOST
            copy = FakeCopy(loss_module, mode, outside, traced.dry_run.closed, home)
            with traced.dry_run.again(copy) as again:
                watched = again.watched() if way == traced.ways[0] else None
                counted = _counted(copy, mode, _inputs(mode, image, target, home), home, way, True, watched)
            if counted is None or counted[1] is None or not counted[1].is_same_as(lines.at(way, size)):
                return None
            if not again.left_nothing or (watched is not None and not again.same_code):
                return None
            found[way] = counted
        graph = traced.graph(_listed(image), _listed(target), lines.at(_PROGRAM, size), _costs(found))
    return dataclasses.replace(known, graph=graph, traced=None)


def _home(loss_module: LossModule) -> torch.device:
    """Return where a model is traced."""
    return next((tensor.device for tensor in loss_module.tensors()), _HOST)


def _ways(loss_module: LossModule, recorded: bool) -> tuple[Way, ...]:
    """Return the ways in which a model runs to be counted; to be `recorded`, first that in which it is traced: with
    gradients, on its own device.
    """
    counted = (True, False) if loss_module.loss is not None else (False,)
    return (_AS_TRACED, *counted) if recorded and (_home(loss_module) != _HOST or True not in counted) else counted


def _costs(counted: Mapping[Way, Counted]) -> dict[bool, WholeCost]:
    return {way: cost for way, (cost, _) in counted.items() if isinstance(way, bool)}


def _outside(loss_module: LossModule) -> list[Any]:
    """Find what a copy of the loss module can only share with it: tensors that are not its own, and other objects."""
    reached = Traversal(roots_of(loss_module.model, loss_module.loss))
    inside = {id(tensor) for tensor in loss_module.tensors()}
    return [*(tensor for _, tensor in reached.tensors if id(tensor) not in inside), *reached.uncopied]


@contextmanager
def _tracing() -> Iterator[None]:
    with quietly(), torch.inference_mode(False), torch.enable_grad():
        yield


def _exported(
    loss_module: LossModule, image: Specs, target: Specs | None, outside: list[Any], recorded: bool
) -> tuple[ExportedProgram, DryRun, dict[Way, Counted]]:
    mode, home = FakeTensorMode(allow_non_fake_inputs=True), _home(loss_module)
    with _tracing():
        inputs = _inputs(mode, image, target, home)
        try:
            # Around the tracing, not inside the module: an exported autocast region has lost its modules' names.
            with _autocast(home, loss_module.autocast):
                dry_run = run_dry(loss_module, mode, inputs, outside)
                counted = _whole_costs(loss_module, mode, (image, target), outside, dry_run, recorded)
                # A copy of its own: a model may keep what its first forward made.
                copy = FakeCopy(loss_module, mode, outside, dry_run.closed)
                copy.known_writes = dry_run.writes
                with dry_run.undone(), modules_themselves(), fx_traceback.preserve_node_meta():
                    exported = torch.export.export(copy.module, inputs, strict=False)
                return functional(exported), dry_run, counted
        except CaptureError:
            raise
        except Exception as error:
            raise explained(error, _listed(image)[0], _listed(target)) from error


def _whole_costs(
    loss_module: LossModule,
    mode: FakeTensorMode,
    specs: tuple[Specs, Specs | None],
    outside: list[Any],
    dry_run: DryRun,
    recorded: bool,
) -> dict[Way, Counted]:
    """Count what plain autograd takes for the whole image, without and with gradients, as far as it can be counted.

    On the host, whatever the model's device: a backward of fake tensors on a GPU leaves autograd without its streams.
    """
    found = dict[Way, Counted]()
    for way in _ways(loss_module, recorded):
        home = _home(loss_module) if way == _AS_TRACED else _HOST
        copy = FakeCopy(loss_module, mode, outside, dry_run.closed, home)
        with dry_run.undone():
            counted = _counted(copy, mode, _inputs(mode, *specs, home), home, way, recorded)
        if counted is not None:
            found[way] = counted
    return found


def _counted(
    copy: FakeCopy,
    mode: FakeTensorMode,
    inputs: Any,
    home: torch.device,
    way: Way,
    recorded: bool,
    watched: AbstractContextManager[None] | None = None,
) -> Counted | None:
    recorder = CallRecorder([*copy.module.tensors(), *tensors_in(inputs)]) if recorded else None
    with _autocast(home, copy.module.autocast), ids_of(copy.ids), copy.replacing():
        cost = count_whole(
            *(copy.module, inputs, mode),
            backward=way is True,
            grad=way is not False,
            recorder=recorder,
            watched=watched,
        )
    return None if cost is None else (cost, None if recorder is None else recorder.record())


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


def program_record(program: ExportedProgram) -> Record | None:
    """Record a program's operators, arguments and shapes; None where it holds something that cannot be compared."""
    places = {node: index for index, node in enumerate(program.graph.nodes)}
    recorder = Recorder(lambda tensor: None)
    for node in program.graph.nodes:
        recorder.note(node.op, node.name, str(node.target))
        recorder.note(*(_without_nodes(given, places) for given in (node.args, dict(node.kwargs))))
        recorder.note(node.meta.get("val"))
    recorder.note(repr(program.graph_signature), repr(program.call_spec.out_spec))
    return recorder.record()


def write(program: ExportedProgram, record: Record) -> None:
    """Write the numbers of a record into a program, in place: its arguments and shapes are those of another size."""
    numbers = map(int, record.numbers)
    for node in program.graph.nodes:
        args, kwargs = _written(node.args, numbers), _written(dict(node.kwargs), numbers)
        if (args, kwargs) != (node.args, node.kwargs):
            node.args, node.kwargs = args, kwargs
        if "val" in node.meta:
            node.meta["val"] = _written(node.meta["val"], numbers)
    assert next(numbers, None) is None


def _without_nodes(value: Any, places: dict[Node, int]) -> Any:
    """Return a nest with the names of nodes in their places."""
    if isinstance(value, Node):
        return f"node {places[value]}"
    if isinstance(value, list | tuple):
        return [_without_nodes(item, places) for item in value]
    if isinstance(value, dict):
        return {name: _without_nodes(item, places) for name, item in value.items()}
    return value


def _written(value: Any, numbers: Iterator[int]) -> Any:
    """Copy a nest with other numbers, in the order in which they were recorded."""
    if is_number(value):
        return type(value)(next(numbers))
    if isinstance(value, list | tuple):
        made = [_written(item, numbers) for item in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, dict):
        return {name: _written(item, numbers) for name, item in value.items()}
    if isinstance(value, torch.Tensor):
        shape, stride = ([next(numbers) for _ in range(value.ndim)] for _ in range(2))
        next(numbers)
        return torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
    return value
