"""Deliver fields in pieces while they are computed: predictions, and the gradient of an image."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from gigagrad.boxes import Box
from gigagrad.devices import Device
from gigagrad.errors import ConfigError, ModelError
from gigagrad.events import Events
from gigagrad.execution.captures import Captures
from gigagrad.execution.model_state import leave_state, stored_in
from gigagrad.execution.needed import Within
from gigagrad.execution.placing import placed
from gigagrad.execution.planner import Planner
from gigagrad.execution.predicted_image import PredictedImage
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.run import Run
from gigagrad.execution.sinks import Handed, OutputField, Pyramid, Sink, WholeTensor
from gigagrad.execution.sources import Source, opened_sources
from gigagrad.graphs import Captured, Graph, LossModule, Node
from gigagrad.images import Image

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
        self, sources: dict[str, Source], sink: Sink, phase: str = "forward", within: Within | None = None
    ) -> Generator[tuple[Box, torch.Tensor], None, None]:
        """Yield a field as it is computed, planned with what the sink holds of it."""
        backward = phase == "backward"
        with self.measured(phase, sources, sink) as (prepared, captured, _):
            if not backward and not delivers_image(prepared.graph):
                raise ConfigError("stream needs a model whose output is an image")
            stored, draws = stored_in(self.composite, prepared.graph), self.draws(prepared)
            read = placed(sources, self.device) if prepared.places_images else sources
            run = Run(prepared, read, stored, self.events, backward=backward, draws=draws, within=within)
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
                prepared = self.planner.prepare(captured.graph, sources, Handed(), backward=False)
            stored, draws = stored_in(self.composite, prepared.graph), self.draws(prepared)
            # Whoever reads boxes does other things, too, for which the plan has no bytes: giving back memory for each
            # tile on their account takes as long as computing it.
            plan = prepared.plan
            peak = plan.budget_bytes or plan.predicted_peak_bytes + (self.device.free_bytes() or 0)
            run = Run(prepared, sources, stored, self.events, backward=False, draws=draws, peak_bytes=peak)
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
