"""How fast a slide is read ahead of the tiles, by one thread and by several: the paper's step without its arithmetic.

    python bench/decoding.py [--height 8000 --width 16000] [--threads 1 2] [--rounds 5] [--memory 1GiB] [--slide PATH]

A synthetic JPEG slide and its mask (made first unless given) are read by the crops of the paper's step, pass by pass in
the tiles' order, and nothing is computed from them. Colour and grey (JPEG's luma) take turns, and numbers of threads
within each round; every reading opens the files anew. Prints one JSON line last: seconds by rounds, the best megapixels
of the slide a second, how often each tile of its file was decoded in a pass, and `times_faster`, the median over rounds
of what the first number of threads takes over what this one does. `spare` is the same of work that threads do without
anything in common (hashes of one buffer), in turns with the reading: what the machine had to give beside other work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.execution.sources import image_source, read_ahead
from gigagrad.images import make_slide, open_image
from gigagrad.images.tiff import TiffImage
from gigagrad.plans import Chunks, Grid, split_segments
from gigagrad.plans.geometry import runs_by_rows
from gigagrad.threads import SideThreads

_HASHES = 1000
"""That together take about as long as a reading."""

Crops = list[tuple[str, Box]]
"""What a tile reads: names of inputs and boxes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=8000)
    parser.add_argument("--width", type=int, default=16000)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--slide", type=Path, help="a slide beside which its mask lies: slide.tif and slide.mask.tif")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        slide = args.slide or Path(folder) / "slide.tif"
        mask = slide.with_suffix(".mask.tif")
        if args.slide is None:
            make_slide(slide, height=args.height, width=args.width, seed=0, mask_path=mask)
        found: dict[str, dict[str, Any]] = {}
        passes: dict[str, list[list[Crops]]] = {}
        for kind in ("colour", "grey"):
            readers, passes[kind] = planned(slide, mask, args.memory, grey=kind == "grey")
            found[kind] = {"readers_planned": readers, "passes": len(passes[kind])}
        found["spare"] = {}
        for _ in range(args.rounds):
            for threads in args.threads:
                found["spare"].setdefault(f"{threads}", {"seconds": []})["seconds"].append(round(hashing(threads), 3))
            for kind in passes:
                row = found[kind]
                for threads in args.threads:
                    one = row.setdefault(f"{threads}", {"seconds": [], "processor_seconds": []})
                    seconds, processor, decoded = read(slide, mask, passes[kind], threads, grey=kind == "grey")
                    one["seconds"].append(round(seconds, 3))
                    one["processor_seconds"].append(round(processor, 3))
                    one["decoded_per_file_tile"] = decoded
        with open_image(slide) as image:
            pixels = image.height * image.width
    for kind, row in found.items():
        for threads in args.threads:
            one = row[f"{threads}"]
            pairs = zip(row[f"{args.threads[0]}"]["seconds"], one["seconds"], strict=True)
            one["times_faster"] = round(statistics.median(first / seconds for first, seconds in pairs), 3)
            if kind in passes:
                one["megapixels_per_second"] = round(pixels * len(passes[kind]) / min(one["seconds"]) / 1e6, 1)
    print(json.dumps({"pixels": pixels, "cores": os.cpu_count(), "load": round(load, 2), **found}))


def planned(slide: Path, mask: Path, memory: str, *, grey: bool) -> tuple[int, list[list[Crops]]]:
    """How many threads the paper's step is planned to be read by, and what the tiles of each pass that reads the slide
    read of files.
    """
    engine = gg.compile(gg.models.resolve("paper-unet"), gg.losses.bce, memory=memory)
    passes = []
    with open_image(slide) as opened, open_image(mask) as target:
        image = opened.grey() if grey else opened
        plan, graph = engine.plan(image, target), engine.problem(image, target).graph
        segments = split_segments(graph, [field.node for field in plan.kept])
        names = {node.id: node.arguments["name"] for node in graph.nodes if node.is_source and node.is_field}
        for step in plan.passes:
            segment = segments[step.segment]
            if any(names.get(i) == "image" for i in segment.reads):
                grid = Grid(graph, segment, plan.segments[step.segment].tile)
                read = [i for i in segment.reads if i in names]
                chunks = Chunks(
                    grid, plan.segments[step.segment].chunks, by_rows=runs_by_rows(segment, graph[grid.reference])
                )
                order = [chunks.tile(position) for chunk in range(len(chunks)) for position in chunks.tiles(chunk)]
                boxes = [[(names[i], tile.box(i)) for i in read] for tile in order]
                passes.append([[(name, box) for name, box in tile if box is not None] for tile in boxes])
    return plan.readers, passes


def read(slide: Path, mask: Path, passes: list[list[Crops]], threads: int, *, grey: bool) -> tuple[float, float, float]:
    """Seconds by the clock and of the processor, and how often each tile of the slide's file was decoded in a pass."""
    with open_image(slide) as opened, open_image(mask) as target, SideThreads(threads, "bench-read") as pool:
        assert isinstance(opened, TiffImage)
        decoded = counted(opened)
        sources = {"image": image_source(opened.grey() if grey else opened), "target": image_source(target)}

        def crops(tile: Crops) -> list[torch.Tensor]:
            return [sources[name].read(box) for name, box in tile]

        pool.submit(crops, passes[0][0][:0]).result()
        start, processor = time.perf_counter(), time.process_time()
        for tiles in passes:
            for tile, found in read_ahead(tiles, crops, pool):
                assert [crop.shape[-2:] for crop in found] == [box.shape for _, box in tile]
        seconds, processor = time.perf_counter() - start, time.process_time() - processor
        return seconds, processor, round(len(decoded) / opened._segments.counts.size / len(passes), 3)


def hashing(threads: int) -> float:
    """Seconds that so many threads take for the same work."""
    buffer = bytes(2**20)
    with SideThreads(threads, "bench-hash") as pool:
        pool.submit(lambda: None).result()
        start = time.perf_counter()
        for task in [pool.submit(lambda: sha256(buffer)) for _ in range(_HASHES)]:
            task.result()
        return time.perf_counter() - start


def counted(image: TiffImage) -> list[None]:
    """An entry for each file tile that is decoded from now on."""
    done: list[None] = []
    decode = image._decode

    def decode_and_count(key: Any) -> Any:
        done.append(None)
        return decode(key)

    image._decode = decode_and_count  # type: ignore[method-assign]
    return done


if __name__ == "__main__":
    main()
