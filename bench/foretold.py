"""How well plans foretell the time of steps of 20 networks that the cost model was not fitted on.

    python bench/foretold.py [--rounds 3] [--only NAME ...] [--size 512 768]

Each network takes training steps on noise, in a process of its own; `planned` is what the cost model predicts (not
tiles that were timed) over the fastest step. Run `gigagrad calibrate` before, on a quiet machine: without it the rates
are typical ones. The error of a network is how far `planned` is from 1. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.calibration import try_case
from gigagrad.devices.heap import settle_allocator
from gigagrad.devices.machine import Machine

NETWORKS = (
    *("timm:resnet26", "timm:resnet50", "timm:seresnet18", "timm:resnext26ts", "timm:regnetx_004", "timm:regnety_004"),
    *("timm:convnext_femto", "timm:densenet121", "timm:dla34", "timm:vgg11_bn", "timm:ghostnet_100"),
    *("timm:mobilenetv2_100", "timm:semnasnet_100", "timm:efficientnet_lite0"),
    *("smp:UnetPlusPlus?encoder_name=resnet18", "smp:Unet?encoder_name=mobilenet_v2", "smp:FPN?encoder_name=resnet34"),
    *("smp:PSPNet?encoder_name=resnet18", "smp:Linknet?encoder_name=resnet18", "smp:MAnet?encoder_name=resnet18"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="parts of names")
    parser.add_argument("--size", type=int, nargs=2, default=[512, 768], metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        warnings.simplefilter("ignore")
        settle_allocator()
        print(json.dumps(try_case(args.case, tuple(args.size), train=True, rounds=args.rounds)))
        return
    cases = []
    for name in NETWORKS:
        if any(part in name for part in args.only):
            more = ["--case", name, "--rounds", str(args.rounds), "--size", *map(str, args.size)]
            done = subprocess.run([sys.executable, __file__, *more], stdout=subprocess.PIPE, text=True, check=True)
            cases.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{name}: {cases[-1]['seconds']} s, planned {cases[-1]['planned']} of that", flush=True)
    told = {
        "calibrated": Machine.detect(torch.get_num_threads()).calibrated,
        "torch": torch.__version__,
        "median_error": round(median(abs(case["planned"] - 1) for case in cases), 3),
        "cases": cases,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
