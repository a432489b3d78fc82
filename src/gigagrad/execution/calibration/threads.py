"""Times steps with several threads, in processes of their own: how threads wait is settled when PyTorch is loaded.

OpenMP's threads spin between two operators for a while, or sleep (`OMP_WAIT_POLICY=passive`, which the command line
sets): threads that share operators are faster with the first and threads beside other programs with the second, so both
are measured, and planning takes the one that counts in its process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import time

import psutil
import torch

from gigagrad.execution.allocator import settle_allocator
from gigagrad.execution.calibration.fit import Compared
from gigagrad.execution.calibration.timing import draw_subject, pass_seconds, pass_work
from gigagrad.plans.machine import cache_bytes

_SIDES_PX = (512, 192)
"""Of tiles, for few of them in a pass and for many."""
_MOST_TILES = 200
_BUSY = 0.1
"""Share of the threads' time that other programs may take while threads are compared."""


def compare_in_a_process(threads: int, networks: int, rounds: int, *, passive: bool) -> list[Compared]:
    """`compare_threads` where waiting threads sleep, or spin; empty where it finds nothing, or the process fails."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if passive:
        environment["OMP_WAIT_POLICY"] = "passive"
    command = [sys.executable, "-m", __name__, *map(str, (threads, networks, rounds))]
    done = subprocess.run(  # noqa: S603  (this interpreter, with numbers)
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        return []
    return [Compared.from_dict(step) for step in json.loads(done.stdout)]


def compare_threads(threads: int, networks: int, rounds: int) -> list[Compared]:
    """Steps of few and of many tiles, by the clock, with threads that share a tile and with a tile for each.

    Empty where nothing can be told: beside programs that take the threads' time.
    """
    found = list[Compared]()
    start, others = time.perf_counter(), _others_seconds()
    for seed in range(networks):
        subject = draw_subject(seed, random.Random(seed))  # noqa: S311  (no secret depends on it)
        for side in _SIDES_PX:
            prepared = subject.prepare((side, side), workers=threads)
            plan = prepared.plan
            if plan.tile_count > _MOST_TILES:
                continue
            counts = [plan.stages[step.stage].tile_count for step in plan.passes]
            ways = (dataclasses.replace(prepared, plan=dataclasses.replace(plan, workers=n)) for n in (1, threads))
            seconds = (sum(pass_seconds(subject, way, rounds, time.perf_counter)) for way in ways)
            found.append(Compared(tuple(zip(pass_work(prepared, cache_bytes()), counts, strict=True)), *seconds))
    busy = _others_seconds() - others > _BUSY * threads * (time.perf_counter() - start)
    return [] if busy else found


def _others_seconds() -> float:
    """Processor seconds that everything but this process has used."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Guests are counted among users, too.
    return float(
        sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0) - time.process_time()
    )


def main(arguments: list[str]) -> None:
    threads, networks, rounds = map(int, arguments)
    torch.set_num_threads(threads)
    settle_allocator()
    json.dump([dataclasses.asdict(step) for step in compare_threads(threads, networks, rounds)], sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
