"""One image over several ranks, by the clock alone: what a step takes, holds and sends, and what keeps it from more.

Each rank computes its share of every pass, and all of what whole-field operators do. After a pass ranks meet: everybody
hears a word of everybody's, around a ring as gloo gathers (n - 1 messages of nothing); then messages travel, those of a
rank one after the other, and a rank goes on when those for it have come and its own are there. What it sends it has
packed before, and what it gets it opens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from gigagrad.errors import ConfigError
from gigagrad.plans import MEMORY, Parts, Plan, Problem, Tiles
from gigagrad.plans.emit import shared_by
from gigagrad.plans.geometry import Grid
from gigagrad.plans.plan import total
from gigagrad.plans.program import Bytes, Exchange, Gather, live, message_memory, messages
from gigagrad.units import parse_bytes, parse_seconds


@dataclass(frozen=True, slots=True)
class Link:
    """A rank's connection to the others: a message of n bytes takes latency + n / bandwidth, and every rank sends and
    receives at once (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
    2005, section 3). Additions cost nothing.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0

    def __str__(self) -> str:
        return f"{8e-9 * self.bytes_per_second:.3g} Gbit/s, {1e6 * self.latency_seconds:.3g} us"

    def shared(self, ranks: int) -> Link:
        """Divide the link among so many ranks that send at once, as the GPUs of a machine do."""
        return Link(self.bytes_per_second / ranks, self.latency_seconds)

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of a message."""
        return self.latency_seconds + nbytes / self.bytes_per_second

    def sum_seconds(self, nbytes: float, ranks: int) -> float:
        """Return the seconds of an all-reduce of `nbytes` in which each of n ranks adds up a share: 2 (n - 1) messages
        of 1/n of them (same paper, section 4.5, around a ring; in the same time each may give every other one its
        share).
        """
        return 2 * (ranks - 1) * self.seconds(nbytes / ranks)


def parse_link(text: str) -> Link:
    """Read `"10Gbit/s"` or `"25GB/s"`, and behind a comma the latency if there is one: `"10Gbit/s,50us"`.

    Raises `ConfigError` for anything else. `Gb/s` is refused: half of its readers take it for bytes.
    """
    match = re.fullmatch(r"([^,]+?)(bit|B)/s(?:\s*,(.+))?", text.strip())
    if match:
        amount, unit, latency = match.groups()
        with suppress(ValueError):
            rate = parse_bytes(f"{amount}B") / (8 if unit == "bit" else 1)
            return Link(rate, parse_seconds(latency) if latency else 0.0)
    raise ConfigError(f"cannot read {text!r} as a link; write it like '10Gbit/s', '25GB/s' or '10Gbit/s,50us'")


PARTS, BALANCE, HALOS, SUMS, COPIES = "fewer parts than ranks", "uneven parts", "halos", "sums", "packing"
LATENCY, REPLICATED = "latency", "whole fields on every rank"
"""Causes that keep a step from being as many times faster as there are ranks."""
_MOVED = 2
"""Bytes that packing or opening a message moves, for each of its own: read and written."""


class PassTimes(NamedTuple):
    """A pass by several ranks."""

    seconds: Sequence[float]
    """That each computes."""
    exchanges: Sequence[tuple[Bytes, Bytes]]
    """That end it: bytes of fields, and of sums, from each rank to each other one."""


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
    problem, plan = problem.of(plan.whole_pixels), shared_by(problem, plan, ranks)
    replicated = plan.whole_seconds if pass_seconds is None and plan.timed_seconds is None else 0.0
    if pass_seconds is None:
        pass_seconds = [share * (plan.predicted_seconds - replicated) for share in plan.pass_shares]
    passes = list[PassTimes]()
    for step in plan.steps:
        if isinstance(step, Tiles):
            shares = _rank_shares(problem, plan, step)
            passes.append(PassTimes([pass_seconds[len(passes)] * share for share in shares], []))
        elif isinstance(step, Exchange | Gather):
            passes[-1] = passes[-1]._replace(exchanges=[*passes[-1].exchanges, messages(step, ranks)])
    copying = problem.machine.memory_bytes_per_second / _MOVED
    message_bytes = max((message_memory(step, ranks) for step in plan.steps), default=0)
    every = [fields + sums for one in passes for fields, sums in one.exchanges]
    sent = sum((matrix.sum(1) for matrix in every), np.zeros(ranks, np.int64))
    return TileStep(
        ranks,
        clock(passes, link, copying) + replicated,
        sum(pass_seconds) + replicated,
        _memory_bytes(plan, ranks) + message_bytes,
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
        for fields, sums in one.exchanges:
            clocks = _exchanged(clocks, fields + sums, link, copying)
    return max(clocks)


def _exchanged(clocks: Sequence[float], messages: Bytes, link: Link, copying: float) -> list[float]:
    heard = (clocks + messages.sum(1) / copying).max() + (len(clocks) - 1) * link.seconds(0)
    # One after the other; those of nothing don't travel.
    there = np.where(messages > 0, link.latency_seconds + messages.cumsum(1) / link.bytes_per_second, 0.0)
    after: list[float] = (heard + np.maximum(there.max(1), there.max(0)) + messages.sum(0) / copying).tolist()
    return after


def _lost(passes: Sequence[PassTimes], link: Link, copying: float) -> dict[str, float]:
    """Return what would be gained without one cause after another."""

    def of(fields_too: bool, sums_too: bool) -> list[PassTimes]:
        return [PassTimes(seconds, [(fields_too * a, sums_too * b) for a, b in met]) for seconds, met in passes]

    quick = Link(link.bytes_per_second)
    sums, silent = of(False, True), of(False, False)
    times = [
        clock(passes, link, copying),
        clock(passes, link),
        *(clock(some, quick) for some in (passes, sums, silent)),
    ]
    waits = [max(one.seconds) - sum(one.seconds) / len(one.seconds) for one in passes]
    idle = sum(wait for wait, one in zip(waits, passes, strict=True) if not all(one.seconds))
    found = dict(zip((COPIES, LATENCY, HALOS, SUMS), (a - b for a, b in pairwise(times)), strict=True))
    return {PARTS: idle, BALANCE: sum(waits) - idle, **found}


def _rank_shares(problem: Problem, plan: Plan, step: Tiles) -> list[float]:
    """Return the share of a pass that each rank takes, of one rank's seconds: its pixels, and what its last tiles leave
    idle of the threads that compute tiles side by side.
    """
    stage = plan.stages[step.stage]
    grid = Grid(problem.graph, stage.computes, stage.tile)
    parts = Parts(grid, stage.parts, by_rows=grid.by_rows)

    def taken(some: range) -> float:
        tiles = range(parts.start(some.start), parts.start(some.stop))
        idle = -len(tiles) % plan.workers / max(len(tiles), 1)
        return (1 + idle) * sum(box.area for box in parts.written(grid.reference, tiles))

    return [taken(step.own(rank)) / taken(range(len(parts))) for rank in range(len(step.first_parts) - 1)]


def _memory_bytes(plan: Plan, ranks: int) -> int:
    """Return the peak, without messages, of the rank whose fields and cotangents in memory are most."""
    peaks = []
    for step, buffers in live(plan.steps):
        here = [buffer.held_bytes for buffer in buffers if buffer.tier == MEMORY]
        peaks.append(total(plan.stages[step.stage].memory) + max(map(sum, zip(*here, strict=True)), default=0))
    return total(plan.fixed) + max(peaks, default=0)
