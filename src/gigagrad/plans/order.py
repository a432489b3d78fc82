"""The order of a plan's passes: is everything finished, and in memory, when a pass needs it?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gigagrad.graphs import GATHER, SCATTER, Graph
from gigagrad.plans.keeping import Lifetime
from gigagrad.plans.plan import Pass
from gigagrad.plans.schedule import Cotangents, last_cotangents
from gigagrad.plans.stages import Stage, is_read


@dataclass(frozen=True, slots=True)
class PlanFault:
    """Where a plan contradicts its graph or itself. `step` is the index of the pass, None for the plan as a whole."""

    rule: str
    step: int | None
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}" if self.step is None else f"{self.rule} (pass {self.step}): {self.text}"


class Walk:
    """The passes in order, with what is finished and what is in memory at each."""

    def __init__(
        self,
        graph: Graph,
        passes: tuple[Pass, ...],
        stages: tuple[Stage, ...],
        lives: tuple[Lifetime, ...],
        *,
        backward: bool,
    ) -> None:
        self._graph, self._passes, self._stages, self._lives = graph, passes, stages, lives
        self._backward = backward
        self._awaited = awaited(graph)
        self._producers = {i: stage.index for stage in stages for i in (*stage.kept, *stage.reductions)}
        self._forward = {stage.index: self._passes_of(stage.index, {"forward", "one pass"}) for stage in stages}
        self._back = {stage.index: self._passes_of(stage.index, {"backward", "one pass"}) for stage in stages}

    def _passes_of(self, stage: int, phases: set[str]) -> list[int]:
        return [index for index, p in enumerate(self._passes) if p.stage == stage and p.phase in phases]

    def faults(self) -> Iterator[PlanFault]:
        for stage in self._stages:
            if len(self._forward[stage.index]) != 1:
                times = len(self._forward[stage.index])
                yield PlanFault("passes", None, f"stage {stage.index} is swept forward {times} times instead of once")
            yield from self._backward_faults(stage)
        for index, p in enumerate(self._passes):
            yield from self._ready_faults(index, self._stages[p.stage], p.phase)
            yield from self._memory_faults(index, self._stages[p.stage], p.phase)
        ends = [*self._graph.outputs, *self._graph.updates.values()]
        for awaited_node in sorted(set().union(*(self._needs(i) for i in ends))):
            if not self._finished(awaited_node, len(self._passes)):
                yield PlanFault(
                    "results", None, f"the result needs {self._named(awaited_node)}, which is never finished"
                )

    def _needs(self, node_id: int) -> frozenset[int]:
        """What must be finished before a global value, or a field that is read, is there."""
        node = self._graph[node_id]
        if not node.is_field or node.op == SCATTER:
            return self._awaited[node_id]
        return frozenset({node_id} if node_id in self._producers else ())

    def _finished(self, node_id: int, index: int) -> bool:
        """Whether the sweep that makes a reduction or a kept field has ended before pass `index`."""
        return any(done < index for done in self._forward[self._producers[node_id]])

    def _ready_faults(self, index: int, stage: Stage, phase: str) -> Iterator[PlanFault]:
        needs = set().union(*(self._needs(i) for i in (*stage.reads, *stage.globals)))
        if phase == "backward":
            needs |= {*stage.kept, *stage.reductions, *self._needs(self._graph.output)}
        for node_id in sorted(needs):
            if not self._finished(node_id, index):
                yield PlanFault("order", index, f"needs {self._named(node_id)}, which is not finished")
        if phase == "one pass":
            last = stage is self._stages[-1]
            if not last or last_cotangents(self._graph, stage) is Cotangents.AFTER_FORWARD:
                yield PlanFault("order", index, f"stage {stage.index} cannot go forward and backward in one pass")

    def _memory_faults(self, index: int, stage: Stage, phase: str) -> Iterator[PlanFault]:
        """Whether the stores that a pass reads and writes are there."""
        alive = {(life.field, life.cotangent) for life in self._lives if life.first <= index <= life.last}
        computed = [i for i in stage.reads if not is_read(self._graph, i)]
        for i in (*computed, *stage.kept):
            if (i, False) not in alive:
                yield PlanFault("memory", index, f"{self._named(i)} is not in memory")
        if phase != "forward":
            for i in (*stage.reads, *stage.kept):
                if self._graph[i].differentiable and (i, True) not in alive:
                    yield PlanFault("memory", index, f"the cotangent of {self._named(i)} is not in memory")

    def _needs_backward(self, stage: Stage) -> bool:
        return self._backward and any(self._graph[i].differentiable for i in (*stage.reductions, *stage.kept))

    def _backward_faults(self, stage: Stage) -> Iterator[PlanFault]:
        """Once backward where a gradient goes through, and only after everything that reads what the stage made."""
        times = len(self._back[stage.index])
        if times != self._needs_backward(stage):
            yield PlanFault("passes", None, f"stage {stage.index} is swept backward {times} times")
            return
        if not times:
            return
        own = {i for i in (*stage.kept, *stage.reductions) if self._graph[i].differentiable}
        for reader in self._stages:
            if reader is stage or not self._needs_backward(reader):
                continue
            read = own & set().union(*(self._needs(i) for i in (*reader.reads, *reader.globals)))
            if read and any(then >= self._back[stage.index][0] for then in self._back[reader.index]):
                text = f"stage {reader.index}, which reads {self._named(min(read))}, is swept backward later"
                yield PlanFault("cotangents", self._back[stage.index][0], text)

    def _named(self, node_id: int) -> str:
        node = self._graph[node_id]
        kind = "field" if node.is_field else "reduction"
        return f"{kind} {node_id} ({node.op}{f' in {node.origin.module_path}' if node.origin.module_path else ''})"


def awaited(graph: Graph) -> list[frozenset[int]]:
    """For each global (and each field laid out from one) the reductions and gathered fields it is computed from."""
    found: list[frozenset[int]] = []
    for node in graph.nodes:
        if node.is_reduction:
            found.append(frozenset({node.id}))
        elif node.op == GATHER:
            (field,) = node.operands
            found.append(found[field] if is_read(graph, field) else frozenset({field}))
        elif node.is_field and node.op != SCATTER:
            found.append(frozenset())
        else:
            found.append(frozenset().union(*(found[i] for i in node.operands)))
    return found
