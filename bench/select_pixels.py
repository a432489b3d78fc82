"""Rows and columns of a crop by index, as explicit resizing and reflecting take them, against PyTorch's own operator.

    python bench/select_pixels.py [--channels 64] [--side 256] [--rounds 15]

Doubles the pixels of a float32 crop of `--side` px along one axis with `rows/windows.select` and with `index_select`,
forward and backward, by one thread. Rounds are interleaved, medians of processor time are compared. Prints one JSON
line last: milliseconds of both and their ratio, by layout and axis.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import torch

from gigagrad.graphs.ops.windows import select

Selecting = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ways: dict[str, Selecting] = {"select": select, "index_select": torch.index_select}
    index = torch.arange(2 * args.side) // 2
    result = {}
    for layout in (torch.channels_last, torch.contiguous_format):
        crop = torch.rand(1, args.channels, args.side, args.side).contiguous(memory_format=layout).requires_grad_()
        for dim, axis in ((-2, "rows"), (-1, "columns")):
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(args.rounds):
                for name, way in ways.items():
                    seconds[name].append(step(way, crop, dim, index))
            both = {name: median(times) for name, times in seconds.items()}
            row = {name: round(1e3 * value, 2) for name, value in both.items()}
            row["ratio"] = round(both["select"] / both["index_select"], 3)
            result[f"{str(layout).removeprefix('torch.')}, {axis}"] = row
    print(json.dumps({"channels": args.channels, "side": args.side, "milliseconds": result}))


def step(way: Selecting, crop: torch.Tensor, dim: int, index: torch.Tensor) -> float:
    start = time.process_time()
    found = way(crop, dim, index)
    torch.autograd.grad(found, crop, found.detach())
    return time.process_time() - start


if __name__ == "__main__":
    main()
