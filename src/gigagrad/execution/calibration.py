"""Measure the rates that planning uses of this machine, or of a GPU in it, and save them: `gigagrad calibrate`.

Work of one thread is timed in processor seconds, which other programs disturb little; only how well threads work beside
each other has to be taken from the clock. So has what a GPU does, which is waited for before the clock is read.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from math import isqrt, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from gigagrad.boxes import Box
from gigagrad.devices import Device, device_for
from gigagrad.devices.heap import LargeBlocks, return_freed_memory, settle_allocator
from gigagrad.devices.machine import BYTE_RATES, CALLS_OF_A_PASS, Gpu, Machine, cache_bytes, profile_path, write_profile
from gigagrad.errors import ConfigError
from gigagrad.events import Events, JobAdvanced, JobFinished, JobStarted, Listener
from gigagrad.execution.compiling import compile
from gigagrad.plans.cost import Costs
from gigagrad.stores import Blosc, DiskStore, FieldSpec, Scratch
from gigagrad.stores.disk import MOST_BYTES
from gigagrad.stores.host import HostStore
from gigagrad.stores.scratch import ScratchFile, page_aligned
from gigagrad.threads import operator_threads
from gigagrad.work import unfolded_flops

_JOB = "calibrate"
_BLOCK_BYTES = 8 * 2**20
_ROUNDS = 5
_FIELD_CHANNELS, _FIELD_TILE_PX = 32, 256
"""Channels and tile side of a field as deep networks keep them."""
_CHANNELS, _SIDE_PX = 64, 128
"""Channels and side of the convolution that is timed, of norms and of pools."""
_SHALLOW, _DEEP = 16, 96
"""Channels of the convolution of one pixel by which moving values is timed, in and out; depthwise ones have as many as
go out."""
_RAGGED_SHALLOW, _RAGGED_DEEP = 20, 100
"""Channels of such a convolution that fill no whole vectors."""
_MEMORY_SIDE_PX = 320
"""Side of such a convolution whose values do not stay in the cache."""
_UNFOLDED_PX = 5
"""Side of windows that the gradient of a depthwise weight unfolds."""
_LEAST_SHARE = 0.1
"""The least part of a time that one of two causes is taken for, however timings scatter."""
_NEW_BLOCKS, _NEW_BLOCK_BYTES = 32, 4 * 2**20
"""Blocks of new memory that are written, below the size from which they are mapped one by one."""
_TURNS = 6
"""Times that ways of sharing threads take turns."""
_LAYERS = 8
"""Layers of the chain on which threads are compared."""
_TILES, _TILE_PX, _OPERATORS = 64, 8, 40
"""Tiles, their side and the operators of the network of small operators."""
_NORMS, _TILES_OF_NORMS = 3, 16
"""Norms and tiles of the network that a GPU's host is timed by as well."""
_GPU_SIDE_PX, _FEW_CHANNELS = 1024, 16
"""Side of convolutions on a GPU, and the channels of those that have few."""
_GPU_VALUES_BYTES = 2**28
"""Bytes of an operator of values on a GPU: more than any cache holds."""
_ROUNDS_IN_ONE = 8
"""Times that work of a GPU is asked for before it is waited for, so that asking takes no time of its own."""

_LEAST_SECONDS = 1e-7
"""The least that a call is taken to cost, however timings scatter."""
_ENDLESS = 1e30
_ONLY_CALLS = Gpu(
    flops_per_second=_ENDLESS,
    few_channels_flops_per_second=_ENDLESS,
    memory_bytes_per_second=_ENDLESS,
    seconds_per_operator=1.0,
    seconds_per_tile=0.0,
    seconds_per_pass=0.0,
)
"""A machine on which a plan takes as many seconds as it counts calls."""

_Clock = Callable[[], float]
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Calibration:
    """The rates that were measured, and the file they are saved in."""

    machine: Machine
    direct: bool
    """True where the disk was measured past the page cache."""
    seconds: float
    path: Path
    copies: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second of plain copies between a GPU and its host, by kind and direction."""


def calibrate(
    *,
    device: str | Device = "cpu",
    scratch: Path = Path(),
    size_bytes: int = 2**28,
    listeners: tuple[Listener, ...] = (),
) -> Calibration:
    """Measure this machine, or a GPU in it, and save its rates. `scratch` is the folder whose disk is measured, with
    `size_bytes`; so are copies.

    Raises:
        ConfigError: `scratch` or `device` cannot be used.
        StoreError: `scratch` has no room for the files that measure it.
        WriteError: the profile cannot be written.
    """
    start = time.perf_counter()
    here = device_for(device)
    events = Events(listeners)
    parts: dict[str, Callable[[], Any]] = {
        "disk": lambda: disk_rates(scratch, size_bytes),
        "files": lambda: file_bytes_per_second(scratch, size_bytes),
        "copies": lambda: (copy_bytes_per_second(size_bytes), {}) if here.is_host else _gpu_copies(here, size_bytes),
        "codec": lambda: codec_rates(size_bytes // 4),
        "operators": lambda: _operator_rates() if here.is_host else _gpu_rates(here),
        "threads": lambda: _rates_of_all_threads(found["operators"]["flops_per_second"]) if here.is_host else {},
    }
    base = _unmeasured(here)
    card = base.card if isinstance(base, Gpu) else ""
    events.emit(JobStarted(_JOB, len(parts), f"rates of {card or 'this machine'}"))
    settle_allocator()
    found = dict[str, Any]()
    for number, (name, measure) in enumerate(parts.items(), 1):
        found[name] = measure()
        return_freed_memory()
        here.trim()
        events.emit(JobAdvanced(_JOB, number, len(parts), name))
    (write, read, direct), (codec, ratio) = found["disk"], found["codec"]
    copied, copies = found["copies"]
    machine = dataclasses.replace(
        base,
        calibrated=True,
        copy_bytes_per_second=copied,
        disk_write_bytes_per_second=write,
        disk_read_bytes_per_second=read,
        file_bytes_per_second=found["files"],
        codec_bytes_per_second=codec,
        codec_ratio=ratio,
        **found["operators"],
        **found["threads"],
    )
    path = profile_path(card)
    write_profile(path, machine)
    seconds = time.perf_counter() - start
    events.emit(JobFinished(_JOB, seconds, str(path)))
    return Calibration(machine, direct, seconds, path, copies)


def _unmeasured(device: Device) -> Machine:
    """Return the machine whose rates are to be measured. Raises `ConfigError` for a device that has no profile."""
    if device.is_host:
        return Machine(threads=torch.get_num_threads(), cache_bytes=cache_bytes())
    typical = device.machine()
    if not isinstance(typical, Gpu):
        raise ConfigError(f"cannot calibrate the device {device}; a processor (cpu) or a GPU (cuda) can be")
    return typical


def _operator_rates() -> dict[str, float]:
    """Measure the rates of one thread, by kinds of work; new memory is touched by all of them."""
    with operator_threads(1):
        found = {
            **_host_rates(device_for("cpu")),
            **_convolution_rates(),
            "statistics_bytes_per_second": _statistics_bytes_per_second(),
            "window_bytes_per_second": _window_bytes_per_second(),
            "cached_bytes_per_second": moved_per_second(cache_bytes() // 8),
            "memory_bytes_per_second": moved_per_second(4 * cache_bytes()),
        }
    return {**found, "new_bytes_per_second": _new_bytes_per_second()}


def _convolution_rates() -> dict[str, float]:
    """Measure products of many channels and the bytes of convolutions, by what two take that have other shares of them,
    and products of unfolded windows.
    """
    many = _convolution(_CHANNELS, _CHANNELS, 3)
    thin = _convolution(_SHALLOW, _DEEP, 1)
    amounts = np.array([many[:2], thin[:2]], float)
    per_flop, per_byte = (float(each) for each in np.linalg.solve(amounts, np.array([many[2], thin[2]])))
    per_byte = max(per_byte, _LEAST_SHARE * thin[2] / thin[1])
    per_flop = max(per_flop, _LEAST_SHARE * many[2] / many[0])
    return {
        "flops_per_second": 1 / per_flop,
        "reordered_bytes_per_second": 1 / per_byte,
        "unfolded_flops_per_second": _unfolded_flops_per_second(per_byte),
    }


def _convolution(
    inputs: int, outputs: int, kernel: int, side: int = _SIDE_PX, clock: _Clock = time.process_time
) -> tuple[float, float, float]:
    """Time a convolution's output and both gradients: its products, the bytes in and out of it, and seconds."""
    x = torch.rand(1, inputs, side, side, requires_grad=True)
    weight = torch.rand(outputs, inputs, kernel, kernel, requires_grad=True)
    gradient = torch.rand(1, outputs, side, side)
    # Dilation means nothing to one pixel, but only with it is that oneDNN's where one thread computes.
    dilation = 1 if kernel > 1 else 2

    def step() -> None:
        y = F.conv2d(x, weight, padding=kernel // 2, dilation=dilation)
        torch.autograd.grad(y, (x, weight), gradient)

    flops = 3 * 2.0 * gradient.numel() * weight[0].numel()
    return flops, 3.0 * (x.nbytes + gradient.nbytes), fastest(step, clock)


def _unfolded_flops_per_second(seconds_per_byte: float) -> float:
    """Measure the gradient of a depthwise weight of large windows, less its bytes."""
    x = torch.rand(1, _DEEP, _SIDE_PX, _SIDE_PX)
    weight = torch.rand(_DEEP, 1, _UNFOLDED_PX, _UNFOLDED_PX, requires_grad=True)
    y, gradient = F.conv2d(x, weight, padding=_UNFOLDED_PX // 2, groups=_DEEP), torch.rand_like(x)
    seconds = fastest(lambda: torch.autograd.grad(y, weight, gradient, retain_graph=True), time.process_time)
    products = max(seconds - 2 * x.nbytes * seconds_per_byte, _LEAST_SHARE * seconds)
    return unfolded_flops(_SIDE_PX**2, weight.shape, _DEEP) / products


def _statistics_bytes_per_second() -> float:
    """Measure the bytes in and out of a batch norm in training."""
    x = torch.rand(1, _CHANNELS, _SIDE_PX, _SIDE_PX)
    return 2 * x.nbytes / fastest(lambda: F.batch_norm(x, None, None, training=True), time.process_time)


def _window_bytes_per_second() -> float:
    """Measure the bytes in and out of the pool that classifiers begin with, the places of its maxima counted."""
    x = torch.rand(1, _CHANNELS, _SIDE_PX, _SIDE_PX)
    made, places = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    moved = x.nbytes + made.nbytes + places.nbytes
    return moved / fastest(lambda: F.max_pool2d(x, 3, 2, 1, return_indices=True), time.process_time)


def _new_bytes_per_second() -> float:
    """Measure writing memory that the system has to give first."""
    best = float("inf")
    for _ in range(_ROUNDS):
        return_freed_memory()
        start = time.perf_counter()
        held = [torch.empty(_NEW_BLOCK_BYTES, dtype=torch.uint8).fill_(1) for _ in range(_NEW_BLOCKS)]
        best = min(best, time.perf_counter() - start)
        del held
    return _NEW_BLOCKS * _NEW_BLOCK_BYTES / best


def _gpu_rates(device: Device) -> dict[str, float]:
    """Measure the rates of a GPU, as operators run on tiles, and what its host takes to ask for them."""
    clock, here = _after(device), device.torch_device
    values = moved_per_second(_GPU_VALUES_BYTES, clock, here, _ROUNDS_IN_ONE)
    few = _flops_per_second(_FEW_CHANNELS, _GPU_SIDE_PX, clock, here, _ROUNDS_IN_ONE)
    return {
        **_host_rates(device),
        "flops_per_second": _flops_per_second(_CHANNELS, _GPU_SIDE_PX, clock, here, _ROUNDS_IN_ONE),
        **dict.fromkeys(("few_channels_flops_per_second", "unfolded_flops_per_second"), few),
        **dict.fromkeys(BYTE_RATES, values),
    }


def _host_rates(device: Device) -> dict[str, float]:
    """Measure what a host takes to call an operator, for a tile beside that and for a pass beside its tiles, by steps
    of networks that have next to nothing to do: one of many operators a tile, and one of norms, which make many passes
    of few operators. Beside a GPU a pass counts as some calls.
    """
    small = nn.Sequential(*(each for _ in range(_OPERATORS // 2) for each in (nn.Conv2d(1, 1, 1), nn.ReLU())))
    normed = _normed(_NORMS)
    steps = [_step(small, _TILES, device), _step(normed, _TILES_OF_NORMS, device)]
    if device.is_host:
        steps.append(_step(normed, 1, device))
    amounts = np.array([amounts for amounts, _ in steps], float)
    if not device.is_host:
        amounts = np.stack([amounts[:, 0] + CALLS_OF_A_PASS * amounts[:, 2], amounts[:, 1]], axis=1)
    found = np.linalg.solve(amounts, np.array([seconds for _, seconds in steps]))
    call, tile, *of_pass = (float(each) for each in found)
    call = max(call, _LEAST_SECONDS)
    return {
        "seconds_per_operator": call,
        "seconds_per_autograd_call": _seconds_per_autograd_call() if device.is_host else call,
        "seconds_per_tile": max(tile, 0.0),
        "seconds_per_pass": max(of_pass[0], 0.0) if of_pass else CALLS_OF_A_PASS * call,
    }


def _normed(norms: int) -> nn.Module:
    return nn.Sequential(*(each for _ in range(norms) for each in (nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.ReLU())))


def _seconds_per_autograd_call() -> float:
    """Measure what a kernel takes by plain autograd that has next to nothing to do, by steps of two depths."""
    image, found = np.ones((1, _TILE_PX, _TILE_PX), np.float32), []
    for norms in (_NORMS, _NORMS + _OPERATORS):
        engine = compile(_normed(norms), lambda output, target: output.mean())
        whole = engine.problem(image, image).whole
        assert whole is not None
        seconds = fastest(lambda engine=engine: engine.backward(image, image), time.process_time)  # type: ignore[misc]
        found.append((len(whole.operators), seconds))
    (few, less), (many, more) = found
    return max((more - less) / (many - few), _LEAST_SECONDS)


def _step(model: nn.Module, tiles: int, device: Device) -> tuple[tuple[float, int, int], float]:
    """Time a step of a network in so many tiles a pass: the calls, tiles and passes that plans count for it, and
    seconds.
    """
    side = int(tiles**0.5) * _TILE_PX
    image = np.ones((1, side, side), np.float32)
    model = model.to(device.torch_device)
    engine = compile(model, lambda output, target: output.mean(), tile=(_TILE_PX, _TILE_PX), device=device)
    engine.records = False
    plan, problem = engine.plan(image, image), engine.problem(image, image)
    clock = time.process_time if device.is_host else _after(device)
    costs, calls = Costs(problem.graph, _ONLY_CALLS), 0.0
    for step in plan.passes:
        segment, backward = plan.segments[step.segment], step.phase != "forward"
        cost = costs.of(segment.computes, segment.tile, backward=backward)
        calls += cost.backward_seconds if backward else cost.forward_seconds
    return (calls, plan.tile_count, len(plan.passes)), fastest(lambda: engine.backward(image, image), clock)


def _gpu_copies(device: Device, size: int) -> tuple[float, dict[str, float]]:
    """Measure a field in the host's memory that tiles on a GPU write and read, in bytes of both per second; and plain
    copies of `size` bytes between both.
    """
    clock, there = _after(device), torch.ones(size, dtype=torch.uint8, device=device.torch_device)
    pageable = torch.ones(size, dtype=torch.uint8)
    rates = {}
    for kind, host in (("pageable", pageable), ("pinned", pageable.pin_memory())):
        for where, target, source in (("GPU", there, host), ("host", host, there)):
            copy = partial(target.copy_, source, non_blocking=True)
            rates[f"{kind}, to the {where}"] = size / fastest(copy, clock)
    shape, boxes = _field(size)
    layout = torch.channels_last
    store = HostStore(shape, torch.float32, (-2, -1), device=torch.device("cpu"), memory_format=layout)
    tile = torch.ones((1, _FIELD_CHANNELS, _FIELD_TILE_PX, _FIELD_TILE_PX), device=device.torch_device)
    tile = tile.contiguous(memory_format=layout)
    with closing(store):

        def write_and_read() -> None:
            for box in boxes:
                store.write(box, tile)
            for box in boxes:
                store.read(box).to(device.torch_device)

        return 2 * tile.nbytes * len(boxes) / fastest(write_and_read, clock), rates


def _after(device: Device) -> _Clock:
    """Make a clock that is read when the device has done what it was asked for."""

    def clock() -> float:
        device.synchronize()
        return time.perf_counter()

    return clock


def _flops_per_second(channels: int, side: int, clock: _Clock, device: torch.device = _HOST, rounds: int = 1) -> float:
    """Measure a convolution of so many channels: the output and both gradients, `rounds` times in one."""

    def values(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device).contiguous(memory_format=torch.channels_last).requires_grad_()

    x, weight = values(1, channels, side, side), values(channels, channels, 3, 3)

    def step() -> None:
        for _ in range(rounds):
            y = F.conv2d(x, weight, padding=1)
            torch.autograd.grad(y, (x, weight), y)

    return rounds * 3 * 2.0 * (channels * side * 3) ** 2 / fastest(step, clock)


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


def moved_per_second(
    nbytes: int, clock: _Clock = time.process_time, device: torch.device = _HOST, rounds: int = 1
) -> float:
    """Measure the bytes in and out of a ReLU of so many bytes, `rounds` times in one."""
    x = torch.rand(nbytes // 4, device=device)
    out = torch.empty_like(x)

    def step() -> None:
        for _ in range(rounds):
            torch.clamp_min(x, 0.5, out=out)

    return rounds * 2 * nbytes / fastest(step, clock)


def _rates_of_all_threads(flops_per_second: float) -> dict[str, float]:
    """Measure what each further thread adds, and a thread's part of what convolutions move in memory."""
    sharing = _sharing()
    speedup = 1 + sharing.get("shared_efficiency", 0.0) * (torch.get_num_threads() - 1)

    def bytes_per_second(inputs: int, outputs: int, side: int) -> float:
        flops, moved, seconds = _convolution(inputs, outputs, 1, side, time.perf_counter)
        return moved / max(speedup * seconds - flops / flops_per_second, _LEAST_SHARE * speedup * seconds)

    blocks = LargeBlocks()  # from the heap, as the next step of a whole image has them: pages are not new
    blocks.choose(in_heap=True, holding=True)
    try:
        return {
            **sharing,
            "reordered_memory_bytes_per_second": bytes_per_second(_SHALLOW, _DEEP, _MEMORY_SIDE_PX),
            "ragged_bytes_per_second": bytes_per_second(_RAGGED_SHALLOW, _RAGGED_DEEP, _SIDE_PX),
        }
    finally:
        blocks.close()


def _sharing() -> dict[str, float]:
    """Measure what each further thread adds: where threads share an operator, and where each has its own. They take
    turns, so that an hour in which the machine is slower is every way's.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        return {}
    steps = [_chain() for _ in range(threads)]
    alone = beside = shared = float("inf")
    with ThreadPoolExecutor(threads, initializer=lambda: torch.set_num_threads(1)) as pool:
        for _ in range(_TURNS):
            with operator_threads(1):
                alone = min(alone, fastest(steps[0], rounds=1))
                beside = min(beside, fastest(lambda: list(pool.map(lambda step: step(), steps)), rounds=1))
            shared = min(shared, fastest(steps[0], rounds=1))

    def further(speedup: float) -> float:
        return min(max((speedup - 1) / (threads - 1), 0.0), 1.0)

    return {
        "shared_efficiency": further(alone / shared),
        "side_by_side_efficiency": further(threads * alone / beside),
    }


def copy_bytes_per_second(size: int) -> float:
    """Measure a copy of `size` bytes by one thread, the fastest of a few."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.empty_like(source)
    return size / fastest(lambda: target.copy_(source))


def disk_rates(folder: Path, size: int) -> tuple[float, float, bool]:
    """Measure how many bytes per second one thread writes and reads of a file of `size` bytes in `folder`, in large
    blocks. The last value is True where the page cache was by-passed; where the file system cannot do that, writes are
    flushed and reads may come from memory.

    Raises `ConfigError` if the folder cannot be used, `StoreError` if the disk is full.
    """
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"cannot measure the disk: {folder} is no folder that can be written; name one with --scratch"
        )
    offsets = range(0, size, _BLOCK_BYTES)
    block = page_aligned(1, _BLOCK_BYTES)
    block[:] = np.frombuffer(np.random.default_rng(0).bytes(_BLOCK_BYTES), np.uint8)
    moved = len(offsets) * _BLOCK_BYTES
    with closing(ScratchFile(folder / f".gigagrad-calibrate-{os.getpid()}", moved, past_cache=True)) as file:
        start = time.perf_counter()
        for offset in offsets:
            file.write(memoryview(block).cast("B"), offset)
        file.sync()
        written = time.perf_counter()
        for offset in offsets:
            file.read_into(block, offset)
        return moved / (written - start), moved / (time.perf_counter() - written), file.past_cache


def file_bytes_per_second(folder: Path, size: int) -> float:
    """Measure a field of about `size` bytes that is written to a file in `folder` and read again, tile by tile: bytes
    of both per second of processor time, whichever threads spend it.

    Raises `StoreError` if the folder cannot be used or the disk is full.
    """
    shape, boxes = _field(size)
    tile = torch.ones(1, _FIELD_CHANNELS, _FIELD_TILE_PX, _FIELD_TILE_PX)
    scratch = Scratch(folder, 4 * prod(shape))
    try:
        store = DiskStore(FieldSpec("rate", shape, tile.dtype, (-2, -1)), scratch)
        with closing(store), operator_threads(1):

            def write_and_read() -> None:
                for box in boxes:
                    store.write(box, tile.clone())  # what a run hands over is new, too
                store.flush()
                for box in boxes:
                    store.read(box)

            return 2 * tile.nbytes * len(boxes) / fastest(write_and_read, time.process_time)
    finally:
        scratch.close()


def _field(size: int) -> tuple[tuple[int, ...], list[Box]]:
    """Return the shape of a field of about `size` bytes, and the boxes of its tiles."""
    side = max(1, isqrt(size // (4 * _FIELD_CHANNELS)) // _FIELD_TILE_PX) * _FIELD_TILE_PX
    starts = range(0, side, _FIELD_TILE_PX)
    boxes = [Box(y, x, y + _FIELD_TILE_PX, x + _FIELD_TILE_PX) for y in starts for x in starts]
    return (1, _FIELD_CHANNELS, side, side), boxes


def codec_rates(size: int) -> tuple[float, float]:
    """Measure the lossless codec on what a convolution makes, in bricks, by one thread: bytes of the field per second,
    the slower of both directions, and bytes of the field per byte encoded.
    """
    codec, brick = Blosc(), MOST_BYTES
    field = np.random.default_rng(0).standard_normal(size // 4, dtype=np.float32).view(np.uint8)
    bricks = [field[start : start + brick] for start in range(0, field.nbytes, brick)]
    encoded = [codec.encode(data, 4) for data in bricks]
    out = np.empty(brick, np.uint8)

    def decode() -> None:
        for data, like in zip(encoded, bricks, strict=True):
            codec.decode(data, out[: len(like)])

    encoding, decoding = fastest(lambda: [codec.encode(data, 4) for data in bricks]), fastest(decode)
    return field.nbytes / max(encoding, decoding), field.nbytes / sum(map(len, encoded))


def fastest(work: Callable[[], object], clock: _Clock = time.perf_counter, rounds: int = _ROUNDS) -> float:
    """Return the seconds of the fastest of a few runs, after one that warms up."""
    work()
    best = float("inf")
    for _ in range(rounds):
        start = clock()
        work()
        best = min(best, clock() - start)
    return best
