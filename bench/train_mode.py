"""A deep network with batch normalisation in training mode: peak memory and time against plain autograd.

    python bench/train_mode.py [--height 2048 --width 2048] [--share 4] [--encoder resnet34] [--steps 1] [--scratch DIR]

Needs segmentation-models-pytorch. Plain autograd and the engine run in a process of their own each, in float32, on the
same image and from the same weights; the engine's budget is its process before the step plus plain autograd's peak
above that, divided by `--share`; fields that do not fit lie in files under `--scratch`. The optimizer is SGD, which
holds nothing, as nothing of an optimizer is in plain autograd's peak. A third process compares both in float64 on 512 x
512 px with tiles of 128 px: in float32 the gradients of this untrained network are known to a percent only, whoever
computes them. Prints one JSON line last: peaks above the process before the step, their ratio, seconds, and the errors
in float64.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.nn.functional as F

from bench.deep_unet import child, deep_unet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=2048)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--share", type=float, default=4.0)
    parser.add_argument("--encoder", default="resnet34")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--run", choices=("plain", "gigagrad", "exact"), help=argparse.SUPPRESS)
    parser.add_argument("--above", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(compare_in_float64(args) if args.run == "exact" else measure(args)))
        return
    exact, plain = (child(__file__, [*sys.argv[1:], "--run", run]) for run in ("exact", "plain"))
    above = str(int(plain["peak_above_bytes"] / args.share))
    ours = child(__file__, [*sys.argv[1:], "--run", "gigagrad", "--above", above])
    line = {
        "network": f"Unet({args.encoder}), batch normalisation in training mode",
        "height": args.height,
        "width": args.width,
        "plain_peak_above_bytes": plain["peak_above_bytes"],
        "peak_above_bytes": ours["peak_above_bytes"],
        "memory_ratio": round(plain["peak_above_bytes"] / ours["peak_above_bytes"], 2),
        "budget_bytes": ours["budget_bytes"],
        "peak_rss_bytes": ours["peak_rss_bytes"],
        "predicted_peak_bytes": ours["predicted_peak_bytes"],
        "kept_bytes": ours["kept_bytes"],
        "scratch_bytes": ours["scratch_bytes"],
        "plain_seconds": plain["seconds"],
        "seconds": ours["seconds"],
        "time_ratio": round(ours["seconds"] / plain["seconds"], 2),
        "float64_512px": exact,
    }
    print(json.dumps(line))


def measure(args: argparse.Namespace) -> dict[str, float]:
    import gigagrad as gg
    from gigagrad.devices.heap import peak_resident_bytes, resident_bytes
    from gigagrad.plans import estimate

    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = deep_unet(args.encoder)
    image = torch.rand(3, args.height, args.width)
    target = (torch.rand(1, args.height, args.width) > 0.5).float()
    result: dict[str, float] = {}
    if args.run == "plain":
        before = resident_bytes()
        model, image = (
            model.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
            image[None].contiguous(memory_format=torch.channels_last),
        )
        start = time.perf_counter()
        for _ in range(args.steps):
            model.zero_grad()
            value = F.binary_cross_entropy_with_logits(model(image), target[None])
            value.backward()
        seconds = time.perf_counter() - start
    else:
        engine = gg.compile(model, F.binary_cross_entropy_with_logits)
        engine.plan(image[:, :64, :64], target[:, :64, :64])  # capture once: its libraries belong to the base
        before = resident_bytes()
        engine = gg.compile(
            model,
            F.binary_cross_entropy_with_logits,
            memory=before + args.above,
            scratch=args.scratch,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        )
        plan = engine.plan(image, target)
        print(plan, file=sys.stderr, flush=True)
        start = time.perf_counter()
        for _ in range(args.steps):
            model.zero_grad()
            value = engine.backward(image, target)
        seconds = time.perf_counter() - start
        result = {
            "budget_bytes": before + args.above,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "kept_bytes": plan.most(estimate.FIELDS, estimate.COTANGENTS),
            "scratch_bytes": plan.bytes_in("disk"),
        }
    return {
        **result,
        "loss": value.item(),
        "seconds": round(seconds / args.steps, 2),
        "peak_rss_bytes": peak_resident_bytes(),
        "peak_above_bytes": peak_resident_bytes() - before,
    }


def compare_in_float64(args: argparse.Namespace) -> dict[str, float]:
    from tests.exactness.comparison import compare

    torch.manual_seed(0)
    model = deep_unet(args.encoder).double()
    image = torch.rand(3, 512, 512, dtype=torch.float64)
    target = (torch.rand(1, 512, 512) > 0.5).double()
    result = compare(model, F.binary_cross_entropy_with_logits, image, target, tile=(128, 128))
    return {"loss_error": result.loss_error, "gradient_error": result.gradient_error, "tiles": result.plan.tile_count}


if __name__ == "__main__":
    main()
