"""List where each field is under a plan: kept, computed again, or made once and not kept."""

from __future__ import annotations

from dataclasses import dataclass

from gigagrad.graphs import Graph
from gigagrad.plans.plan import EXACT, Plan


@dataclass(frozen=True, slots=True)
class Placement:
    """One computed field: kept and where, or not, and how often it is computed."""

    node: int
    operator: str
    module: str
    shape: tuple[int, ...]
    size_bytes: int
    """Bytes of the whole field; where it is kept, as it is stored."""
    tier: str | None
    """The tier that the field is kept in; None if it is not kept."""
    storage: str
    """The type that its values are rounded to there."""
    stages: tuple[int, ...]
    """The stages that compute it."""
    readers: tuple[int, ...]
    """The stages that read it, if it is kept."""
    passes: int
    """Number of times that it is computed in one step, tile by tile."""

    @property
    def kept(self) -> bool:
        return self.tier is not None


def placements(graph: Graph, plan: Plan) -> tuple[Placement, ...]:
    """Return every field that the plan's stages compute, the largest first; none where the whole image is computed at
    once.
    """
    if plan.whole:
        return ()
    graph, kept = graph.with_whole(plan.whole_pixels), {field.node: field for field in plan.kept}
    stages = [stage.computes for stage in plan.stages]
    passes = [sum(p.stage == stage.index for p in plan.passes) for stage in stages]
    computing: dict[int, list[int]] = {}
    reading: dict[int, list[int]] = {}
    for stage in stages:
        for i in stage.fields:
            computing.setdefault(i, []).append(stage.index)
        for i in stage.reads:
            reading.setdefault(i, []).append(stage.index)
    found = [
        Placement(
            node=i,
            operator=graph[i].op,
            module=graph[i].origin.module_path,
            shape=graph[i].shape,
            size_bytes=kept[i].size_bytes if i in kept else graph[i].nbytes,
            tier=kept[i].tier if i in kept else None,
            storage=kept[i].storage if i in kept else EXACT,
            stages=tuple(where),
            readers=tuple(reading.get(i, ())),
            passes=sum(passes[index] for index in where),
        )
        for i, where in computing.items()
    ]
    return tuple(sorted(found, key=lambda placement: (-placement.size_bytes, placement.node)))
