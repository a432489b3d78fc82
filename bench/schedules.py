"""Schedules of a pipeline, and a simulator that runs them by the clock alone.

Stage s runs on rank s mod ranks, so a rank with several stages has `chunks` of the chain (Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, section 2.2). A rank begins with some
forwards, then takes one forward and one backward in turns, and ends with the backwards that are left: schedules differ
in how many forwards they begin with, and in whether they empty the pipeline after a step. With p ranks, m micro-batches
and v chunks, equal stages and messages that take no time, the idle share of a step's time is

    GPipe, 1F1B           (p - 1) / (m + p - 1)      Huang et al., "GPipe", NeurIPS 2019, section 2.3
    1F1B, interleaved     (p - 1) / (v m + p - 1)    Megatron-LM, section 2.2.2: (p - 1) / (v m) of the ideal time
    2BW                   0                          Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN
                                                     Training", ICML 2021, section 3.1
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from gigagrad.errors import ConfigError
from gigagrad.scaling.link import Link


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Of one micro-batch in one stage."""

    forward_seconds: float
    backward_seconds: float
    cut_bytes: int = 0
    """Its output, sent on to the next stage, and as much of gradient sent back."""


class Work(NamedTuple):
    """What a rank does at a time."""

    backward: bool
    stage: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """In which order ranks work."""

    name: str
    warm_up: Callable[[int, int, int, int], int]
    """Forwards that a rank begins with, from its number, the ranks, the chunks, and all forwards that it has."""
    exact: bool
    """Whether the pipeline is emptied after every step: all of a step's gradients are of the weights it began with."""


def _alternating(rank: int, ranks: int, chunks: int, forwards: int) -> int:
    later = ranks - 1 - rank
    return min(forwards, later if chunks == 1 else 2 * later + (chunks - 1) * ranks)


GPIPE = Schedule("GPipe", lambda rank, ranks, chunks, forwards: forwards, exact=True)
"""All forwards, then all backwards. Exact: weights change after the last backward. Holds every micro-batch."""
ONE_F_ONE_B = Schedule("1F1B", _alternating, exact=True)
"""Of one chunk what DAPPLE, PipeDream-Flush and Megatron-LM run: rank r holds p - r micro-batches at most, in GPipe's
time. Of several chunks Megatron-LM's interleaved schedule. Exact: weights change after the last backward."""
PIPEDREAM_2BW = Schedule("PipeDream-2BW", _alternating, exact=False)
"""1F1B whose steps follow each other without a pause. Not exact: gradients are of weights one step old, W(t+1) =
W(t) - rate x gradient(W(t-1)). A rank holds two versions, given one chunk and no fewer micro-batches than ranks.
Steps of one micro-batch are PipeDream itself (SOSP 2019, section 3.3), with up to p versions."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """One step."""

    seconds: float
    """From its first forward to its last backward; what one more step takes where steps follow without a pause."""
    idle_share: float
    """Of all ranks' time, what they wait: the bubble."""
    held: tuple[int, ...]
    """Of each rank, the most micro-batches whose activations it holds at once, counted in each of its stages."""
    weight_versions: int
    """Steps whose micro-batches a rank has under way at once, at most: each needs its weights."""


def simulate(
    schedule: Schedule, stages: Sequence[StageTimes], ranks: int, micro_batches: int, link: Link | None = None
) -> Simulated:
    """A step of so many micro-batches on stages that `ranks` ranks share; without a link messages take no time.

    Messages travel beside the work and do not wait for each other. Raises `ConfigError` where stages are no multiple of
    ranks, or where ranks have several stages each and micro-batches are no multiple of ranks.
    """
    if ranks < 1 or not stages or len(stages) % ranks:
        raise ConfigError(f"every rank needs as many stages, got {len(stages)} stages on {ranks} ranks")
    chunks = len(stages) // ranks
    if micro_batches < 1 or (chunks > 1 and micro_batches % ranks):
        multiple = f"a multiple of {ranks}" if chunks > 1 else "1 at least"
        raise ConfigError(f"micro-batches must be {multiple} here, got {micro_batches}")

    def orders(steps: int) -> list[list[Work]]:
        return [_order(schedule, rank, ranks, chunks, steps * micro_batches) for rank in range(ranks)]

    steps = 1 if schedule.exact else ranks  # so many fill it, and as many more have its period
    run = orders(steps)
    seconds = _seconds(run, stages, link)
    if not schedule.exact:
        seconds = (_seconds(orders(2 * steps), stages, link) - seconds) / steps
    work = micro_batches * sum(stage.forward_seconds + stage.backward_seconds for stage in stages)
    held, versions = zip(*(_under_way(order, micro_batches) for order in run), strict=True)
    return Simulated(seconds, 1 - work / (ranks * seconds), held, max(versions))


def _order(schedule: Schedule, rank: int, ranks: int, chunks: int, micro_batches: int) -> list[Work]:
    """What a rank does, in order: rounds of `ranks` micro-batches through one chunk after another."""

    def work(index: int, backward: bool) -> Work:
        rounds, within = divmod(index, ranks * chunks)
        chunk, batch = divmod(within, ranks)
        return Work(backward, (chunks - 1 - chunk if backward else chunk) * ranks + rank, rounds * ranks + batch)

    count = chunks * micro_batches
    forwards, backwards = ([work(index, backward) for index in range(count)] for backward in (False, True))
    first = schedule.warm_up(rank, ranks, chunks, count)
    in_turns = chain.from_iterable(zip(forwards[first:], backwards, strict=False))
    return [*forwards[:first], *in_turns, *backwards[count - first :]]


def _under_way(order: Sequence[Work], micro_batches: int) -> tuple[int, int]:
    """The most activations that a rank holds at once, and the most steps that they are of."""
    steps: Counter[int] = Counter()
    most = most_steps = 0
    for work in order:
        steps[work.micro_batch // micro_batches] += -1 if work.backward else 1
        most, most_steps = max(most, steps.total()), max(most_steps, sum(map(bool, steps.values())))
    return most, most_steps


def _seconds(orders: Sequence[Sequence[Work]], stages: Sequence[StageTimes], link: Link | None) -> float:
    """When the last rank is done."""
    done: dict[Work | None, float] = {None: 0.0}
    clocks = [0.0] * len(orders)
    queues = [deque(order) for order in orders]
    while any(queues):
        left = sum(map(len, queues))
        for rank, queue in enumerate(queues):
            while queue and (needs := _needs(queue[0], len(stages) - 1)) in done:
                work = queue.popleft()
                stage, ready = stages[work.stage], done[needs]
                if link and needs and (needs.stage - work.stage) % len(orders):
                    ready += link.seconds(stages[min(needs.stage, work.stage)].cut_bytes)
                lasts = stage.backward_seconds if work.backward else stage.forward_seconds
                done[work] = clocks[rank] = max(clocks[rank], ready) + lasts
        assert sum(map(len, queues)) < left, "ranks wait for each other"
    return max(clocks)


def _needs(work: Work, last: int) -> Work | None:
    """Whose output it reads; `None` where that is the image."""
    backward, stage, batch = work
    if not backward:
        return Work(False, stage - 1, batch) if stage else None
    return Work(True, stage + 1, batch) if stage < last else Work(False, stage, batch)
