"""Random networks by many ranks in one process: the bits of one rank, and the bytes that the plan names.

    python bench/virtual_ranks.py [--cases 1000] [--first 0] [--most 64]

The cases are those of tests/exactness/generated.py, each by one rank and by three random numbers of ranks up to
`--most`, in threads (gigagrad.ranks.run_threaded). Compared are losses, gradients and buffers, bit for bit on every
rank, and the bytes that were sent with what the plan says. Prints every case that differs, now and then how far it is,
and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gigagrad.plans.emit import shared_by
from gigagrad.ranks import SingleRank, run_threaded
from tests.exactness.generated import make_case
from tests.execution.by_ranks import outcome, prepared_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--most", type=int, default=64, help="ranks")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    differing = other_bytes = runs = sent = segments = 0
    largest = 0
    start = time.perf_counter()
    for seed in range(args.first, args.first + args.cases):
        case = make_case(seed)
        run = prepared_for(case.model, case.loss, case.image, case.target, tile=case.tile)
        alone, _ = outcome(run, SingleRank())
        segments += len(run.prepared.segments)
        draw = random.Random(seed)
        for count in draw.sample(range(2, args.most + 1), 3):
            found = run_threaded(count, partial(outcome, run))
            runs, largest = runs + 1, max(largest, count)
            sent += sum(nbytes for _, nbytes in found)
            if any(bits != alone for bits, _ in found):
                differing += 1
                print(f"seed {seed} by {count} ranks differs\n{case.description}", flush=True)
            planned = shared_by(run.prepared.problem, run.prepared.plan, count).ranks
            assert planned is not None
            if planned.sent_bytes != sum(nbytes for _, nbytes in found):
                other_bytes += 1
                print(
                    f"seed {seed} by {count} ranks sends other bytes than the {planned.sent_bytes} planned", flush=True
                )
        if (seed + 1) % 25 == 0:
            print(f"up to seed {seed}: {runs} runs, {differing} differ", flush=True)
    line = {
        "cases": args.cases,
        "first_seed": args.first,
        "runs": runs,
        "most_ranks": largest,
        "segments": segments,
        "differing": differing,
        "other_bytes_than_planned": other_bytes,
        "sent_bytes": sent,
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
