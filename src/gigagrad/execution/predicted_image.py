"""See a prediction as an image: its tiles are computed when somebody reads them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Final

import numpy as np
import torch

from gigagrad.boxes import Box
from gigagrad.execution.run import Run
from gigagrad.graphs import Node
from gigagrad.images import Image
from gigagrad.images.pixels import Array
from gigagrad.plans import Grid, Plan, TileGeometry

_Compute = Callable[[Iterable[TileGeometry]], Iterator[tuple[Box, torch.Tensor]]]
_KEPT_BYTES: Final = 128 * 2**20
"""The most that computed tiles take; the newest stay."""


class PredictedImage(Image):
    """The output field of a network for one image, `(C, H, W)`. Made by `Engine.at`.

    Tiles are those of the `plan` for the whole image, computed by the same programs: each pixel has the bits that it
    has in a whole prediction by this plan. What the plan computes before the output's tiles (sums over the image, kept
    fields) is computed when the first box is read. Closing it ends the run; an image that `Engine.at` was given stays
    open.
    """

    def __init__(self, run: Run, plan: Plan, node: Node, name: str, mpp: float | None, held: ExitStack) -> None:
        """Read the field of `node` from a run that has not begun; `held` is closed with this."""
        _, channels, height, width = node.shape
        self._torch_dtype = torch.float32 if node.dtype is torch.bfloat16 else node.dtype  # which NumPy lacks
        dtype = torch.empty(0, dtype=self._torch_dtype).numpy().dtype
        super().__init__(shape=(channels, height, width), dtype=dtype, name=name, mpp=mpp, cache_bytes=_KEPT_BYTES)
        self.plan = plan
        self.computed = 0
        """Tiles that were computed, those that no longer stay included."""
        self._run, self._node, self._held = run, node.id, held
        self._begun: tuple[Grid, _Compute] | None = None
        self._tiles: OrderedDict[int, Array] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def _read_inside(self, box: Box) -> Array:
        pixels = np.asarray(self._blank(*box.shape))
        with self._lock:
            self._require_open()
            if self._begun is None:
                self._begun = self._run.up_to_output()
            grid, compute = self._begun
            wanted = self._at(grid, box)
            found = {tile: self._tiles[tile] for tile in wanted if tile in self._tiles}
            missing = [tile for tile in wanted if tile not in found]
            for tile, (_, crop) in zip(missing, compute(grid[tile] for tile in missing), strict=True):
                found[tile] = crop[0].to("cpu", self._torch_dtype).numpy()
            self.computed += len(missing)
            self._keep(found)
        for tile, computed in found.items():
            own = grid[tile].wanted(self._node)
            part = box.intersect(own)
            to, of = part.shift(-box.y0, -box.x0), part.shift(-own.y0, -own.x0)
            pixels[:, to.y0 : to.y1, to.x0 : to.x1] = computed[:, of.y0 : of.y1, of.x0 : of.x1]
        return pixels

    def _at(self, grid: Grid, box: Box) -> list[int]:
        """Return the tiles that a box meets."""
        rows, columns = (
            [i for i in range(grid.shape[axis]) if grid.wanted(axis, i)[self._node].meets(span)]
            for axis, span in enumerate((box.y, box.x))
        )
        return [row * grid.shape[1] + column for row in rows for column in columns]

    def _keep(self, found: dict[int, Array]) -> None:
        for tile, computed in found.items():
            if tile not in self._tiles:
                self._tiles[tile] = computed
                self._kept_bytes += computed.nbytes
            self._tiles.move_to_end(tile)
        while self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= self._tiles.popitem(last=False)[1].nbytes

    def _release(self) -> None:
        with self._lock:  # what is being computed comes to its end
            self._tiles.clear()
            self._held.close()
