"""Plan a network that fits as it is: PyTorch runs the model and the loss by itself, on the whole image."""

from __future__ import annotations

from gigagrad.allowances import ALLOCATOR_FRAGMENTATION, FILLED_UNSEEN_BYTES, MAPPED_BYTES
from gigagrad.graphs import WholeCost
from gigagrad.plans import estimate
from gigagrad.plans.plan import Amount, Plan, amount_of, total
from gigagrad.plans.problem import Problem
from gigagrad.plans.program import Whole

_HEAP_SHARES = (ALLOCATOR_FRAGMENTATION, 0.125, 0.0625, 0.0)
"""Shares of a whole network's memory for freed blocks in the heap (a step of Unet(resnet34) at 2048 px: 0.14)."""


def whole_plan(problem: Problem, memory_format: str) -> Plan | None:
    """Return the faster way to run the whole image at once that fits, None if none does."""
    cost = problem.whole
    if cost is None:
        return None
    room = problem.room_bytes
    for freed_bytes in _freed_bytes(cost):
        fixed = _amounts(problem, cost, freed_bytes)
        if room is None or total(fixed) <= room:
            return Plan(
                image_shape=problem.image_shape,
                device=problem.device,
                memory_format=memory_format,
                workers=1,
                threads=problem.machine.threads,
                segments=(),
                steps=(Whole("forward and backward" if problem.backward else "forward"),),
                kept=(),
                whole_field=(),
                budget_bytes=problem.budget_bytes,
                fixed=fixed,
                whole_seconds=_seconds(problem, cost, from_heap=_is_enough_for_heap(freed_bytes, cost)),
            )
    return None


def is_from_heap(plan: Plan, cost: WholeCost) -> bool:
    """Say whether the plan has room for what the heap keeps of large blocks, whose pages then serve again."""
    freed_bytes = amount_of(plan.fixed, estimate.ACTIVATION_FRAGMENTATION)
    return cost.largest_bytes >= MAPPED_BYTES and _is_enough_for_heap(freed_bytes, cost)


def is_roomy(plan: Plan, cost: WholeCost) -> bool:
    """Say whether the plan has room for all that the heap ever kept of such a network, so that nobody has to look."""
    return _planned_freed_bytes(plan) >= _freed_bytes(cost)[0]


def unseen_bytes(cost: WholeCost) -> int:
    """Return what large blocks from the heap may add to the process before anybody looks."""
    return min(cost.largest_bytes, FILLED_UNSEEN_BYTES)


def _planned_freed_bytes(plan: Plan) -> int:
    return amount_of(plan.fixed, estimate.ACTIVATION_FRAGMENTATION)


def _freed_bytes(cost: WholeCost) -> tuple[int, ...]:
    """Return what may be planned for freed blocks, the fastest first: large blocks from the heap, with more or less
    room until freed ones are given back; or each from the system.
    """
    small = int(ALLOCATOR_FRAGMENTATION * cost.small_bytes)
    least = small + unseen_bytes(cost)
    return (*(max(int(share * cost.peak_bytes), least) for share in _HEAP_SHARES), small)


def _is_enough_for_heap(freed_bytes: int, cost: WholeCost) -> bool:
    return freed_bytes >= _freed_bytes(cost)[-2]


def _amounts(problem: Problem, cost: WholeCost, freed_bytes: int) -> tuple[Amount, ...]:
    images = sum(node.nbytes for node in problem.graph.nodes if node.is_source and node.is_field)
    return (
        *problem.held,
        Amount(estimate.COMPILED, problem.compiled_bytes(cost.compiled)),
        Amount(estimate.IMAGES, images),
        Amount(estimate.ACTIVATIONS, cost.peak_bytes),
        Amount(estimate.ACTIVATION_FRAGMENTATION, freed_bytes),
    )


def _seconds(problem: Problem, cost: WholeCost, *, from_heap: bool) -> float:
    """Predict the time by the cost model: all threads share each operator, and on a host new pages take time."""
    machine = problem.machine
    seconds = sum(machine.operator_seconds(moved, flops) for moved, flops in cost.operators)
    wall = machine.wall_seconds(seconds, len(cost.operators), 1, 1)
    if problem.device != "cpu":
        return wall
    return wall + (machine.page_seconds(cost.peak_bytes) if from_heap else machine.block_seconds(cost.large_bytes))
