"""Predicted against measured peak of the whole process, over networks and tile sizes, each in a process of its own.

    python bench/tile_memory.py [--quick]

Every case runs one backward over a noise image of four tiles. Prints a table and one JSON line last with the range of
measured / predicted: a plan keeps its promise where the ratio is at most 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

CASES = [
    ("paper-unet", 320),
    ("paper-unet", 640),
    ("paper-unet", 1280),
    ("paper-unet", 2400),
    ("smp:Unet?encoder_name=resnet18", 256),
    ("smp:Unet?encoder_name=resnet34", 512),
    ("smp:Unet?encoder_name=resnet34", 1024),
    ("smp:UnetPlusPlus?encoder_name=resnet18", 256),
    ("smp:DeepLabV3Plus?encoder_name=mobilenet_v2", 384),
    ("smp:FPN?encoder_name=mobilenet_v2&decoder_segmentation_channels=32", 384),
]


def one(model_name: str, side: int) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import numpy as np

    import gigagrad as gg
    import gigagrad.models.torchvision_operators
    from gigagrad.losses import bce
    from gigagrad.plans import ledger

    model = gg.models.resolve(model_name).eval()
    rng = np.random.default_rng(0)
    image = rng.integers(0, 255, (3, 2 * side, 2 * side), dtype=np.uint8)
    mask = rng.integers(0, 2, (1, 2 * side, 2 * side), dtype=np.uint8)
    engine = gg.compile(model, bce, tile=(side, side))
    plan = engine.plan(image, mask)
    for _ in range(2):
        engine.backward(image, mask)
    assert engine.last_run is not None
    measured = engine.last_run.peak_bytes
    print(json.dumps({"measured": measured, "predicted": plan.predicted_peak_bytes, "base": plan.most(ledger.PROCESS)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first three cases only")
    parser.add_argument("--case", nargs=2, metavar=("MODEL", "SIDE"), help="run one case in this process")
    args = parser.parse_args()
    if args.case:
        one(args.case[0], int(args.case[1]))
        return
    ratios = []
    for model, side in CASES[:3] if args.quick else CASES:
        done = subprocess.run(
            [sys.executable, __file__, "--case", model, str(side)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(f"{model:60} {side:5}  {done.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        result = json.loads(done.stdout.strip().splitlines()[-1])
        ratios.append(result["measured"] / result["predicted"])
        above = [(result[k] - result["base"]) / 2**20 for k in ("measured", "predicted")]
        print(
            f"{model:60} {side:5}  above base {above[0]:7.0f} of {above[1]:7.0f} MiB  ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(json.dumps({"cases": len(ratios), "lowest_ratio": min(ratios), "highest_ratio": max(ratios)}))


if __name__ == "__main__":
    main()
