"""Planned movement of fields against leaving it to the operating system, under the same limit of memory.

    python bench/paging.py --scratch DIR [--height 4096 --width 4096] [--ratios 0.5 1 2 4] [--rounds 1]

Linux, as root: every run is a process in a control group of its own with a limit of memory, page cache included. One
job in all of them: a step of a small network with batch normalisation in training mode on random bytes, by the same
engine. "planned" has the limit as its budget and keeps what does not fit in files under `--scratch`; "paged" has no
budget: its fields lie in a memory-mapped file there, which the kernel writes and reads as it sees fit, as unified
memory would. The limit leaves the fields 1 / ratio of what they take at most: 2 means that half of them fit. Prints
one JSON line last: for each ratio the limit, seconds, major page faults, loss.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gigagrad.boxes import Box
from gigagrad.plans import ledger
from gigagrad.stores import HostStore

CACHE_BYTES = 96 * 2**20
"""Left of a limit for the page cache, which counts, too."""
GROUPS = Path("/sys/fs/cgroup")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=4096)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1, 2, 4])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=1800, help="after which a run is given up")
    parser.add_argument("--run", choices=("plan", "planned", "paged"), help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run == "plan":
        plan = engine(None, None).plan(*pair(args))
        print(json.dumps({"peak": plan.predicted_peak_bytes, "fields": plan.most(ledger.FIELDS, ledger.COTANGENTS)}))
    elif args.run:
        print(json.dumps(step(args)))
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    needs = run(args, "plan", None)
    rows = []
    for ratio in args.ratios:
        limit = int(needs["peak"] - needs["fields"] + needs["fields"] / ratio) + CACHE_BYTES
        row: dict[str, Any] = {"oversubscription": ratio, "limit_bytes": limit}
        found: dict[str, list[dict[str, Any]]] = {"planned": [], "paged": []}
        for _ in range(args.rounds):
            for kind, results in found.items():
                results.append(run(args, kind, limit))
                print(ratio, kind, results[-1], flush=True)
        for kind, results in found.items():
            row[kind] = min(results, key=lambda result: result.get("seconds", float("inf")))
        if all("seconds" in row[kind] for kind in found):
            row["paged_over_planned"] = round(row["paged"]["seconds"] / row["planned"]["seconds"], 2)
        rows.append(row)
    print(json.dumps({"height": args.height, "width": args.width, "fields_bytes": needs["fields"], "rows": rows}))


def run(args: argparse.Namespace, kind: str, limit: int | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--run", kind, "--scratch", str(args.scratch), "--limit", str(limit or 0)]
    command += ["--height", str(args.height), "--width", str(args.width)]
    with limited(limit) as join:
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=False, timeout=args.seconds, preexec_fn=join
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"longer than {args.seconds} s"}
    if done.returncode:
        return {"failed": f"exit {done.returncode}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@contextmanager
def limited(limit: int | None) -> Iterator[Any]:
    """A function for a child process to call first: from then on, it and its page cache have this much memory."""
    if limit is None:
        yield None
        return
    unified = (GROUPS / "cgroup.controllers").exists()
    group = (GROUPS if unified else GROUPS / "memory") / f"gigagrad-paging-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(limit))
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        group.rmdir()


def engine(memory: int | None, scratch: Path | None) -> Any:
    import gigagrad as gg

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 16), (16, 16)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(gg.models.Normalise(), *layers, nn.Conv2d(16, 1, 1)).train()
    return gg.compile(model, loss, memory=memory, scratch=scratch)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))


def pair(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = (args.height, args.width)
    image = torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator)
    return image, torch.randint(0, 2, (1, *size), dtype=torch.uint8, generator=generator)


class MappedStore(HostStore):
    """A field in a memory-mapped file, which is gone when the process is."""

    folder: Path

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, axes: tuple[int, int], **layout: Any) -> None:
        super().__init__(shape, dtype, axes, device=torch.device("cpu"))
        path = self.folder / f"mapped-{os.getpid()}-{id(self)}"
        flat = torch.from_file(str(path), shared=True, size=prod(shape), dtype=dtype)
        path.unlink()
        last = layout.get("memory_format") == torch.channels_last and len(shape) == 4
        order = (shape[0], shape[2], shape[3], shape[1]) if last else shape
        self._tensor = flat.view(order).permute(0, 3, 1, 2) if last else flat.view(order)

    def read(self, box: Box) -> torch.Tensor:
        return super().read(box).clone()  # the reader's thread waits for the disk, not a tile's


def step(args: argparse.Namespace) -> dict[str, Any]:
    from gigagrad.stores import host

    if args.run == "planned":
        made = engine(args.limit - CACHE_BYTES, args.scratch)
    else:
        MappedStore.folder = args.scratch
        setattr(host, "HostStore", MappedStore)  # noqa: B010
        made = engine(None, None)
    image, target = pair(args)
    plan = made.plan(image, target)
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    value = made.backward(image, target)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": round(seconds, 1),
        "major_faults": after.ru_majflt - before.ru_majflt,
        "processor_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "peak_rss_bytes": made.last_run.peak_bytes,
        "fields_on_disk": sum(field.tier == "disk" for field in plan.kept),
        "loss": value.item(),
    }


if __name__ == "__main__":
    main()
