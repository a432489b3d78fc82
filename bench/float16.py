"""Gradients in half precisions against float32: what float16 arithmetic can give, whatever the number of pixels.

    python bench/float16.py [--side 2048] [--seed 0]

The paper's network, one with batch norms in training mode and a classifier behind a global average, on noise. For each
the largest relative error (2-norms) of a parameter's gradient against float32, of gradients above a thousandth of the
largest, of gigagrad in bfloat16 and float16 and of plain autocast in float16. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import copy
import json

import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg


def networks() -> dict[str, nn.Module]:
    normed = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(8, 1, 1),
    )
    classifier = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    return {"paper's network": gg.models.resolve("paper-unet"), "with batch norms": normed, "classifier": classifier}


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if output.ndim == 2:
        return F.cross_entropy(output, target[0, 0, 0, :1].long())
    return F.binary_cross_entropy_with_logits(output, target)


def gradients(network: nn.Module, image: torch.Tensor, target: torch.Tensor, precision: str) -> list[torch.Tensor]:
    network = copy.deepcopy(network)
    gg.compile(network, loss, precision=precision).backward(image, target)
    return [p.grad for p in network.parameters() if p.grad is not None]


def autocast(network: nn.Module, image: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    network = copy.deepcopy(network)
    with torch.autocast("cpu", torch.float16):
        value = loss(network(image[None]), target[None])
    value.backward()
    return [p.grad for p in network.parameters() if p.grad is not None]


def worst(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    least = max(float(g.norm()) for g in exact) / 1000
    pairs = [(ours, g) for ours, g in zip(found, exact, strict=True) if g.norm() > least]
    return max(float((ours - g).norm() / g.norm()) for ours, g in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    result = {}
    for name, network in networks().items():
        image = torch.rand(3, args.side, args.side)
        target = (torch.rand(1, args.side, args.side) > 0.5).float()
        exact = gradients(network, image, target, "float32")
        found = {precision: gradients(network, image, target, precision) for precision in ("bfloat16", "float16")}
        found["float16 by plain autocast"] = autocast(network, image, target)
        result[name] = {how: round(worst(gradient, exact), 5) for how, gradient in found.items()}
        print(name, result[name], flush=True)
    print(json.dumps({"side": args.side, "seed": args.seed, "worst_relative_error": result}))


if __name__ == "__main__":
    main()
