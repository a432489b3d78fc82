"""Regions, holes and graphs of a gigapixel mask in a small memory, and the forms in which they may be computed.

    python bench/regions.py [--height 16000] [--width 64000] [--masks 10000]

First regions and filled holes of `--masks` random small masks, in bands of random height, are compared with
`scipy.ndimage`. Then a mask of that size with tissue, glands in it and nuclei in these is written as a pyramid. A
process of its own finds its regions and neighbours; another one its holes; a third one makes the graph with PyTorch in
memory, as `predict` does. Told are their seconds, and the peak of each process with all its libraries.

Forms: regions of the runs of such a mask, by a list of links whose ends are apart, by `scipy.sparse.csgraph`, and by
products with the sparse matrix of links, (min, min) in the place of (+, *). Scores of patches on a grid, by products
with a sparse matrix and by a list of the patches whose change has not been passed on, as a loop would do it and in
rounds. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gigagrad.boxes import Box, tiles
from gigagrad.images import fill_holes, find_regions, open_image, regions, write_pyramid

CODE = """
import json, resource, sys, time
begin = time.perf_counter()
import gigagrad as gg
from gigagrad.boxes import Box
with gg.open_image(sys.argv[1]) as mask:
{body}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({{"seconds": round(time.perf_counter() - begin, 2), "cpu_seconds": round(time.process_time(), 2),
                  "peak_mib": round(peak), **found}}))
"""
JOBS = {
    "regions": """
    regions = gg.images.find_regions(mask, min_area_px=16)
    found = {"regions": len(regions), "pairs": len(regions.pairs)}
""",
    "holes": """
    holes = gg.images.fill_holes(mask)
    filled = sum(int((holes.read(Box(y, 0, min(y + 256, mask.height), mask.width)) > 0).sum())
                 for y in range(0, mask.height, 256))
    found = {"filled_share": round(filled / mask.height / mask.width, 4)}
""",
    "graph": """
    from gigagrad.masks.classes import mask_classes
    from gigagrad.prediction import tissue_graph
    graph = tissue_graph(mask, mask_classes(3), min_area_px=16)
    found = {"nodes": len(graph.y), "edges": graph.edge_index.shape[1] // 2}
""",
}


def tissue(height: int, width: int) -> Iterator[NDArray[np.uint8]]:
    """Yield strips of class ids: 1 tissue with holes, 2 glands in it, 3 nuclei in these."""
    from scipy.ndimage import gaussian_filter

    step, draw = 16, np.random.default_rng(0)
    low = -(-height // step), -(-width // step)
    kinds = [gaussian_filter(draw.standard_normal(low).astype(np.float32), sigma) for sigma in (24, 6)]
    cells = np.zeros(low, np.uint8)
    cells[kinds[0] > 0] = 1
    cells[(kinds[0] > 0) & (kinds[1] > kinds[1].std())] = 2
    y, x = np.mgrid[:1024, :1024] % 64 - 32
    nuclei = (y**2 + x**2) < 200
    for box in tiles(height, width, 512, width):
        strip = cells[box.y0 // step : -(-box.y1 // step)].repeat(step, 0).repeat(step, 1)[: box.height, :width]
        across = np.tile(nuclei[:512][np.arange(box.y0, box.y1) % 512], (1, -(-width // 1024)))[:, :width]
        strip[(strip == 2) & across] = 3
        yield strip


def equal_to_scipy(count: int) -> int:
    """Compare random masks and return how many were equal, which is all of them or an error."""
    from scipy import ndimage

    draw = np.random.default_rng(7)
    for number in range(count):
        shape = draw.integers(1, 40, 2)
        plane = (draw.random(shape) < draw.random()).astype(np.uint8)
        vars(regions)["_BAND_PX"] = int(draw.integers(1, 500))
        mask, corners, whole = open_image(plane), bool(number % 2), Box.whole(*plane.shape)
        expected, _ = ndimage.label(plane, np.ones((3, 3)) if corners else None)
        assert np.array_equal(np.asarray(find_regions(mask, corners=corners).read(whole))[0], expected)
        assert np.array_equal(np.asarray(fill_holes(mask).read(whole))[0], ndimage.binary_fill_holes(plane))
    return count


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.process_time()
    found = work()
    return found, time.process_time() - begin


def forms_of_regions(mask: Path) -> dict[str, Any]:
    """Run each form on the links of all bands of a mask; what they find is the same."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    seconds = dict.fromkeys(("worklist", "csgraph", "products"), 0.0)
    visited = dict.fromkeys(("worklist", "products"), 0)
    worklist = regions.components

    def all_forms(count: int, one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
        root, used = timed(lambda: worklist(count, one, other))
        seconds["worklist"] += used

        def by_scipy() -> Any:
            matrix = csr_array((np.ones(len(one), np.int8), (one, other)), shape=(count, count))
            return connected_components(matrix, directed=False)[1]

        found, used = timed(by_scipy)
        seconds["csgraph"] += used
        assert len(np.unique(found * count + root)) == len(np.unique(root)) == len(np.unique(found))

        def by_products() -> Any:
            both = np.concatenate((one, other)), np.concatenate((other, one))
            matrix = csr_array((np.ones(2 * len(one), np.int8), both), shape=(count, count))
            rows = np.flatnonzero(np.diff(matrix.indptr))
            found, before = np.arange(count), np.zeros(0, np.int64)
            while not np.array_equal(found, before):
                before = found.copy()
                if len(rows):
                    least = np.minimum.reduceat(found[matrix.indices], matrix.indptr[rows])
                    found[rows] = np.minimum(found[rows], least)
                visited["products"] += 2 * len(one)
            return found

        found, used = timed(by_products)
        seconds["products"] += used
        assert np.array_equal(found, root)
        left, right, parents = one, other, np.arange(count)
        while len(left):  # as in `components`, counted
            visited["worklist"] += len(left)
            np.minimum.at(parents, np.maximum(left, right), np.minimum(left, right))
            while not np.array_equal(above := parents[parents], parents):
                parents = above
            left, right = parents[left], parents[right]
            left, right = left[left != right], right[left != right]
        return root

    vars(regions).update(_BAND_PX=1 << 24, components=all_forms)
    with open_image(mask) as image:
        find_regions(image)
    vars(regions)["components"] = worklist
    return {
        "cpu_seconds": {name: round(value, 2) for name, value in seconds.items()},
        "links_visited": visited,
    }


def forms_of_scores(side: int, damping: float = 0.85) -> dict[str, Any]:
    """Smooth scores of which all or a few differ from 0 by products and by lists of changes."""
    from gigagrad.prediction import patch_edges, smooth_scores

    coords = np.stack(np.meshgrid(np.arange(side), np.arange(side)), axis=-1).reshape(-1, 2)
    edges, inside = patch_edges(coords, 1), ((coords - side / 2) ** 2).sum(axis=1) < (side / 4) ** 2
    noisy = inside + np.random.default_rng(0).standard_normal(len(coords))
    single = np.zeros(len(coords))
    single[len(single) // 2 + side // 2] = 1
    order = np.argsort(edges[0], kind="stable")
    here, there = edges[:, order]
    start = np.searchsorted(here, np.arange(len(coords) + 1))
    degree = np.diff(start)

    def in_rounds(scores: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
        """Pass on, in each round, all changes above the limit."""
        found, change, visits = np.zeros(len(scores)), (1 - damping) * scores, 0
        limit = 1e-6 * np.ptp(scores) * (1 - damping)
        while len(active := np.flatnonzero(np.abs(change) > limit)):
            found[active] += change[active]
            # A change of a patch is seen by its neighbours, each by the share of its own degree.
            count = degree[active]
            edge = np.arange(count.sum()) + np.repeat(start[active] - np.cumsum(count) + count, count)
            passed = np.repeat(change[active], count) * damping / degree[there[edge]]
            change[active] = 0
            change += np.bincount(there[edge], passed, len(scores))
            visits += len(edge)
        return found, visits

    def one_by_one(scores: NDArray[np.float64]) -> NDArray[np.float64]:
        found, change = np.zeros(len(scores)), ((1 - damping) * scores).tolist()
        limit = 1e-6 * np.ptp(scores) * (1 - damping)
        waiting = deque(np.flatnonzero(np.abs(change) > limit).tolist())
        queued = bytearray(len(scores))
        neighbours, degrees = np.split(there, start[1:-1]), degree.tolist()
        lists = [each.tolist() for each in neighbours]
        while waiting:
            node = waiting.popleft()
            queued[node] = False
            amount, change[node] = change[node], 0.0
            found[node] += amount
            for other in lists[node]:
                change[other] += amount * damping / degrees[other]
                if abs(change[other]) > limit and not queued[other]:
                    queued[other] = True
                    waiting.append(other)
        return found

    told: dict[str, Any] = {"patches": len(coords), "edges": edges.shape[1]}
    for name, scores in (("all", noisy), ("one", single)):
        product, product_seconds = timed(partial(smooth_scores, scores, edges, damping))
        (rounds, visits), rounds_seconds = timed(partial(in_rounds, scores))
        alone, alone_seconds = timed(partial(one_by_one, scores))
        told[name] = {
            "cpu_seconds": {
                "products": round(product_seconds, 3),
                "rounds": round(rounds_seconds, 3),
                "one_by_one": round(alone_seconds, 3),
            },
            "edges_visited_in_rounds": visits,
            "largest_difference": float(max(np.abs(product - rounds).max(), np.abs(product - alone).max())),
        }

    def area_under_curve(found: NDArray[np.float64]) -> float:
        rank = np.argsort(np.argsort(found)) + 1
        within, beyond = int(inside.sum()), int((~inside).sum())
        return round(float((rank[inside].sum() - within * (within + 1) / 2) / (within * beyond)), 4)

    told["auc"] = {"scores": area_under_curve(noisy), "smoothed": area_under_curve(smooth_scores(noisy, edges))}
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=16000)
    parser.add_argument("--width", type=int, default=64000)
    parser.add_argument("--masks", type=int, default=10_000)
    args = parser.parse_args()
    result: dict[str, Any] = {"height": args.height, "width": args.width}
    result["masks_equal_to_scipy"] = equal_to_scipy(args.masks)
    print(result, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mask.tif"
        shape = args.height, args.width, 1
        write_pyramid(path, tissue(args.height, args.width), shape=shape, dtype=np.uint8, nearest=True, mpp=0.5)
        for name, body in JOBS.items():
            ran = subprocess.run(
                [sys.executable, "-c", CODE.format(body=body), str(path)], capture_output=True, text=True
            )
            assert not ran.returncode, ran.stderr
            result[name] = json.loads(ran.stdout.splitlines()[-1])
            print(name, result[name], flush=True)
        result["forms_of_regions"] = forms_of_regions(path)
    result["forms_of_scores"] = forms_of_scores(200)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
