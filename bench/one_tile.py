"""One tile that all threads share, or a tile for each thread? The fastest plan of both kinds, in turns.

    python bench/one_tile.py [--networks paper-unet timm:resnet18 ...] [--rounds 3]

Each network in training mode at its size and budget, in float32 on random bytes. Both plans are the fastest of their
kind by the cost model; an engine each runs one step, then steps in turns, of which the fastest counts. Prints one JSON
line last: by network, tiles and seconds of both kinds, and the ratio of one tile to several.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CASES = {
    "paper-unet": ((4096, 4096), "1GiB"),
    "timm:efficientnet_b0": ((640, 640), "1500MiB"),
    "timm:convnext_tiny": ((480, 480), "2GiB"),
    "timm:resnet18": ((2048, 2048), "2GiB"),
    "smp:Unet?encoder_name=mobilenet_v2": ((512, 640), "1GiB"),
    "smp:Unet?encoder_name=resnet34": ((1024, 1024), "4GiB"),
}
USELESS: tuple[dict[str, Any], ...] = ({"side_by_side_efficiency": 0.0}, {"shared_efficiency": 0.0})
"""What makes plans of one tile at a time, and of several."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found = {}
    for name in args.networks:
        found[name] = compared(name, *CASES[name], args.rounds)
        print(name, json.dumps(found[name]), flush=True)
    print(json.dumps(found))


def compared(name: str, size: tuple[int, int], memory: str, rounds: int) -> dict[str, Any]:
    import gigagrad as gg
    import gigagrad.models.torchvision_operators
    from bench.calibration import loss, subject
    from gigagrad.devices import Machine

    network, image, target = subject(name, size)
    network.train()
    chosen = gg.compile(network, loss, memory=memory).plan(image, target)
    here, engines, plans = Machine.detect, [], []
    alone, shared = (dataclasses.replace(here(torch.get_num_threads()), **useless) for useless in USELESS)
    for machine in (alone, shared):
        with mock.patch.object(Machine, "detect", lambda *_, machine=machine: machine):
            engines.append(gg.compile(network, loss, memory=memory))
            plans.append(engines[-1].plan(image, target))
            engines[-1].backward(image, target)
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        for own, engine in zip(seconds, engines, strict=True):
            start = time.perf_counter()
            engine.backward(image, target)
            own.append(time.perf_counter() - start)
    best = [min(own) for own in seconds]
    return {
        "size": size,
        "memory": memory,
        "chosen_workers": chosen.workers,
        "workers": [plan.workers for plan in plans],
        "tiles": [plan.tile_count for plan in plans],
        "seconds": [round(s, 2) for s in best],
        "one_to_several": round(best[0] / best[1], 2),
    }


if __name__ == "__main__":
    main()
