"""What the cheapest mix of machines saves against the best single kind, for a cohort of slides of many sizes.

    python bench/mix.py [--slides 300] [--model MODEL] [--deadline 24h] [--out DIR]

Makes a cohort of empty Zarr slides, whose pixels are spread log-normally around half a gigapixel, and a machines.yaml,
and runs `gigagrad plan --cohort`. Prices are examples; times are plans by data sheets and typical rates.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml
import zarr

from gigagrad.cli import main

MACHINES = [
    {"name": "cpu-32", "price": 1.4, "memory": "100GiB", "cores": 32, "most": 8},
    {"name": "l4", "price": 0.7, "memory": "20GiB", "device": "cuda", "card": "L4", "most": 8},
    {"name": "h100", "price": 11.0, "memory": "70GiB", "device": "cuda", "card": "H100", "most": 2},
]


def make_cohort(folder: Path, count: int) -> Path:
    """Write a cohort of `count` slides, of 12 sizes at most, each the folder of an array that holds no chunk."""
    generator = np.random.default_rng(0)
    pixels = np.exp(generator.normal(np.log(5e8), 1.0, count)).clip(2e6, 4e9)
    rows = ["slide"]
    for i, size in enumerate(2 ** np.round(np.log2(pixels))):
        height = round((size / 2) ** 0.5 / 64) * 64
        zarr.create_array(
            folder / f"{i:03d}.zarr", shape=(3, height, 2 * height), chunks=(3, 512, 512), dtype="uint8", fill_value=255
        )
        rows.append(f"{i:03d}.zarr")
    (folder / "cohort.csv").write_text("\n".join(rows) + "\n")
    (folder / "machines.yaml").write_text(yaml.safe_dump(MACHINES, sort_keys=False))
    return folder / "cohort.csv"


def run() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slides", type=int, default=300)
    parser.add_argument("--model", default="smp:Unet?encoder_name=resnet34&classes=1")
    parser.add_argument("--deadline", default="24h")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = args.out or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        cohort = make_cohort(place, args.slides)
        command = ["plan", "--model", args.model, "--cohort", str(cohort), "--machines", str(place / "machines.yaml")]
        start, text = time.perf_counter(), io.StringIO()
        with contextlib.redirect_stdout(text):
            assert main([*command, "--deadline", args.deadline, "--json"]) == 0
        found = json.loads(text.getvalue())
    print(json.dumps({"slides": args.slides, "model": args.model, "seconds": time.perf_counter() - start, **found}))


if __name__ == "__main__":
    run()
