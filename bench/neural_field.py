"""A slide as a neural field: quality at equal bytes beside JPEG and JPEG XL, how long it takes to fit, and to decode.

    python bench/neural_field.py --slide FILE [--side 512] [--bits 0.5 1 2] [--steps 1500] [--crops 3]

Crops of a slide's level 0, spread over its tissue. A field is a hash grid of several resolutions and a small network on
what it holds at a position (Müller et al., 2022), in float32, trained on all pixels in batches by Adam; its tables are
counted in 8 bits a number, and are rounded to them before its quality is measured, the network in 16. JPEG and JPEG XL
get the quality at which they take as many bytes, or the nearest below. PSNR in dB over RGB. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import imagecodecs
import numpy as np
import torch
from torch import Tensor, nn

from gigagrad.boxes import Box
from gigagrad.images import open_image
from gigagrad.images.tissue import PAPER_RECIPE, Recipe, tissue_mask

LEVELS, FEATURES, HIDDEN = 8, 2, 32
PRIMES = 1, 2654435761
"""By which Müller et al. hash columns and rows."""


class HashGrid(nn.Module):
    """A field over `[0, 1)^2`: numbers at the corners of grids of several resolutions, interpolated, then a network."""

    def __init__(self, side: int, entries: int) -> None:
        super().__init__()
        growth = math.exp(math.log(side / 2 / 16) / (LEVELS - 1))
        self.sides = [int(16 * growth**level) for level in range(LEVELS)]
        self.tables = nn.ParameterList(
            nn.Parameter(torch.empty(min(entries, (n + 1) ** 2), FEATURES).uniform_(-1e-2, 1e-2)) for n in self.sides
        )
        self.network = nn.Sequential(nn.Linear(LEVELS * FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 3))

    def forward(self, places_N2: Tensor) -> Tensor:
        found = []
        for n, table in zip(self.sides, self.tables, strict=True):
            scaled = places_N2 * n
            corner = scaled.floor().long()
            share = scaled - corner
            value = torch.zeros(len(places_N2), FEATURES)
            for dy in (0, 1):
                for dx in (0, 1):
                    y, x = corner[:, 0] + dy, corner[:, 1] + dx
                    dense = len(table) == (n + 1) ** 2
                    index = y * (n + 1) + x if dense else (y * PRIMES[1] ^ x * PRIMES[0]) % len(table)
                    weight = (share[:, 0] if dy else 1 - share[:, 0]) * (share[:, 1] if dx else 1 - share[:, 1])
                    value = value + table[index] * weight[:, None]
            found.append(value)
        result: Tensor = self.network(torch.cat(found, 1)).sigmoid()
        return result

    @property
    def nbytes(self) -> int:
        """Bytes of its tables in 8 bits a number, and of its network in 16."""
        return sum(table.numel() for table in self.tables) + 2 * sum(p.numel() for p in self.network.parameters())

    @torch.no_grad()
    def quantise(self) -> None:
        for table in self.tables:
            step = table.abs().max() / 127
            table.copy_((table / step).round() * step)
        self.network.half().float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slide", type=Path, required=True)
    parser.add_argument("--side", type=int, default=512, help="pixels a side of a crop")
    parser.add_argument("--crops", type=int, default=3)
    parser.add_argument("--bits", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="a pixel")
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    rows = []
    for number, crop_HWC in enumerate(crops(args.slide, args.side, args.crops)):
        for bits in args.bits:
            row = {"crop": number, **compared(crop_HWC, int(bits * args.side**2 / 8), args.steps)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    ways = ("field", "jpeg", "jpegxl")
    means = {
        way: {
            bits: round(statistics.mean(row[way]["psnr"] for row in rows[at :: len(args.bits)]), 2)
            for at, bits in enumerate(args.bits)
        }
        for way in ways
    }
    print(
        json.dumps(
            {
                "side": args.side,
                "steps": args.steps,
                "torch": torch.__version__,
                "mean_psnr_by_bits": means,
                "rows": rows,
            }
        )
    )


def crops(path: Path, side: int, count: int) -> list[Any]:
    """Crops of level 0 with the most tissue, apart from each other."""
    with open_image(path) as image:
        tissue = tissue_mask(image, Recipe(downsample=side // 4, threshold=PAPER_RECIPE.threshold)).astype(float)
        rows, columns = image.height // side, image.width // side
        shares = {
            (y, x): tissue[4 * y : 4 * y + 4, 4 * x : 4 * x + 4].mean() for y in range(rows) for x in range(columns)
        }
        best = sorted(shares, key=lambda place: -shares[place])[: max(count, len(shares) // 2)]
        chosen = best[:: max(1, len(best) // count)][:count]
        boxes = [Box.whole(side, side).shift(y * side, x * side) for y, x in chosen]
        return [np.ascontiguousarray(np.asarray(image.read(box)).transpose(1, 2, 0)) for box in boxes]


def compared(crop_HWC: Any, nbytes: int, steps: int) -> dict[str, Any]:
    """One crop at about so many bytes, three ways."""
    side = crop_HWC.shape[0]
    entries = max(16, nbytes // (LEVELS * FEATURES))
    while HashGrid(side, entries).nbytes < 0.99 * nbytes and entries < side**2:
        entries = int(entries * 1.02) + 1
    torch.manual_seed(0)
    field, target = HashGrid(side, entries), torch.from_numpy(crop_HWC).reshape(-1, 3).float() / 255
    line = (torch.arange(side) + 0.5) / side
    places = torch.cartesian_prod(line, line)
    optimizer = torch.optim.Adam(field.parameters(), lr=1e-2, eps=1e-15)
    start = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / steps))
        chosen = torch.randint(0, len(places), (1 << 14,))
        loss = (field(places[chosen]) - target[chosen]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    fitted = time.perf_counter() - start
    field.quantise()
    with torch.no_grad():
        start = time.perf_counter()
        decoded = torch.cat([field(some) for some in places.split(1 << 16)])
        decoding = time.perf_counter() - start
    made = (decoded * 255).round().clamp(0, 255).byte().reshape(side, side, 3).numpy()
    own = {"bytes": field.nbytes, "psnr": psnr(made, crop_HWC), "fit_seconds": round(fitted, 1)}
    own["megapixels_a_second"] = round(side**2 / decoding / 1e6, 2)
    return {
        "field": own,
        "jpeg": nearest(crop_HWC, field.nbytes, range(1, 101), imagecodecs.jpeg8_encode, imagecodecs.jpeg8_decode),
        "jpegxl": nearest(
            crop_HWC,
            field.nbytes,
            [40 * 0.93**n for n in range(80)],
            lambda x, d: imagecodecs.jpegxl_encode(x, distance=min(15.0, d)),
            imagecodecs.jpegxl_decode,
        ),
    }


def nearest(
    crop_HWC: Any,
    most: int,
    qualities: Any,
    encode: Callable[[Any, Any], bytes | bytearray],
    decode: Callable[[Any], Any],
) -> dict[str, Any]:
    """The best quality in at most so many bytes, qualities from the worst on; the worst where there is none."""
    best, low, high = encode(crop_HWC, qualities[0]), 0, len(qualities) - 1
    while low < high:
        middle = (low + high + 1) // 2
        coded = encode(crop_HWC, qualities[middle])
        if len(coded) <= most:
            best, low = coded, middle
        else:
            high = middle - 1
    start = time.perf_counter()
    made = decode(best)
    rate = crop_HWC.shape[0] * crop_HWC.shape[1] / (time.perf_counter() - start) / 1e6
    return {"bytes": len(best), "psnr": psnr(made, crop_HWC), "megapixels_a_second": round(rate, 2)}


def psnr(made: Any, true: Any) -> float:
    """10 log10(255^2 / mean squared error)."""
    return round(10 * math.log10(255**2 / float(np.mean((made.astype(float) - true.astype(float)) ** 2))), 2)


if __name__ == "__main__":
    main()
