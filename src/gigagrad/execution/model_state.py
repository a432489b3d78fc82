"""Read what a run needs of a model, write what it leaves behind in it, and predict what its optimizer will hold."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gigagrad.errors import ModelError
from gigagrad.execution.scalars import Values, evaluated
from gigagrad.graphs import Captured, Graph, LossModule
from gigagrad.graphs.graph import remembered

_USUAL_COPIES = 2
"""Copies of the trainable parameters, where nothing says what there will be: Adam's two moments."""
_OTHER_KERNELS = ("foreach", "fused", "capturable")
"""Options that ask for kernels which tensors without storage do not have; the state is the same without."""
_DEEPEST = 4
"""Lists and objects inside of each other in an optimizer's state, at most."""
_HOST = torch.device("cpu")


def stored_in(composite: LossModule, graph: Graph) -> Callable[[str], torch.Tensor]:
    """Return a function that looks up a parameter or buffer as it is now, by its name in the graph."""
    tensors = {**composite.named_tensors(), **graph.closed}

    def look_up(name: str) -> torch.Tensor:
        tensor = tensors[name].detach()
        return tensor if name in graph.closed else tensor.to(composite.dtype_of(tensor.dtype))

    return look_up


def leave_state(composite: LossModule, updates: Mapping[str, torch.Tensor], captured: Captured) -> None:
    """Write running statistics and the like, weights that forward itself changes, counters too: once a run, as in
    PyTorch.

    `updates` are new values.
    """
    written: dict[torch.dtype, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
    closed = captured.graph.closed
    tensors = {**composite.named_tensors(), **closed}
    for name, value in updates.items():
        buffer = tensors.get(name)
        if buffer is not None and (name in closed or buffer.shape == value.shape):
            written.setdefault(buffer.dtype, {})[buffer.data_ptr()] = buffer.detach(), value  # one of two names
        else:
            path, _, own = name.rpartition(".")
            owner = composite.get_submodule(path)
            setattr(owner, own, value.clone() if buffer is None else value.to(buffer, copy=True))
    memory = {buffer.untyped_storage()._cdata for pairs in written.values() for buffer, _ in pairs.values()}
    with torch.no_grad():
        for pairs in written.values():
            buffers, values = zip(*pairs.values(), strict=True)
            # What a buffer takes may be what another one held before.
            apart = [value.clone() if value.untyped_storage()._cdata in memory else value for value in values]
            torch._foreach_copy_(buffers, apart)
    for name in captured.frozen:
        frozen = captured.graph.closed[name] if name in captured.graph.closed else composite.get_parameter(name)
        frozen.requires_grad_(False)
    captured.leave_effects()


def leaving_again(
    composite: LossModule, captured: Captured, values: Values, *, overwritten: bool = False
) -> Callable[[], None]:
    """Return a function that writes the buffers which a run wrote as if the run took place then: `values` of it by
    node, which are `overwritten` by the next run, so that copies are needed, or not.

    The model must have passed `check_independent`.
    """
    graph = captured.graph
    later, written, needed = _behind(graph)
    known = {i: values[i].detach() for i in needed if i in values}  # of dependent models some are gone
    if overwritten:
        known = {i: value.clone() for i, value in known.items()}

    def leave() -> None:
        device = next((value.device for value in known.values()), _HOST)
        stored = stored_in(composite, graph)
        found = known | {i: stored(graph[i].arguments["name"]).to(device) for i in written}
        with torch.no_grad():
            for i in later:
                found[i] = evaluated(graph, i, found, device)
            leave_state(composite, {name: found[i] for name, i in graph.updates.items()}, captured)

    return leave


def check_independent(captured: Captured) -> None:
    """Raises ModelError where what a run computes depends on what the run before it left in the model."""
    graph = captured.graph
    later = _behind_written(graph)
    pixels = any(graph[i].is_field or graph[i].is_reduction or graph[i].whole for i in later)
    if pixels or not set(later).isdisjoint(graph.outputs):
        what = f"reads the buffers that the one before it wrote ({', '.join(sorted(graph.updates))})"
    elif captured.effects and not captured.effects.steady:
        what = "reads attributes that the one before it changed"
    else:
        return
    raise ModelError(f"a forward of the model {what}, so slides come one after the other; leave all ranks in one group")


@remembered
def _behind(graph: Graph) -> tuple[list[int], set[int], set[int]]:
    """Return the nodes behind buffers and parameters that the graph writes, those, and what else they read."""
    later = _behind_written(graph)
    read = {*graph.updates.values(), *(i for node in later for i in graph[node].operands)}
    written = {i for i in read if _is_written(graph, i)}
    return later, written, read - written - set(later)


def _is_written(graph: Graph, node_id: int) -> bool:
    return graph[node_id].op in ("buffer", "parameter") and graph[node_id].arguments["name"] in graph.updates


def _behind_written(graph: Graph) -> list[int]:
    """Return the nodes that depend on buffers and parameters which the graph writes."""
    found: list[int] = []
    behind: set[int] = set()
    for node in graph.nodes:
        if _is_written(graph, node.id):
            behind.add(node.id)
        elif not behind.isdisjoint(node.operands):
            behind.add(node.id)
            found.append(node.id)
    return found


class OptimizerState:
    """The state that the optimizer of a model's parameters will hold beside what it holds already."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer
        self._versions: int | None = None
        """Versions of the trainable parameters when they were first looked at: any write to one counts up."""
        self._stepped = False

    def coming_bytes(self) -> int:
        """Return the bytes of it; 0 once they are part of what the process holds. An optimizer that nobody named is
        taken for Adam, until a write to the parameters shows that it has stepped.
        """
        if self._optimizer is not None:
            return coming_state_bytes(self._optimizer)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        versions = sum(parameter._version for parameter in trained)
        if self._versions is None:
            self._versions = versions
        self._stepped = self._stepped or versions != self._versions
        return 0 if self._stepped else usual_state_bytes(trained)


def usual_state_bytes(parameters: Iterable[torch.Tensor]) -> int:
    return _USUAL_COPIES * sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)


def coming_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of state that `optimizer` makes in its next step, for parameters that have none yet: what a copy
    of it makes when it steps parameters of the same shapes without storage. One that needs values steps ones, a
    parameter of each shape at a time. As much as Adam's where it cannot step those either.
    """
    fresh = [
        (group, p)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and not optimizer.state.get(p)
    ]
    try:
        return _rehearsed_bytes(optimizer, fresh, torch.device("meta"))
    except Exception:  # noqa: S110  # anyone's own code: what it cannot do without values is its affair
        pass
    alike: dict[tuple[object, ...], list[tuple[dict[str, Any], torch.Tensor]]] = {}
    for group, p in fresh:
        alike.setdefault((id(group), p.shape, p.dtype), []).append((group, p))
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            each = [(_rehearsed_bytes(optimizer, found[:1], _HOST), len(found)) for found in alike.values()]
        return sum(nbytes * count for nbytes, count in each)
    except Exception:
        return usual_state_bytes(p for _, p in fresh)


def _rehearsed_bytes(
    optimizer: torch.optim.Optimizer, given: Iterable[tuple[dict[str, Any], torch.Tensor]], device: torch.device
) -> int:
    """Return the bytes of state that a copy of the optimizer makes of stand-ins of parameters. Raises anything."""
    groups: dict[int, dict[str, Any]] = {}
    for group, parameter in given:
        plain = {name: False for name in _OTHER_KERNELS if name in group}
        own = groups.setdefault(id(group), copy.copy(group) | plain | {"params": []})
        stand_in = torch.ones_like(parameter, device=device).requires_grad_()
        stand_in.grad = torch.ones_like(stand_in)
        own["params"].append(stand_in)
    # What it keeps for itself comes along, its hooks do not; a copy by itself has neither.
    known = {name for name in vars(optimizer) if name in ("param_groups", "state") or name.startswith("_optimizer_")}
    own = {name: value for name, value in vars(optimizer).items() if name not in known and not callable(value)}
    rehearsal = copy.copy(optimizer)
    vars(rehearsal).update(copy.deepcopy(own, {id(p): p for _, p in given}))
    rehearsal.param_groups, rehearsal.state = list(groups.values()), defaultdict(dict)
    rehearsal.step()
    held = {id(tensor): tensor.nbytes for state in rehearsal.state.values() for tensor in tensors_in(state)}
    return sum(held.values())


def tensors_in(value: Any, depth: int = _DEEPEST) -> Iterator[torch.Tensor]:
    """Yield the tensors in what an optimizer keeps of a parameter, in lists and objects of its own, too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        items = value.values() if isinstance(value, Mapping) else getattr(value, "__dict__", {}).values()
        items = value if isinstance(value, (list, tuple, deque)) else items
        for item in items:
            yield from tensors_in(item, depth - 1)
