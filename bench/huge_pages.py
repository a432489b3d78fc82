"""What huge pages save: page faults, seconds and peak of a step, with and without PyTorch's request for them.

    python bench/huge_pages.py [--rounds 2]

Each setting runs in processes of its own, in turns; the fastest of three steps of every process counts. Prints one JSON
line last. Only Linux has the request, and only where /sys/kernel/mm/transparent_hugepage/enabled is not `never`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

_CASES = (
    ("paper-unet", 2048),
    ("paper-unet", 8192),
    ("smp:Unet?encoder_name=resnet18", 1024),
    ("timm:mobilenetv3_small_100", 2048),
)
_STEPS = 3


def run(name: str, side: int) -> dict[str, float]:
    """Some steps of one network, in this process."""
    import gigagrad as gg
    from bench.calibration import loss, subject

    network, image, target = subject(name, (side, side))
    engine = gg.compile(network.train(), loss, memory="4GiB")
    engine.plan(image, target)
    found = []
    for _ in range(_STEPS):
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        engine.backward(image, target)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
        found.append({"seconds": seconds, "faults": after.ru_minflt - before.ru_minflt})
    assert engine.last_run is not None
    return min(found, key=lambda step: step["seconds"]) | {"peak_mib": engine.last_run.peak_bytes / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--run", nargs=2, metavar=("NAME", "SIDE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(run(args.run[0], int(args.run[1]))))
        return
    rows: list[dict[str, Any]] = []
    for name, side in _CASES:
        best: dict[str, dict[str, float]] = {}
        for _ in range(args.rounds):
            for setting in ("0", "1"):
                done = subprocess.run(
                    [sys.executable, "-W", "ignore", __file__, "--run", name, str(side)],
                    env={**os.environ, "THP_MEM_ALLOC_ENABLE": setting},
                    capture_output=True,
                    text=True,
                    check=True,
                )
                found = json.loads(done.stdout.splitlines()[-1])
                if setting not in best or found["seconds"] < best[setting]["seconds"]:
                    best[setting] = found
        row = {"model": name, "side": side, "small_pages": best["0"], "huge_pages": best["1"]}
        row["time_ratio"] = round(best["1"]["seconds"] / best["0"]["seconds"], 3)
        rows.append(row)
        print(row, flush=True)
    print(json.dumps({"cases": rows}))


if __name__ == "__main__":
    main()
