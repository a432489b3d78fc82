"""Write another number of patches into a traced program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from gigagrad.graphs.sizes import Record, Recorder, is_number


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
