"""The global values of a run and their gradients: arithmetic on reductions and parameters, on PyTorch's autograd.

Leaves of the graph are the parameters, the reductions and the fields that whole-field operators read. Cotangents arrive
from the passes (of every global that fields read) and from the loss; they go backward to the leaves segment by segment,
each part of the graph as rarely as the order of the segments allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

import torch
from torch.autograd.graph import get_gradient_edge

from gigagrad.devices import Device
from gigagrad.execution.gradient_scale import GradientScale, multiplied
from gigagrad.execution.refusals import explained
from gigagrad.execution.seeds import GENERATORS, drawing, seed_of
from gigagrad.graphs import GATHER, Call, Graph
from gigagrad.graphs.graph import remembered
from gigagrad.graphs.op_rules import Bound, plain
from gigagrad.plans import Segment, levels
from gigagrad.plans.memory import passing_values
from gigagrad.plans.partition import gradient_dtype
from gigagrad.plans.segments import differentiable_reductions

Values = dict[int, torch.Tensor]

_HOLDERS = getattr(torch._C, "_storage_Use_Count", None)
"""Counts who holds a storage; no version of PyTorch promises it, and without it values are copied."""
_AT_ONCE = 1 << 17
"""Numbers: PyTorch adds those of another dtype by way of a copy in the sum's own, which is to fit in a cache."""


def add(
    sums: Values,
    key: int,
    value: torch.Tensor,
    dtype: torch.dtype,
    layout: torch.memory_format = torch.preserve_format,
    *,
    take: bool = False,
) -> None:
    """Add to a sum in this dtype. Unless told otherwise it lies in memory as the first value did: others of the kind
    are added fastest. With `take` the first value becomes the sum as it is, where nobody else holds its memory. Sums of
    sparse values are dense.
    """
    value, total = value.to_dense() if value.is_sparse else value, sums.get(key)
    if total is None:
        copied = not (take and _is_held_once(value))
        sums[key] = value.detach().to(dtype, copy=copied, memory_format=layout)
        return
    value = value.detach()
    if value.numel() <= _AT_ONCE:
        total.add_(value)
    else:
        rows = max(1, value.shape[0] * _AT_ONCE // value.numel())
        for row in range(0, len(value), rows):
            total[row : row + rows].add_(value[row : row + rows])


def _is_held_once(value: torch.Tensor) -> bool:
    """Return True where this tensor is the only one that lies in its memory, and takes all of it."""
    storage = value.untyped_storage()
    count = None if _HOLDERS is None else _HOLDERS(storage._cdata)
    return count == 2 and storage.nbytes() == value.nbytes  # the other one is `storage`


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """Holds the order of a graph's global values: the same in every run of a plan."""

    level: list[int]
    recorded: set[int]
    """Values that the loss or any field depends on: the rest (running statistics) has no gradient."""
    missing: dict[int, int]
    """Number of operands of each value computed here."""
    readers: dict[int, list[int]]
    passing: dict[int, list[int]]
    """Values that are gone behind their last reader, by reader."""
    uses: dict[int, int]
    """Number of readers of each of those."""
    whole: list[int]
    """Whole fields that are given back, the first known first."""
    late: dict[int, int]
    """Bytes of the gradients that come from the tape, not from tiles, by parameter."""


@remembered
def _order(graph: Graph, kept: frozenset[int]) -> _Order:
    level, gone = levels(graph, kept), passing_values(graph)
    readers, passing, missing = dict[int, list[int]](), dict[int, list[int]](), dict[int, int]()
    for node in graph.nodes:
        if node.is_field or node.is_source or node.is_reduction or node.op == GATHER:
            continue
        operands = set(node.operands)
        missing[node.id] = len(operands)
        passing[node.id] = [i for i in operands if i in gone]
        for operand in operands:
            readers.setdefault(operand, []).append(node.id)
    results = {*graph.outputs, *graph.updates.values()}
    whole = (node.id for node in graph.nodes if node.whole and node.id not in results)
    late = (graph[i] for i in graph.ancestors(tuple(graph.read_late())))
    return _Order(
        level=level,
        recorded=graph.ancestors((graph.output, *(node.id for node in graph.nodes if node.is_field))),
        missing=missing,
        readers=readers,
        passing=passing,
        uses={i: len(readers[i]) for i in gone if i in readers},
        whole=sorted(whole, key=level.__getitem__),
        late={node.id: node.nbytes for node in late if node.op == "parameter" and node.differentiable},
    )


class ScalarGraph:
    """Values by node id; `backward` says whether autograd records at all."""

    def __init__(
        self,
        graph: Graph,
        kept: set[int],
        device: Device,
        *,
        backward: bool,
        overflows: int = 0,
        draws: int = 0,
        seeds: Values | None = None,
        share: Callable[[int, torch.Tensor], torch.Tensor] = lambda parameter, gradient: gradient,
    ) -> None:
        """Set up the values; `draws`: what random operators draw from, `seeds`: what some have drawn. `share`: what of
        a parameter's gradient is to be added up here.
        """
        self.graph = graph
        self._device, self._share = device, share
        self._draws, self._drawing, self._seeds = draws, drawing(graph), seeds or {}
        self.backward = backward
        self.scale = GradientScale(graph, overflows)
        self.values: Values = {}
        self.gradients: Values = {}
        """Shares of the parameters' gradients by node: sums over a segment's tiles, which are in float64, rounded and
        added up.
        """
        self._order = order = _order(graph, frozenset(kept))
        self._level = order.level
        self._missing, self._uses = dict(order.missing), dict(order.uses)
        self._whole = list(order.whole)
        """Whole fields that are not given back yet, the first known first."""
        self._ready = [node_id for node_id, count in self._missing.items() if not count]
        self._leaves: dict[int, None] = {}
        self._pending: Values = {}
        self._cotangents: Values = {}

    def put(self, node_id: int, value: torch.Tensor) -> None:
        """Give a leaf or a constant its value."""
        node = self.graph[node_id]
        wanted = node.differentiable and self.backward
        self._set(node_id, value.detach().requires_grad_(wanted))
        if wanted:
            self._leaves[node_id] = None

    def compute(self) -> None:
        """Compute every global whose operands are known."""
        with torch.no_grad():
            while self._ready:
                node_id = heappop(self._ready)
                torch.set_grad_enabled(self.backward and node_id in self._order.recorded)
                self._set(node_id, self._evaluated(node_id, self.values))
                for operand in self._order.passing.get(node_id, ()):
                    self._uses[operand] -= 1
                    if not self._uses[operand]:
                        del self.values[operand]

    def _set(self, node_id: int, value: torch.Tensor) -> None:
        """Set a value, and find with it what may be computed."""
        self.values[node_id] = value
        for reader in self._order.readers.get(node_id, ()):
            self._missing[reader] -= 1
            if not self._missing[reader]:
                heappush(self._ready, reader)

    def accumulate(self, node_id: int, cotangent: torch.Tensor) -> None:
        """Add a contribution to the cotangent of a value."""
        if self.graph[node_id].op == "parameter":
            self.accumulate_share(node_id, self._share(node_id, cotangent))
        elif node_id in self._leaves:
            self._receive(node_id, cotangent)
        elif self.values[node_id].requires_grad:
            add(self._pending, node_id, cotangent, self._device.sum_dtype)

    def accumulate_share(self, parameter: int, gradient: torch.Tensor, times: float = 1) -> None:
        """Add a contribution to what is added up here of a gradient, so many times as large as it truly is. The caller
        gives it away.
        """
        dtype = gradient_dtype(self.graph, parameter)
        gradient = gradient if times == 1 else gradient.to(dtype) / times
        # What a recorded step has made is made again in the same memory.
        add(self.gradients, parameter, gradient, dtype, torch.contiguous_format, take=not self._device.records)

    def forget(self) -> None:
        """Give back all values: there will be no results."""
        for values in (self.values, self.gradients, self._leaves, self._pending, self._cotangents):
            values.clear()

    def start(self) -> None:
        """Give the loss its own cotangent."""
        output = self.values.get(self.graph.output)
        if output is not None and output.requires_grad:
            self.accumulate(self.graph.output, torch.ones_like(output))

    def backward_from(self, level: int) -> None:
        """Run backward from what has arrived at values that are known only after `level` passes or more. Give back
        those that are whole fields before: but for what autograd keeps, nothing reads them any more.
        """
        gone = list[int]()
        while self._whole and self._level[self._whole[-1]] >= level:
            gone.append(self._whole.pop())
        self._backward([i for i in self._pending if self._level[i] >= level], gone)
        for i in gone:
            self.values.pop(i, None)
            self._leaves.pop(i, None)

    def backward_parameters(self) -> None:
        """Run backward from what has arrived at values that are made of parameters alone. Nothing else leads
        to it, and until the end it would wait in float64.
        """
        self._backward([i for i in self._pending if self._level[i] == 0])

    def _backward(self, arrived: list[int], gone: Iterable[int] = ()) -> None:
        """Run backward from values, `gone` among which nothing reads any more, unless they are leaves."""
        if not arrived:
            return
        outputs = [get_gradient_edge(self.values[i]) for i in arrived]
        times = self.scale.within(self._pending[i] for i in arrived)
        cotangents = [multiplied(self._pending.pop(i), times).to(self.values[i].dtype) for i in arrived]
        reached = self._reached(arrived)
        if not reached:
            return
        leaves = [self.values[i] for i in reached]
        for i in gone:
            if i not in self._leaves:
                self.values.pop(i, None)
        gradients = torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True, allow_unused=True)
        # Autograd may give one tensor to several leaves, or a cotangent as it is.
        found = [gradient if gradient is None else gradient.detach() for gradient in reversed(gradients)]
        del gradients
        for i in reached:
            gradient = found.pop()  # and with it the memory, once it is added to the sums
            if gradient is None:
                continue
            if self.graph[i].op == "parameter":
                self.accumulate_share(i, self._share(i, gradient), times)
            else:
                self._receive(i, gradient, times)

    def _reached(self, arrived: list[int]) -> list[int]:
        """Return the leaves that these values are computed from, in the order in which they became known."""
        seen, stack = set(arrived), list(arrived)
        while stack:
            node_id = stack.pop()
            for operand in self.graph[node_id].operands if node_id not in self._leaves else ():
                if operand not in seen:
                    seen.add(operand)
                    stack.append(operand)
        return [i for i in self._leaves if i in seen]

    @property
    def coming_bytes(self) -> int:
        """Bytes of the gradients that are still to be made, all at once: of what whole-field operators read."""
        late = self._order.late
        return sum(map(late.__getitem__, late.keys() - self.gradients.keys()))

    def level_of(self, segment: Segment) -> int:
        """Return the number of passes that must have ended before what a segment delivers is known."""
        return max(self._level[i] for i in segment.targets(self.graph)) + 1

    def cotangent(self, leaf: int) -> torch.Tensor | None:
        """Return what has arrived at a reduction or, in the fields' scale, at a gathered field; None if nothing has."""
        return self._cotangents.get(leaf)

    def take_cotangent(self, leaf: int) -> torch.Tensor | None:
        """Return the same, and hold it no longer."""
        return self._cotangents.pop(leaf, None)

    def constant_cotangents(self, segment: Segment) -> Values:
        """Return the cotangents of the last segment's reductions where they do not depend on any of its sums."""
        varying = differentiable_reductions(self.graph, segment)
        values = dict(self.values)
        leaves = {}
        for reduction in segment.reductions:
            node = self.graph[reduction]
            leaf = torch.zeros(node.shape, dtype=node.dtype, device=self._device.torch_device)
            values[reduction] = leaves[reduction] = leaf.requires_grad_(node.differentiable)
        behind = set(segment.reductions)
        with torch.enable_grad():
            for node in self.graph.nodes:
                if not (node.is_field or node.id in values) and not behind.isdisjoint(node.operands):
                    behind.add(node.id)
                    values[node.id] = self._evaluated(node.id, values)
        loss, read = values[self.graph.output], [leaves[i] for i in varying]
        gradients = torch.autograd.grad(loss, read, allow_unused=True) if loss.requires_grad else [None] * len(read)
        return {
            i: torch.zeros_like(leaves[i]) if gradient is None else gradient
            for i, gradient in zip(varying, gradients, strict=True)
        }

    def _evaluated(self, node_id: int, values: Values) -> torch.Tensor:
        """Compute a value. Random numbers are drawn in the order of the values, however those lie in memory."""
        if node_id in self._seeds:
            return self._seeds[node_id]
        number = self._drawing.get(node_id)
        if number is None:
            return evaluated(self.graph, node_id, values, self._device.torch_device)
        operands = {i: values[i].contiguous() for i in self.graph[node_id].operands}
        with GENERATORS, self._device.seeded(seed_of(self._draws, number)):
            return evaluated(self.graph, node_id, operands, self._device.torch_device)

    def _receive(self, leaf: int, cotangent: torch.Tensor, times: float = 1) -> None:
        """Add to a leaf's cotangent. `cotangent` is so many times as large as the true one."""
        known = self._cotangents.get(leaf)
        if self.graph[leaf].op == GATHER:
            self.scale.settle([cotangent], times)
            times /= self.scale.times
        cotangent = multiplied(cotangent, 1 / times)
        value = cotangent.detach().to(self.values[leaf].dtype)
        self._cotangents[leaf] = value if known is None else known + value


def evaluated(graph: Graph, node_id: int, values: Values, device: torch.device) -> torch.Tensor:
    """Compute the value, or of an operator with several outputs the tuple, which only `gigagrad.item` reads."""
    node, run = graph[node_id], _bound(graph, node_id, device)
    with explained(node):
        return run([values[i] for i in node.operands])


@remembered
def _bound(graph: Graph, node_id: int, device: torch.device) -> Bound:
    node = graph[node_id]
    placed = {} if node.arguments.get("device") is None else {"device": device}
    return plain(Call(node, graph.operands(node)), **placed)
