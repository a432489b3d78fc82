"""Kernels of one pixel with one thread: PyTorch's own convolution against oneDNN's, which it takes when told to dilate.

    python bench/one_pixel_kernels.py [--rounds 10]

Forward, and backward for input, weight and bias, in float32; rounds interleaved, the fastest counts. Prints one JSON
line last: GFLOP/s of both, by layout and shape, and the largest relative difference of any result.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

SHAPES = ((40, 160, 128), (160, 40, 128), (64, 256, 96), (320, 1280, 24), (16, 96, 256))
"""Channels in and out, side of the crop in pixels."""
LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [measure(name, *shape, rounds=args.rounds) for name in LAYOUTS for shape in SHAPES]
    for row in rows:
        print(row, flush=True)
    print(json.dumps({"rows": rows}))


def measure(layout: str, channels_in: int, channels_out: int, side: int, *, rounds: int) -> dict[str, object]:
    x = torch.randn(1, channels_in, side, side).contiguous(memory_format=LAYOUTS[layout]).requires_grad_()
    weight = torch.randn(channels_out, channels_in, 1, 1, requires_grad=True)
    bias = torch.randn(channels_out, requires_grad=True)
    forward, backward = {1: float("inf"), 2: float("inf")}, {1: float("inf"), 2: float("inf")}
    results: dict[int, tuple[torch.Tensor, ...]] = {}
    for _ in range(rounds):
        for dilation in (1, 2):
            start = time.perf_counter()
            y = torch.conv2d(x, weight, bias, dilation=dilation)
            middle = time.perf_counter()
            gradients = torch.autograd.grad(y, [x, weight, bias], torch.ones_like(y))
            end = time.perf_counter()
            forward[dilation] = min(forward[dilation], middle - start)
            backward[dilation] = min(backward[dilation], end - middle)
            results[dilation] = (y.detach(), *gradients)
    flops = 2 * channels_in * channels_out * side * side / 1e9
    differences = [((a - b).norm() / a.norm()).item() for a, b in zip(results[1], results[2], strict=True)]
    return {
        "layout": layout,
        "channels": [channels_in, channels_out],
        "side": side,
        "forward_gflops": [round(flops / forward[dilation]) for dilation in (1, 2)],
        "backward_gflops": [round(2 * flops / backward[dilation]) for dilation in (1, 2)],
        "largest_difference": float(f"{max(differences):.1e}"),
    }


if __name__ == "__main__":
    main()
