"""Measure the tiers below the caches: copies in memory, the disk under a scratch folder and what processors do for
fields in its files, a lossless codec.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from math import isqrt
from pathlib import Path

import numpy as np
import torch

from gigagrad.boxes import Box
from gigagrad.errors import ConfigError
from gigagrad.stores import Blosc, DiskStore, FieldSpec, Scratch
from gigagrad.stores.disk import MOST_BYTES
from gigagrad.stores.scratch import ScratchFile, page_aligned
from gigagrad.threads import operator_threads

_BLOCK_BYTES = 8 * 2**20
_ROUNDS = 5
_CHANNELS, _TILE_PX = 32, 256
"""Channels and tile side of a field as deep networks keep them."""


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Bytes per second of one thread that writes and reads in large blocks."""

    write: float
    read: float
    direct: bool
    """True where the page cache was by-passed. Where the file system cannot do that, writes are flushed and reads may
    come from memory."""


def copy_bytes_per_second(size: int) -> float:
    """Measure a copy of `size` bytes by one thread, the fastest of a few."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.empty_like(source)
    return size / fastest(lambda: target.copy_(source))


def disk_rates(folder: Path, size: int) -> DiskRates:
    """Write and read a file of `size` bytes in `folder`, which is removed afterwards.

    Raises `ConfigError` if the folder cannot be used, `StoreError` if the disk is full.
    """
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"cannot measure the disk: {folder} is no folder that can be written; name one with --scratch"
        )
    offsets = range(0, size, _BLOCK_BYTES)
    block = page_aligned(1, _BLOCK_BYTES)
    block[:] = np.frombuffer(np.random.default_rng(0).bytes(_BLOCK_BYTES), np.uint8)
    moved = len(offsets) * _BLOCK_BYTES
    with closing(ScratchFile(folder / f".gigagrad-calibrate-{os.getpid()}", moved, past_cache=True)) as file:
        start = time.perf_counter()
        for offset in offsets:
            file.write(memoryview(block).cast("B"), offset)
        file.sync()
        written = time.perf_counter()
        for offset in offsets:
            file.read_into(block, offset)
        return DiskRates(moved / (written - start), moved / (time.perf_counter() - written), file.past_cache)


def file_bytes_per_second(folder: Path, size: int) -> float:
    """Measure a field of about `size` bytes that is written to a file in `folder` and read again, tile by tile: bytes
    of both per second of processor time, whichever threads spend it.

    Raises `StoreError` if the folder cannot be used or the disk is full.
    """
    side = max(1, isqrt(size // (4 * _CHANNELS)) // _TILE_PX) * _TILE_PX
    starts = range(0, side, _TILE_PX)
    boxes = [Box(y, x, y + _TILE_PX, x + _TILE_PX) for y in starts for x in starts]
    tile = torch.ones(1, _CHANNELS, _TILE_PX, _TILE_PX)
    scratch = Scratch(folder, _CHANNELS * side * side * 4)
    try:
        shape = (1, _CHANNELS, side, side)
        store = DiskStore(FieldSpec("rate", shape, tile.dtype, (-2, -1)), scratch)
        with closing(store), operator_threads(1):

            def write_and_read() -> None:
                for box in boxes:
                    store.write(box, tile.clone())  # what a run hands over is new, too
                store.flush()
                for box in boxes:
                    store.read(box)

            return 2 * tile.nbytes * len(boxes) / fastest(write_and_read, time.process_time)
    finally:
        scratch.close()


def codec_rates(size: int) -> tuple[float, float]:
    """Measure the lossless codec on what a convolution makes, in bricks, by one thread: bytes of the field per second,
    the slower of both directions, and bytes of the field per byte encoded.
    """
    codec, brick = Blosc(), MOST_BYTES
    field = np.random.default_rng(0).standard_normal(size // 4, dtype=np.float32).view(np.uint8)
    bricks = [field[start : start + brick] for start in range(0, field.nbytes, brick)]
    encoded = [codec.encode(data, 4) for data in bricks]
    out = np.empty(brick, np.uint8)

    def decode() -> None:
        for data, like in zip(encoded, bricks, strict=True):
            codec.decode(data, out[: len(like)])

    encoding, decoding = fastest(lambda: [codec.encode(data, 4) for data in bricks]), fastest(decode)
    return field.nbytes / max(encoding, decoding), field.nbytes / sum(map(len, encoded))


def fastest(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of the fastest of a few runs, after one that warms up."""
    work()
    best = float("inf")
    for _ in range(_ROUNDS):
        start = clock()
        work()
        best = min(best, clock() - start)
    return best
