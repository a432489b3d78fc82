"""Seconds per gigapixel of the paper's network by tile side, memory layout and tiles at a time, rounds interleaved.

    python bench/tile_shape.py [--sides 320 640 800 1280] [--rounds 3]

The image is noise in memory, so reading costs nothing. Prints one JSON line last: the best round of each setting and
its ratio to the shape that the planner chooses.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch

import gigagrad as gg
from gigagrad.losses import bce


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", type=int, nargs="+", default=[320, 480, 640, 800, 960, 1280, 1600])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=4800, help="side of the square image in pixels")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    image = rng.integers(0, 255, (args.size, args.size, 3), dtype=np.uint8).transpose(2, 0, 1)
    mask = rng.integers(0, 2, (1, args.size, args.size), dtype=np.uint8)
    model = gg.models.resolve("paper-unet")
    engines: dict[str, gg.Engine] = {}
    threads = torch.get_num_threads()
    settings = [("channels_last", threads), ("channels_last", 1), ("contiguous", threads)]
    for side in args.sides:
        for layout, workers in settings:
            engine = gg.compile(model, bce, tile=(side, side))
            choice = {"memory_format": layout, "workers": workers, "tiles": [[side, side]], "kept": []}
            engine.load_state_dict({"choices": {f"backward 1x3x{args.size}x{args.size}": choice}})
            engines[f"{side} {layout}, {workers} at a time"] = engine
    engines["planned"] = gg.compile(model, bce)
    plan = engines["planned"].plan(image, mask)
    best = dict.fromkeys(engines, float("inf"))
    for _ in range(args.rounds):
        for name, engine in engines.items():
            engine.plan(image, mask)
            start = time.perf_counter()
            engine.backward(image, mask)
            best[name] = min(best[name], (time.perf_counter() - start) / image.shape[1] / image.shape[2] * 1e9)
    for name, seconds in best.items():
        print(f"{name:36} {seconds:7.1f} s per gigapixel")
    result = {
        "planned_tile": list(plan.tile),
        "planned_layout": plan.memory_format,
        "planned_workers": plan.workers,
        "seconds_per_gigapixel": {name: round(seconds, 1) for name, seconds in best.items()},
        "ratio_to_planned": {name: round(seconds / best["planned"], 2) for name, seconds in best.items()},
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
