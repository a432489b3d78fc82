"""A step on bags of patches inside a budget: memory by the number of patches, and time beside plain autograd.

    python bench/bag_step.py [--patches 1000 10000 100000] [--memory 1.5GiB] [--side 64] [--chunks 64]
        [--model "mil:encoder=timm:vit_tiny_patch16_224&encoder.img_size=64&head=abmil&classes=2"]

For each number of patches one step in float32 in a process of its own, of bytes that are made when they are read: the
peak of the whole process, beside what was predicted and what plain autograd holds at one patch. Then, on so many
patches as plain autograd can hold (`--plain`), step after step in processes of their own, in turns: the encoder alone
by plain autograd, forward and backward in batches of each of `--chunks`, of which the fastest counts; the engine inside
the budget, where nothing is saved and all is computed again; and the engine without a budget, which saves all. Prints
one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from functools import partial
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
_TURNS = 2
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


def timed_by_itself(args: argparse.Namespace) -> dict[str, float]:
    """Best seconds of some steps in a row of one way: plain autograd in batches of each size, or the engine."""
    torch.manual_seed(0)
    model, label = resolve(args.model), torch.tensor([1])
    bag = torch.from_numpy(np.array(Drawn(args.plain, args.side).read(0, args.plain)))
    encoder = torch.nn.Sequential(model.get_submodule("preprocess"), model.get_submodule("network.encoder"))
    engine = gg.compile(model, F.cross_entropy, memory=args.memory if args.run == "computed again" else None)
    engine.in_tiles = args.run == "computed again"

    def plain(chunk: int) -> None:
        for part in bag.split(chunk):
            encoder(part).sum().backward()

    ways: dict[str, Any] = {args.run: lambda: engine.backward(bag, label)}
    if args.run == "plain":
        ways = {f"plain, {chunk} at a time": partial(plain, chunk) for chunk in args.chunks}
    found = {}
    for name, run in ways.items():
        seconds = []
        for _ in range(args.rounds + 1):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
            model.zero_grad()
        found[name] = min(seconds[1:])
    return found


def compared(args: argparse.Namespace) -> dict[str, Any]:
    """Times the encoder by plain autograd and the engine with and without memory: each in processes of its own, as they
    would find what others leave of the heap, and in turns.
    """
    found: dict[str, list[float]] = {}
    for _ in range(_TURNS):
        for way in ("plain", "computed again", "saved"):
            for name, seconds in child(__file__, [*sys.argv[1:], "--run", way]).items():
                found.setdefault(name, []).append(seconds)
    best = {name: min(seconds) for name, seconds in found.items()}
    of_plain = min(value for name, value in best.items() if name.startswith("plain"))
    return {
        "patches": args.plain,
        "best_seconds": {name: round(value, 3) for name, value in best.items()},
        "computed_again_to_plain": round(best["computed again"] / of_plain, 3),
        "saved_to_plain": round(best["saved"] / of_plain, 3),
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
        print(json.dumps(step(args, int(args.run)) if args.run.isdigit() else timed_by_itself(args)))
        return
    found = []
    for count in args.patches:
        found.append(child(__file__, [*sys.argv[1:], "--run", str(count)]))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    timed = compared(args) if args.rounds else None
    print(json.dumps({"model": args.model, "memory": args.memory, "steps": found, "time": timed}))


if __name__ == "__main__":
    main()
