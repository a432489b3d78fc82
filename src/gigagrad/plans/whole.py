"""Plan a network that fits as it is: PyTorch runs the model and the loss by itself, on the whole image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from gigagrad.allowances import ALLOCATOR_FRAGMENTATION, FILLED_UNSEEN_BYTES, most_kept
from gigagrad.graphs import WholeCost
from gigagrad.plans import estimate
from gigagrad.plans.cost import autograd_seconds
from gigagrad.plans.plan import Amount, Plan, total
from gigagrad.plans.problem import Problem
from gigagrad.plans.program import Whole

_HEAP_SHARES = (ALLOCATOR_FRAGMENTATION, 0.125, 0.0625, 0.0)
"""Shares of a whole network's memory for freed blocks in the heap (a step of Unet(resnet34) at 2048 px: 0.14)."""


def whole_plan(problem: Problem, memory_format: str) -> Plan | None:
    """Return the faster way to run the whole image at once that fits, None if none does."""
    cost = problem.whole
    numel = max((prod(node.shape) for node in problem.graph.nodes if node.is_field), default=0)
    if cost is None or numel > problem.most_numel:
        return None
    room = problem.room_bytes
    phase = "forward and backward" if problem.backward else "forward"
    for freed_bytes, step in _ways(cost, phase):
        fixed = _amounts(problem, cost, freed_bytes)
        if room is None or total(fixed) <= room:
            peak = total(fixed)
            step = replace(step, keeps=step.from_heap and most_kept(peak, peak - cost.peak_bytes, room) == peak)
            return Plan(
                image_shape=problem.image_shape,
                device=problem.device,
                memory_format=memory_format,
                workers=1,
                threads=problem.machine.threads,
                segments=(),
                steps=(step,),
                kept=(),
                whole_field=(),
                budget_bytes=problem.budget_bytes,
                fixed=fixed,
                whole_seconds=_seconds(problem, cost, step),
            )
    return None


def unseen_bytes(cost: WholeCost) -> int:
    """Return what large blocks from the heap may add to the process before anybody looks."""
    return min(cost.largest_bytes, FILLED_UNSEEN_BYTES)


def _ways(cost: WholeCost, phase: str) -> Iterator[tuple[int, Whole]]:
    """Yield what may be planned for freed blocks, with the step that keeps to it, the fastest first."""
    small = int(ALLOCATOR_FRAGMENTATION * cost.small_bytes)
    for share in _HEAP_SHARES:
        freed_bytes = max(int(share * cost.peak_bytes), small + unseen_bytes(cost))
        yield freed_bytes, Whole(phase, from_heap=True)
    yield small, Whole(phase)


def _amounts(problem: Problem, cost: WholeCost, freed_bytes: int) -> tuple[Amount, ...]:
    images = sum(node.nbytes for node in problem.graph.nodes if node.is_source and node.is_field)
    return (
        *problem.held,
        Amount(estimate.COMPILED, problem.compiled_bytes(cost.compiled)),
        Amount(estimate.IMAGES, images),
        Amount(estimate.ACTIVATIONS, cost.peak_bytes),
        Amount(estimate.ACTIVATION_FRAGMENTATION, freed_bytes),
    )


def _seconds(problem: Problem, cost: WholeCost, step: Whole) -> float:
    """Predict the time of any step but the first by the cost model; on a host new pages take time, too."""
    machine = problem.machine
    wall = autograd_seconds(machine, cost.operators)
    if problem.device != "cpu" or step.keeps:
        return wall
    return wall + (machine.page_seconds(cost.peak_bytes) if step.from_heap else machine.block_seconds(cost.large_bytes))
