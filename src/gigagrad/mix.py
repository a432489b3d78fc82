"""Find the cheapest mix of machines for a cohort, from what each kind takes for a slide of each size and its price.

Slides of about one size are a bucket, as requests are in Melange (Griggs et al., "Mélange: Cost Efficient Large
Language Model Serving by Exploiting GPU Heterogeneity", 2024): which kind is cheapest depends on the size. A machine is
paid by the second, from a minute before its first slide until its last one is done, and slides are not divided. With
n_bj slides of bucket b on machine j, y_j = 1 where it is rented, and t_bj the seconds of a slide,

    minimise sum_j price_j (60 y_j + sum_b t_bj n_bj)  where  sum_j n_bj = slides_b,  sum_b t_bj n_bj <= (D - 60) y_j,
    n_bj <= slides_b y_j.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from gigagrad.errors import extra

START_SECONDS = 60
"""Seconds for which a machine is paid before its first slide: clouds bill a minute at least."""
_SAME_SIZE = 1.25
"""Slides of one bucket have at most so many times the pixels of its smallest."""
_LONGEST_SEARCH_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Rented:
    """A machine of a mix: its kind, its slides of each bucket, the seconds for which it is paid, and what it costs."""

    kind: int
    slides: tuple[int, ...]
    seconds: float
    cost: float


@dataclass(frozen=True, slots=True)
class Mix:
    """The machines, and by how much a better mix could be cheaper, as a share; 0 where there is none."""

    machines: tuple[Rented, ...]
    gap: float = 0.0

    @property
    def cost(self) -> float:
        return sum(machine.cost for machine in self.machines)


def buckets(pixels: Sequence[int]) -> list[list[int]]:
    """Divide slides by their pixels into buckets of about one size, the largest first: indices, the largest first."""
    found: list[list[int]] = []
    for i in sorted(range(len(pixels)), key=lambda i: -pixels[i]):
        if not found or pixels[found[-1][0]] > _SAME_SIZE * pixels[i]:
            found.append([])
        found[-1].append(i)
    return found


def cheapest_mix(
    slides: Sequence[int],
    seconds: Sequence[Sequence[float]],
    prices: Sequence[float],
    most: Sequence[int],
    deadline: float,
) -> Mix | None:
    """Find the cheapest machines that finish so many slides of each bucket within `deadline` seconds; None where none
    do.

    Args:
        slides: Number of slides of each bucket.
        seconds: For each bucket, the seconds of a slide on each kind of machine; infinite where it does not fit.
        prices: Of an hour of each kind.
        most: Number of machines that there are of each kind.
        deadline: Seconds, of which each machine takes `START_SECONDS` before its first slide.

    Raises:
        ConfigError: scipy is not installed.
    """
    with extra("mix"):
        from scipy.optimize import Bounds, LinearConstraint, milp

    room = deadline - START_SECONDS
    seconds_BK, slides_B = np.array(seconds, float), np.array(slides)
    seconds_BK[seconds_BK > room] = inf
    kinds = _machines(seconds_BK, slides_B, most, room)
    if not kinds or not np.isfinite(seconds_BK[:, sorted(set(kinds))]).any(1).all():
        return None
    share_BJ, price_J = seconds_BK[:, kinds] / room, np.array(prices, float)[kinds]
    fits_BJ = np.isfinite(share_BJ)
    share_BJ[~fits_BJ] = 0.0
    n_buckets, n_machines = share_BJ.shape
    start = START_SECONDS / room
    cost = np.concatenate([(price_J * share_BJ).ravel(), start * price_J])
    every, load = np.zeros((n_buckets, cost.size)), np.zeros((n_machines, cost.size))
    for b in range(n_buckets):
        every[b, b * n_machines : (b + 1) * n_machines] = 1
    for j in range(n_machines):
        load[j, j : n_buckets * n_machines : n_machines] = share_BJ[:, j]
    rented = np.eye(n_machines, cost.size, cost.size - n_machines)
    # Short slides are so small a share of the deadline that a solver would take them for nothing.
    used = np.eye(cost.size - n_machines, cost.size) - np.repeat(slides_B, n_machines)[:, None] * np.tile(
        rented, (n_buckets, 1)
    )
    same = np.flatnonzero(np.equal(kinds[1:], kinds[:-1]))  # machines of a kind in the order of their load
    bounds = np.concatenate([(fits_BJ * slides_B[:, None]).ravel(), np.ones(n_machines)])
    found = milp(
        cost / max(cost.max(), 1e-300),
        integrality=np.ones(cost.size, int),
        bounds=Bounds(0, bounds),
        constraints=[
            LinearConstraint(every, slides_B, slides_B),
            LinearConstraint(load - rented, -inf, 0),
            LinearConstraint(used, -inf, 0),
            *([LinearConstraint(load[same] - load[same + 1], 0, inf)] if same.size else []),
        ],
        options={"time_limit": _LONGEST_SEARCH_SECONDS, "mip_rel_gap": 1e-6},
    )
    if found.x is None:
        return None
    slides_BJ = np.rint(found.x[: n_buckets * n_machines]).astype(int).reshape(n_buckets, n_machines)
    machines = []
    for j, kind in enumerate(kinds):
        if slides_BJ[:, j].any():
            paid = START_SECONDS + room * float(share_BJ[:, j] @ slides_BJ[:, j])
            machines.append(Rented(kind, tuple(map(int, slides_BJ[:, j])), paid, prices[kind] * paid / 3600))
    return Mix(tuple(machines), float(found.mip_gap or 0.0) if found.status else 0.0)


def _machines(
    seconds_BK: NDArray[np.float64], slides_B: NDArray[np.int_], most: Sequence[int], room: float
) -> list[int]:
    """Return the kind of each machine that may be needed: filled one after the other, all but one are half full."""
    found = []
    for kind, count in enumerate(most):
        fits = np.isfinite(seconds_BK[:, kind])
        load = float(seconds_BK[fits, kind] @ slides_B[fits]) / room if fits.any() and room > 0 else 0.0
        found += [kind] * min(count, int(slides_B[fits].sum()), ceil(2 * load) + 1)
    return found


def least_deadline(slides: Sequence[int], seconds: Sequence[Sequence[float]], most: Sequence[int]) -> float:
    """Return seconds in which no mix of these machines finishes earlier, were slides divisible; infinite where a slide
    fits on none.
    """
    with extra("mix"):
        from scipy.optimize import linprog

    seconds_BK = np.array(seconds, float)
    fits = np.isfinite(seconds_BK)
    if not (fits & (np.array(most) > 0)).any(1).all():
        return inf
    n_buckets, n_kinds = seconds_BK.shape
    every, load = np.zeros((n_buckets, n_buckets * n_kinds + 1)), np.zeros((n_kinds, n_buckets * n_kinds + 1))
    for b in range(n_buckets):
        every[b, b * n_kinds : (b + 1) * n_kinds] = 1
    for kind in range(n_kinds):
        load[kind, kind:-1:n_kinds] = np.where(fits[:, kind], seconds_BK[:, kind], 0.0)
    load[:, -1] = -np.array(most)
    limits = [(0, None if fit else 0) for fit in fits.ravel()] + [(0, None)]
    cost = np.zeros(load.shape[1])
    cost[-1] = 1
    found = linprog(cost, load, np.zeros(n_kinds), every, np.array(slides), limits)
    longest = seconds_BK.min(1).max()
    assert found.x is not None
    return START_SECONDS + max(float(found.x[-1]), float(longest))
