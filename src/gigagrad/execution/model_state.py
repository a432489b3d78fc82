"""Read what a run needs of a model, and write what it leaves behind in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from gigagrad.errors import ModelError
from gigagrad.execution.scalars import Values, evaluated
from gigagrad.graphs import Captured, Graph, LossModule


def stored_in(composite: LossModule, graph: Graph) -> Callable[[str, str], torch.Tensor]:
    """Return a function that looks up a parameter or buffer as it is now, by its kind and name in the graph."""

    def look_up(kind: str, name: str) -> torch.Tensor:
        if name in graph.closed:
            return graph.closed[name].detach()
        tensor = composite.get_parameter(name) if kind == "parameter" else composite.get_buffer(name)
        return tensor.detach().to(composite.dtype_of(tensor.dtype))

    return look_up


def leave_state(composite: LossModule, updates: Mapping[str, torch.Tensor], captured: Captured) -> None:
    """Write running statistics and the like, weights that forward itself changes, counters too: once a run, as in
    PyTorch.

    `updates` are new values.
    """
    for name, value in updates.items():
        if name in captured.graph.closed:
            captured.graph.closed[name].copy_(value)
            continue
        path, _, own = name.rpartition(".")
        owner = composite.get_submodule(path)
        buffer = getattr(owner, own)
        if buffer is not None and buffer.shape == value.shape:
            buffer.detach().copy_(value)
        else:
            setattr(owner, own, value.clone() if buffer is None else value.to(buffer, copy=True))
    for name in captured.frozen:
        frozen = captured.graph.closed[name] if name in captured.graph.closed else composite.get_parameter(name)
        frozen.requires_grad_(False)
    captured.leave_effects()


class Left:
    """The buffers that a run wrote, to be written again where these hold something else meanwhile. `values` by node.

    The model must have passed `check_independent`.
    """

    def __init__(self, composite: LossModule, captured: Captured, values: Values) -> None:
        self._composite, self._captured = composite, captured
        graph = captured.graph
        self._later = _behind_written(graph)
        read = {*graph.updates.values(), *(i for later in self._later for i in graph[later].operands)}
        self._written = {i for i in read if _is_written(graph, i)}
        needed = read - self._written - set(self._later)
        self._values = {i: values[i].detach() for i in needed if i in values}  # of dependent models some are gone

    def again(self) -> None:
        """Write the buffers as if the run took place now."""
        graph, values = self._captured.graph, dict(self._values)
        device = next((value.device for value in values.values()), torch.device("cpu"))
        stored = stored_in(self._composite, graph)
        values |= {i: stored(graph[i].op, graph[i].arguments["name"]).to(device) for i in self._written}
        with torch.no_grad():
            for i in self._later:
                values[i] = evaluated(graph, i, values, device)
            leave_state(self._composite, {name: values[i] for name, i in graph.updates.items()}, self._captured)


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
