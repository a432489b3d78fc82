"""Ways to paint outlines: which pixels they agree on, whether a pixel depends on its tile, and how long it takes.

    python bench/painting.py [--side 8192] [--polygons 1300] [--corners 60]

Blobs as in bench/annotations.py, tile by tile of 512 px: ours, OpenCV's `fillPoly` with 4 bits of fractions, Pillow's
`ImageDraw.polygon`, shapely's `contains_xy` for every pixel of a polygon's box, and rasterio's `rasterize` if it is
there. Right is what shapely says of pixel centres, on a part of the image. Prints one JSON line last: seconds, pixels
that are wrong, and pixels that change when tiles are shifted by 100 px.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import time
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import shapely
from PIL import Image as Pictures
from PIL import ImageDraw

from gigagrad.boxes import Box, tiles
from gigagrad.images import open_image
from gigagrad.masks import ClassTable, Outlines, open_mask

TILE_PX = 512
CHECKED_PX = 1024
SHIFT_PX = 100
Paint = Callable[[Box], np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=8192)
    parser.add_argument("--polygons", type=int, default=1300)
    parser.add_argument("--corners", type=int, default=60)
    args = parser.parse_args()
    rings = blobs(args.side, args.polygons, args.corners)
    ways = painters(rings, args.side)
    checked = Box.whole(CHECKED_PX, CHECKED_PX)
    right = ways["shapely"](checked) > 0
    found = {}
    for name, paint in ways.items():
        start = time.perf_counter()
        whole = assembled(paint, args.side, 0)
        seconds = time.perf_counter() - start
        shifted = assembled(paint, args.side, SHIFT_PX)
        found[name] = {
            "seconds": round(seconds, 2),
            "wrong_of_a_megapixel": int((whole[:CHECKED_PX, :CHECKED_PX] != right).sum()),
            "depend_on_the_tile": int((whole != shifted).sum()),
        }
        print(name, found[name], flush=True)
    print(json.dumps({"pixels": args.side**2, "polygons": args.polygons, "ways": found}))


def blobs(side: int, count: int, corners: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    mean_radius = 0.5 * (side * side / count) ** 0.5
    angles = np.linspace(0, 2 * np.pi, corners, endpoint=False)
    found = []
    for _ in range(count):
        radii = mean_radius * rng.uniform(0.3, 1.2) * (1 + 0.15 * rng.standard_normal(corners))
        shape = np.maximum(radii, 2)[:, None] * np.stack((np.cos(angles), np.sin(angles)), axis=1)
        found.append((rng.uniform(0, side, 2) + shape).round(2))
    return found


def assembled(paint: Paint, side: int, shift: int) -> np.ndarray:
    """The whole plane of booleans from tiles whose corners lie `shift` px off the usual grid."""
    plane = np.zeros((side, side), bool)
    for tile in tiles(side + shift, side + shift, TILE_PX, TILE_PX):
        box = tile.shift(-shift, -shift).clamp(side, side)
        if not box.empty:
            plane[box.y0 : box.y1, box.x0 : box.x1] = paint(box) > 0
    return plane


def painters(rings: list[np.ndarray], side: int) -> dict[str, Paint]:
    polygons: Any = shapely.polygons([np.concatenate((ring, ring[:1])) for ring in rings])
    tree = shapely.STRtree(polygons)
    slide = open_image(np.broadcast_to(np.uint8(0), (3, side, side)))
    outlines = Outlines.pack([("a", [ring]) for ring in rings], "blobs")
    ours = open_mask(outlines, slide, ClassTable.parse(["a"]))

    def near(box: Box) -> Any:
        return np.sort(tree.query(shapely.box(box.x0, box.y0, box.x1, box.y1)))

    def by_opencv(box: Box) -> np.ndarray:
        canvas = np.zeros(box.shape, np.uint8)
        for index in near(box):
            # Corners of pixels are at halves for OpenCV.
            points = np.rint((rings[index] - (box.x0 + 0.5, box.y0 + 0.5)) * 16).astype(np.int32)
            cv2.fillPoly(canvas, [points], 1, shift=4)
        return canvas

    def by_pillow(box: Box) -> np.ndarray:
        picture = Pictures.new("L", box.shape[::-1])
        draw = ImageDraw.Draw(picture)
        for index in near(box):
            draw.polygon([tuple(point) for point in (rings[index] - (box.x0 + 0.5, box.y0 + 0.5)).tolist()], fill=1)
        return np.asarray(picture)

    def by_shapely(box: Box) -> np.ndarray:
        canvas = np.zeros(box.shape, np.uint8)
        for index in near(box):
            x0, y0, x1, y1 = (int(edge) for edge in polygons[index].bounds)
            part = Box(y0, x0, y1 + 1, x1 + 1).intersect(box)
            if part.empty:
                continue
            y, x = np.mgrid[part.y0 : part.y1, part.x0 : part.x1] + 0.5
            at = part.shift(-box.y0, -box.x0)
            shapely.prepare(polygons[index])
            canvas[at.y0 : at.y1, at.x0 : at.x1] |= shapely.contains_xy(polygons[index], x, y)
        return canvas

    found: dict[str, Paint] = {
        "ours": lambda box: np.asarray(ours.read(box))[0],
        "opencv": by_opencv,
        "pillow": by_pillow,
        "shapely": by_shapely,
    }
    if importlib.util.find_spec("rasterio"):
        features: Any = importlib.import_module("rasterio.features")
        affine: Any = importlib.import_module("affine").Affine

        def by_rasterio(box: Box) -> np.ndarray:
            shapes = [polygons[index] for index in near(box)]
            transform = affine.translation(box.x0, box.y0)
            if not shapes:
                return np.zeros(box.shape, np.uint8)
            painted: np.ndarray = features.rasterize(shapes, out_shape=box.shape, transform=transform, dtype=np.uint8)
            return painted

        found["rasterio"] = by_rasterio
    return found


if __name__ == "__main__":
    main()
