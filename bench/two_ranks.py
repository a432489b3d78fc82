"""A step by two ranks of one thread, in turns with one process of two threads: seconds by the clock of the wall.

    python bench/two_ranks.py [--model smp:Unet?encoder_name=resnet34] [--side 2048] [--memory 10GiB] [--rounds 2]

Float32 on random bytes, norms in training mode; the ranks over gloo, each with half of the memory, and each side with
the plan that suits it. Of three steps behind a first one the fastest counts. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.scale import prepared
from gigagrad.ranks import Ranks, SingleRank
from gigagrad.ranks.process_group import ProcessGroup
from gigagrad.units import parse_bytes
from tests.ranks.started import started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smp:Unet?encoder_name=resnet34")
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--memory", default="10GiB")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(steps(args)))
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--worker"]
    two, one = list[float](), list[float]()
    for _ in range(args.rounds):
        printed = [rank.communicate()[0] for rank in started(command, 2)]
        two.append(max(min(json.loads(text.splitlines()[-1])) for text in printed))
        one.append(min(json.loads(subprocess.check_output(command, text=True).splitlines()[-1])))
    line = {
        "network": args.model,
        "side": args.side,
        "two_ranks_seconds": two,
        "one_process_seconds": one,
        "ratios": [round(a / b, 3) for a, b in zip(two, one, strict=True)],
    }
    print(json.dumps(line))


def steps(args: argparse.Namespace) -> list[float]:
    ranks: Ranks = SingleRank()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        ranks = ProcessGroup()
    torch.set_num_threads(2 // ranks.count)
    engine, image, target = prepared(args, memory=parse_bytes(args.memory) // ranks.count, mesh=ranks)
    found = []
    for _ in range(4):
        start = time.perf_counter()
        engine.backward(image, target)
        found.append(round(time.perf_counter() - start, 2))
    if ranks.count > 1:
        dist.destroy_process_group()
    return found[1:]


if __name__ == "__main__":
    main()
