"""Take an output field, tile by tile. A sink says what it holds, so that it is part of the plan."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from gigagrad.boxes import Box, tiles
from gigagrad.errors import ModelError
from gigagrad.images import Image
from gigagrad.images.georeference import geotiff_tags
from gigagrad.threads import SideThreads

_ROWS = 512
"""Rows in which gaps are looked for at a time."""

Piece = tuple[Box, torch.Tensor]
Pieces = Iterable[Piece]
"""Disjoint boxes that cover the field with their crops `(1, C, h, w)`: rows of equal height, left to right."""


@dataclass(frozen=True, slots=True)
class OutputField:
    """The field that a sink is given."""

    shape: tuple[int, ...]
    """`(1, C, H, W)`."""
    dtype: torch.dtype
    device: torch.device
    mpp: float | None
    """Micrometres per pixel where the output is as large as the image and that knows."""


class Sink(ABC):
    """Takes one output field. `kind` names what it holds: sinks of one kind hold the same."""

    kind: str

    @abstractmethod
    def held_bytes(self, tile_height: int, shape: tuple[int, ...]) -> int:
        """Return what is held at most of a field of this shape that comes in rows of tiles of this height."""

    @abstractmethod
    def take(self, pieces: Pieces, field: OutputField) -> Any:
        """Take everything, to the end; what is returned is `forward`'s result."""


class WholeTensor(Sink):
    """One tensor `(1, C, H, W)` on the device."""

    kind = "tensor"

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def held_bytes(self, tile_height: int, shape: tuple[int, ...]) -> int:
        return prod(shape) * self._dtype.itemsize

    def take(self, pieces: Pieces, field: OutputField) -> torch.Tensor:
        result = torch.empty(field.shape, dtype=field.dtype, device=field.device)
        for box, crop in pieces:
            result[..., box.y0 : box.y1, box.x0 : box.x1] = crop
        return result


class Pyramid(Sink):
    """A pyramid in the format that the file's name says (see `write_pyramid`), written row of tiles by row of tiles.

    `pixels` makes `(h, w)` or `(h, w, C)` of a crop `(1, C, h, w)`; without it they are the values themselves in
    float32. `planes` is how many channels that has, None: as many as the output. Where `seen`, an image of the field's
    size, has no data, they are `nodata`. `options` are `write_pyramid`'s. Raises WriteError.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: type[np.generic] = np.float32,
        planes: int | None = None,
        pixels: Callable[[torch.Tensor], NDArray[Any]] | None = None,
        nearest: bool = False,
        seen: Image | None = None,
        nodata: int | float = 0,
        **options: Any,
    ) -> None:
        self._path, self._dtype, self._planes = path, np.dtype(dtype), planes
        self._seen, self._nodata = seen, nodata
        self._gap_bytes = 0 if seen is None else seen.missing_bytes
        self._pixels, self._options = pixels or _values, {"nearest": nearest, **options}
        self.kind = f"pyramid of {self._dtype}, {planes or 'all'} channels, {self._gap_bytes} bytes for gaps"

    @classmethod
    def in_place_of(cls, path: Path, image: Image | None) -> Self:
        """Write a field's values: where `image`, of the field's size, lies on earth, and NaN where that has no data."""
        if image is None:
            return cls(path)
        nodata = math.nan if image.missing_bytes else None
        return cls(path, seen=image, nodata=math.nan, tags=geotiff_tags(image.georeference, nodata))

    def held_bytes(self, tile_height: int, shape: tuple[int, ...]) -> int:
        from gigagrad.images.write import pyramid_bytes

        channels = self._planes or shape[1]
        row = shape[-1] * channels * self._dtype.itemsize
        strips = 2 * min(tile_height, shape[-2]) * row  # one is assembled while the one before it is written
        gaps = self._gap_bytes and self._gap_bytes + min(_ROWS, shape[-2]) * shape[-1]
        return strips + gaps + pyramid_bytes(self._path, (shape[-2], shape[-1], channels), self._dtype)

    def take(self, pieces: Pieces, field: OutputField) -> Path:
        from gigagrad.images.write import write_pyramid

        height, width = field.shape[-2:]
        channels = self._planes or field.shape[1]
        rows = self._without_gaps(assemble(((box, self._pixels(crop)) for box, crop in pieces), height, width))
        options = {"shape": (height, width, channels), "dtype": self._dtype, "mpp": field.mpp, **self._options}
        return write_pyramid(self._path, rows, **options)

    def _without_gaps(self, strips: Iterable[NDArray[Any]]) -> Iterator[NDArray[Any]]:
        """Yield the strips, which are ours, with `nodata` in their gaps."""
        if self._seen is None or not self._gap_bytes:
            yield from strips
            return
        y = 0
        for strip in strips:
            height, width = strip.shape[:2]
            for rows in tiles(height, width, _ROWS, width):
                if (missing := self._seen.missing(rows.shift(y, 0))) is not None:
                    strip[rows.y0 : rows.y1][missing] = self._nodata
            y += height
            yield strip


class Several(Sink):
    """Several sinks of one pass, each in a thread of its own. All are done with a piece before the next one is made.

    Returns what each of them does. The first error of any of them ends the others.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self.kind = " and ".join(sink.kind for sink in sinks)

    def held_bytes(self, tile_height: int, shape: tuple[int, ...]) -> int:
        return sum(sink.held_bytes(tile_height, shape) for sink in self._sinks)

    def take(self, pieces: Pieces, field: OutputField) -> tuple[Any, ...]:
        ready: SimpleQueue[BaseException | None] = SimpleQueue()
        given: list[SimpleQueue[Piece | None]] = [SimpleQueue() for _ in self._sinks]

        def take(sink: Sink, inbox: SimpleQueue[Piece | None]) -> Any:
            own = _each(inbox, ready)
            try:
                taken = sink.take(own, field)
                for _ in own:
                    pass  # what it left
                return taken
            except BaseException as error:
                ready.put(error)
                raise

        with SideThreads(len(self._sinks), "gigagrad-sink") as threads:
            tasks = [threads.submit(take, sink, inbox) for sink, inbox in zip(self._sinks, given, strict=True)]
            try:
                for piece in pieces:
                    _hand_out(piece, given)
                    for _ in given:
                        if (error := ready.get()) is not None:
                            raise error
            except BaseException:
                _hand_out(GeneratorExit(), given)
                raise
            _hand_out(None, given)
            return tuple(task.result() for task in tasks)


def _hand_out(piece: Piece | GeneratorExit | None, given: Iterable[SimpleQueue[Any]]) -> None:
    for inbox in given:
        inbox.put(piece)


def _each(inbox: SimpleQueue[Any], ready: SimpleQueue[BaseException | None]) -> Iterator[Piece]:
    """Yield what comes in until None does, saying `ready` after each piece. Raises GeneratorExit where the run is over
    before its end.
    """
    while (piece := inbox.get()) is not None:
        if isinstance(piece, GeneratorExit):
            raise piece
        yield piece
        ready.put(None)


def _values(crop: torch.Tensor) -> NDArray[Any]:
    return crop[0].permute(1, 2, 0).to("cpu", torch.float32).numpy()


def assemble(tiles: Iterable[tuple[Box, NDArray[Any]]], height: int, width: int) -> Iterator[NDArray[Any]]:
    """Join tiles into strips `(h_i, width, ...)` that cover `[0, height)` from top to bottom.

    `tiles` are disjoint boxes with their `(h, w)` or `(h, w, C)` arrays, row by row and left to right, all of one row
    equally high. One strip (a row of tiles) is held at a time; a strip is a fresh array, so the receiver may keep it.
    A strip leaves only when the next tile is there or there is none, so `tiles` has come to its end before the last
    strip is given away: a receiver that stops asking then, as TIFF writers do, cuts nothing off.

    Raises `ModelError` when the tiles cover another area, as those of a model do that changes the image's size.
    """
    y0 = x0 = 0
    strip: NDArray[Any] | None = None
    for box, pixels in tiles:
        assert pixels.shape[:2] == box.shape, f"tile {box} came with pixels of shape {pixels.shape}"
        if strip is not None and x0 == width:
            yield strip
            y0, x0, strip = y0 + len(strip), 0, None
        if strip is None:
            strip = np.empty((box.height, width, *pixels.shape[2:]), pixels.dtype)
        if (box.y0, box.x0, box.height) != (y0, x0, len(strip)) or box.x1 > width or box.y1 > height:
            raise _wrong_size(f"tile {box} where row {y0}, column {x0} comes next", height, width)
        strip[:, box.x0 : box.x1] = pixels
        x0 = box.x1
    if strip is None or x0 < width or y0 + len(strip) < height:
        raise _wrong_size(f"nothing from row {y0}, column {x0} on", height, width)
    yield strip


def _wrong_size(found: str, height: int, width: int) -> ModelError:
    return ModelError(
        f"the model's output does not cover the {height} x {width} px slide pixel for pixel (got {found}); "
        "prediction needs a model whose output is as high and wide as its input"
    )
