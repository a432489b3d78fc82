"""The long exactness campaign: generated networks in float64 against whole-image autograd.

    python bench/exactness.py [--cases 2000] [--first 0] [--device cuda]

The cases are those of tests/exactness/generated.py: even seeds in the memory layout that the engine chooses, which in
float64 is contiguous, odd ones in channels_last. The whole image is always the CPU's. Prints every case above the
tolerance and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.exactness.comparison import compare
from tests.exactness.generated import make_case

TOLERANCE = 1e-11


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    worst_loss = worst_gradient = 0.0
    above, tiles = 0, 0
    start = time.perf_counter()
    for seed in range(args.first, args.first + args.cases):
        case = make_case(seed)
        layout = "channels_last" if seed % 2 else None
        inputs = case.model, case.loss, case.image, case.target
        result = compare(*inputs, tile=case.tile, device=args.device, layout=layout)
        worst_loss = max(worst_loss, result.loss_error)
        worst_gradient = max(worst_gradient, result.gradient_error)
        tiles += result.plan.tile_count
        if max(result.loss_error, result.gradient_error) > TOLERANCE:
            above += 1
            print(f"{result}\n{case.description}", flush=True)
    line = {
        "cases": args.cases,
        "device": args.device,
        "first_seed": args.first,
        "above_tolerance": above,
        "tolerance": TOLERANCE,
        "worst_loss_error": worst_loss,
        "worst_gradient_error": worst_gradient,
        "tiles": tiles,
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
