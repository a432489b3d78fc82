"""A cohort in shares of which some are killed: the files of one process, byte for byte.

    python bench/shares.py [--slides 40] [--shares 4] [--kills 2] [--seed 0]

Makes slides of different sizes and an untrained network, and predicts all in one process. Then every share predicts its
own in a process of its own, two at a time; some are killed (SIGKILL) when they have made a part of their masks, drawn
from the seed, and all are given again until they end by themselves. Whether any file differs (of records, the seconds
are left out) and how shares divided the bytes is in the one JSON line last; progress on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from gigagrad.cohorts import find_slides
from gigagrad.files import size_of
from gigagrad.images.write import write_pyramid
from gigagrad.models import resolve, save_model
from gigagrad.shares import Share


def write_slides(folder: Path, count: int, seed: int) -> None:
    """Noise in blobs, of a few heights, so that a process captures the network a few times and not for each slide."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    for number in range(count):
        height = 256 * (1 + number % 4)
        small = rng.integers(60, 250, (height // 32, 16, 3), np.uint8)
        pixels = np.kron(small, np.ones((32, 32, 1), np.uint8)) - rng.integers(0, 20, (height, 512, 3), np.uint8)
        write_pyramid(folder / f"slide-{number:02}.tif", [pixels], shape=pixels.shape, dtype=np.uint8, nearest=False)


def command(folder: Path, out: str, share: str) -> list[str]:
    places = ["--run", folder / "best.pt", "--slides", folder / "slides", "--out", folder / out]
    return [sys.executable, "-m", "gigagrad", "predict", *map(str, places), "--mpp", "0.5", "--share", share]


def until_done(share: Share, kills_at: int | None, folder: Path) -> tuple[int, int]:
    """Give the command of a share again until it ends by itself; how often it was killed and how often it began."""
    killed = began = 0
    own = share.deal(rows := find_slides([folder / "slides"]), [size_of(row.slide) for row in rows])
    while True:
        began += 1
        process = subprocess.Popen(command(folder, "apart", str(share)), stdout=subprocess.DEVNULL)
        while process.poll() is None:
            made = sum((folder / "apart" / "masks" / f"{row.name}.tif").exists() for row in own)
            if not killed and kills_at is not None and made >= kills_at:
                process.send_signal(signal.SIGKILL)
                process.wait()
                killed += 1
                print(f"share {share} killed after {made} of {len(own)} masks", file=sys.stderr)
            time.sleep(0.005)
        if process.returncode == 0:
            return killed, began
        assert process.returncode == -signal.SIGKILL, f"share {share} ended with {process.returncode}"


def files_of(out: Path) -> dict[str, Any]:
    files: dict[str, Any] = {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    return {
        name: {**json.loads(data), "seconds": 0} if name.startswith("records") else data for name, data in files.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("slides", 40), ("shares", 4), ("kills", 2), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.manual_seed(args.seed)
    draws = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_slides(folder / "slides", args.slides, args.seed)
        save_model(folder / "best.pt", "paper-unet", resolve("paper-unet"))
        start = time.perf_counter()
        subprocess.run(command(folder, "alone", "1/1"), check=True, stdout=subprocess.DEVNULL)
        alone_seconds = time.perf_counter() - start
        shares = [Share(number, args.shares) for number in range(1, args.shares + 1)]
        least = args.slides // args.shares
        unlucky = {share: draws.randint(1, least - 1) for share in draws.sample(shares, args.kills)}
        with ThreadPoolExecutor(2) as pool:
            ended = list(pool.map(partial(until_done, folder=folder), shares, map(unlucky.get, shares)))
        alone, apart = files_of(folder / "alone"), files_of(folder / "apart")
        rows = find_slides([folder / "slides"])
        sizes = [size_of(row.slide) for row in rows]
        of_shares = [sum(size_of(row.slide) for row in share.deal(rows, sizes)) for share in shares]
    print(
        json.dumps(
            {
                "slides": args.slides,
                "shares": args.shares,
                "killed": sum(killed for killed, _ in ended),
                "began": sum(began for _, began in ended),
                "files": len(alone),
                "differing_files": sorted(n for n in alone.keys() | apart.keys() if alone.get(n) != apart.get(n)),
                "largest_share_over_mean": max(of_shares) * args.shares / sum(of_shares),
                "alone_seconds": alone_seconds,
            }
        )
    )


if __name__ == "__main__":
    main()
