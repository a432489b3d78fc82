"""A journal of the finished chunks of a step: one that was killed goes on behind them, by any number of ranks.

Each chunk has a file: a hash of what it read of images, what it wrote of fields or the cotangents that it added up, and
its sums. A step that begins anew runs as ever but for chunks whose files are there: it reads the images as they did,
and takes the rest from the file if the hash is the same. Every rank writes its own chunks and reads whosever there are.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import IO, Any

import imagecodecs
import torch

from gigagrad.boxes import Box, Span, apart
from gigagrad.execution.ordered_sum import OrderedSum, Overlap
from gigagrad.execution.prepared import Prepared, Shape
from gigagrad.execution.scalars import ScalarGraph, Values
from gigagrad.files import write_error
from gigagrad.graphs import GATHER
from gigagrad.plans import Chunks
from gigagrad.ranks.ranks import as_bytes
from gigagrad.stores import Store

_AT_A_TIME_BYTES = 2**23
_CHECKSUM, _DIGEST_BYTES = struct.Struct("<I"), 32
_crc32: Any = imagecodecs.deflate_crc32

Sums = tuple[OrderedSum, Mapping[int, Shape]]
"""Sums of a pass, and the shape and dtype of each of them by node."""


class Journal:
    """The finished chunks of one run, in a folder of its own; None: nothing is written down."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._pass = folder, 0
        self._read: dict[int, Any] = {}
        self.taken = 0
        """Chunks that were taken from it."""

    @property
    def is_kept(self) -> bool:
        return self._folder is not None

    def begin(self, index: int) -> None:
        """Begin a pass. Raises `WriteError`."""
        self._pass = index
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise write_error(self._folder, error) from error

    def close(self) -> None:
        """End the step: nobody goes on with it."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def hash_of(self, crops: Mapping[int, torch.Tensor]) -> bytes:
        """Hash what a tile reads of images, in any thread; where nothing is written down, hash nothing."""
        digest = _empty_hash()
        for _, crop in sorted(crops.items()) if self.is_kept else ():
            digest.update(_bytes(crop))
        found: bytes = digest.digest()
        return found

    def reads(self, chunk: int, tile_hash: bytes) -> None:
        """Add to a chunk's hash what a tile of it reads of images; tiles in their order."""
        if self.is_kept:
            self._read.setdefault(chunk, _empty_hash()).update(tile_hash)

    def has_read(self, chunk: int) -> bytes:
        """Return the hash of what the chunk has read."""
        found: bytes = self._read.pop(chunk, _empty_hash()).digest()
        return found

    def entry(self, chunk: int) -> Entry | None:
        """Return what is written down of a chunk, undamaged."""
        return None if self._folder is None else Entry.of(self._path(chunk))

    def forget_later(self) -> None:
        """Remove later passes: a chunk of this one is of other images than before, and so is all that was computed from
        it. That chunk stays until it is written anew, so that whoever comes before that finds as much.
        """
        for path in [] if self._folder is None else self._folder.iterdir():
            index, _, _ = path.name.partition("-")
            if index.isdecimal() and int(index) > self._pass:
                path.unlink(missing_ok=True)

    def write(self, chunk: int, tensors: Iterable[torch.Tensor]) -> None:
        """Write what a chunk leaves behind. Not to outlive the machine: of what a crash of that leaves, the checksum
        differs.

        Raises `WriteError`.
        """
        if not self.is_kept:
            return
        path, checksum = self._path(chunk), 0
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        digest = torch.frombuffer(bytearray(self.has_read(chunk)), dtype=torch.uint8)
        try:
            with partial.open("wb") as file:
                for tensor in chain([digest], tensors):
                    data = _bytes(tensor)
                    checksum = _crc32(data, checksum)
                    file.write(data)
                file.write(_CHECKSUM.pack(checksum))
            os.replace(partial, path)
        except OSError as error:
            raise write_error(path, error) from error

    def _path(self, chunk: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._pass}-{chunk}"


class Entry:
    """The tensors written down of a chunk, to be taken in the order in which they were written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.read_by = file.read(_DIGEST_BYTES)
        """The hash of what the chunk has read of images."""

    @classmethod
    def of(cls, path: Path) -> Entry | None:
        """Open the file; None where it is missing or damaged."""
        try:
            file = path.open("rb")
        except OSError:
            return None
        checksum, behind = 0, b""
        while block := file.read(_AT_A_TIME_BYTES):
            block = behind + block
            checksum, behind = _crc32(block[: -_CHECKSUM.size], checksum), block[-_CHECKSUM.size :]
        if behind != _CHECKSUM.pack(checksum):
            file.close()
            return None
        file.seek(0)
        return cls(file)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        data = bytearray(self._file.read(prod(shape) * dtype.itemsize))
        return torch.frombuffer(data, dtype=dtype).reshape(tuple(shape)) if data else torch.empty(*shape, dtype=dtype)

    def values(self, shapes: Mapping[int, Shape]) -> Values:
        """Return the value of each node, where there is one."""
        there = self.tensor((len(shapes),), torch.int64).tolist()
        return {key: self.tensor(*shapes[key]) for key, is_there in zip(shapes, there, strict=True) if is_there}

    def close(self) -> None:
        self._file.close()


class ChunkRecord:
    """The tensors that the chunks of a pass leave behind, in a fixed order: crops of the pixels that nobody else
    writes, overlaps, and sums. They are written down when a chunk was computed, and taken as if it had been.

    An overlap has begun a chunk before anything is taken, and has ended it before anything is left.
    """

    def __init__(
        self,
        chunks: Chunks,
        stores: Mapping[int, Store],
        boxes: Callable[[Chunks, int, int], Iterable[Box]],
        sums: Sequence[Sums],
        overlaps: Mapping[int, Overlap] | None = None,
    ) -> None:
        """Set the stores and sums; `boxes`: of a field, by node, those of a chunk: `written`, or `first_reached`."""
        self._chunks, self._stores, self._boxes = chunks, stores, boxes
        self._sums, self._overlaps = sums, list((overlaps or {}).values())

    def tensors(self, chunk: int) -> Iterator[torch.Tensor]:
        """Yield the tensors of the chunk that came last."""
        for store, box in self._crops(chunk):
            yield store.read(box)
        for overlap in self._overlaps:
            for _, given in sorted(overlap.given.items()):
                yield given
        for sums, shapes in self._sums:
            yield from _values(sums, shapes)

    def take(self, chunk: int, entry: Entry) -> None:
        for store, box in self._crops(chunk):
            store.write(box, entry.tensor(store.crop_shape(box), store.dtype))
        for overlap in self._overlaps:
            for _, waiting in sorted(overlap.waiting.items()):
                waiting.copy_(entry.tensor(waiting.shape, waiting.dtype))
            overlap.end()
        for sums, shapes in self._sums:
            sums.add(chunk, entry.values(shapes))

    def _crops(self, chunk: int) -> Iterator[tuple[Store, Box]]:
        for field, store in self._stores.items():
            yield from _strips(store, self._boxes(self._chunks, field, chunk))


def written(chunks: Chunks, field: int, chunk: int) -> list[Box]:
    """Return what a chunk writes of a field."""
    return chunks.written(field, chunks.tiles(chunk))


def _values(sums: OrderedSum, shapes: Mapping[int, Shape]) -> Iterator[torch.Tensor]:
    """Yield the values of the chunk being computed: for each node whether there is one, and those that there are."""
    values = sums.chain
    yield torch.tensor([key in values for key in shapes], dtype=torch.int64)
    for key, (_, dtype) in shapes.items():
        if key in values:
            yield values[key].to(dtype)


def _strips(store: Store, boxes: Iterable[Box]) -> Iterator[tuple[Store, Box]]:
    """Yield boxes of a field, in pieces of whole rows that are written down one at a time."""
    height, width = (store.shape[axis] for axis in store.axes)
    pixel = prod(store.shape) // (height * width) * store.dtype.itemsize
    for box in boxes:
        rows = max(1, _AT_A_TIME_BYTES // (pixel * box.x.length))
        for y in range(box.y0, box.y1, rows):
            yield store, Box.of(Span(y, min(y + rows, box.y1)), box.x)


def first_reached(chunks: Chunks, field: int, chunk: int) -> list[Box]:
    """Return the pixels of a field that no chunk before this one has reached."""
    boundary = chunks.boundary(field, chunk)
    read = chunks.read(field, chunks.tiles(chunk))
    return apart([piece for box in read for piece, which in boundary.split(box) if which is None])


def key_of(prepared: Prepared, scalars: ScalarGraph, draws: int, overflows: int) -> str:
    """Hash what else a step's chunks depend on: kernels, plan, graph, values without pixels, draws."""
    graph, plan = prepared.graph, prepared.plan
    digest = _empty_hash()
    for segment in plan.segments:
        digest.update(f"{segment.tile} {segment.chunks};".encode())
    kernels = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    digest.update(
        f"{kernels} {plan.memory_format} {plan.workers} {plan.threads} {plan.kept} {overflows} {draws}".encode()
    )
    for node in graph.nodes:
        arguments = {name: value for name, value in sorted(node.arguments.items()) if name != "name"}
        digest.update(f"{node.id} {node.op} {arguments} {node.shape} {node.dtype};".encode())
        if node.id in scalars.values and (node.is_source or node.op == GATHER):
            digest.update(_bytes(scalars.values[node.id]))
    found: str = digest.hexdigest()
    return found


def _empty_hash() -> Any:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(as_bytes(tensor).numpy())
