"""Steps whose activations fit in memory, beside plain autograd's of the same size, step after step as in training.

    python bench/beside_plain.py [--networks resnet34-unet resnet18 vit-s ...] [--sides 64 128 256 512 1024]
        [--rounds 5] [--steps 8] [--tiles]

Each network in training mode, in float32 on a tensor of random numbers, two threads as they come, with a step of SGD
behind each. Plain autograd has a process of its own, in which PyTorch's allocator is as it comes: in one process each
would find what the other left of the heap. Both take turns of so many steps, of which the first does not count. The
best of all rounds counts, and so does the median of each round's ratio of medians. With `--tiles` the engine is kept to
tiles, and the JSON says what a pass costs beyond plain autograd's step. Prints one JSON line last: by network and side
both times in milliseconds, their ratio, the median ratio, the passes, and page faults of a step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--sides", type=int, nargs="+", default=[64, 128, 256, 512, 1024], help="pixels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of a turn, the first not counted")
    parser.add_argument("--tiles", action="store_true", help="in tiles, too, what fits as it is")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found = []
    for name in args.networks:
        for side in args.sides:
            found.append(compared(name, side, args))
            print(json.dumps(found[-1]), flush=True)
    print(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, "jobs": found}))


def compared(name: str, side: int, args: argparse.Namespace) -> dict[str, Any]:
    """One network's step, ours and PyTorch's, in turns."""
    spawn = multiprocessing.get_context("spawn")
    pipes = {}
    for kind in ("plain", "ours"):
        os.environ["THP_MEM_ALLOC_ENABLE"] = "0" if kind == "plain" else "1"
        pipes[kind], there = spawn.Pipe()
        spawn.Process(target=serve, args=(there, kind, name, side, args.tiles), daemon=True).start()
    told = {kind: pipe.recv() for kind, pipe in pipes.items()}
    turns: dict[str, list[tuple[list[float], int]]] = {kind: [] for kind in pipes}
    for _ in range(args.rounds):
        for kind, pipe in pipes.items():
            pipe.send(args.steps)
            turns[kind].append(pipe.recv())
    for pipe in pipes.values():
        pipe.send(0)
    best = {kind: 1e3 * min(min(seconds) for seconds, _ in each) for kind, each in turns.items()}
    medians = {kind: [statistics.median(seconds) for seconds, _ in each] for kind, each in turns.items()}
    passes = told["ours"]["passes"]
    return {
        "network": name,
        "side": side,
        "plain_ms": round(best["plain"], 2),
        "ours_ms": round(best["ours"], 2),
        "ratio": round(best["ours"] / best["plain"], 3),
        "median_ratio": round(
            statistics.median(b / a for a, b in zip(medians["plain"], medians["ours"], strict=True)), 3
        ),
        **told["ours"],
        "page_faults": {kind: each[-1][1] for kind, each in turns.items()},
        **({"ms_per_pass_beyond": round((best["ours"] - best["plain"]) / passes, 3)} if passes else {}),
    }


def serve(there: Connection, kind: str, name: str, side: int, tiles: bool) -> None:
    """Send the plan; then take as many steps as is asked for, and send their seconds and the last one's page faults."""
    warnings.simplefilter("ignore")
    import gigagrad as gg
    import gigagrad.models.torchvision_operators

    torch.manual_seed(0)
    network = NETWORKS[name](side).train()
    image = torch.rand(1, 3, side, side)
    dense = name.endswith(("unet", "fpn"))
    target = torch.randint(0, 2, (1, 1, side, side)).float() if dense else torch.tensor([1])
    loss = F.binary_cross_entropy_with_logits if dense else F.cross_entropy
    optimizer = torch.optim.SGD(network.parameters(), 1e-4)
    plan: dict[str, int] = {}
    if kind == "plain":

        def step() -> None:
            loss(network(image), target).backward()
    else:
        engine = gg.compile(network, loss)
        engine.in_tiles = tiles
        found = engine.plan(image, target)
        plan = {"passes": len(found.passes), "tiles": found.tile_count}

        def step() -> None:
            engine.backward(image, target)

    def timed() -> tuple[float, int]:
        optimizer.zero_grad()
        start, faults = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step()
        seconds = time.perf_counter() - start
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        optimizer.step()
        return seconds, faults

    timed(), timed()
    there.send(plan)
    while count := there.recv():
        seconds, faults = zip(*(timed() for _ in range(count)), strict=True)
        there.send(([*seconds[1:]], faults[-1]))


def _unet(side: int) -> nn.Module:
    import segmentation_models_pytorch as smp

    made: nn.Module = smp.Unet("resnet34", encoder_weights=None, classes=1)
    return made


def _resnet(side: int) -> nn.Module:
    import torchvision

    made: nn.Module = torchvision.models.resnet18(num_classes=2)
    return made


def _mobilenet(side: int) -> nn.Module:
    import timm

    made: nn.Module = timm.create_model("mobilenetv3_large_100", num_classes=2)
    return made


def _fpn(side: int) -> nn.Module:
    import segmentation_models_pytorch as smp

    made: nn.Module = smp.FPN("resnet34", encoder_weights=None, classes=1)
    return made


def _ghostnet(side: int) -> nn.Module:
    import timm

    made: nn.Module = timm.create_model("ghostnet_050", num_classes=2)
    return made


def _densenet(side: int) -> nn.Module:
    import timm

    made: nn.Module = timm.create_model("densenet121", num_classes=2)
    return made


def _vit(side: int) -> nn.Module:
    import timm

    made: nn.Module = timm.create_model("vit_small_patch16_224", num_classes=2, img_size=side)
    return made


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "resnet34-unet": _unet,
    "resnet18": _resnet,
    "vit-s": _vit,
    "mobilenetv3": _mobilenet,
    "densenet121": _densenet,
    "resnet34-fpn": _fpn,
    "ghostnet": _ghostnet,
}


if __name__ == "__main__":
    main()
