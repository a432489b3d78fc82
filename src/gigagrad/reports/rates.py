"""Set this machine's measured rates beside what its processor could do, and say what bounds a training step of
paper-unet on a slide of 16000 x 64000 px.
"""

from __future__ import annotations

import time

import numpy as np

from gigagrad.devices.machine import BYTE_RATES, Machine, peak_flops_per_second, processor_fields
from gigagrad.execution import compile
from gigagrad.execution.calibration import moved_per_second
from gigagrad.losses import named_loss
from gigagrad.models import resolve
from gigagrad.plans import Costs, Plan, Problem
from gigagrad.plans.description import GOOD, Table, percent
from gigagrad.threads import operator_threads
from gigagrad.units import format_seconds

_SIZE = (16000, 64000)
_DECODED_PX_PER_SECOND = 180e6
"""Pixels of a JPEG that one thread decodes to grey (bench/decoding.py, on an AMD EPYC)."""
_ENDLESS = 1e30
_PARTS = {
    "products": ("flops_per_second", "unfolded_flops_per_second"),
    "bytes between cache and memory": BYTE_RATES,
    "calls of operators": ("seconds_per_operator",),
}
"""The rates that each part of a step's time comes from."""


def rates_tables(machine: Machine) -> tuple[Table, ...]:
    """Tabulate the rates of `machine`, this one, beside what it could do, and what bounds the founding step."""
    peak, threads = peak_flops_per_second(processor_fields()), machine.threads
    with operator_threads(threads):
        all_threads = moved_per_second(4 * machine.cache_bytes, time.perf_counter)
    source = "measured" if machine.calibrated else "typical"
    rows = [
        (
            "products of convolutions, one thread",
            f"{machine.flops_per_second / 1e9:,.0f} GFLOP/s",
            "-" if peak is None else f"{peak / 1e9:,.0f} GFLOP/s",
            "-" if peak is None else percent(machine.flops_per_second, peak),
            "clock x lanes x units x 2",
        ),
        (
            f"values in memory, {threads} threads",
            f"{machine.memory_bytes_per_second * threads / 1e9:,.1f} GB/s",
            f"{all_threads / 1e9:,.1f} GB/s",
            percent(machine.memory_bytes_per_second * threads, all_threads),
            "one operator of all threads, now",
        ),
    ]
    note = "The clock is what the system tells; above it, shares exceed 100 %." if peak else ""
    note += (
        "" if machine.calibrated else f"Rates are typical ones: '{machine.calibrate_command}' measures this machine's."
    )
    rates = Table("Rates", ("what", source, "it could do", "share", "known by"), tuple(rows), note)
    parts = founding_parts(machine)
    whole = sum(parts.values())
    most = max(parts, key=lambda part: parts[part])
    step = Table(
        f"What bounds a step of paper-unet, {_SIZE[0]} x {_SIZE[1]} px in 4 GiB: {most}",
        ("part", "time of all threads", "share"),
        tuple((part, format_seconds(seconds), percent(seconds, whole)) for part, seconds in parts.items()),
        "Time that each part would take if it were all there is; they overlap in part.",
        tones=tuple(GOOD if part == most else "" for part in parts),
    )
    return rates, step


def founding_parts(machine: Machine) -> dict[str, float]:
    """Predict the seconds that products, bytes, calls and decoding a JPEG to grey take in a step, were each alone."""
    model, shape = resolve("paper-unet", published=False).train(), (1, *_SIZE)
    engine = compile(model, named_loss("bce").function, memory="4 GiB")
    engine.in_tiles = True
    image, target = np.broadcast_to(np.uint8(0), shape), np.broadcast_to(np.uint8(0), (1, *_SIZE))
    plan, problem = engine.plan(image, target, machine=machine), engine.problem(image, target, machine=machine)
    rates_of_parts = {rate for rates in _PARTS.values() for rate in rates}
    endless = dict.fromkeys(rates_of_parts, _ENDLESS) | {"seconds_per_operator": 0.0}
    seconds = {
        part: _seconds(plan, problem, machine.with_rates(endless | {name: getattr(machine, name) for name in rates}))
        for part, rates in _PARTS.items()
    }
    seconds["decoding a JPEG to grey (typical)"] = _SIZE[0] * _SIZE[1] / _DECODED_PX_PER_SECOND
    return {name: one / machine.threads for name, one in seconds.items()}


def _seconds(plan: Plan, problem: Problem, machine: Machine) -> float:
    """Predict what the tiles of a plan take by one thread on a machine."""
    costs, seconds = Costs(problem.graph.with_whole(plan.whole_pixels), machine), 0.0
    for step in plan.passes:
        segment, backward = plan.segments[step.segment], step.phase != "forward"
        cost = costs.of(segment.computes, segment.tile, backward=backward)
        seconds += cost.backward_seconds if backward else cost.forward_seconds
    return seconds
