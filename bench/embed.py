"""Patches a second of `gigagrad embed`, beside a plain PyTorch loop with a DataLoader over OpenSlide.

    python bench/embed.py [--encoder timm:resnet18] [--patches 512] [--mpp 0.5] [--rounds 5] [--slide FILE]
                          [--batches 4 8 16 32 64 128] [--compile]

The same patches of one slide (made up, JPEG, 0.5 um/px, unless one is named) through the same encoder, on as many
threads as PyTorch has (two on two cores). The plain loop is what people write: a data set that reads a patch with
`read_region` and makes it RGB and a tensor, a DataLoader with two workers, a batch at a time through the encoder. Its
workers pass on floats, as the encoder's own preprocessing makes them, or bytes, which the encoder's first layer
normalises. It runs in a process of its own, in which no engine has settled the allocator. Of both kinds, and of several
sizes of a batch, the fastest counts, by a quarter of the patches; workers have been started before. Then both in turns:
the best round of each, and the median of each round's ratio. Processor seconds are of all that takes part. With
`--compile` the plain loop's encoder is compiled (`torch.compile`, weights frozen); ours is not. Prints one JSON line
last.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import psutil
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import gigagrad as gg
from gigagrad.images.synthetic import make_slide
from gigagrad.prediction import Encoder

WORKERS = 2


class Patches(Dataset[Tensor]):
    """Patches of a slide as OpenSlide reads them: bytes, or floats as the encoder's own preprocessing makes them."""

    def __init__(self, path: Path, corners: Any, size: int, side: int, preprocess: nn.Module | None) -> None:
        self.path, self.corners, self.size, self.side, self.preprocess = path, corners, size, side, preprocess
        self.slide: openslide.OpenSlide | None = None

    def __len__(self) -> int:
        return len(self.corners)

    def __getitem__(self, index: int) -> Tensor:
        if self.slide is None:  # in each worker its own
            self.slide = openslide.OpenSlide(str(self.path))
        level = self.slide.get_best_level_for_downsample(self.side / self.size + 0.01)
        region = round(self.side / self.slide.level_downsamples[level])
        image = self.slide.read_region(tuple(map(int, self.corners[index])), level, (region, region)).convert("RGB")
        if region != self.size:
            image = image.resize((self.size, self.size))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return pixels.contiguous() if self.preprocess is None else self.preprocess(pixels[None])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="timm:resnet18")
    parser.add_argument("--patches", type=int, default=512)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--mpp", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slide", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128], help="of the plain loop")
    parser.add_argument("--compile", action="store_true", help="the plain loop's encoder")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        if args.slide is None:
            args.slide = make_slide(Path(folder) / "slide.tif", height=8192, width=8192, seed=0, mpp=0.5)
        print(json.dumps(compared(args)))


def compared(args: argparse.Namespace) -> dict[str, Any]:
    """Both in turns, the plain loop as it is fastest."""
    with gg.open_bag(args.slide, args.size, args.mpp) as whole:
        chosen, side = np.array(whole.coords[: args.patches]), int(whole.patch_size_level0)
    bag = gg.open_bag(args.slide, args.size, args.mpp, coords=chosen)
    encoder = Encoder(encoder_of(args.encoder))

    def ours() -> Tensor:
        return torch.cat([torch.from_numpy(found) for _, found in encoder.features(bag)])

    here, there = multiprocessing.Pipe()
    os.environ["THP_MEM_ALLOC_ENABLE"] = "0"  # as PyTorch has it where nobody asks for huge pages
    # Patches are in one order in both: that of the bag.
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(there, args, bag.coords, side))
    child.start()
    best, theirs_first = here.recv()
    difference = float((ours() - torch.from_numpy(theirs_first)).abs().max())
    rounds = []
    for _ in range(args.rounds):
        here.send(True)
        rounds.append((here.recv(), timed(ours)))
        print(rounds[-1], flush=True)
    here.send(False)
    child.join()
    theirs, mine = (list(zip(*each, strict=True)) for each in zip(*rounds, strict=True))
    return {
        "encoder": args.encoder,
        "patches": len(chosen),
        "mpp": args.mpp,
        "threads": torch.get_num_threads(),
        "plain": best,
        "plain_patches_per_second": round(len(chosen) / min(theirs[0]), 2),
        "ours_patches_per_second": round(len(chosen) / min(mine[0]), 2),
        "ratio": round(min(theirs[0]) / min(mine[0]), 3),
        "median_ratio": round(statistics.median(a / b for a, b in zip(theirs[0], mine[0], strict=True)), 3),
        "plain_cpu_ms_per_patch": round(1e3 * min(theirs[1]) / len(chosen), 2),
        "ours_cpu_ms_per_patch": round(1e3 * min(mine[1]) / len(chosen), 2),
        "largest_difference": difference,
        "plain_compiled": args.compile,
    }


def encoder_of(name: str) -> nn.Module:
    """Build the encoder, the same in both processes."""
    torch.manual_seed(0)
    return gg.models.resolve_encoder(name).eval()


def serve(there: Connection, args: argparse.Namespace, corners: Any, side: int) -> None:
    """Find the fastest plain loop, send its name and its features; then time it as often as is asked."""
    warnings.simplefilter("ignore")
    network = encoder_of(args.encoder)

    def loop_of(some: Any, size: int, *, floats: bool) -> Callable[[], Tensor]:
        preprocess = network.get_submodule("preprocess") if floats else None
        return plain(network, Patches(args.slide, some, args.size, side, preprocess), size, args.compile)

    tried = {}
    few = corners[: max(1, len(corners) // 4)]
    for kind in ("floats", "bytes"):
        for size in args.batches:
            loop = loop_of(few, size, floats=kind == "floats")
            loop()  # its workers start
            seconds = timed(loop)[0]
            tried[seconds / len(few)] = kind, size
            print(f"plain, {kind}, {size}: {len(few) / seconds:.1f} patches a second", flush=True)
            del loop
    kind, size = tried[min(tried)]
    loop = loop_of(corners, size, floats=kind == "floats")
    there.send((f"{kind}, {size}", loop().numpy()))
    while there.recv():
        there.send(timed(loop))


def plain(network: nn.Module, patches: Patches, batch: int, compiled: bool) -> Callable[[], Tensor]:
    """The loop that people write."""
    loader = DataLoader(patches, batch_size=batch, num_workers=WORKERS, persistent_workers=True)
    module = network if patches.preprocess is None else network.get_submodule("network")
    encoder: Callable[[Tensor], Tensor] = module
    if compiled:
        torch._inductor.config.freezing = True
        module.requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        encoder = torch.compile(module)

    @torch.no_grad()
    def loop() -> Tensor:
        return torch.cat([encoder(batch) for batch in loader])

    return loop


def timed(work: Callable[[], Tensor]) -> tuple[float, float]:
    """Seconds, and processor seconds of this process and its workers."""
    process = psutil.Process()
    everybody = [process, *(one for one in process.children() if work.__name__ == "loop")]

    def spent() -> float:
        return sum(sum(one.cpu_times()[:2]) for one in everybody)

    start, before = time.perf_counter(), spent()
    work()
    return time.perf_counter() - start, spent() - before


if __name__ == "__main__":
    main()
