"""Steps whose activations fit in memory, beside plain autograd's of the same size, in turns.

    python bench/beside_plain.py [--networks resnet34-unet resnet18 vit-s] [--sides 64 128 256 512 1024] [--rounds 7]
        [--tiles]

Each network in training mode, in float32 on a tensor of random numbers, two threads as they come. A round is a step of
each; the best of the rounds counts, and so does the median of each round's ratio. With `--tiles` the engine is kept to
tiles, and the JSON says what a pass costs beyond plain autograd's step. Prints one JSON line last: by network and side
both times in milliseconds, their ratio, the median ratio, and the passes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch.nn import functional as F

import gigagrad as gg
import gigagrad.models.torchvision_operators


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--sides", type=int, nargs="+", default=[64, 128, 256, 512, 1024], help="pixels")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiles", action="store_true", help="in tiles, too, what fits as it is")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found = []
    for name in args.networks:
        for side in args.sides:
            found.append(compared(name, side, args.rounds, tiles=args.tiles))
            print(json.dumps(found[-1]), flush=True)
    print(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, "jobs": found}))


def compared(name: str, side: int, rounds: int, *, tiles: bool) -> dict[str, Any]:
    """One network's step, ours and PyTorch's, in turns."""
    torch.manual_seed(0)
    network = NETWORKS[name](side).train()
    image = torch.rand(1, 3, side, side)
    dense = name.endswith("unet")
    target = torch.randint(0, 2, (1, 1, side, side)).float() if dense else torch.tensor([1])
    loss = F.binary_cross_entropy_with_logits if dense else F.cross_entropy
    if name == "resnet18" and side < 64:
        raise SystemExit("ResNet-18 in training mode needs more than one pixel at its end: 64 px or more")
    engine = gg.compile(network, loss)
    engine.in_tiles = tiles
    plan = engine.plan(image, target)

    def ours() -> Tensor:
        return engine.backward(image, target)

    def plain() -> Tensor:
        found: Tensor = loss(network(image), target)
        found.backward()
        return found

    for step in (plain, ours, plain, ours):
        timed(network, step)
    pairs = [(timed(network, plain), timed(network, ours)) for _ in range(rounds)]
    plain_best, ours_best = (min(times) for times in zip(*pairs, strict=True))
    passes = len(plan.passes)
    return {
        "network": name,
        "side": side,
        "plain_ms": round(1e3 * plain_best, 2),
        "ours_ms": round(1e3 * ours_best, 2),
        "ratio": round(ours_best / plain_best, 3),
        "median_ratio": round(statistics.median(mine / theirs for theirs, mine in pairs), 3),
        "passes": passes,
        "tiles": plan.tile_count,
        **({"ms_per_pass_beyond": round(1e3 * (ours_best - plain_best) / passes, 3)} if passes else {}),
    }


def timed(network: nn.Module, step: Callable[[], Tensor]) -> float:
    """Seconds of a step, with gradients to be made anew as an optimizer leaves them."""
    network.zero_grad()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _unet(side: int) -> nn.Module:
    import segmentation_models_pytorch as smp

    made: nn.Module = smp.Unet("resnet34", encoder_weights=None, classes=1)
    return made


def _resnet(side: int) -> nn.Module:
    import torchvision

    made: nn.Module = torchvision.models.resnet18(num_classes=2)
    return made


def _vit(side: int) -> nn.Module:
    import timm

    made: nn.Module = timm.create_model("vit_small_patch16_224", num_classes=2, img_size=side)
    return made


NETWORKS: dict[str, Callable[[int], nn.Module]] = {"resnet34-unet": _unet, "resnet18": _resnet, "vit-s": _vit}


if __name__ == "__main__":
    main()
