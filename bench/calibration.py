"""How well is the time of a step foretold: by the plan, and by the step itself after a twentieth of it?

    python bench/calibration.py [--only NAME] [--rounds 3]

Published networks take training steps on noise of 512 to 2048 px, in training and in evaluation mode, each case in a
process of its own. `planned` is what the cost model foretells (not tiles that were timed) over the fastest of the
steps; without `gigagrad calibrate` before, by typical rates. `corrected` is the whole time that the progress shows when
a twentieth of a step is over, the time since its beginning and `TileDone.seconds_left`, over what that step then took:
the median of the steps after the first, which know what the passes of the last one took; `first` is the same of the
first. Steps of fewer than 40 tiles have no such moment. Errors are means of the absolute logarithms of these ratios.
Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
import warnings
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gigagrad as gg
import gigagrad.models.torchvision_operators
from gigagrad.devices.heap import settle_allocator
from gigagrad.devices.machine import Machine
from gigagrad.events import TileDone

_TWENTIETH = 0.05
_FEWEST_TILES = 40
_CASES = (
    ("paper-unet", ((1024, 2048), (2048, 2048))),
    ("smp:Unet?encoder_name=resnet18", ((512, 512), (1024, 1024))),
    ("smp:FPN?encoder_name=resnet18", ((512, 768), (1024, 1024))),
    ("smp:Unet?encoder_name=efficientnet-b0", ((512, 512), (768, 1024))),
    ("smp:Linknet?encoder_name=resnet34", ((512, 512), (1024, 1024))),
    ("timm:resnet10t", ((512, 512), (2048, 2048))),
    ("timm:resnet34", ((512, 512), (1024, 1536))),
    ("timm:convnext_atto", ((512, 512), (1024, 1024))),
    ("timm:mobilenetv3_small_100", ((512, 1024), (2048, 2048))),
)


class Bytes(nn.Module):
    """A network for images of bytes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.network(image.float() / 255)
        return result


def loss(output: Tensor, target: Tensor) -> Tensor:
    if output.ndim == 2:
        return F.cross_entropy(output, target)
    return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))


def subject(name: str, size: tuple[int, int]) -> tuple[nn.Module, np.ndarray[Any, Any], Any]:
    """A published network, and noise and targets for it and `loss`."""
    torch.manual_seed(0)
    made = gg.models.resolve(name)
    rng = np.random.default_rng(0)
    image = rng.integers(0, 255, (3, *size), dtype=np.uint8)
    target = torch.tensor([1]) if name.startswith("timm:") else rng.integers(0, 2, (1, *size), dtype=np.uint8)
    return made if name == "paper-unet" else Bytes(made), image, target


class Watch:
    """Hears the tiles of a step; notes what is foretold when a twentieth of its time is over."""

    def __init__(self) -> None:
        self.foretold: list[tuple[float, float]] = []
        self.began = 0.0

    def __call__(self, event: object) -> None:
        if isinstance(event, TileDone):
            gone = time.perf_counter() - self.began
            self.foretold.append((gone, event.seconds_left))

    def at_a_twentieth(self, seconds: float) -> float:
        return next(gone + left for gone, left in self.foretold if gone >= _TWENTIETH * seconds)


def try_case(name: str, size: tuple[int, int], *, train: bool, rounds: int) -> dict[str, Any]:
    """What was foretold of a network's steps, over what they took."""
    network, image, target = subject(name, size)
    engine = gg.compile(network.train(train), loss)
    watch = Watch()
    engine.events.subscribe(watch)
    plan = engine.plan(image, target)
    taken, corrected = [], []
    for _ in range(1 + rounds):
        watch.foretold, watch.began = [], time.perf_counter()
        engine.backward(image, target)
        taken.append(time.perf_counter() - watch.began)
        if plan.tile_count >= _FEWEST_TILES:
            corrected.append(watch.at_a_twentieth(taken[-1]) / taken[-1])
    return {
        "model": name,
        "size": list(size),
        "mode": "train" if train else "eval",
        "segments": len(plan.segments),
        "tiles": plan.tile_count,
        "workers": plan.workers,
        "seconds": round(min(taken), 3),
        "planned": round(plan.modelled_seconds / min(taken), 3),
        "first": round(corrected[0], 3) if corrected else None,
        "corrected": round(median(corrected[1:]), 3) if corrected else None,
    }


def _error(ratios: list[float]) -> float | None:
    return round(fmean(abs(math.log(ratio)) for ratio in ratios), 3) if ratios else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        warnings.simplefilter("ignore")
        settle_allocator()
        name, height, width, mode = args.case.split("|")
        print(json.dumps(try_case(name, (int(height), int(width)), train=mode == "train", rounds=args.rounds)))
        return
    found = []
    for name, sizes in _CASES:
        for height, width in sizes if args.only in name else ():
            for mode in ("train", "eval"):
                command = [sys.executable, __file__, "--rounds", str(args.rounds)]
                command += ["--case", f"{name}|{height}|{width}|{mode}"]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
                print(json.dumps(found[-1]), file=sys.stderr)
    told = {
        "threads": torch.get_num_threads(),
        "calibrated": Machine.detect(1).calibrated,
        "planned_error": _error([case["planned"] for case in found]),
        "first_error": _error([case["first"] for case in found if case["first"]]),
        "corrected_error": _error([case["corrected"] for case in found if case["corrected"]]),
        "cases": found,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
