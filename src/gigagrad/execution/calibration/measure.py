"""Measure the rates that planning uses of this machine, and save them: `gigagrad calibrate`.

Work of one thread is timed in processor seconds, which other programs disturb little; only how well threads work beside
each other has to be taken from the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from gigagrad.devices.heap import return_freed_memory, settle_allocator
from gigagrad.devices.machine import Machine, cache_bytes, profile_path, write_profile
from gigagrad.events import Events, JobAdvanced, JobFinished, JobStarted, Listener
from gigagrad.execution.calibration.tiers import (
    DiskRates,
    codec_rates,
    copy_bytes_per_second,
    disk_rates,
    fastest,
    file_bytes_per_second,
)
from gigagrad.execution.compiling import compile
from gigagrad.threads import operator_threads

_JOB = "calibrate"
_CHANNELS, _SIDE_PX = 64, 128
"""Channels and side of the convolution that is timed."""
_LAYERS = 8
"""Layers of the chain on which threads are compared."""
_TILES, _TILE_PX, _OPERATORS = 64, 8, 40
"""Tiles, their side and the operators of the network of small operators."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The rates that were measured, and the file they are saved in."""

    machine: Machine
    disk: DiskRates
    seconds: float
    path: Path


def calibrate(*, scratch: Path = Path(), size_bytes: int = 2**28, listeners: tuple[Listener, ...] = ()) -> Calibration:
    """Measure this machine and save its rates. `scratch` is the folder whose disk is measured, with `size_bytes`.

    Raises:
        ConfigError: `scratch` cannot be used.
        StoreError: `scratch` has no room for the files that measure it.
        WriteError: the profile cannot be written.
    """
    start = time.perf_counter()
    events = Events(listeners)
    parts: dict[str, Callable[[], Any]] = {
        "disk": lambda: disk_rates(scratch, size_bytes),
        "files": lambda: file_bytes_per_second(scratch, size_bytes),
        "copies": lambda: copy_bytes_per_second(size_bytes),
        "codec": lambda: codec_rates(size_bytes // 4),
        "operators": _operator_rates,
        "threads": _sharing,
    }
    events.emit(JobStarted(_JOB, len(parts), "rates of this machine"))
    settle_allocator()
    found = dict[str, Any]()
    for number, (name, measure) in enumerate(parts.items(), 1):
        found[name] = measure()
        return_freed_memory()
        events.emit(JobAdvanced(_JOB, number, len(parts), name))
    disk, (codec, ratio) = found["disk"], found["codec"]
    machine = Machine(
        threads=torch.get_num_threads(),
        cache_bytes=cache_bytes(),
        calibrated=True,
        copy_bytes_per_second=found["copies"],
        disk_write_bytes_per_second=disk.write,
        disk_read_bytes_per_second=disk.read,
        file_bytes_per_second=found["files"],
        codec_bytes_per_second=codec,
        codec_ratio=ratio,
        **found["operators"],
        **found["threads"],
    )
    path = profile_path()
    write_profile(path, machine)
    seconds = time.perf_counter() - start
    events.emit(JobFinished(_JOB, seconds, str(path)))
    return Calibration(machine, disk, seconds, path)


def _operator_rates() -> dict[str, float]:
    """Measure the rates of one thread, as operators run on tiles."""
    with operator_threads(1):
        call = _seconds_per_operator()
        return {
            "seconds_per_operator": call,
            "flops_per_second": _convolution_flops() / fastest(_convolution(), time.process_time),
            "cached_bytes_per_second": _moved_per_second(cache_bytes() // 8),
            "memory_bytes_per_second": _moved_per_second(4 * cache_bytes()),
        }


def _convolution() -> Callable[[], object]:
    """Make a step of a convolution of many channels: the output and both gradients."""
    x = torch.rand(1, _CHANNELS, _SIDE_PX, _SIDE_PX).contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.rand(_CHANNELS, _CHANNELS, 3, 3).contiguous(memory_format=torch.channels_last).requires_grad_()

    def step() -> object:
        y = F.conv2d(x, weight, padding=1)
        return torch.autograd.grad(y, (x, weight), y)

    return step


def _chain() -> Callable[[], object]:
    """Make a step of a few operators as tiles of deep networks have them: calls have a rate of their own."""
    x = torch.rand(1, _CHANNELS, _SIDE_PX, _SIDE_PX).contiguous(memory_format=torch.channels_last)
    weights = [torch.rand(_CHANNELS, _CHANNELS, 3, 3).sub_(0.5).requires_grad_() for _ in range(_LAYERS)]

    def step() -> object:
        y = x
        for weight in weights:
            y = torch.relu(F.conv2d(y, weight, padding=1))
        return torch.autograd.grad(y.sum(), weights)

    return step


def _convolution_flops() -> float:
    return 3 * 2.0 * (_CHANNELS * _SIDE_PX * 3) ** 2


def _moved_per_second(nbytes: int) -> float:
    """Measure the bytes in and out of a ReLU of so many bytes."""
    x = torch.rand(nbytes // 4)
    out = torch.empty_like(x)
    return 2 * nbytes / fastest(lambda: torch.clamp_min(x, 0.5, out=out), time.process_time)


def _seconds_per_operator() -> float:
    """Time a step of a network of operators that have next to nothing to do, in many tiles."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1), *(nn.ReLU() for _ in range(_OPERATORS - 1)))
    side = int(_TILES**0.5) * _TILE_PX
    image = np.ones((1, side, side), np.float32)
    engine = compile(model, lambda output, target: output.mean(), tile=(_TILE_PX, _TILE_PX))
    calls = 3 * _TILES * _OPERATORS  # a backward is about two forwards
    return fastest(lambda: engine.backward(image, image), time.process_time) / calls


def _sharing() -> dict[str, float]:
    """Measure what each further thread adds: where threads share an operator, and where each has its own."""
    threads = torch.get_num_threads()
    if threads == 1:
        return {}
    steps = [_chain() for _ in range(threads)]
    with operator_threads(1):
        alone = fastest(steps[0])
        with ThreadPoolExecutor(threads, initializer=lambda: torch.set_num_threads(1)) as pool:
            beside = fastest(lambda: list(pool.map(lambda step: step(), steps)))
    shared = fastest(steps[0])

    def further(speedup: float) -> float:
        return min(max((speedup - 1) / (threads - 1), 0.0), 1.0)

    return {
        "shared_efficiency": further(alone / shared),
        "side_by_side_efficiency": further(threads * alone / beside),
    }
