"""Files of fields: their bandwidth beside the disk's own, and how much of the transfer hides behind the computation.

    python bench/tiers.py --scratch DIR [--gibibytes N] [--side 3072] [--rounds 3]

Bandwidth: a field of 64 channels is written crop by crop and flushed to the disk, forgotten by the page cache, and read
crop by crop; the disk's own is that of large blocks, by-passing the cache, in a file of its own, before every row of
crops: a disk whose rate changes within seconds changes it for both. Files that are more than memory go past the cache:
that is the size unless `--gibibytes` says otherwise. Overlap: a step
of a small network with batch normalisation in training mode, by one thread, with all fields in files; beside it the
same tiles with the fields in memory, which is the computation alone, and the same crops read and written with nothing
computed, which is the transfer alone. Rounds are interleaved, medians are compared. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.execution.calibration import disk_rates
from gigagrad.stores import DiskStore, FieldSpec, Scratch
from gigagrad.stores.scratch import cacheable_bytes

CHANNELS = 64
Call = tuple[str, int, tuple[int, ...], Box | None]
"""What was called, of which store (by number) of which shape, for which crop."""
CROP_PX = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--gibibytes", type=float, default=1.05 * cacheable_bytes() / 2**30)
    parser.add_argument("--side", type=int, default=3072, help="of the image, in pixels")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    bandwidths, overlaps = [], []
    for _ in range(args.rounds):
        bandwidths.append(bandwidth(args.scratch, int(args.gibibytes * 2**30)))
        print(bandwidths[-1], flush=True)
        overlaps.append(overlap(args.scratch, args.side))
        print(overlaps[-1], flush=True)
    line = {
        "gibibytes": round(args.gibibytes, 2),
        "bandwidth": {name: median(found[name] for found in bandwidths) for name in bandwidths[0]},
        "side": args.side,
        "overlap": {name: median(found[name] for found in overlaps) for name in overlaps[0]},
    }
    print(json.dumps(line))


def bandwidth(folder: Path, nbytes: int) -> dict[str, float]:
    side = int((nbytes / 4 / CHANNELS) ** 0.5) // CROP_PX * CROP_PX
    crop = torch.randn(1, CHANNELS, CROP_PX, CROP_PX).contiguous(memory_format=torch.channels_last)
    rows = [[Box(y, x, y + CROP_PX, x + CROP_PX) for x in range(0, side, CROP_PX)] for y in range(0, side, CROP_PX)]
    own_writing, own_reading, writing, reading = [], [], [], []
    scratch = Scratch(folder, nbytes)
    try:
        store = DiskStore(FieldSpec("field", (1, CHANNELS, side, side), torch.float32, (-2, -1)), scratch)
        size = side * CROP_PX * CHANNELS * 4
        for row in rows:
            own_writing.append(size / disk_rates(folder, size)[0])
            start = time.perf_counter()
            for box in row:
                store.write(box, crop)
            store.flush()
            store._file.sync()
            writing.append(time.perf_counter() - start)
        os.posix_fadvise(store._file._cached.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for row in rows:
            own_reading.append(size / disk_rates(folder, size)[1])
            start = time.perf_counter()
            for box in row:
                store.read(box)
            reading.append(time.perf_counter() - start)
        store.close()
    finally:
        scratch.close()
    rates = [len(rows) * size / sum(seconds) / 1e9 for seconds in (own_writing, own_reading, writing, reading)]
    own_write, own_read, write, read = rates
    return {
        "disk_write_gb_per_second": round(own_write, 2),
        "disk_read_gb_per_second": round(own_read, 2),
        "write_gb_per_second": round(write, 2),
        "read_gb_per_second": round(read, 2),
        "write_share": round(write / own_write, 2),
        "read_share": round(read / own_read, 2),
    }


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(32, 1, 1)).train()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target)


def overlap(folder: Path, side: int) -> dict[str, float]:
    image, target = torch.rand(3, side, side), torch.rand(1, side, side).round()
    model = network()
    engine = gg.compile(model, loss, tile=(256, 256))
    engine.plan(image, target)
    state = engine.state_dict()
    in_files = json.loads(json.dumps(state))
    for choice in in_files["choices"].values():
        choice["kept"] = [[node, "disk"] for node, _ in choice["kept"]]
    computing = step(model, image, target, state)
    calls: list[Call] = []
    both = step(model, image, target, in_files, folder, record=None)
    step(model, image, target, in_files, folder, record=calls)
    transfer = replay(calls, folder)
    return {
        "compute_seconds": round(computing, 2),
        "transfer_seconds": round(transfer, 2),
        "seconds": round(both, 2),
        "overlap": round(max(computing, transfer) / both, 2),
    }


def step(
    model: nn.Module,
    image: Tensor,
    target: Tensor,
    state: dict[str, Any],
    folder: Path | None = None,
    record: list[Call] | None = None,
) -> float:
    """Seconds of the second step; `record` gets `(what, store, box)` of every crop that is moved, stores by number."""
    engine = gg.compile(model, loss, tile=(256, 256), scratch=folder)
    engine.load_state_dict(state)
    engine.forward(image[:, :512, :512], target[:, :512, :512])
    engine.plan(image, target)
    if record is None:
        start = time.perf_counter()
        engine.backward(image, target)
        return time.perf_counter() - start
    original = {name: getattr(DiskStore, name) for name in ("read", "write", "add", "close")}
    known: dict[int, int] = {}
    numbers = count()

    def noting(name: str) -> Any:
        def call(self: DiskStore, *arguments: Any) -> Any:
            if id(self) not in known:
                known[id(self)] = next(numbers)
            number = known.pop(id(self)) if name == "close" else known[id(self)]
            record.append((name, number, self.shape, arguments[0] if arguments else None))
            return original[name](self, *arguments)

        return call

    try:
        for name in original:
            setattr(DiskStore, name, noting(name))
        engine.backward(image, target)
    finally:
        for name, method in original.items():
            setattr(DiskStore, name, method)
    return 0.0


def replay(calls: list[Call], folder: Path) -> float:
    """Seconds of moving the same crops in the same order, written behind as in a run."""
    scratch = Scratch(folder, 0)
    stores: dict[int, DiskStore] = {}
    crops: dict[Any, Tensor] = {}
    seconds = 0.0
    try:
        for index, (name, number, shape, box) in enumerate(calls):
            if number not in stores and name != "close":
                for store in stores.values():
                    store.flush()
                field = FieldSpec(f"field-{index}", shape, torch.float32, (-2, -1))
                stores[number] = DiskStore(field, scratch)
            start = time.perf_counter()
            if name == "close":
                if number in stores:
                    stores.pop(number).close()
            elif box is not None and name == "read":
                stores[number].read(box)
            elif box is not None:
                key = (shape[1], *box.shape)
                if key not in crops:
                    crops[key] = torch.randn(1, *key).contiguous(memory_format=torch.channels_last)
                getattr(stores[number], name)(box, crops[key])
            seconds += time.perf_counter() - start
    finally:
        scratch.close()
    return seconds


if __name__ == "__main__":
    main()
