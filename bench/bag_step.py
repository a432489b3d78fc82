"""A step on bags of patches inside a budget: memory by the number of patches, and time beside plain autograd.

    python bench/bag_step.py [--patches 1000 10000 100000] [--memory 1.5GiB] [--side 64] [--chunks 64]
        [--model "mil:encoder=timm:vit_tiny_patch16_224&encoder.img_size=64&head=abmil&classes=2"]

For each number of patches one step in float32 in a process of its own, of bytes that are made when they are read: the
peak of the whole process, beside what was predicted and what plain autograd holds at one patch. Then, on so many
patches as plain autograd can hold (`--plain`), rounds in turn: the encoder alone by plain autograd, forward and
backward in batches of each of `--chunks`, of which the fastest counts; the engine inside the budget, where nothing is
saved and all is computed again; and the engine without a budget, which saves all. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad as gg
import gigagrad.models.torchvision_operators
from bench.deep_unet import child
from gigagrad.images.bag import Bag
from gigagrad.models import resolve

MODEL = "mil:encoder=timm:vit_tiny_patch16_224&encoder.img_size=64&head=abmil&classes=2"
DRAWN = 97
"""Patches that are drawn; others are these again."""


class Drawn(Bag):
    """Random patches, of which few are in memory."""

    def __init__(self, count: int, side: int) -> None:
        super().__init__(shape=(count, 3, side, side), dtype=np.dtype(np.uint8), name="drawn")
        self._drawn = np.random.default_rng(0).integers(0, 256, (DRAWN, 3, side, side), np.uint8)

    def _read_inside(self, start: int, stop: int) -> Any:
        return self._drawn[np.arange(start, stop) % DRAWN]


def step(args: argparse.Namespace, count: int) -> dict[str, Any]:
    """Measures one step of so many patches."""
    torch.manual_seed(0)
    engine = gg.compile(resolve(args.model), F.cross_entropy, memory=args.memory)
    engine.in_tiles = True
    bag, label = Drawn(count, args.side), torch.tensor([1])
    plan = engine.plan(bag, label)
    start = time.perf_counter()
    loss = engine.backward(bag, label)
    run = engine.last_run
    assert run is not None
    return {
        "patches": count,
        "seconds": round(time.perf_counter() - start, 2),
        "predicted_seconds": round(plan.predicted_seconds, 2),
        "peak_bytes": run.peak_bytes,
        "predicted_peak_bytes": run.predicted_peak_bytes,
        "budget_bytes": run.budget_bytes,
        "patches_at_a_time": plan.to_dict()["segments"][0]["tile"][0],
        "loss": loss.item(),
    }


def rounds(args: argparse.Namespace) -> dict[str, Any]:
    """Times the encoder by plain autograd and the engine with and without memory, in turns."""
    torch.manual_seed(0)
    model, label = resolve(args.model), torch.tensor([1])
    bag = torch.from_numpy(np.array(Drawn(args.plain, args.side).read(0, args.plain)))
    encoder = torch.nn.Sequential(model.get_submodule("preprocess"), model.get_submodule("network.encoder"))
    lean, ample = gg.compile(model, F.cross_entropy, memory=args.memory), gg.compile(model, F.cross_entropy)
    lean.in_tiles = True

    def plain(chunk: int) -> None:
        for part in bag.split(chunk):
            encoder(part).sum().backward()

    ways: dict[str, Any] = {f"plain, {chunk} at a time": lambda chunk=chunk: plain(chunk) for chunk in args.chunks}
    ways |= {"computed again": lambda: lean.backward(bag, label), "saved": lambda: ample.backward(bag, label)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
            model.zero_grad()
    best = {name: min(found[1:]) for name, found in seconds.items()}
    of_plain = min(value for name, value in best.items() if name.startswith("plain"))
    return {
        "patches": args.plain,
        "best_seconds": {name: round(value, 3) for name, value in best.items()},
        "computed_again_to_plain": round(best["computed again"] / of_plain, 3),
        "saved_to_plain": round(best["saved"] / of_plain, 3),
        "whole_at_once": ample.plan(bag, label).tile_count == 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patches", type=int, nargs="*", default=[1000, 10000, 100000])
    parser.add_argument("--memory", default="1.5GiB")
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--plain", type=int, default=512)
    parser.add_argument("--chunks", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.run:
        print(json.dumps(rounds(args) if args.run == "rounds" else step(args, int(args.run))))
        return
    found = []
    for count in args.patches:
        found.append(child(__file__, [*sys.argv[1:], "--run", str(count)]))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    timed = child(__file__, [*sys.argv[1:], "--run", "rounds"]) if args.rounds else None
    print(json.dumps({"model": args.model, "memory": args.memory, "steps": found, "time": timed}))


if __name__ == "__main__":
    main()
