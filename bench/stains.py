"""Two stains of one tissue, trained end to end: what both together learn that neither shows alone.

    python bench/stains.py [--side 128] [--epochs 10] [--slides 8] [--seeds 1] [--memory 2GiB]

Made-up slides of nuclei: some are brown in the first stain, some, by chance of their own, in the second, which is at
half the resolution. What is to be found is brown in both. `multi-stain` learns it of a cohort with the columns `slide`
and `slide:ihc`. The same network, with as many weights, sees one of the stains twice for comparison. Printed are the
mean Dice of four slides that nobody trained on, for each seed, and what `predict` and `evaluate` say of the last run
with both. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad as gg
from gigagrad.prediction import Evaluation
from gigagrad.prediction.cohort_scores import evaluate_model

WHITE, BLUE, BROWN = (236, 230, 238), (120, 110, 190), (150, 100, 60)
STAINS = {"both": ("he", "ihc"), "first alone": ("he", "he"), "second alone": ("ihc", "ihc")}


def make_slide(folder: Path, name: str, side: int, seed: int) -> None:
    """Write both stains of a slide and the mask of nuclei that are brown in both."""
    draw = np.random.default_rng(seed)
    first, second = (np.full((side, side, 3), WHITE, float) for _ in range(2))
    mask = np.zeros((side, side), np.uint8)
    y, x = np.mgrid[:side, :side]
    for cell_y in range(16, side - 15, 32):
        for cell_x in range(16, side - 15, 32):
            (at_y, at_x), brown = draw.integers(-4, 5, 2), draw.random(2) < 0.5
            inside = (y - cell_y - at_y) ** 2 + (x - cell_x - at_x) ** 2 < draw.integers(6, 11) ** 2
            first[inside], second[inside] = BROWN if brown[0] else BLUE, BROWN if brown[1] else BLUE
            mask[inside] = brown.all()
    stains = {"he": first, "ihc": second.reshape(side // 2, 2, side // 2, 2, 3).mean((1, 3))}
    for stain, pixels in stains.items():
        noisy = (pixels + draw.normal(0, 12, pixels.shape)).clip(0, 255).astype(np.uint8)
        tifffile.imwrite(folder / f"{name}-{stain}.tif", noisy, tile=(128, 128), photometric="rgb")
    tifffile.imwrite(folder / f"{name}-mask.tif", mask, tile=(128, 128))


def trained(folder: Path, stains: tuple[str, str], args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train on these two columns and return the test slides' mean Dice."""
    splits = ["train"] * args.slides + ["val"] * 2 + ["test"] * 4
    rows = [
        f"{number}-{stains[0]}.tif,{number}-{stains[1]}.tif,{number}-mask.tif,{split},s{number}"
        for number, split in enumerate(splits)
    ]
    cohort, run = folder / f"{'-'.join(stains)}.csv", folder / f"run-{'-'.join(stains)}-{seed}"
    cohort.write_text("\n".join(["slide,slide:ihc,mask,split,name", *rows]))
    result = gg.fit(
        {
            "slides": cohort,
            "model": "multi-stain?width=4",
            "loss": "bce_dice",
            "epochs": args.epochs,
            "learning_rate": 0.01,
            "seed": seed,
            "memory": args.memory,
            "out": run,
        }
    )
    return {"dice": round(float(np.mean(list(result.scores.values()))), 4), "run": run, "cohort": cohort}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--slides", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--memory", default="2GiB")
    args = parser.parse_args()
    begin, dice = time.perf_counter(), dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for number in range(args.slides + 6):
            make_slide(folder, str(number), args.side, number)
        for name, stains in STAINS.items():
            runs = [trained(folder, stains, args, seed) for seed in range(args.seeds)]
            dice[name] = [run["dice"] for run in runs]
            print(name, dice[name], flush=True)
            if name == "both":
                run, cohort = runs[-1]["run"], runs[-1]["cohort"]
                made = gg.predict({"run": run, "slides": [cohort], "split": "test", "out": folder / "predictions"})
                scored = evaluate_model(run, cohort, split="test")
                assert isinstance(scored, Evaluation)
                told = {
                    "predict": [result.dice for result in made],
                    "evaluate": [score.dice for score in scored.scores],
                }
    print(
        json.dumps(
            {
                "side": args.side,
                "epochs": args.epochs,
                "slides": args.slides,
                "dice": dice,
                "last": told,
                "seconds": round(time.perf_counter() - begin, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
