"""A training run at full size: synthetic 16000 x 64000 slides, the paper's network and settings, its curve.

    python bench/gigapixel_training.py --out DIR [--slides 4] [--epochs 12] [--memory 1GiB]

Makes the cohort (about half a minute and 160 MB a slide; an existing one is used), labels it by the recipe, trains with
Adam 1e-3, batch 1 and binary cross-entropy, and scores the test slides. An interrupted run continues. Prints one JSON
line last with the loss of every step and epoch and the Dice of the test slides.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

from gigagrad.images import make_cohort
from gigagrad.terminal import Terminal
from gigagrad.training import FitConfig, fit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--slides", type=int, default=4)
    parser.add_argument("--height", type=int, default=16000)
    parser.add_argument("--width", type=int, default=64000)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--memory", default="1GiB")
    args = parser.parse_args()
    made = args.out / "cohort" / "cohort.csv"
    if not made.exists():
        make_cohort(made.parent, args.slides, height=args.height, width=args.width, overwrite=True)
    cohort = made.with_name("by_recipe.csv")
    with made.open() as source, cohort.open("w", newline="") as target:
        writer = csv.writer(target)
        writer.writerow(["slide", "mask", "split"])
        writer.writerows([row["slide"], "", row["split"]] for row in csv.DictReader(source))
    config = FitConfig(
        slides=str(cohort),
        out=str(args.out / "run"),
        memory=args.memory,
        epochs=args.epochs,
        learning_rate=args.learning_rate,
    )
    with Terminal() as terminal:
        result = fit(config, (terminal,))
    records = [json.loads(line) for line in (args.out / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics = [record for record in records if record["event"] == "metrics"]
    steps = [record for record in records if record["event"] == "step" and record["phase"] == "backward"]
    line = {
        "pixels": args.height * args.width,
        "steps": len(steps),
        "train_loss": [round(m["values"]["loss"], 5) for m in metrics if m["split"] == "train"],
        "val_loss": [round(m["values"]["loss"], 5) for m in metrics if m["split"] == "val"],
        "seconds_per_step": sorted(round(s["seconds"], 1) for s in steps)[len(steps) // 2],
        "peak_bytes": max(s["peak_bytes"] for s in steps),
        "predicted_peak_bytes": max(s["predicted_peak_bytes"] for s in steps),
        "test_dice_mean": result.mean,
        "test_dice_sd": result.sd,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
