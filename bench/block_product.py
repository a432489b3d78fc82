"""Transposed convolution by block products against PyTorch's kernel: time forward and backward, rounds interleaved.

    python bench/block_product.py [--side 640] [--rounds 7]

The layer is the paper's last one (3 -> 3 channels, 15 x 15, stride 8). Prints one JSON line last, in seconds per
gigapixel of output, best round of each, and the largest difference between the two results in float64.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

import gigagrad as gg
from gigagrad.graphs.ops.transposed import TransposedConvolution


def _always(answer: bool) -> Any:
    return staticmethod(lambda call: answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ConvTranspose2d(3, 3, 15, 8, 4, 1))
    image = np.random.default_rng(0).random((3, args.side // 2, args.side // 2), dtype=np.float32)
    engine = gg.compile(layer, lambda output, target: output.square().mean(), tile=(args.side, args.side))
    engine.plan(image, 0)
    best = {"kernel": float("inf"), "blocks": float("inf")}
    for _ in range(args.rounds):
        for name in best:
            with mock.patch.object(TransposedConvolution, "_suits_blocks", _always(name == "blocks")):
                start = time.perf_counter()
                engine.backward(image, 0)
                pixels = (args.side // 2 * 8) ** 2
                best[name] = min(best[name], (time.perf_counter() - start) / pixels * 1e9)
    double = layer.double()
    double_engine = gg.compile(double, engine.loss, tile=(args.side, args.side))
    gradients = {}
    for name in best:
        double.zero_grad()
        with mock.patch.object(TransposedConvolution, "_suits_blocks", _always(name == "blocks")):
            double_engine.backward(image.astype(np.float64), 0)
        gradients[name] = torch.cat([p.grad.flatten() for p in double.parameters() if p.grad is not None])
    difference = (gradients["kernel"] - gradients["blocks"]).norm() / gradients["kernel"].norm()
    result = {
        "seconds_per_gigapixel": {name: round(seconds, 2) for name, seconds in best.items()},
        "ratio": round(best["kernel"] / best["blocks"], 2),
        "relative_difference_float64": difference.item(),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
