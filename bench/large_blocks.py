"""What large blocks cost: a step whose tiles take them from the heap, against one that maps each block anew.

    python bench/large_blocks.py [--rounds 2] [--memory 2GiB]

Training and evaluation steps of published networks on noise. Each way runs in processes of its own, in turns; of four
steps in each the first is not counted and the fastest is told, and in `given_back` how often freed memory went back to
the system. Prints one JSON line last. Only glibc has the choice.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad as gg
from bench.calibration import loss, subject
from gigagrad.devices import cpu
from gigagrad.devices.heap import peak_resident_bytes

_CASES = (
    ("paper-unet", (2048, 2048), "train"),
    ("smp:Unet?encoder_name=resnet18", (1024, 1024), "eval"),
    ("smp:Unet?encoder_name=resnet18", (1024, 1024), "train"),
    ("timm:resnet10t", (2048, 2048), "eval"),
    ("timm:resnet34", (1024, 1536), "train"),
)
_WAYS = ("heap", "mapped")
_STEPS = 4


def one(name: str, size: tuple[int, int], mode: str, way: str, memory: str | None) -> dict[str, float]:
    """Steps of one network, in this process."""
    warnings.simplefilter("ignore")
    begin, give_back, given_back = cpu.HeapWatch.begin_pass, cpu.Cpu.trim, 0

    def as_if_small(self: cpu.HeapWatch, tile_bytes: int, beside_bytes: int, largest_bytes: int = 0) -> None:
        begin(self, tile_bytes, beside_bytes, largest_bytes if way == "heap" else 0)

    def counted(self: cpu.Cpu) -> None:
        nonlocal given_back
        given_back += 1
        give_back(self)

    cpu.HeapWatch.begin_pass = as_if_small  # type: ignore[method-assign]
    cpu.Cpu.trim = counted  # type: ignore[method-assign]
    network, image, target = subject(name, size)
    engine = gg.compile(network.train(mode == "train"), loss, memory=memory)
    predicted = engine.plan(image, target).predicted_peak_bytes
    steps = []
    for _ in range(_STEPS):
        before, start = os.times(), time.perf_counter()
        engine.backward(image, target)
        seconds, after = time.perf_counter() - start, os.times()
        steps.append({"seconds": round(seconds, 3), "system_seconds": round(after.system - before.system, 3)})
    peak = {"peak_mib": peak_resident_bytes() >> 20, "predicted_mib": predicted >> 20}
    return min(steps[1:], key=lambda step: step["seconds"]) | peak | {"given_back": given_back}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--memory", help="the budget; without one only speed decides")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        number, way = args.one
        print(json.dumps(one(*_CASES[int(number)], way, args.memory)))
        return
    rows: list[dict[str, Any]] = []
    for number, (name, size, mode) in enumerate(_CASES):
        found: dict[str, list[dict[str, float]]] = {way: [] for way in _WAYS}
        for _ in range(args.rounds):
            for way, results in found.items():
                command = [sys.executable, __file__, "--one", str(number), way]
                command += ["--memory", args.memory] if args.memory else []
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                results.append(json.loads(done.stdout.splitlines()[-1]))
        row: dict[str, Any] = {"model": name, "size": size, "mode": mode, **found}
        heap, mapped = (median(result["seconds"] for result in found[way]) for way in _WAYS)
        row["mapped_over_heap"] = round(mapped / heap, 2)
        rows.append(row)
        print(row, flush=True)
    print(json.dumps({"memory": args.memory, "cases": rows}))


if __name__ == "__main__":
    main()
