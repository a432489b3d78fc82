"""Have the caller's own model draw the random numbers that it would draw in tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from gigagrad.devices import Device
from gigagrad.execution.seeds import GENERATORS, SEED, drawing, key_of, seed_of
from gigagrad.graphs import Draw, Graph
from gigagrad.graphs.draws import DRAWING, DROPOUTS
from gigagrad.graphs.graph import remembered
from gigagrad.graphs.operators import uniform

_OF_DROPOUT: Final = frozenset(function.__name__ for function in DROPOUTS)
_NAMES: Final = {"aten.native_dropout.default": "bernoulli", "aten.normal_functional.default": "normal"}
"""Operators of a captured program, each with what draws in its place where PyTorch runs by itself."""
_AT_LEAST, _BELOW = "aten.ge.Scalar", "aten.lt.Scalar"
"""Dropout by one operator, and by those that write in place: what keeps a value."""


class Drawn(NamedTuple):
    """Name what draws the numbers of one call in a graph."""

    node: int
    """The operator that draws."""
    compared: str
    """The operator that compares uniform numbers, of dropout by places; else empty."""


@remembered
def draws_by_call(graph: Graph, calls: tuple[Draw | None, ...] | None) -> tuple[Drawn | None, ...] | None:
    """Return for each call that may draw what draws the same numbers in a graph, None for one that draws nothing; None
    instead of a tuple where the two do not correspond.
    """
    if calls is None or len(drawing(graph)) != sum(call is not None for call in calls):
        return None
    nodes, found = iter(drawing(graph)), list[Drawn | None]()
    for call in calls:
        drawn = None if call is None else _drawn(graph, call, next(nodes))
        if drawn is None and call is not None:
            return None
        found.append(drawn)
    return tuple(found)


def _drawn(graph: Graph, call: Draw, node_id: int) -> Drawn | None:
    """Return what a node draws, None where it is not what the call draws."""
    node = graph[node_id]
    if node.op != SEED:
        name = _NAMES.get(node.op, node.op.split(".")[1])
        alike = name == call.function or (name == call.op and tuple(node.shape) == call.shape)
        return Drawn(node_id, "") if alike else None
    uniform_numbers = [one for one in graph.nodes if node_id in one.operands]
    if call.function not in _OF_DROPOUT or [tuple(one.shape) for one in uniform_numbers] != [call.shape]:
        return None
    compared = [one.op for one in graph.nodes if uniform_numbers[0].id in one.operands]
    return Drawn(node_id, compared[0]) if compared in ([_AT_LEAST], [_BELOW]) else None


class NotAtOnce(Exception):
    """The whole image cannot be computed at once, although it was planned; the message says why."""


_OTHER_DRAWS: Final = "the model draws random numbers otherwise than it did for the plan"


class DrawnAsInTiles(TorchFunctionMode):
    """Have the calls of a model draw what the nodes of its graph draw in a run, whatever plan it has."""

    def __init__(self, graph: Graph, by_call: tuple[Drawn | None, ...], draws: int, device: Device) -> None:
        """`by_call`: what `draws_by_call` returned; `draws`: the number that the run draws from."""
        super().__init__()
        self._graph, self._draws, self._device = graph, draws, device
        self._by_call = iter(by_call)

    def finish(self) -> None:
        """Raise NotAtOnce where calls are left that were not made."""
        if next(self._by_call, self) is not self:
            raise NotAtOnce(_OTHER_DRAWS)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in DRAWING:
            return func(*args, **kwargs)
        drawn = next(self._by_call, self)
        if isinstance(drawn, DrawnAsInTiles):
            raise NotAtOnce(_OTHER_DRAWS)
        if drawn is None:
            return func(*args, **kwargs)
        number = drawing(self._graph)[drawn.node]
        if drawn.compared:
            return _dropped(key_of(self._draws, number), drawn.compared, *args, **kwargs)
        with GENERATORS, self._device.seeded(seed_of(self._draws, number)):
            return _in_order(self._graph[drawn.node].shape, func, *args, **kwargs)


def _dropped(
    key: torch.Tensor, compared: str, field: torch.Tensor, p: float = 0.5, *_: Any, inplace: bool = False, **__: Any
) -> torch.Tensor:
    """Return a field with values dropped by their places, as the nodes do that dropout is rewritten to."""
    drawn = uniform(field, key)
    if compared == _AT_LEAST:
        mask = drawn.ge_(p).to(field.dtype).mul_(1 / (1 - p))
    else:
        mask = drawn.lt_(1 - p).to(field.dtype).div_(1 - p)
    return field.mul_(mask) if inplace else field * mask


def _in_order(shape: Sequence[int], func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function that draws something of this shape in the order of its values, however they lie in memory."""
    given = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if given is None or given.shape != torch.Size(shape) or given.is_contiguous():
        return func(*args, **kwargs)
    lying = given.contiguous()
    drawn = func(lying, *args[1:], **kwargs)
    return given.copy_(drawn) if drawn is lying else drawn
