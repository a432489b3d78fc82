"""Bring the sums of a stage to all ranks: small ones whole from each to each, large ones cut into a share for each.

Whoever has a share joins it, in the order of parts, and gives it to the others: what the next pass needs at once,
gradients of parameters when the step is over. So a rank sends as much as it would around a ring (Thakur, Rabenseifner
and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, section 4.4), and adds as little.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from gigagrad.graphs import MOMENTS, Graph, merge_of
from gigagrad.plans.problem import Problem
from gigagrad.plans.program import Bytes, Sum
from gigagrad.plans.stages import Stage, summed_globals

_TOLD_BYTES = 2**16
"""Sums of a pass that are no more travel whole: on a fast link that takes less than a further meeting."""

_AT_ONCE_BYTES = 2**24


def how_summed(problem: Problem, nodes: Sequence[int]) -> Sum:
    """Sort these nodes by how their sums travel. Moments go whole: they are merged, and each of their numbers needs the
    others.
    """
    late = tuple(i for i in nodes if problem.graph[i].op == "parameter")
    now = tuple(i for i in nodes if i not in late)
    small = sum(prod(problem.graph[i].shape) * sum_dtype(problem, i).itemsize for i in now) <= _TOLD_BYTES
    whole = tuple(i for i in now if small or problem.graph[i].op == MOMENTS)
    return Sum(whole, tuple(i for i in now if i not in whole), late)


def late_gradients(graph: Graph, stages: Sequence[Stage]) -> list[list[int]]:
    """Return the parameters whose gradients ranks have shares of until the step is over, as they are put together then:
    a few at a time, so that their messages do not take much memory.
    """
    found, nbytes = list[list[int]](), 0
    for i in sorted({i for stage in stages for i in summed_globals(graph, stage) if graph[i].op == "parameter"}):
        own = prod(graph[i].shape) * gradient_dtype(graph, i).itemsize
        if not found or nbytes + own > _AT_ONCE_BYTES:
            found.append([])
            nbytes = 0
        found[-1].append(i)
        nbytes += own
    return found


def share_of(size: int, rank: int, ranks: int) -> slice:
    """Return which of so many numbers are a rank's."""
    return slice(size * rank // ranks, size * (rank + 1) // ranks)


def sum_dtype(problem: Problem, node: int) -> torch.dtype:
    """Return the type in which a node is summed."""
    return problem.sum_dtype if merge_of(problem.graph[node]) is None else problem.graph[node].dtype


def gradient_dtype(graph: Graph, parameter: int) -> torch.dtype:
    """Return the type of a parameter's gradient, once it is summed: sums over stages are added up in no less than
    float32.
    """
    dtype = graph[parameter].dtype
    return dtype if dtype.itemsize >= 4 else torch.float32


def sum_bytes(problem: Problem, summed: Sum, ranks: int) -> Bytes:
    """Return, as `(ranks,)`, the bytes of one sum in a message to each of them, behind a part and whether each node has
    a sum.
    """
    head = 8 * (1 + len(summed.all))
    whole = sum(prod(problem.graph[i].shape) * sum_dtype(problem, i).itemsize for i in summed.whole)
    return head + whole + share_bytes(problem, summed.shared, ranks)


def share_bytes(problem: Problem, nodes: Sequence[int], ranks: int, *, gradients: bool = False) -> Bytes:
    """Return, as `(ranks,)`, the bytes of the shares that each has of the sums of some nodes, or of gradients."""
    edges, found = np.arange(ranks + 1, dtype=np.int64), np.zeros(ranks, np.int64)
    for i in nodes:
        dtype = gradient_dtype(problem.graph, i) if gradients else sum_dtype(problem, i)
        found += np.diff(prod(problem.graph[i].shape) * edges // ranks) * dtype.itemsize
    return found
