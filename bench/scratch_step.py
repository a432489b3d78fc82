"""A deep network with batch normalisation in training mode, on an image whose fields fit only on a disk.

    python bench/scratch_step.py --scratch DIR [--height 8192 --width 8192] [--memory 2GiB] [--encoder resnet34]

Needs segmentation-models-pytorch. One step of Unet(encoder) in float32 on random bytes, in a process of its own, inside
`--memory` with the rest under `--scratch`; before and after it plain autograd at 512 x 512 px, where it is fastest per
pixel, in other processes, best of five each; the ratio is to their mean, as the machine's speed changes in the minutes
between. Prints one JSON line last: seconds, seconds per megapixel of both and their ratio, the peak of the whole
process beside what was predicted, the bytes in files, and the loss.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.nn.functional as F

from bench.deep_unet import child, deep_unet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=8192)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--encoder", default="resnet34")
    parser.add_argument("--run", choices=("plain", "gigagrad"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(plain(args) if args.run == "plain" else ours(args)))
        return
    before, step, after = (child(__file__, [*sys.argv[1:], "--run", run]) for run in ("plain", "gigagrad", "plain"))
    references = [run["seconds_per_megapixel"] for run in (before, after)]
    line = {
        "network": f"Unet({args.encoder}), batch normalisation in training mode",
        "height": args.height,
        "width": args.width,
        **step,
        "plain_512px_seconds_per_megapixel": references,
        "time_ratio": round(step["seconds_per_megapixel"] / fmean(references), 2),
    }
    print(json.dumps(line))


class FromBytes(torch.nn.Module):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(image.float() / 255)
        return logits


def network(encoder: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return FromBytes(deep_unet(encoder)).train()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output, target.float())


def pair(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)
    return image, torch.randint(0, 2, (1, height, width), dtype=torch.uint8, generator=generator)


def plain(args: argparse.Namespace) -> dict[str, Any]:
    model = network(args.encoder).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    image, target = (value[None] for value in pair(512, 512))
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        loss(model(image.contiguous(memory_format=torch.channels_last)), target).backward()
        seconds.append(time.perf_counter() - start)
    return {"seconds_per_megapixel": round(min(seconds[1:]) / (512 * 512 / 1e6), 3)}


def ours(args: argparse.Namespace) -> dict[str, Any]:
    import gigagrad as gg
    from gigagrad.plans import ledger

    model = network(args.encoder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # as plain autograd: nothing beside the gradients
    engine = gg.compile(model, loss, memory=args.memory, scratch=args.scratch, optimizer=optimizer)
    image, target = pair(args.height, args.width)
    start = time.perf_counter()
    plan = engine.plan(image, target)
    planning = time.perf_counter() - start
    start = time.perf_counter()
    value = engine.backward(image, target)
    seconds = time.perf_counter() - start
    step = engine.last_run
    assert step is not None
    return {
        "seconds_per_step": round(seconds, 1),
        "plan_seconds": round(planning, 1),
        "seconds_per_megapixel": round(seconds / (args.height * args.width / 1e6), 3),
        "peak_rss_bytes": step.peak_bytes,
        "predicted_peak_bytes": step.predicted_peak_bytes,
        "budget_bytes": step.budget_bytes,
        "base_bytes": plan.most(ledger.PROCESS),
        "scratch_bytes": plan.bytes_in("disk"),
        "fields_on_disk": sum(field.tier == "disk" for field in plan.kept),
        "loss": value.item(),
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
