"""`gigagrad calibrate`: measures this machine once, fits the model of time and saves both for the planner.

Passes are timed in processor seconds of one thread, which other programs on the machine disturb little; only how well
threads work beside each other has to be taken from the clock.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import torch

from gigagrad.events import Events, JobAdvanced, JobFinished, JobStarted, Listener, Notice
from gigagrad.execution.calibration.fit import Sample, achieved, fit, require_scikit_learn
from gigagrad.execution.calibration.networks import draw_network, flops, is_dense, loss
from gigagrad.execution.calibration.tiers import DiskRates, codec_rates, copy_bytes_per_second, disk_rates
from gigagrad.execution.calibration.timing import Subject, make_subject, pass_seconds, pass_work
from gigagrad.execution.process import return_freed_memory, settle_allocator
from gigagrad.execution.run import Prepared
from gigagrad.plans.machine import LOCK_COST, Machine, TimeModel, cache_bytes, profile_path, write_profile
from gigagrad.threads import operator_threads

_JOB = "calibrate"
_SIDES_PX = (64, 96, 128, 192, 256, 320, 384, 512)
_TILINGS = 3
"""Tile shapes that each network is timed with."""
_MOST_PIXELS = 1_000_000
_SHORTEST_PX = 96
"""Side of the smallest image: deep networks divide it by up to 40."""
_MOST_TILES = 200
_LONGEST_STEP = 1.2
"""Typical seconds of a step above which it is not timed: many small ones tell more."""
_BUSY = 0.1
"""Share of the threads' time that other programs may take while threads are compared."""
_COMPARED = 10
"""Networks on which threads are compared: how well they do depends on the network, and the median counts."""
_COMPARED_PX, _COMPARED_LEAST_PX = 256, 16
"""Side of their tiles, in pixels of a stage's last field: as plans choose them, and the least."""
_COMPARED_TILES = 4
"""The fewest tiles, for each thread and stage, of a network that is compared: with few, waiting for the last would
count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured. `seconds` bounds the time spent on networks; fewer are timed on a slow machine."""

    networks: int
    seconds: float
    rounds: int
    disk_bytes: int
    copy_bytes: int


FULL = Effort(networks=100, seconds=200, rounds=2, disk_bytes=2**30, copy_bytes=2**28)
QUICK = Effort(networks=25, seconds=30, rounds=1, disk_bytes=2**28, copy_bytes=2**26)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured, and where it is saved."""

    machine: Machine
    disk: DiskRates
    achieved: Mapping[str, float]
    """Operations or bytes per second by kind of work and direction, of one thread inside networks."""
    networks: int
    samples: int
    seconds: float
    path: Path


def calibrate(effort: Effort = FULL, *, scratch: Path = Path(), listeners: tuple[Listener, ...] = ()) -> Calibration:
    """Measure this machine and save its profile. `scratch` is the folder whose disk is measured.

    Raises:
        ConfigError: scikit-learn is missing, or `scratch` cannot be used.
        WriteError: the profile, or the file that measures the disk, cannot be written.
    """
    require_scikit_learn()
    start = time.perf_counter()
    events = Events(listeners)
    events.emit(JobStarted(_JOB, effort.networks + 2, "rates of this machine"))
    settle_allocator()
    threads, cache = torch.get_num_threads(), cache_bytes()
    disk = disk_rates(scratch, effort.disk_bytes)
    copying = copy_bytes_per_second(effort.copy_bytes)
    codec, ratio = codec_rates(effort.copy_bytes // 4)
    return_freed_memory()
    events.emit(JobAdvanced(_JOB, 1, effort.networks + 2, "memory and disk"))
    samples = time_networks(effort, cache, events)
    model = fit(samples)
    efficiencies = thread_efficiencies(threads, effort.rounds + 1, model, cache)
    if efficiencies is None and threads > 1:
        events.emit(
            Notice(
                f"how well {threads} threads share the processor was not measured: other programs use it, or there are "
                "too few tiles for so many",
                warning=True,
            )
        )
    usual = Machine()
    shared, side_by_side = efficiencies or (usual.shared_efficiency, usual.side_by_side_efficiency)
    machine = Machine(
        threads=threads,
        cache_bytes=cache,
        shared_efficiency=shared,
        side_by_side_efficiency=side_by_side,
        copy_bytes_per_second=copying,
        disk_write_bytes_per_second=disk.write,
        disk_read_bytes_per_second=disk.read,
        codec_bytes_per_second=codec,
        codec_ratio=ratio,
        model=model,
    )
    path = profile_path()
    write_profile(path, machine)
    seconds = time.perf_counter() - start
    events.emit(JobFinished(_JOB, seconds, str(path)))
    return Calibration(
        machine, disk, achieved(samples, model), len({s.network for s in samples}), len(samples), seconds, path
    )


def time_networks(effort: Effort, cache: int, events: Events) -> list[Sample]:
    """Time the passes of random networks, each with a few tile shapes, until they or the time are used up."""
    samples: list[Sample] = []
    step, start = 0, time.perf_counter()
    with operator_threads(1):
        for number in range(effort.networks):
            if time.perf_counter() - start > effort.seconds and samples:
                break
            draw = random.Random(number)  # noqa: S311  (no secret depends on it)
            subject = _subject(number, draw)
            for prepared in _tilings(subject, draw, cache):
                seconds = pass_seconds(subject, prepared, effort.rounds)
                work = pass_work(prepared, cache)
                samples += [Sample(number, step, w, s) for w, s in zip(work, seconds, strict=True)]
                step += 1
            events.emit(JobAdvanced(_JOB, number + 2, effort.networks + 2, f"network {number + 1}"))
    return samples


def _subject(number: int, draw: random.Random) -> Subject:
    """A random network with an image of a size that suits its cost."""
    network = draw_network(number)
    per_pixel = flops(network, (256, 256)) / 256**2
    pixels = min(10 ** draw.uniform(8.7, 10.3) / per_pixel, _MOST_PIXELS)
    width = max(_SHORTEST_PX, int((pixels * draw.uniform(0.6, 1.6)) ** 0.5))
    return make_subject(network, loss, (max(_SHORTEST_PX, int(pixels / width)), width), dense=is_dense(network))


def _tilings(subject: Subject, draw: random.Random, cache: int) -> list[Prepared]:
    """Plans with differently shaped tiles, none of which takes long."""
    typical, found = TimeModel({}, 0.0), dict[tuple[tuple[int, int], ...], Prepared]()
    for side in draw.sample(_SIDES_PX, len(_SIDES_PX)):
        prepared = subject.prepare((side, side), workers=1)
        cost = sum(typical.seconds(work) for work in pass_work(prepared, cache))
        if prepared.plan.tile_count <= _MOST_TILES and cost <= _LONGEST_STEP:
            found.setdefault(tuple(stage.tiles for stage in prepared.plan.stages), prepared)
        if len(found) == _TILINGS:
            break
    return list(found.values())


def thread_efficiencies(threads: int, rounds: int, model: TimeModel, cache: int) -> tuple[float, float] | None:
    """What each further thread adds: sharing the operators of one tile, and computing tiles side by side.

    None where that cannot be told: with a single thread, beside programs that take the other ones' time, and where no
    network has enough tiles for so many threads.
    """
    if threads == 1:
        return None
    start, others = time.perf_counter(), _others_seconds()
    shared, side_by_side = list[float](), list[float]()
    for seed in range(_COMPARED):
        subject = _subject(seed, random.Random(seed))  # noqa: S311  (no secret depends on it)
        prepared = _side_by_side(subject, threads)
        if prepared is None:
            continue
        one_by_one = dataclasses.replace(prepared, plan=dataclasses.replace(prepared.plan, workers=1))
        work = [model.split(work) for work in pass_work(prepared, cache)]
        with operator_threads(1):
            alone = sum(pass_seconds(subject, one_by_one, rounds))
        calls = alone * sum(part.calls for part in work) / max(sum(part.total for part in work), 1e-9)
        for plan, lock_cost, found in ((one_by_one, 1.0, shared), (prepared, LOCK_COST, side_by_side)):
            wall = sum(pass_seconds(subject, plan, rounds, time.perf_counter))
            waiting = calls * lock_cost
            speedup = (alone - calls) / max(wall - waiting, 1e-9)
            found.append(min(1.0, max(0.0, (speedup - 1) / (threads - 1))))
    if not shared or _others_seconds() - others > _BUSY * threads * (time.perf_counter() - start):
        return None
    return median(shared), median(side_by_side)


def _side_by_side(subject: Subject, threads: int) -> Prepared | None:
    """A plan with the largest tiles of which every thread gets some; None where even small ones are too few."""
    side = _COMPARED_PX
    while side >= _COMPARED_LEAST_PX:
        prepared = subject.prepare((side, side), workers=threads)
        plan = prepared.plan
        if plan.workers == threads and plan.tile_count >= _COMPARED_TILES * threads * len(plan.stages):
            return prepared
        side //= 2
    return None


def _others_seconds() -> float:
    """Processor seconds that everything but this process has used."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Guests are counted among users, too.
    return float(
        sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0) - time.process_time()
    )
