"""Capture `loss(model(image), target)` as a `Graph`, at the image's true size, without touching its pixels.

`torch.export` traces the model on fake tensors: shapes and dtypes without storage, so a gigapixel image costs nothing
and the captured graph holds every value's true whole-image shape.
"""

from __future__ import annotations

import dataclasses
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
from torch.fx import traceback as fx_traceback

from gigagrad.errors import CaptureError
from gigagrad.graphs.capture.constants import Asked
from gigagrad.graphs.capture.convert import convert, stored_tensors
from gigagrad.graphs.capture.dry_run import DryRun, Effects, roots_of, run_dry
from gigagrad.graphs.capture.explain import explained
from gigagrad.graphs.capture.functional import functional
from gigagrad.graphs.capture.guard import Guard
from gigagrad.graphs.capture.loss_module import CLOSED, FakeCopy, LossModule
from gigagrad.graphs.capture.stand_ins import ids_of, modules_themselves, quietly, state_kept
from gigagrad.graphs.capture.traversal import Traversal
from gigagrad.graphs.graph import Graph, InputSpec
from gigagrad.graphs.whole import WholeCost, count_whole

_HOST = torch.device("cpu")
_LOWERED = 2
"""Graphs kept of one program beside the first, by the pixels that fields may have to be whole."""
_CAPTURING = threading.RLock()
"""Export exchanges functions of Python itself while it traces, and a dry run may undo no other thread's changes."""
Specs = InputSpec | tuple[InputSpec, ...]


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

    def with_graph(self, graph: Graph) -> Captured:
        """Return a copy with an equal graph that others know already."""
        return dataclasses.replace(self, graph=graph)

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
        named = _named("image", images) + _named("target", targets)
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
        with dry_run.undone(), _autocast(_HOST, loss_module.autocast), ids_of(copy.ids):
            cost = count_whole(copy.module, copy.replacement, inputs, mode, backward=backward)
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


def _named(kind: str, specs: tuple[InputSpec, ...]) -> list[tuple[str, str, InputSpec]]:
    return [(kind, f"{kind}{index or ''}", spec) for index, spec in enumerate(specs)]
