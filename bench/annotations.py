"""A step on a gigapixel slide whose mask is a GeoJSON file of many polygons, against one whose mask is an image.

    python bench/annotations.py [--height 16000] [--width 64000] [--polygons 20000] [--corners 60] [--memory 1GiB]
        [--rounds 2] [--slide PATH]

Nothing else should run. Round blobs of random size and place, some of them with a hole, are written as QuPath's GeoJSON
and, painted, as a mask of bytes; the paper's network takes steps with either in turns, each in a process of its own,
the second step of which counts. Prints one JSON line last: seconds of both and their ratio, peaks, the losses (equal),
the seconds to read the file and to paint all of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gigagrad.boxes import Box, tiles

TILE_PX = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=16000)
    parser.add_argument("--width", type=int, default=64000)
    parser.add_argument("--polygons", type=int, default=20000)
    parser.add_argument("--corners", type=int, default=60)
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--slide", type=Path)
    parser.add_argument("--one", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        slide, mask = args.one
        print(json.dumps(stepped(slide, mask, args.memory)))
        return
    with tempfile.TemporaryDirectory() as folder:
        slide = args.slide or made_slide(Path(folder), args.height, args.width)
        drawn, painted = Path(folder) / "drawn.geojson", Path(folder) / "painted.tif"
        height, width = size_of(slide)
        draw(drawn, height, width, args.polygons, args.corners)
        found: dict[str, Any] = {"polygons": args.polygons, "geojson_bytes": drawn.stat().st_size}
        found |= paint(drawn, slide, painted)
        runs: dict[str, list[dict[str, Any]]] = {"geojson": [], "image": []}
        for _ in range(args.rounds):
            for kind, mask in (("geojson", drawn), ("image", painted)):
                command = [sys.executable, __file__, "--one", str(slide), str(mask), "--memory", args.memory]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                runs[kind].append(json.loads(done.stdout.splitlines()[-1]))
    for kind, results in runs.items():
        found[kind] = {key: [result[key] for result in results] for key in results[0]}
    seconds = {kind: median(result["seconds"] for result in results) for kind, results in runs.items()}
    print(json.dumps({**found, "pixels": height * width, "ratio": round(seconds["geojson"] / seconds["image"], 3)}))


def stepped(slide_path: Path, mask_path: Path, memory: str) -> dict[str, Any]:
    """The second of two steps, opening the mask included, and what the process held at most."""
    import torch

    import gigagrad as gg
    from gigagrad.devices.heap import peak_resident_bytes

    torch.manual_seed(0)
    model = gg.models.resolve("paper-unet")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    engine = gg.compile(model, gg.losses.bce, memory=memory, optimizer=optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        start = time.perf_counter()
        with gg.open_image(slide_path) as slide, gg.open_mask(mask_path, slide) as mask:
            loss = engine.backward(slide, mask)
        optimizer.step()
        seconds = time.perf_counter() - start
    return {"seconds": round(seconds, 2), "loss": float(loss), "peak_bytes": peak_resident_bytes()}


def made_slide(folder: Path, height: int, width: int) -> Path:
    from gigagrad.images import make_slide

    make_slide(folder / "slide.tif", height=height, width=width, seed=0, mask_path=folder / "unused.tif")
    return folder / "slide.tif"


def size_of(slide: Path) -> tuple[int, int]:
    import gigagrad as gg

    with gg.open_image(slide) as image:
        return image.height, image.width


def draw(path: Path, height: int, width: int, count: int, corners: int) -> None:
    rng = np.random.default_rng(0)
    mean_radius = 0.5 * (height * width / count) ** 0.5
    angles = np.linspace(0, 2 * np.pi, corners, endpoint=False)
    features = []
    for _ in range(count):
        centre = rng.uniform((0, 0), (width, height))
        radii = mean_radius * rng.uniform(0.3, 1.2) * (1 + 0.15 * rng.standard_normal(corners))
        ring = centre + np.maximum(radii, 2)[:, None] * np.stack((np.cos(angles), np.sin(angles)), axis=1)
        rings = [ring] if rng.random() < 0.8 else [ring, centre + 0.3 * (ring - centre)]
        closed = [np.concatenate((one, one[:1])).round(2).tolist() for one in rings]
        features.append(
            {
                "type": "Feature",
                "geometry": {"type": "Polygon", "coordinates": closed},
                "properties": {"objectType": "annotation", "classification": {"name": "Gland", "color": [200, 0, 0]}},
            }
        )
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))


def paint(drawn: Path, slide_path: Path, painted: Path) -> dict[str, float]:
    """The mask as an image, and how long reading the outlines and painting them took."""
    import gigagrad as gg
    from gigagrad.images import write_pyramid

    start = time.perf_counter()
    with gg.open_image(slide_path) as slide, gg.open_mask(drawn, slide) as mask:
        reading = time.perf_counter() - start
        start = time.perf_counter()
        for box in tiles(mask.height, mask.width, TILE_PX, TILE_PX):
            mask.read(box)
        painting = time.perf_counter() - start
        rows = (
            np.asarray(mask.read(Box(y, 0, min(y + TILE_PX, mask.height), mask.width)))[0]
            for y in range(0, mask.height, TILE_PX)
        )
        shape = (mask.height, mask.width, 1)
        write_pyramid(painted, rows, shape=shape, dtype=np.uint8, nearest=True)
    return {"reading_seconds": round(reading, 2), "painting_seconds": round(painting, 2)}


if __name__ == "__main__":
    main()
