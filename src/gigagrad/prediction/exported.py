"""Predict whole images with an exported network, tile by tile, into the same sinks as an engine.

Tiles are disjoint and each is computed from its crop (`models.exported`), so that the result does not depend on them.
A thread reads the next crop while one is computed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import closing
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from gigagrad.allowances import ROOM_BYTES
from gigagrad.boxes import Box, tiles
from gigagrad.devices import device_for
from gigagrad.errors import BudgetError, ImageError, ModelError
from gigagrad.events import Events, TileDone
from gigagrad.execution.compiling import bytes_or_none
from gigagrad.execution.executor import ahead
from gigagrad.execution.needed import Within
from gigagrad.execution.sinks import OutputField, Piece, Sink, WholeTensor
from gigagrad.images import Image
from gigagrad.models.exported import DTYPE, ExportedNetwork
from gigagrad.threads import SideThreads

_SHARE: Final = 0.5
"""The share of free memory that crops may take where nobody names a budget."""
_WIDE: Final = 8
"""Tiles are at most so many times as wide as what is read around them: larger ones save little."""


class ExportedEngine:
    """Predictions of an exported network; as much of an `Engine` as they need."""

    def __init__(self, network: ExportedNetwork, *, memory: str | int | None = None) -> None:
        """Load the network. `memory`, the peak of the process, chooses the tiles: it is an estimate, not a bound.

        Raises `ModelError` for a file that ONNX Runtime refuses.
        """
        self.network, self.events = network, Events()
        self._budget_bytes, self._device = bytes_or_none(memory), device_for("cpu")
        self._session = network.open(torch.get_num_threads())

    def output_shape(self, image: Image) -> tuple[int, ...]:
        """Return `(1, outputs, H, W)` for an image. Raises `ImageError` for one that the network does not take."""
        channels, height, width = image.shape
        if channels != self.network.channels or image.dtype != DTYPE:
            raise ImageError(
                f"{image.name} has {channels} channels of {image.dtype}; the exported network takes "
                f"{self.network.channels} of {DTYPE}: predict with the run that it was made of"
            )
        return 1, self.network.outputs, height, width

    def forward(self, image: Image, *, out: Sink | None = None, within: Any = None) -> Any:
        """Return what the sink makes of the output for an image; without one a tensor `(1, outputs, H, W)`.

        `within` as in `Engine.forward`. Raises `ImageError`, `ModelError`, `WriteError`, and `BudgetError` where the
        smallest tile does not fit.
        """
        shape = self.output_shape(image)
        field = OutputField(shape, torch.float32, self._device.torch_device, image.mpp)
        sink = WholeTensor(field.dtype) if out is None else out
        wanted = None if within is None else Within(within, shape)
        with closing(self._pieces(image, self._tile(sink, shape), wanted)) as pieces:
            return sink.take(pieces, field)

    def _tile(self, sink: Sink, shape: tuple[int, ...]) -> tuple[int, int]:
        """Choose the largest tiles that fit, of whole strides and about one size. Raises `BudgetError`."""
        geometry, size = self.network.geometry, shape[-2:]
        most = [-(-_WIDE * max(geometry.around(axis), 64) // stride) for axis, stride in enumerate(geometry.stride)]

        def sides(strides: int) -> tuple[int, int]:
            found = []
            for axis, stride in enumerate(geometry.stride):
                count = -(-size[axis] // (min(strides, most[axis]) * stride))
                found.append(-(-size[axis] // (count * stride)) * stride)
            return found[0], found[1]

        def needed(strides: int) -> int:
            tile = sides(strides)
            crop = math.prod(min(tile[axis] + geometry.around(axis), size[axis]) for axis in (0, 1))
            return int(crop * self.network.bytes_per_pixel) + sink.held_bytes(tile[0], shape)

        held, free = self._device.held_bytes(), self._device.free_bytes() or 0
        room = int(_SHARE * free) if self._budget_bytes is None else self._budget_bytes - held
        strides = max(most)
        while strides > 1 and needed(strides) > room:
            strides -= 1
        if self._budget_bytes is not None and needed(strides) > room:
            raise BudgetError(
                f"a tile of {' x '.join(map(str, sides(1)))} px of the exported network does not fit",
                budget_bytes=self._budget_bytes,
                needed_bytes=held + needed(1),
                smallest_bytes=held + needed(1) + ROOM_BYTES,
            )
        return sides(strides)

    def _pieces(self, image: Image, sides: tuple[int, int], wanted: Within | None) -> Generator[Piece, None, None]:
        _, height, width = image.shape
        boxes = list(tiles(height, width, *sides))
        parts = boxes if wanted is None else [wanted.hull(box) for box in boxes]
        crops = [None if part is None else self.network.geometry.crop(part, height, width) for part in parts]
        start, done, count = time.perf_counter(), 0, sum(crop is not None for crop in crops)
        with SideThreads(1, "gigagrad-read") as threads:
            read = ahead(crops, lambda crop: None if crop is None else np.asarray(image.read(crop)), threads, 1)
            for box, part, crop, pixels in zip(boxes, parts, crops, read, strict=True):
                if part is None or crop is None or pixels is None:
                    yield box, torch.full((1, self.network.outputs, *box.shape), math.nan)
                    continue
                computed = self._computed(part, crop, pixels)
                yield box, computed if wanted is None else wanted.piece(box, part, computed)
                done += 1
                left = (time.perf_counter() - start) / done * (count - done)
                self.events.emit(TileDone("forward", done, count, left))

    def _computed(self, part: Box, crop: Box, pixels: NDArray[Any]) -> torch.Tensor:
        output = self._session.run(pixels[None])
        if output.shape != (1, self.network.outputs, *crop.shape):
            raise ModelError(
                f"{self.network.path} makes {output.shape} of {pixels[None].shape}, expected {self.network.outputs} "
                "channels of the same size; export it again"
            )
        inside = part.shift(-crop.y0, -crop.x0)
        return torch.from_numpy(output[:, :, inside.y0 : inside.y1, inside.x0 : inside.x1].astype(np.float32))
