"""Would another allocator of memory serve as well as what is set of glibc's? Peaks and times of the same steps.

    python bench/allocators.py [--rounds 2]

Every step in a process of its own: the paper's network on a large slide and a deep U-Net under a budget, with
glibc as gigagrad sets it, and with jemalloc and mimalloc preloaded (then gigagrad's settings of glibc do nothing).
Rounds are interleaved. Measured is the highest resident memory of the process, told as a share of what the plan said.
Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ALLOCATORS = {"glibc": None, "jemalloc": "libjemalloc.so.2", "mimalloc": "libmimalloc.so.2"}
_EAGER = {"jemalloc": {"MALLOC_CONF": "dirty_decay_ms:0,muzzy_decay_ms:0"}, "mimalloc": {"MIMALLOC_PURGE_DELAY": "0"}}
"""What makes them give freed pages back at once."""
CASES = {
    "paper-unet": ("paper-unet", 8192, "1GiB"),
    "unet-resnet34": ("smp:Unet?encoder_name=resnet34", 1024, "1536MiB"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(step(*CASES[args.one])))
        return
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for case in CASES:
            for name in ALLOCATORS:
                for eager in (False, True) if name in _EAGER else (False,):
                    key = f"{case}, {name}{', eager' if eager else ''}"
                    found.setdefault(key, []).append(in_process(case, name, eager=eager))
                    print(key, found[key][-1], flush=True)
    print(json.dumps({key: summary(runs) for key, runs in found.items()}))


def in_process(case: str, name: str, *, eager: bool) -> dict[str, Any]:
    library = ALLOCATORS[name]
    environment = dict(os.environ)
    if library is not None:
        if ctypes.util.find_library(name) is None:
            raise SystemExit(f"{library} is not installed")
        environment |= {"LD_PRELOAD": library, **(_EAGER[name] if eager else {})}
    command = [sys.executable, __file__, "--one", case]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def step(model: str, side: int, memory: str) -> dict[str, Any]:
    """Two steps; the peak is that of both, the seconds are the second's."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import time

    import numpy as np

    import gigagrad as gg
    import gigagrad.models.torchvision_operators
    from gigagrad.devices.heap import peak_resident_bytes
    from gigagrad.losses import named_loss
    from gigagrad.models import resolve
    from gigagrad.units import parse_bytes

    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (3, side, side), dtype=np.uint8)
    target = rng.integers(0, 2, (1, side, side), dtype=np.uint8)
    engine = gg.compile(resolve(model).train(), named_loss("bce").function, memory=memory)
    plan = engine.plan(image, target)
    for _ in range(2):
        start = time.perf_counter()
        engine.backward(image, target)
        seconds = time.perf_counter() - start
    peak = peak_resident_bytes()
    return {
        "seconds": round(seconds, 2),
        "peak_mib": peak >> 20,
        "of_predicted": round(peak / plan.predicted_peak_bytes, 3),
        "of_budget": round(peak / parse_bytes(memory), 3),
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "seconds": min(run["seconds"] for run in runs),
        **{key: max(run[key] for run in runs) for key in ("peak_mib", "of_predicted", "of_budget")},
    }


if __name__ == "__main__":
    main()
