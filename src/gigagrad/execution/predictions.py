"""Deliver fields in pieces while they are computed: predictions, and the gradient of an image. Or see a
prediction as an image, whose tiles are computed when somebody reads them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.utils._pytree import tree_unflatten

from gigagrad.boxes import Box
from gigagrad.devices import Device
from gigagrad.errors import ConfigError, ModelError
from gigagrad.events import Events
from gigagrad.execution.captures import Captures
from gigagrad.execution.model_state import leave_state, stored_in
from gigagrad.execution.needed import Within
from gigagrad.execution.planner import Planner
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.run import Run
from gigagrad.execution.sinks import OutputField, Pyramid, Sink, WholeTensor
from gigagrad.execution.sources import Source, opened_sources, placed
from gigagrad.graphs import Captured, Graph, LossModule, Node
from gigagrad.images import Image
from gigagrad.images.pixels import Array
from gigagrad.plans import Grid, Plan, TileGeometry

Measured = Callable[..., AbstractContextManager[tuple[Prepared, Captured, dict[str, float]]]]


@dataclass(frozen=True, slots=True)
class Predictions:
    """Delivers the fields of an engine's model, one run a call."""

    composite: LossModule
    captures: Captures
    planner: Planner
    events: Events
    device: Device
    measured: Measured
    """Takes a phase, sources and a sink; gives the plan and what was captured to the block that runs it."""
    draws: Callable[[Prepared], int]
    """Says what random operators draw from."""

    def delivered(
        self, graph: Graph, sources: dict[str, Source], out: str | Path | Sink | None, within: Any = None
    ) -> Any:
        """Return what the sink makes of the output field; as the model returns it where there is none."""
        node = graph[graph.output]
        wanted = None if within is None else Within(within, node.shape, whole_tiles=self.planner.forces_tiles)
        taken = self.taken(node, sources, out, "forward", wanted)
        return tree_unflatten([taken], graph.structure) if out is None and graph.structure is not None else taken

    def taken(
        self,
        node: Node,
        sources: dict[str, Source],
        out: str | Path | Sink | None,
        phase: str,
        within: Within | None = None,
    ) -> Any:
        """Return what the sink makes of a field that comes in pieces: the output, or `backward` the gradient of the
        image.
        """
        image = _image_of_its_size(node, sources)
        if out is None or isinstance(out, Sink):
            sink = WholeTensor(node.dtype) if out is None else out
        else:
            sink = Pyramid.in_place_of(Path(out), image)
        mpp = None if image is None else image.mpp
        pieces = self.pieces(sources, sink, phase, within)
        try:
            return sink.take(pieces, OutputField(node.shape, node.dtype, self.device.torch_device, mpp))
        finally:
            pieces.close()  # the traceback of an error may keep it

    def pieces(
        self, sources: dict[str, Source], sink: Sink | None = None, phase: str = "forward", within: Within | None = None
    ) -> Generator[tuple[Box, torch.Tensor], None, None]:
        """Yield a field as it is computed, planned with what the sink that takes it holds of it, if there is one."""
        with self.measured(phase, sources, sink) as (prepared, captured, _):
            if not prepared.problem.backward and not delivers_image(prepared.graph):
                raise ConfigError("stream needs a model whose output is an image")
            stored, draws = stored_in(self.composite, prepared.graph), self.draws(prepared)
            read = placed(sources, self.device) if prepared.places_images else sources
            run = Run(prepared, read, stored, self.events, draws=draws, within=within)
            with run, closing(run):
                delivered = False
                for piece in run.stream():
                    delivered = True
                    yield piece
                if not delivered:  # a gradient that a whole-field operator gives, or none
                    yield _whole_gradient(run)
            self.planner.finished(prepared, None)
        leave_state(self.composite, run.updates, captured)

    def at(self, image: Any, *, at_once: bool) -> PredictedImage:
        """Open the prediction of an image as an image. Raises as `Engine.at`."""
        with ExitStack() as held:
            sources = held.enter_context(opened_sources(self.composite, image, None))
            captured = self.captures.get(sources)
            if not delivers_image(captured.graph):
                raise ConfigError("the model's output is no image, which at() needs; forward() returns it")
            if at_once:
                prepared = self.planner.prepare_boxes(captured.graph, sources)
            else:
                prepared = self.planner.prepare(captured.graph, sources, None, backward=False)
            stored, draws = stored_in(self.composite, prepared.graph), self.draws(prepared)
            # Whoever reads boxes does other things, too, for which the plan has no bytes: giving back memory for each
            # tile on their account takes as long as computing it.
            plan = prepared.plan
            peak = plan.budget_bytes or plan.predicted_peak_bytes + (self.device.free_bytes() or 0)
            run = Run(prepared, sources, stored, self.events, draws=draws, peak_bytes=peak)
            held.enter_context(run)
            node = prepared.graph[prepared.graph.output]
            seen = _image_of_its_size(node, sources)
            name = getattr(sources["image"].image, "name", "prediction")
            mpp = None if seen is None else seen.mpp
            return PredictedImage(run, plan, node, name, mpp, held.pop_all())


def delivers_image(graph: Graph) -> bool:
    """Say whether the model's output is an image `(1, C, H, W)`, else a value without spatial axes.

    Raises ModelError for a field with its axes anywhere else.
    """
    node = graph[graph.output]
    if node.is_field and (node.axes != (-2, -1) or len(node.shape) != 4):
        raise ModelError(f"an output that is an image must be laid out as (N, C, H, W), got shape {node.shape}")
    return node.is_field


def _image_of_its_size(node: Node, sources: dict[str, Source]) -> Image | None:
    """Return the image where the field is of its size, so that its pixels are where the image's are."""
    source = sources["image"]
    image = source.image
    return image if isinstance(image, Image) and source.spec.shape[-2:] == node.shape[-2:] else None


def _whole_gradient(run: Run) -> tuple[Box, torch.Tensor]:
    whole = run.input_gradients.get("image")
    if whole is None:
        raise ModelError("no gradient reaches the image; is it detached in the model or the loss, or rounded?")
    return Box.whole(*whole.shape[-2:]), whole


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
