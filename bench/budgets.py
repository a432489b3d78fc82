"""Is a budget kept, and is the prediction tight? Random (network, size, budget) cases, each in processes of its own.

    python bench/budgets.py [--cases 300] [--seed 0] [--out budgets.jsonl] [--jobs 2] [--ranks 1]

A case draws a network, an image and how its budget is set: none at all; or a multiple of the smallest budget, which a
first process is told when it is refused 64 MiB, so that a multiple of 1 checks the refusal's own advice. Three training
steps with Adam run in a fresh interpreter (bench/budgets_case.py), half of them with scratch files. Lines already in
`--out` are not run again.

Measured is the highest resident memory of the whole process, from the operating system, over all steps; predicted is
what the plan said before the first one. With several `--ranks`, processes compute each image together over gloo, and
the highest of any of them counts. Prints one JSON line last and exits with 1 where a budget was exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.ranks.started import variables_of

_REFUSED_BYTES = 64 * 2**20
"""No process that has imported PyTorch is as small as this."""
_TIGHT = 0.8
"""A prediction is tight where at least this share of it was used."""
_SECONDS = 300


@dataclass(frozen=True)
class Network:
    """What to draw: the most pixels that keep a case to some seconds, and whether its target is a class label."""

    name: str
    megapixels: float
    label: bool = False
    weight: int = 2
    fixed: int | None = None
    """The only side it takes, in pixels."""
    step: int = 1
    """Sides are multiples of this."""
    trainable: bool = True
    """Whether its norms can be in training mode: one that sees a single pixel cannot."""


NETWORKS = (
    Network("paper-unet", 16.0, weight=5),
    Network("unet-batch?8", 1.5, weight=4),
    Network("unet-group?8", 1.5, weight=4),
    Network("unet-batch?24", 0.4),
    Network("multi-stain?stains=2&classes=1", 0.3),
    Network("smp:Unet?encoder_name=resnet18", 0.6, step=32),
    Network("smp:Unet?encoder_name=resnet34", 0.5, step=32),
    Network("smp:FPN?encoder_name=resnet18", 0.5, step=32),
    Network("smp:FPN?encoder_name=efficientnet-b0", 0.3, step=32),
    Network("smp:Unet?encoder_name=efficientnet-b0", 0.3, step=32),
    Network("smp:DeepLabV3Plus?encoder_name=resnet34", 0.5, step=32, trainable=False),
    Network("timm:resnet18", 1.0, label=True),
    Network("timm:resnet50", 0.4, label=True),
    Network("timm:convnext_tiny", 0.25, label=True),
    Network("timm:efficientnet_b0", 0.5, label=True),
    Network("timm:vit_tiny_patch16_224?dynamic_img_size=true", 0.2, label=True, step=16),
    Network("timm:vit_base_patch16_224", 0.1, label=True, weight=1, fixed=224),
    Network("timm:swin_tiny_patch4_window7_224", 0.1, label=True, weight=1, fixed=224),
)


def draw(seed: int, index: int) -> dict[str, Any]:
    """Case `index` of the campaign: everything but the files and the bytes of its budget."""
    rng = random.Random(f"{seed} {index}")
    network = rng.choices(NETWORKS, [n.weight for n in NETWORKS])[0]
    if network.fixed is not None:
        height = width = network.fixed
    else:
        area = network.megapixels * 1e6 * rng.choice((0.1, 0.3, 0.6, 1.0))
        shape = rng.uniform(0.5, 2.0)
        height, width = (min(max(round(side), 192), 4096) for side in ((area * shape) ** 0.5, (area / shape) ** 0.5))
        height, width = (side - side % network.step for side in (height, width))
    return {
        "index": index,
        "model": network.name,
        "label": network.label,
        "height": height,
        "width": width,
        "train": rng.random() < 0.75 and network.trainable,
        "image": rng.choice(("bytes", "bytes", "floats", "tiff")),
        "precision": rng.choice((None, None, None, "bfloat16")),
        "threads": rng.choice((1, 2, 2)),
        # Of the smallest budget; None: no budget.
        "multiple": rng.choice((None, 1.0, 1.0, rng.uniform(1.0, 1.15), rng.uniform(1.15, 3.0))),
        "scratch": rng.random() < 0.5,
    }


def attempt(case: dict[str, Any], budget: int | None) -> dict[str, Any]:
    """One process with this budget, or several with this budget each."""
    command = [sys.executable, str(Path(__file__).with_name("budgets_case.py")), json.dumps(case | {"budget": budget})]
    # On a busy machine spinning threads take the time that others need; memory is the same.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    variables = variables_of(case["ranks"]) if case["ranks"] > 1 else [{}]
    with ThreadPoolExecutor(case["ranks"]) as pool:
        runs = pool.map(lambda variables: _process(command, environment | variables), variables)
        first, *others = runs
    if "measured" in first and all("measured" in other for other in others):
        first["measured"] = [max(step) for step in zip(*(run["measured"] for run in (first, *others)), strict=True)]
    failed = next((run for run in (first, *others) if "failed" in run), {})
    return {"budget": budget, **first, **failed}


def _process(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return {"failed": f"longer than {_SECONDS} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    file = folder / f"{case['index']}.tif"
    if case["image"] == "tiff":
        pixels = np.random.default_rng(case["index"]).integers(0, 256, (case["height"], case["width"], 3), np.uint8)
        tifffile.imwrite(file, pixels, tile=(256, 256), compression="deflate", photometric="rgb")
        case = case | {"file": str(file)}
    case = case | {"folder": str(folder) if case["scratch"] else None}
    attempts = []
    budget = None
    if case["multiple"] is not None:
        attempts.append(attempt(case, _REFUSED_BYTES))
        if "smallest" in attempts[0]:
            budget = int(attempts[0]["smallest"] * case["multiple"])
    if case["multiple"] is None or budget is not None:
        attempts.append(attempt(case, budget))
    file.unlink(missing_ok=True)
    return {key: value for key, value in case.items() if key not in ("file", "folder")} | {"attempts": attempts}


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    last = [record["attempts"][-1] for record in records]
    ran = [a for a in last if "measured" in a]
    ratios = [max(a["measured"]) / a["predicted"][0] for a in ran]
    bounded = [a for a in ran if a["budget"] is not None]
    refusals = [r for r in records if any("refused" in a for a in r["attempts"])]
    worked = [r for r in refusals if r["multiple"] == 1.0 and "measured" in r["attempts"][-1]]
    kept = [r for r in worked if max(r["attempts"][-1]["measured"]) <= r["attempts"][-1]["budget"]]
    return {
        "cases": len(records),
        "ran": len(ran),
        "with_files": sum(a["scratch_bytes"] > 0 for a in ran),
        "refused": len(refusals),
        "refused_twice": sum("refused" in r["attempts"][-1] and len(r["attempts"]) > 1 for r in records),
        "failed": sum("failed" in a for a in last),
        "over_budget": sum(max(a["measured"]) > a["budget"] for a in bounded),
        "over_prediction": sum(ratio > 1 for ratio in ratios),
        "share_between_0.8_and_1": round(sum(_TIGHT <= ratio <= 1 for ratio in ratios) / max(len(ratios), 1), 3),
        "lowest_ratio": round(min(ratios, default=0.0), 3),
        "highest_ratio": round(max(ratios, default=0.0), 3),
        "median_ratio": round(sorted(ratios)[len(ratios) // 2], 3) if ratios else 0.0,
        "smallest_budgets_tried": sum(r["multiple"] == 1.0 for r in refusals),
        "smallest_budgets_that_worked": len(kept),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("budgets.jsonl"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    records = {}
    if args.out.exists():
        records = {r["index"]: r for r in map(json.loads, args.out.read_text().splitlines())}
    drawn = (draw(args.seed, index) for index in range(args.cases) if index not in records)
    due = [case | {"ranks": args.ranks} for case in drawn]
    with (
        tempfile.TemporaryDirectory() as folder,
        args.out.open("a") as out,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        for future in as_completed([pool.submit(run_case, case, Path(folder)) for case in due]):
            record = future.result()
            records[record["index"]] = record
            out.write(json.dumps(record) + "\n")
            out.flush()
            print(describe(record), flush=True)
    line = summarise([records[index] for index in sorted(records) if index < args.cases])
    print(json.dumps({"seed": args.seed, "ranks": args.ranks, **line}))
    sys.exit(line["over_budget"] > 0)


def describe(record: dict[str, Any]) -> str:
    last = record["attempts"][-1]
    what = f"{record['index']:4} {record['model'][:44]:44} {record['height']:4} x {record['width']:4}"
    if "measured" not in last:
        return f"{what}  {last.get('refused') or last.get('failed')}"
    measured, predicted, budget = max(last["measured"]), last["predicted"][0], last["budget"]
    limit = "none" if budget is None else f"{budget / 2**20:.0f}"
    over = "  OVER BUDGET" if budget is not None and measured > budget else "  over" if measured > predicted else ""
    return (
        f"{what}  {measured / 2**20:5.0f} of {predicted / 2**20:5.0f} MiB, budget {limit:>5}, "
        f"ratio {measured / predicted:.2f}{over}"
    )


if __name__ == "__main__":
    main()
