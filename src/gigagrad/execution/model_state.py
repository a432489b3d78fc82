"""What a run reads of a model, and what it leaves behind in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from gigagrad.graphs import Captured, Composite, Graph


def stored_in(composite: Composite, graph: Graph) -> Callable[[str, str], torch.Tensor]:
    """Looks up a parameter or buffer as it is now, by its kind and name in the graph."""

    def look_up(kind: str, name: str) -> torch.Tensor:
        if name in graph.closed:
            return graph.closed[name].detach()
        tensor = composite.get_parameter(name) if kind == "parameter" else composite.get_buffer(name)
        return tensor.detach().to(composite.dtype_of(tensor.dtype))

    return look_up


def leave_state(composite: Composite, updates: Mapping[str, torch.Tensor], captured: Captured) -> None:
    """Running statistics and the like, counters too: once a run, as PyTorch would. `updates` are new values."""
    for name, value in updates.items():
        if name in captured.graph.closed:
            captured.graph.closed[name].copy_(value)
            continue
        path, _, own = name.rpartition(".")
        owner = composite.get_submodule(path)
        buffer = getattr(owner, own)
        if buffer is not None and buffer.shape == value.shape:
            buffer.copy_(value)
        else:
            setattr(owner, own, value.clone() if buffer is None else value.to(buffer, copy=True))
    captured.leave_effects()
