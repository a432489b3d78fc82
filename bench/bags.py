"""How fast the patches of a slide are read, against decoding each tile of its file once.

    python bench/bags.py [--height 6000 --width 8000] [--size 224] [--chunk 16] [--threads 1 2] [--rounds 5]
                         [--slide PATH]

A slide of one level, in JPEG tiles of 256 px, is made first: of the pixels of a slide that is given, repeated, or of
synthetic ones. It is read as a bag of all its patches, chunk by chunk in their order, at the resolution of its level 0
and at half of it, by threads that read ahead; and its tiles are decoded one after the other by as many threads. All of
these take turns within each round, each opening the file anew; a first round, in which memory is taken from the system,
does not count. The allocator is set as every job sets it. In turns with these the least that reading takes is timed:
decoding, tiles kept until the next row of patches has passed, and beside that nothing but a copy of each patch's bytes
out of a tile just decoded ("own_least"), or the filter on pixels that are together already ("twice_least"). Prints one
JSON line last: seconds by rounds, patches a second, how often each tile of the file was decoded, and bytes copied, as
multiples of the bag's own (decoding not counted); and `of_decoding`, the median over rounds of the seconds of decoding
alone over those of reading.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import tifffile

import gigagrad as gg
from bench.decoding import counted
from gigagrad.boxes import Box
from gigagrad.devices.heap import settle_allocator
from gigagrad.images import make_slide, open_image
from gigagrad.images.slide_bag import resampled
from gigagrad.images.tiff import TiffImage
from gigagrad.threads import SideThreads, Task

QUALITY = 75
_AHEAD = 2
"""Chunks that each thread has before it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=6000)
    parser.add_argument("--width", type=int, default=8000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--chunk", type=int, default=16)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slide", type=Path, help="a slide whose pixels are repeated")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    settle_allocator()
    with tempfile.TemporaryDirectory() as folder:
        slide = Path(folder) / "slide.tif"
        write_slide(slide, args.height, args.width, args.slide)
        mpp = 0.25
        found: dict[str, dict[str, Any]] = {}
        for turn in range(1 + args.rounds):
            if turn == 1:
                found.clear()
            for threads in args.threads:
                of = found.setdefault(str(threads), {"decoding": {"seconds": [], "processor_seconds": []}})
                told(of["decoding"], *decoding(slide, threads))
                for name, factor in ("own", 1), ("twice", 2):
                    row = of.setdefault(name, {"seconds": [], "processor_seconds": []})
                    told(row, *reading(slide, threads, args.size, factor * mpp, args.chunk, row))
                    least = of.setdefault(f"{name}_least", {"seconds": [], "processor_seconds": []})
                    least["patches"] = row["patches"]
                    told(least, *decoding(slide, threads, beside(args.size, factor), row["patches"]))
    for of in found.values():
        for name, row in of.items():
            if name == "decoding":
                continue
            for unit in ("seconds", "processor_seconds"):
                pairs = zip(of["decoding"][unit], row[unit], strict=True)
                ratio = statistics.median(alone / reading for alone, reading in pairs)
                row["of_decoding" if unit == "seconds" else "of_decoding_by_processor"] = round(ratio, 3)
            row["patches_per_second"] = round(row["patches"] / min(row["seconds"]), 1)
    print(
        json.dumps(
            {
                "pixels": args.height * args.width,
                "size": args.size,
                "cores": os.cpu_count(),
                "load": round(load, 2),
                "threads": found,
            }
        )
    )


def write_slide(path: Path, height: int, width: int, given: Path | None) -> None:
    if given is None:
        given = path.with_name("synthetic.tif")
        make_slide(given, height=height, width=width, seed=0)
    with open_image(given) as image:
        pixels_HWC = np.asarray(image.read(Box.whole(min(height, image.height), min(width, image.width))))
    pixels_HWC = pixels_HWC.transpose(1, 2, 0)
    repeats = -(-height // pixels_HWC.shape[0]), -(-width // pixels_HWC.shape[1]), 1
    options: dict[str, Any] = {"compression": "jpeg", "compressionargs": {"level": QUALITY}, "subsampling": (2, 2)}
    options |= {"tile": (256, 256), "resolution": (40000, 40000), "resolutionunit": "CENTIMETER", "metadata": None}
    tifffile.imwrite(path, np.tile(pixels_HWC, repeats)[:height, :width], photometric="ycbcr", **options)


def told(row: dict[str, Any], seconds: float, processor: float) -> None:
    row["seconds"].append(round(seconds, 3))
    row["processor_seconds"].append(round(processor, 3))


def decoding(
    slide: Path, threads: int, work: Callable[[Any], object] = lambda tile: None, times: int = 0
) -> tuple[float, float]:
    """Seconds by the clock and of the processor that all tiles of level 0 take, and so often `work` on one of them."""
    with open_image(slide) as image:
        assert isinstance(image, TiffImage)
        segments = image._segments
        _, rows, columns = segments.offsets.shape
        kept = deque[Any](maxlen=2 * columns if times else 0)

        def row_of(row: int) -> None:
            for number in range(row * columns, (row + 1) * columns):
                tile = image._decode(((0, row, number - row * columns), segments.decode))
                kept.append(tile)
                for _ in range((number + 1) * times // (rows * columns) - number * times // (rows * columns)):
                    work(tile)

        return timed(row_of, range(rows), threads)


def beside(size: int, factor: int) -> Callable[[Any], object]:
    """Return the least work that makes a patch of decoded tiles: a copy of its bytes, or the filter alone."""
    if factor == 1:
        return lambda tile: tile.reshape(-1)[: 3 * size**2].copy()
    region_NHWC = np.random.default_rng(0).integers(0, 256, (1, factor * size, factor * size, 3), np.uint8)
    return lambda tile: resampled(region_NHWC.transpose(0, 3, 1, 2), size)


def reading(slide: Path, threads: int, size: int, mpp: float, chunk: int, row: dict[str, Any]) -> tuple[float, float]:
    """Seconds by the clock and of the processor that all patches take."""
    with gg.open_bag(slide, size, mpp, tissue=None) as bag:
        image = bag._image
        assert isinstance(image, TiffImage)
        assert image.shape[1:] == image.levels[0].shape, "all are read from level 0"
        decoded, copied = counted(image), [0]
        read_squares = bag._squares

        def squares(start: int, corners: Any, side: int) -> Any:
            found = read_squares(start, corners, side)
            copied[0] += found.nbytes
            return found

        bag._squares = squares  # type: ignore[method-assign]

        def patches(start: int) -> None:
            bag.read(start, min(start + chunk, len(bag)))

        seconds = timed(patches, range(0, len(bag), chunk), threads)
        row["patches"] = len(bag)
        row["decoded_per_file_tile"] = round(len(decoded) / image._segments.counts.size, 4)
        nbytes = math.prod(bag.shape)
        resampled = nbytes if copied[0] > nbytes else 0
        row["bytes_copied"] = round((copied[0] + resampled) / nbytes, 3)
        row["cache_bytes"] = bag.cache_bytes
        return seconds


def timed(work: Callable[[int], None], items: Iterable[int], threads: int) -> tuple[float, float]:
    """Do work for all items in order, by threads that have a few before them."""
    with SideThreads(threads, "bench-bags") as pool:
        pool.submit(lambda: None).result()
        start, processor = time.perf_counter(), time.process_time()
        due: deque[Task[None]] = deque()
        for item in items:
            due.append(pool.submit(work, item))
            if len(due) > _AHEAD * threads:
                due.popleft().result()
        while due:
            due.popleft().result()
        return time.perf_counter() - start, time.process_time() - processor


if __name__ == "__main__":
    main()
