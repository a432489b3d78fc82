"""`gigagrad calibrate`: measures this machine once, fits the model of time and saves both for the planner.

Passes are timed in processor seconds of one thread, which other programs on the machine disturb little; only how well
threads work beside each other has to be taken from the clock.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from gigagrad.events import Events, JobAdvanced, JobFinished, JobStarted, Listener, Notice
from gigagrad.execution.allocator import return_freed_memory, settle_allocator
from gigagrad.execution.calibration.fit import Sample, achieved, fit, fit_sharing, require_scikit_learn
from gigagrad.execution.calibration.threads import compare_in_a_process
from gigagrad.execution.calibration.tiers import (
    DiskRates,
    codec_rates,
    copy_bytes_per_second,
    disk_rates,
    file_bytes_per_second,
)
from gigagrad.execution.calibration.timing import Subject, draw_subject, pass_seconds, pass_work
from gigagrad.execution.prepared import Prepared
from gigagrad.plans.machine import Machine, Sharing, TimeModel, cache_bytes, profile_path, write_profile
from gigagrad.threads import operator_threads

_JOB = "calibrate"
_SIDES_PX = (64, 96, 128, 192, 256, 320, 384, 512, 768, 1024)
_TILINGS = 3
"""Tile shapes that each network is timed with."""
_MOST_TILES = 200
_LONGEST_STEP = 1.2
"""Typical seconds of a step above which it is not timed: many small ones tell more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured. `seconds` bounds the time spent on networks; fewer are timed on a slow machine."""

    networks: int
    compared: int
    """Networks on which threads are compared: how well they do depends on the network."""
    seconds: float
    rounds: int
    disk_bytes: int
    copy_bytes: int


FULL = Effort(networks=100, compared=20, seconds=200, rounds=2, disk_bytes=2**30, copy_bytes=2**28)
QUICK = Effort(networks=25, compared=6, seconds=30, rounds=1, disk_bytes=2**28, copy_bytes=2**26)


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
        StoreError: `scratch` has no room for the files that measure it.
        WriteError: the profile, or the file that measures the disk, cannot be written.
    """
    require_scikit_learn()
    start = time.perf_counter()
    events = Events(listeners)
    events.emit(JobStarted(_JOB, effort.networks + 3, "rates of this machine"))
    settle_allocator()
    threads, cache = torch.get_num_threads(), cache_bytes()
    disk = disk_rates(scratch, effort.disk_bytes)
    file_rate = file_bytes_per_second(scratch, effort.copy_bytes)
    copying = copy_bytes_per_second(effort.copy_bytes)
    codec, ratio = codec_rates(effort.copy_bytes // 4)
    return_freed_memory()
    events.emit(JobAdvanced(_JOB, 1, effort.networks + 3, "memory and disk"))
    spinning, passive = (
        compare_in_a_process(threads, effort.compared, effort.rounds, passive=sleeping) if threads > 1 else []
        for sleeping in (False, True)
    )
    events.emit(JobAdvanced(_JOB, 2, effort.networks + 3, "threads"))
    if threads > 1 and not (spinning and passive):
        events.emit(
            Notice(
                f"how well {threads} threads share the processor was not measured: other programs use it", warning=True
            )
        )
    samples = time_networks(effort, cache, events)
    model = fit(samples)
    machine = Machine(
        threads=threads,
        cache_bytes=cache,
        copy_bytes_per_second=copying,
        disk_write_bytes_per_second=disk.write,
        disk_read_bytes_per_second=disk.read,
        file_bytes_per_second=file_rate,
        codec_bytes_per_second=codec,
        codec_ratio=ratio,
        model=model,
        spinning=fit_sharing(spinning, model, threads) if spinning else Sharing(),
        passive=fit_sharing(passive, model, threads) if passive else Sharing(),
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
            subject = draw_subject(number, draw)
            for prepared in _tilings(subject, draw, cache):
                seconds = pass_seconds(subject, prepared, effort.rounds)
                work = pass_work(prepared, cache)
                samples += [Sample(number, step, w, s) for w, s in zip(work, seconds, strict=True)]
                step += 1
            events.emit(JobAdvanced(_JOB, number + 3, effort.networks + 3, f"network {number + 1}"))
    return samples


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
