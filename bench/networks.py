"""The campaign over random networks: training steps in float64 against whole-image autograd.

    python bench/networks.py [--networks 1000] [--seed 0] [--log runs/networks.jsonl]

The networks come from the generator in tests/exactness/networks/. Prints the recipe of every failure, which is Python
and can be pasted into tests/exactness/test_networks.py, and one JSON line last. With `--log` every network is written
down as soon as it is done, and a campaign that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.exactness.networks import compare_forward, compare_step, draw_recipe, ill_conditioned

TOLERANCE = 1e-9


def run(seed: int, number: int) -> dict[str, Any]:
    """What one network of the campaign came to: its errors, or why there are none."""
    start = time.perf_counter()
    recipe = draw_recipe(random.Random(f"{seed}/{number}").randint)
    record: dict[str, Any] = {"number": number, "verdict": "skipped"}
    if recipe is None:
        return record
    record |= {"recipe": repr(recipe), "covered": sorted(recipe.covered())}
    try:
        outcome = compare_step(recipe)
        record |= {
            "loss_error": outcome.loss_error,
            "gradient_error": outcome.gradient_error,
            "buffer_error": outcome.buffer_error,
            "worst": f"{outcome.worst_parameter} {outcome.worst_buffer}".strip(),
            "tiles": outcome.tile_count,
        }
        # A prediction costs a capture of its own; every tenth network is asked for one.
        record["forward_error"] = compare_forward(recipe) if number % 10 == 0 else 0.0
    except Exception as error:
        record |= {"verdict": "raised", "error": f"{type(error).__name__}: {error}"}
    else:
        worst = max(outcome.worst, record["forward_error"])
        record["verdict"] = "exact" if worst <= TOLERANCE else "wrong"
        if record["verdict"] == "wrong" and ill_conditioned(recipe, worst):
            record["verdict"] = "ill-conditioned"
    return record | {"seconds": round(time.perf_counter() - start, 3)}


def summary(records: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    verdicts = Counter(record["verdict"] for record in records)
    compared = [record for record in records if record["verdict"] in ("exact", "wrong")]

    def worst(key: str) -> float:
        return max((record[key] for record in compared), default=math.nan)

    covered = Counter(name for record in compared for name in record["covered"])
    return {
        "networks": len(records),
        "seed": seed,
        "tolerance": TOLERANCE,
        **{verdict: verdicts[verdict] for verdict in ("exact", "wrong", "raised", "ill-conditioned", "skipped")},
        "tiles": sum(record["tiles"] for record in compared),
        "worst_loss_error": worst("loss_error"),
        "worst_gradient_error": worst("gradient_error"),
        "worst_buffer_error": worst("buffer_error"),
        "worst_forward_error": worst("forward_error"),
        "covered": len(covered),
        "operators": dict(sorted(covered.items())),
        "seconds": round(sum(record.get("seconds", 0.0) for record in records), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="a JSONL file to write to and to go on from")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    if args.log is not None and args.log.exists():
        earlier = [json.loads(line) for line in args.log.read_text().splitlines()]
        records = [record for record in earlier if record["seed"] == args.seed and record["number"] < args.networks]
    done = {record["number"] for record in records}
    for number in range(args.networks):
        if number in done:
            continue
        record = run(args.seed, number) | {"seed": args.seed}
        records.append(record)
        if args.log is not None:
            args.log.parent.mkdir(parents=True, exist_ok=True)
            with args.log.open("a") as log:
                log.write(json.dumps(record) + "\n")
        if record["verdict"] in ("wrong", "raised"):
            print(json.dumps({k: v for k, v in record.items() if k not in ("recipe", "covered")}), flush=True)
            print(record["recipe"], flush=True)
    print(json.dumps(summary(records, args.seed)))


if __name__ == "__main__":
    main()
