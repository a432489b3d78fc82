"""Prediction on tissue only: how much faster it is where a tenth is tissue, and what it costs in Dice on real slides.

    python bench/skipping.py [--side 20480] [--memory 2GiB] [--slides DIR]

A synthetic slide of `--side` px a side, of which 10 % are tissue and the rest is noisy glass, as a JPEG pyramid. U-Net
with a ResNet-18 of random weights predicts it with all default outputs, once whole and once with `only_tissue="auto"`,
behind predictions of a small slide that are not timed. Told are seconds by the clock and of the processors, those from
the first tile to the last, and whether the masks are the same on tissue.

DIR holds `slides/` and `masks/` with files of the same stem; without it the second half is left out. The paper's
network trains on the first of them, and is compared with all masks, whole and on tissue only. Told as well: how many
tiles of a slide are of a single colour, which could be computed once and exactly. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad as gg
from gigagrad.boxes import Box, tiles
from gigagrad.events import Event, TileBegun, TileDone
from gigagrad.images.synthetic import make_slide
from gigagrad.images.write import write_pyramid
from gigagrad.masks import find_tissue
from gigagrad.models import resolve, save_model

NETWORK = "smp:Unet?encoder_name=resnet18&encoder_weights=none"
TISSUE = 0.1
STRIP_PX = 512
TILES_PX = 256, 512, 1024


def tissue_of(path: Path) -> NDArray[np.bool_]:
    with gg.open_image(path) as slide:
        cells, _ = find_tissue(slide, min(slide.shape[1:]), "auto")
    return cells > 0


def sparse_slide(path: Path, side: int, folder: Path) -> None:
    """Write a slide whose middle is a synthetic one, as large as makes a tenth of it tissue."""
    make_slide(folder / "trial.tif", height=1024, width=1024, seed=0)
    share = tissue_of(folder / "trial.tif").mean()
    for _ in range(2):  # tissue looks otherwise at another size
        inner = round(side * math.sqrt(TISSUE / share))
        make_slide(folder / "inner.tif", height=inner, width=inner, seed=0, overwrite=True)
        share = tissue_of(folder / "inner.tif").mean()
    first = (side - inner) // 2
    with gg.open_image(folder / "inner.tif") as tissue:

        def strips() -> Iterator[NDArray[np.uint8]]:
            draw = np.random.default_rng(0)
            for box in tiles(side, side, STRIP_PX, side):
                strip = draw.integers(238, 244, (box.height, side, 3), dtype=np.uint8)
                rows = Box(max(box.y0, first), first, min(box.y1, first + inner), first + inner)
                if rows.y1 > rows.y0:
                    crop = np.asarray(tissue.read(rows.shift(-first, -first))).transpose(1, 2, 0)
                    strip[rows.y0 - box.y0 : rows.y1 - box.y0, rows.x0 : rows.x1] = crop
                yield strip

        write_pyramid(path, strips(), shape=(side, side, 3), dtype=np.uint8, nearest=False, compression="jpeg", mpp=0.5)


def timed(run: Path, slide: Path, out: Path, memory: str, **settings: Any) -> dict[str, float]:
    begun, done = list[float](), list[float]()

    def note(event: Event) -> None:
        if isinstance(event, TileBegun):
            begun.append(time.perf_counter())
        if isinstance(event, TileDone):
            done.append(time.perf_counter())

    wall, processors = time.perf_counter(), time.process_time()
    (result,) = gg.predict({"run": run, "slides": [slide], "out": out, "memory": memory, **settings}, [note])
    assert not result.failed, result.error
    return {
        "seconds": round(time.perf_counter() - wall, 2),
        "cpu_seconds": round(time.process_time() - processors, 2),
        "seconds_of_tiles": round(done[-1] - begun[0], 2),
    }


def mask_in(out: Path, slide: Path) -> NDArray[np.uint8]:
    with gg.open_image(out / "masks" / f"{slide.stem}.tif") as mask:
        return np.asarray(mask.read(Box.whole(*mask.shape[1:])))[0]


def speed(side: int, memory: str, folder: Path) -> dict[str, Any]:
    slide, run = folder / "sparse.tif", folder / "unet.pt"
    sparse_slide(slide, side, folder)
    save_model(run, NETWORK, resolve(NETWORK).eval())
    timed(run, folder / "trial.tif", folder / "warm", memory)
    timed(run, folder / "trial.tif", folder / "warm-only", memory, only_tissue="auto")
    whole = timed(run, slide, folder / "whole", memory)
    only = timed(run, slide, folder / "only", memory, only_tissue="auto")
    cells = tissue_of(slide)
    rows, columns = (np.arange(side) * count // side for count in cells.shape)
    there = cells[rows][:, columns]
    masks = [mask_in(folder / name, slide) for name in ("whole", "only")]
    return {
        "side": side,
        "tissue": round(float(cells.mean()), 4),
        "whole": whole,
        "only_tissue": only,
        "times_faster": round(whole["seconds"] / only["seconds"], 2),
        "times_faster_of_tiles": round(whole["seconds_of_tiles"] / only["seconds_of_tiles"], 2),
        "times_less_cpu": round(whole["cpu_seconds"] / only["cpu_seconds"], 2),
        "pixels_that_differ_on_tissue": int((masks[0] != masks[1])[there].sum()),
        "pixels_above_0_elsewhere": int(masks[1][~there].sum()),
        "single_colour_tiles": single_colour(slide),
    }


def single_colour(path: Path) -> dict[str, float]:
    """Return the share of tiles that hold one colour, by their side."""
    found = {}
    with gg.open_image(path) as slide:
        for side in TILES_PX:
            boxes = list(tiles(slide.height, slide.width, side, side))
            crops = (np.asarray(slide.read(box)) for box in boxes)
            found[str(side)] = round(sum(bool((crop == crop[:, :1, :1]).all()) for crop in crops) / len(boxes), 4)
    return found


def dice(data: Path, folder: Path, epochs: int) -> dict[str, Any]:
    slides = sorted((data / "slides").iterdir())
    masks = {slide: next((data / "masks").glob(f"{slide.stem}.*tif")) for slide in slides}
    splits = ["train", *["val"] * (len(slides) - 1)]
    rows = [f"{slide},{masks[slide]},{split}" for slide, split in zip(slides, splits, strict=True)]
    cohort = folder / "cohort.csv"
    cohort.write_text("\n".join(["slide,mask,split", *rows]))
    gg.fit(
        {
            "slides": cohort,
            "model": "paper-unet",
            "loss": "bce_dice",
            "epochs": epochs,
            "learning_rate": 0.005,
            "out": folder / "run",
            "memory": "2GiB",
        }
    )
    found: dict[str, Any] = {}
    for name, settings in (("whole", {}), ("only_tissue", {"only_tissue": "auto"})):
        results = gg.predict(
            {
                "run": folder / "run",
                "slides": [cohort],
                "out": folder / f"real-{name}",
                "memory": "2GiB",
                **settings,
            }
        )
        found[name] = {result.name: None if result.dice is None else round(result.dice, 4) for result in results}
    found["tissue"] = {slide.stem: round(float(tissue_of(slide).mean()), 4) for slide in slides}
    found["single_colour_tiles"] = {slide.stem: single_colour(slide) for slide in slides}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=20480)
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--slides", type=Path)
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        line: dict[str, Any] = {"network": NETWORK, "memory": args.memory, **speed(args.side, args.memory, folder)}
        if args.slides is not None:
            line["real_slides"] = dice(args.slides, folder, args.epochs)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
