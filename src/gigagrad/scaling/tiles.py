"""One image over several ranks, by the clock alone: what a step takes, holds and sends, and what keeps it from more.

Each rank computes its share of every pass, and all of what whole-field operators do. After a pass ranks meet: everybody
hears a word of everybody's, around a ring as gloo gathers (n - 1 messages of nothing); then messages travel, those of a
rank one after the other, and a rank goes on when those for it have come and its own are there. What it sends it has
packed before, and what it gets it opens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from gigagrad.plans import Plan, Problem, Stage, lifetimes, split_stages
from gigagrad.plans.ledger import COTANGENTS, FIELDS
from gigagrad.plans.owners import Owners
from gigagrad.plans.plan import amount_of, total
from gigagrad.plans.traffic import Meeting, held_by_ranks, meetings
from gigagrad.scaling.link import Link

PARTS, BALANCE, HALOS, SUMS, COPIES = "fewer parts than ranks", "uneven parts", "halos", "sums", "packing"
LATENCY, REPLICATED = "latency", "whole fields on every rank"
"""Causes that keep a step from being as many times faster as there are ranks."""
_MOVED = 2
"""Bytes that packing or opening a message moves, for each of its own: read and written."""


class PassTimes(NamedTuple):
    """A pass by several ranks."""

    seconds: Sequence[float]
    """That each computes."""
    meetings: Sequence[Meeting]
    """That end it."""


@dataclass(frozen=True, slots=True)
class TileStep:
    """A step on one image, shared by several ranks."""

    ranks: int
    """That have something to do: no more than any stage has parts."""
    seconds: float
    alone_seconds: float
    """Seconds that one rank takes."""
    memory_bytes: int
    """The predicted peak of the rank that holds most."""
    sent_bytes: int
    """Bytes of the rank that sends most."""
    lost: Mapping[str, float]
    """Seconds beyond an equal share of what one rank takes, by cause."""


def most_ranks(plan: Plan) -> int:
    """Return how many ranks have something to do: the parts of a stage that are not empty."""
    return max((min(stage.parts, stage.tile_count) for stage in plan.stages), default=1)


def tile_step(
    problem: Problem, plan: Plan, ranks: int, link: Link, pass_seconds: Sequence[float] | None = None
) -> TileStep:
    """Estimate a step by so many ranks, as far as they have something to do, of a plan that was made for one.

    `pass_seconds`: what each pass takes one rank, where that was measured; by default what the plan predicts.
    """
    ranks = min(ranks, most_ranks(plan))
    stages = split_stages(problem.graph, [field.node for field in plan.kept])
    owners = Owners(problem.graph, stages, plan, ranks)
    replicated = plan.whole_seconds if pass_seconds is None and plan.timed_seconds is None else 0.0
    if pass_seconds is None:
        pass_seconds = [share * (plan.predicted_seconds - replicated) for share in plan.pass_shares]
    met = meetings(problem, stages, plan, owners)
    passes = [
        PassTimes([seconds * share for share in _rank_shares(plan.workers, owners, step.stage)], ending)
        for step, seconds, ending in zip(plan.passes, pass_seconds, met, strict=True)
    ]
    copying = problem.machine.memory_bytes_per_second / _MOVED
    every = [meeting for ending in met for meeting in ending]
    messages = max((meeting.memory_bytes for meeting in every), default=0)
    sent = sum((meeting.sent_bytes for meeting in every), np.zeros(ranks, np.int64))
    return TileStep(
        ranks,
        clock(passes, link, copying) + replicated,
        sum(pass_seconds) + replicated,
        _memory_bytes(problem, stages, plan, owners) + messages,
        int(sent.max()),
        {**_lost(passes, link, copying), REPLICATED: replicated * (1 - 1 / ranks)},
    )


def clock(passes: Sequence[PassTimes], link: Link, copying: float = inf) -> float:
    """Return the seconds until the last rank is through all passes; `copying`: bytes a second of messages packed or
    opened.
    """
    clocks = [0.0] * len(passes[0].seconds) if passes else [0.0]
    for one in passes:
        clocks = [now + seconds for now, seconds in zip(clocks, one.seconds, strict=True)]
        for meeting in one.meetings:
            clocks = _exchanged(clocks, meeting, link, copying)
    return max(clocks)


def _exchanged(clocks: Sequence[float], meeting: Meeting, link: Link, copying: float) -> list[float]:
    messages = meeting.messages
    heard = (clocks + messages.sum(1) / copying).max() + (len(clocks) - 1) * link.seconds(0)
    # One after the other; those of nothing don't travel.
    there = np.where(messages > 0, link.latency_seconds + messages.cumsum(1) / link.bytes_per_second, 0.0)
    after: list[float] = (heard + np.maximum(there.max(1), there.max(0)) + messages.sum(0) / copying).tolist()
    return after


def _lost(passes: Sequence[PassTimes], link: Link, copying: float) -> dict[str, float]:
    """Return what would be gained without one cause after another."""

    def only(wanted: Callable[[Meeting], Meeting]) -> list[PassTimes]:
        return [PassTimes(seconds, [wanted(meeting) for meeting in met]) for seconds, met in passes]

    quick = Link(link.bytes_per_second)
    sums = only(lambda meeting: Meeting(0 * meeting.fields, meeting.sums))
    silent = only(lambda meeting: Meeting(0 * meeting.fields, 0 * meeting.sums))
    times = [
        clock(passes, link, copying),
        clock(passes, link),
        *(clock(some, quick) for some in (passes, sums, silent)),
    ]
    waits = [max(one.seconds) - sum(one.seconds) / len(one.seconds) for one in passes]
    idle = sum(wait for wait, one in zip(waits, passes, strict=True) if not all(one.seconds))
    found = dict(zip((COPIES, LATENCY, HALOS, SUMS), (a - b for a, b in pairwise(times)), strict=True))
    return {PARTS: idle, BALANCE: sum(waits) - idle, **found}


def _rank_shares(workers: int, owners: Owners, stage: int) -> list[float]:
    """Return the share of a pass that each rank takes, of one rank's seconds: its pixels, and what its last tiles leave
    idle of the threads that compute tiles side by side.
    """
    parts = owners.parts(stage)
    grid = parts.grid

    def taken(first: int, stop: int) -> float:
        tiles = range(parts.start(first), parts.start(stop))
        idle = -len(tiles) % workers / max(len(tiles), 1)
        return (1 + idle) * sum(box.area for box in parts.written(grid.reference, tiles))

    own = (owners.own(stage, rank) for rank in range(owners.count))
    return [taken(some.start, some.stop) / taken(0, len(parts)) for some in own]


def _memory_bytes(problem: Problem, stages: Sequence[Stage], plan: Plan, owners: Owners) -> int:
    """Return the peak, without messages, of the rank whose fields and cotangents in memory are most."""
    lives = lifetimes(problem.graph, tuple(stages), plan.passes)
    held = held_by_ranks(problem, lives, plan, owners, problem.memory)
    peaks = (
        total(amounts := plan.stages[step.stage].memory) - amount_of(amounts, FIELDS, COTANGENTS) + max(own)
        for step, own in zip(plan.passes, held, strict=True)
    )
    return total(plan.fixed) + max(peaks, default=0)
