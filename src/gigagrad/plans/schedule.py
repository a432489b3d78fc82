"""Order the passes over stages, and say whether the last stage needs one pass or two.

Backward, a stage needs the cotangents of its reductions, and those exist only once the loss is known. The last stage is
the exception when the loss depends on its reductions in a way that is known beforehand:

- *affine*: a mean, a sum, any weighted sum of them: the cotangents are constants;
- *scaled*: a single number leads to the loss (a class-weighted mean, the logarithm of a mean): run with cotangent 1 and
  multiply the finished sums by the true cotangent, which is exact because the backward pass is linear.
"""

from __future__ import annotations

from enum import Enum
from math import prod

from gigagrad.graphs import Affine, Graph, lookup
from gigagrad.plans.program import Tiles
from gigagrad.plans.stages import Stage


class Cotangents(Enum):
    """Ways in which the cotangents of the last stage's reductions become known."""

    AFFINE = "affine"
    SCALED = "scaled"
    AFTER_FORWARD = "after the forward pass"


def differentiable_reductions(graph: Graph, stage: Stage) -> tuple[int, ...]:
    return tuple(r for r in stage.reductions if graph[r].differentiable)


def last_cotangents(graph: Graph, stage: Stage) -> Cotangents:
    """Say how the cotangents of the reductions of the last stage become known."""
    varying = differentiable_reductions(graph, stage)
    if stage.kept:  # a field that is kept is written by a forward pass, and something global waits for it
        return Cotangents.AFTER_FORWARD
    if _affine(graph, set(varying), set(stage.reductions)):
        return Cotangents.AFFINE
    to_parameters_only = not any(graph[i].differentiable for i in stage.reads)
    if len(varying) == 1 and prod(graph[varying[0]].shape) == 1 and to_parameters_only:
        return Cotangents.SCALED
    return Cotangents.AFTER_FORWARD


def _affine(graph: Graph, varying: set[int], unknown: set[int]) -> bool:
    """Say whether every global computed from `varying` is an affine function of it, with coefficients known before."""
    varying, unknown = set(varying), set(unknown)
    for node in graph.nodes:
        if node.is_field or node.id in unknown:
            continue
        operands = set(node.operands)
        if operands & unknown:
            unknown.add(node.id)
        if not operands & varying:
            continue
        varying.add(node.id)
        unknown.add(node.id)
        affine = lookup(node.op).affine
        if affine is Affine.JOINTLY:
            continue
        moving = [i for i in node.operands if i in varying]
        alone = affine is Affine.SEPARATELY or (affine is Affine.FIRST and node.operands[0] in varying)
        if not alone or len(moving) != 1 or any(i in unknown for i in node.operands if i not in varying):
            return False
    return True


def make_passes(graph: Graph, stages: tuple[Stage, ...], *, backward: bool) -> tuple[Tiles, ...]:
    """Return the passes of one forward, or of one forward and backward, in order."""
    forward = [Tiles(stage.index, "forward") for stage in stages]
    if not backward or not stages:
        return tuple(forward)
    needing = [stage for stage in stages if any(graph[i].differentiable for i in (*stage.reductions, *stage.kept))]
    passes = forward
    last = stages[-1]
    if last in needing and last_cotangents(graph, last) is not Cotangents.AFTER_FORWARD:
        passes = [*forward[:-1], Tiles(last.index, "one pass")]
        needing = needing[:-1]
    return (*passes, *(Tiles(stage.index, "backward") for stage in reversed(needing)))
