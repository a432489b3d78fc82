"""Which last-level cache should planning count on? Steps of plans for caches of different sizes, in turns.

    python bench/cache_size.py [--mib 8 32 260] [--rounds 2]

A guest on a large server is told of a cache of hundreds of MiB that its neighbours use, too. Three training steps of
each network run in a process of their own, planned without a machine profile; the fastest counts. Prints one JSON line
last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad as gg
import gigagrad.devices.machine as machine
from bench.calibration import Bytes, loss, subject

_CASES = (
    ("smp:Unet?encoder_name=resnet18", (1024, 1024)),
    ("timm:resnet34", (1024, 1536)),
    ("smp:FPN?encoder_name=resnet18", (1024, 1024)),
)


def one(name: str, size: tuple[int, int], mib: int) -> dict[str, object]:
    machine.cache_bytes = lambda: mib * 2**20
    network, image, target = subject(name, size)
    engine = gg.compile(Bytes(network).train(), loss)
    plan = engine.plan(image, target)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        engine.backward(image, target)
        seconds.append(time.perf_counter() - start)
    return {"seconds": round(min(seconds), 2), "tiles": plan.tile_count, "workers": plan.workers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[8, 32, 260])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(one(*_CASES[args.one], args.mib[0])))
        return
    rows = []
    with tempfile.TemporaryDirectory() as no_profile:
        environment = {**os.environ, "XDG_CACHE_HOME": no_profile, "OMP_WAIT_POLICY": "passive"}
        for number, (name, size) in enumerate(_CASES):
            found: dict[int, list[dict[str, float]]] = {mib: [] for mib in args.mib}
            for _ in range(args.rounds):
                for mib, results in found.items():
                    command = [sys.executable, __file__, "--one", str(number), "--mib", str(mib)]
                    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
                    results.append(json.loads(done.stdout.splitlines()[-1]))
            for mib, results in found.items():
                seconds = [result["seconds"] for result in results]
                rows.append({"model": name, "size": size, "cache_mib": mib, **results[0], "seconds": seconds})
                print(rows[-1], flush=True)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
