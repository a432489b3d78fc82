"""Is a budget kept when the process turns out larger than planning foresaw? With and without fewer tiles at a time.

    python bench/unforeseen.py [--seed 1] [--case 49] [--budget 560] [--mib 0 25 45] [--rounds 3]

Kernels of another processor, a library's cache: what planning has not met cannot be in its prediction. Here so many MiB
are taken just as the second of two training steps begins, after its plan was made; the case is one of
`bench/budgets.py`. Runs where workers are held back in time and runs where they are not take turns, each in a process
of its own. Prints one JSON line last: peaks of the second step, from the operating system, and its seconds.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bench.budgets as budgets
import bench.budgets_case as budgets_case
from gigagrad.devices.cpu import HeapWatch
from gigagrad.execution.run import Run

_MIB = 2**20


def one(seed: int, case: int, budget: int, mib: int, *, holds: bool) -> None:
    begin, taken = Run.__enter__, list[mmap.mmap]()

    def entered(run: Run) -> Run:
        if taken:  # the second step
            for _ in range(mib):
                taken[0].write(bytes(_MIB))
        else:
            taken.append(mmap.mmap(-1, max(mib, 1) * _MIB))
        return begin(run)

    Run.__enter__ = entered  # type: ignore[method-assign]
    if not holds:
        HeapWatch.is_short = lambda *_: False  # type: ignore[method-assign]
    print(json.dumps(budgets_case.run(budgets.draw(seed, case) | {"budget": budget * _MIB})))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, default=49)
    parser.add_argument("--budget", type=int, default=560, help="MiB")
    parser.add_argument("--mib", type=int, nargs="+", default=[0, 25, 45], help="what the process grows by unforeseen")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=["holds", "does not"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.seed, args.case, args.budget, args.mib[0], holds=args.one == "holds")
        return
    rows = []
    fixed = [f"--seed={args.seed}", f"--case={args.case}", f"--budget={args.budget}"]
    for mib in args.mib:
        found: dict[str, list[dict[str, list[float]]]] = {"holds": [], "does not": []}
        for _ in range(args.rounds):
            for way, results in found.items():
                command = [sys.executable, __file__, *fixed, "--one", way, "--mib", str(mib)]
                environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
                done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
                results.append(json.loads(done.stdout.splitlines()[-1]))
        row: dict[str, object] = {"unforeseen_mib": mib}
        for way, results in found.items():
            key = "held" if way == "holds" else "not_held"
            row[f"{key}_mib"] = [round(r["measured"][-1] / _MIB) for r in results]
            row[f"{key}_seconds"] = median(r["seconds"][-1] for r in results)
        rows.append(row)
        print(row, flush=True)
    print(json.dumps({"budget_mib": args.budget, "rows": rows}))


if __name__ == "__main__":
    main()
