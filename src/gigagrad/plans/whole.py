"""Plan a network that fits as it is: PyTorch runs the model and the loss by itself, on the whole image."""

from __future__ import annotations

from gigagrad.allowances import ALLOCATOR_FRAGMENTATION, MAPPED_BYTES
from gigagrad.graphs import WholeCost
from gigagrad.plans import estimate
from gigagrad.plans.plan import Amount, Plan, total
from gigagrad.plans.problem import Problem
from gigagrad.plans.program import Whole


def whole_plan(problem: Problem, memory_format: str) -> Plan | None:
    """Return the faster way to run the whole image at once that fits, None if none does."""
    cost = problem.whole
    if cost is None:
        return None
    for from_heap in (True, False):
        fixed = _amounts(problem, cost, from_heap=from_heap)
        room = problem.budget_bytes
        if room is None and problem.free_bytes is not None:
            room = problem.free_bytes + total(problem.held)
        if room is None or total(fixed) <= room:
            return Plan(
                image_shape=problem.image_shape,
                device=problem.device,
                memory_format=memory_format,
                workers=1,
                threads=problem.machine.threads,
                stages=(),
                steps=(Whole("forward and backward" if problem.backward else "forward"),),
                kept=(),
                whole_field=(),
                budget_bytes=problem.budget_bytes,
                fixed=fixed,
                whole_seconds=_seconds(problem, cost, from_heap=from_heap),
            )
    return None


def is_from_heap(plan: Plan, cost: WholeCost) -> bool:
    """Say whether the plan has room for what the heap keeps of large blocks, whose pages then serve again."""
    fragmentation = next(amount.size_bytes for amount in plan.fixed if amount.name == estimate.ACTIVATION_FRAGMENTATION)
    return cost.largest_bytes >= MAPPED_BYTES and fragmentation >= _fragmentation(cost, from_heap=True)


def _amounts(problem: Problem, cost: WholeCost, *, from_heap: bool) -> tuple[Amount, ...]:
    images = sum(node.nbytes for node in problem.graph.nodes if node.is_source and node.is_field)
    return (
        *problem.held,
        Amount(estimate.COMPILED, problem.compiled_bytes(cost.compiled)),
        Amount(estimate.IMAGES, images),
        Amount(estimate.ACTIVATIONS, cost.peak_bytes),
        Amount(estimate.ACTIVATION_FRAGMENTATION, _fragmentation(cost, from_heap=from_heap)),
    )


def _fragmentation(cost: WholeCost, *, from_heap: bool) -> int:
    return int(ALLOCATOR_FRAGMENTATION * (cost.peak_bytes if from_heap else cost.small_bytes))


def _seconds(problem: Problem, cost: WholeCost, *, from_heap: bool) -> float:
    """Predict the time by the cost model: all threads share each operator, and on a host new pages take time."""
    machine = problem.machine
    seconds = sum(machine.operator_seconds(moved, flops) for moved, flops in cost.operators)
    wall = machine.wall_seconds(seconds, len(cost.operators), 1, 1)
    if problem.device != "cpu":
        return wall
    return wall + (machine.page_seconds(cost.peak_bytes) if from_heap else machine.block_seconds(cost.large_bytes))
