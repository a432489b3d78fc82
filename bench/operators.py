"""Random uses of single operators on images of every dtype and size, against PyTorch: how many differ.

Prints what is wrong, and one JSON line last. `python bench/operators.py --cases 1000`.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.exactness.generated_operators import make_case, outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--cases", type=int, default=300)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    counted = Counter[str]()
    for seed in range(args.first, args.first + args.cases):
        case = make_case(seed)
        found = outcome(case)
        kind = (
            found
            if found in ("same", "both refuse", "more", "no image")
            else "refused"
            if found.startswith("refused")
            else "wrong"
        )
        counted[kind] += 1
        if kind in ("refused", "wrong"):
            print(seed, case, found, flush=True)
    print(json.dumps({"first": args.first, "cases": args.cases, **counted}))


if __name__ == "__main__":
    main()
