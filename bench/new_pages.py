"""What new memory costs, by how long it has been free: one reason why a step takes longer in one hour than in another.

    python bench/new_pages.py [--mib 256] [--waits 0 0.5 1 2 3 4 6] [--rounds 3]

A block is taken, written to once and freed, again and again, by one thread, after so many seconds without it. A virtual
machine may hand memory that has been free for some seconds back to its host (free page reporting), and the host has to
find it again. Prints one JSON line last: processor seconds per GB, the system's part of them, medians.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from statistics import median

import torch


def touched(nbytes: int) -> tuple[float, float]:
    """Seconds of the processor, and the system's part, to take and write a new block."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    torch.empty(nbytes, dtype=torch.uint8).fill_(1)
    after = resource.getrusage(resource.RUSAGE_SELF)
    system = after.ru_stime - before.ru_stime
    return system + after.ru_utime - before.ru_utime, system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--waits", type=float, nargs="+", default=[0, 0.5, 1, 2, 3, 4, 6], help="seconds")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    nbytes = args.mib * 2**20
    found: dict[float, list[tuple[float, float]]] = {wait: [] for wait in args.waits}
    touched(nbytes)
    for _ in range(args.rounds):
        for wait, seconds in found.items():
            time.sleep(wait)
            seconds.append(touched(nbytes))
    rows = []
    for wait, seconds in found.items():
        total, system = (median(part) / nbytes * 1e9 for part in zip(*seconds, strict=True))
        rows.append({"seconds_free": wait, "seconds_per_gb": round(total, 2), "of_the_system": round(system, 2)})
        print(rows[-1])
    print(json.dumps({"mib": args.mib, "rows": rows}))


if __name__ == "__main__":
    main()
