"""A deep network's step inside a budget, beside plain autograd's best time per pixel.

    python bench/deep_step.py [--model smp:Unet?encoder_name=resnet34] [--eval] [--height 8192 --width 8192]
        [--memory 2GiB] [--scratch DIR [--scratch-bytes 1GiB]] [--any-optimizer] [--plain 512 1024]
        [--steps 1] [--device cuda]

One step in float32 on random bytes in a process of its own, inside `--memory` with the rest under `--scratch`, norms in
training mode unless `--eval`; `--steps` more than 1 tells the best of the second and later ones. A network with one
output channel per pixel gets a mask, one of class scores (`timm:resnet18`) a label. Before and after it plain autograd
at the sizes `--plain`, in other processes, best of five steps each, of which the best per pixel counts; the ratio is to
the mean of before and after, as the machine's speed changes in the minutes between. Prints one JSON line last: seconds,
seconds per megapixel of both and their ratio, the peak of the whole process beside what was predicted and what it held
before, the number of tiles, the bytes in files, and the loss; the plan is on standard error. On a GPU `--memory` and
the peak are that of its own memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.nn.functional as F

import gigagrad.models.torchvision_operators  # noqa: F401
from bench.deep_unet import child
from gigagrad.models import resolve

Pair = tuple[torch.Tensor, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smp:Unet?encoder_name=resnet34")
    parser.add_argument("--eval", action="store_true", help="norms with running statistics")
    parser.add_argument("--height", type=int, default=8192)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--scratch-bytes", help="room of the files, as 1GiB; all that is free unless given")
    parser.add_argument("--any-optimizer", action="store_true", help="room for the state of whatever optimizer comes")
    parser.add_argument("--plain", type=int, nargs="+", default=[512, 1024], help="sides in pixels")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--run", choices=("plain", "gigagrad"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(plain(args) if args.run == "plain" else ours(args)))
        return
    before, step, after = (child(__file__, [*sys.argv[1:], "--run", run]) for run in ("plain", "gigagrad", "plain"))
    references = [min(run.values()) for run in (before, after)]
    line = {
        "network": args.model,
        "mode": "eval" if args.eval else "training",
        "device": args.device,
        "height": args.height,
        "width": args.width,
        **step,
        "plain_seconds_per_megapixel": references,
        "time_ratio": round(step["seconds_per_megapixel"] / fmean(references), 2),
    }
    print(json.dumps(line))


class FromBytes(torch.nn.Module):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.net(image.float() / 255)
        return output


def network(args: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(0)
    return FromBytes(resolve(args.model)).train(not args.eval)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if output.ndim == 2:
        return F.cross_entropy(output, target)
    return F.binary_cross_entropy_with_logits(output, target.float())


def pair(args: argparse.Namespace, height: int, width: int) -> Pair:
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(0, 256, (1, 3, height, width), dtype=torch.uint8, generator=generator)
    if args.model.startswith("timm:"):
        return image, torch.tensor([1])
    return image, torch.randint(0, 2, (1, 1, height, width), dtype=torch.uint8, generator=generator)


def plain(args: argparse.Namespace) -> dict[str, float]:
    """Seconds per megapixel by side, the best of five steps after one."""
    model = network(args).to(args.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    found = {}
    for side in args.plain:
        image, target = (tensor.to(args.device) for tensor in pair(args, side, side))
        seconds = []
        for _ in range(6):
            start = time.perf_counter()
            loss(model(image.contiguous(memory_format=torch.channels_last)), target).backward()
            if args.device != "cpu":
                torch.accelerator.synchronize()
            seconds.append(time.perf_counter() - start)
        found[str(side)] = round(min(seconds[1:]) / (side * side / 1e6), 3)
    return found


def held_bytes(device: str) -> int:
    """Counts what the process holds of the memory that the budget bounds."""
    return psutil.Process().memory_info().rss if device == "cpu" else torch.cuda.memory_reserved(device)


def ours(args: argparse.Namespace) -> dict[str, Any]:
    import gigagrad as gg

    model = network(args).to(args.device)
    # As plain autograd: nothing beside the gradients. Where none is named, plans keep room for Adam's state.
    optimizer = None if args.any_optimizer else torch.optim.SGD(model.parameters(), lr=0.1)
    where = {"device": args.device, "scratch": args.scratch, "scratch_bytes": args.scratch_bytes}
    engine = gg.compile(model, loss, memory=args.memory, optimizer=optimizer, **where)
    image, target = pair(args, args.height, args.width)
    held, start = held_bytes(args.device), time.perf_counter()
    plan = engine.plan(image, target)
    planning = time.perf_counter() - start
    print(plan, file=sys.stderr)
    seconds = []
    for _ in range(args.steps):
        start = time.perf_counter()
        value = engine.backward(image, target)
        seconds.append(time.perf_counter() - start)
    step = engine.last_run
    assert step is not None
    best = min(seconds[1:] or seconds)
    return {
        "seconds_per_step": round(best, 1),
        "plan_seconds": round(planning, 1),
        "predicted_seconds": round(plan.predicted_seconds, 1),
        "seconds_per_megapixel": round(best / (args.height * args.width / 1e6), 3),
        "peak_rss_bytes": step.peak_bytes,
        "predicted_peak_bytes": step.predicted_peak_bytes,
        "budget_bytes": step.budget_bytes,
        "base_bytes": held,
        "tiles": plan.tile_count,
        "scratch_bytes": plan.bytes_in("disk"),
        "host_bytes": plan.bytes_in("host"),
        "loss": value.item(),
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
