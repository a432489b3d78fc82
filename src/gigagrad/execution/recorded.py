"""Replay a step: what it asks a GPU for is recorded once, and asked for at once from then on.

A step in tiles is thousands of small kernels, and a GPU's host takes longer to ask for them than the GPU to compute
them (docs/decisions/0058-recorded-steps.md). Nothing that a plan does depends on what is in an image, so one recording
serves every image of the size, as long as the model's tensors stay where they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch.utils._pytree import tree_unflatten

from gigagrad.boxes import Box
from gigagrad.devices import Device
from gigagrad.devices.device import Recording, Say
from gigagrad.devices.streams import Streams
from gigagrad.errors import GigagradError
from gigagrad.execution.run import Run
from gigagrad.execution.scalars import Values
from gigagrad.execution.sources import Source, read_ahead
from gigagrad.graphs import Graph
from gigagrad.images import open_image
from gigagrad.images.bag import ArrayBag
from gigagrad.threads import SideThreads, living

_BAND_BYTES = 64 * 2**20
"""Bytes of an image that are read at a time."""

Sources = Mapping[str, Source]
Compute = Callable[[Sources, Values], Run]


class RecordedRun:
    """Hold what a replayed step has left, by the names that it has in `Run`. It belongs to whoever asked for it."""

    pass_seconds = None
    rounding_errors: Mapping[str, float] = {}

    def __init__(self, graph: Graph, found: dict[str, Any]) -> None:
        """`found` is what `_found` says; the next step overwrites it."""
        self._graph = graph
        names = tuple(found["gradients"])
        gradients = torch._foreach_mul([found["gradients"][i] for i in names], 1) if names else ()
        self.gradients: Values = dict(zip(names, gradients, strict=True))
        self.input_gradients = {name: value.clone() for name, value in found["input_gradients"].items()}
        self._outputs = [value.clone() for value in found["outputs"]]
        self.updates: dict[str, torch.Tensor] = found["updates"]
        self.values: Values = found["values"]

    @property
    def output(self) -> torch.Tensor:
        found: torch.Tensor = self._outputs[self._graph.outputs.index(self._graph.output)]
        return found

    @property
    def outputs(self) -> Any:
        structure = self._graph.structure
        return self._outputs[0] if structure is None else tree_unflatten(self._outputs, structure)


class RecordedStep:
    """One plan's step on a device. The first one is computed, the second one in a row is recorded. A recording holds
    all the memory of the plan, so that on a device nothing but the step that ran last has one.
    """

    _all: ClassVar[WeakValueDictionary[int, RecordedStep]] = WeakValueDictionary()

    def __init__(self, device: Device, say: Say = lambda text: None) -> None:
        """`say` gets a sentence if the step cannot be recorded."""
        self._device, self._streams, self._say = device, device.streams(), say
        self._ran = self._given_up = False
        self._recording: Recording | None = None
        self._places: list[object] = []
        self._all[id(self)] = self

    @classmethod
    def drop_others(cls, device: Device, but: RecordedStep | None = None) -> None:
        """Give up the recordings of other steps on a device: their memory is for what runs now."""
        for step in living(cls._all):
            here, there = step._device.torch_device, device.torch_device
            # A device without a number may be any of its kind.
            if step is not but and here.type == there.type and (here == there or None in (here.index, there.index)):
                step._ran, step._recording = False, None

    def run(
        self, graph: Graph, sources: Sources, seeds: Values, tensors: Sequence[torch.Tensor], compute: Compute
    ) -> Run | RecordedRun:
        """Compute or replay the step for these images and labels, and for what random operators have drawn. `tensors`:
        those of the model that it reads; `compute`: runs it for what lies on the device. Raises as that does.
        """
        if not self._ran or self._given_up:
            placed = [_uploaded(source, self._empty(source), self._streams) for source in sources.values()]
            run = compute(_placed(sources, placed), seeds)
            self._ran = True
            return run
        recording = self._recorded(graph, sources, seeds, tensors, compute)
        if recording is None:
            return self.run(graph, sources, seeds, tensors, compute)
        inputs = iter(recording.inputs)
        for source in sources.values():
            _uploaded(source, next(inputs), self._streams)
        for seed in seeds.values():
            next(inputs).copy_(seed)
        recording.replay()
        return RecordedRun(graph, recording.result)

    def _recorded(
        self, graph: Graph, sources: Sources, seeds: Values, tensors: Sequence[torch.Tensor], compute: Compute
    ) -> Recording | None:
        places: list[object] = [(one.data_ptr(), one.shape, one.stride(), one.dtype) for one in tensors]
        if self._recording is not None and places == self._places:
            return self._recording
        self._recording = None

        def work(inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
            images, drawn = inputs[: len(sources)], inputs[len(sources) :]
            return _found(graph, compute(_placed(sources, images), dict(zip(seeds, drawn, strict=True))))

        inputs = [self._empty(source, "meta") for source in sources.values()]
        try:
            self._recording = self._device.record(work, [*inputs, *(seed.to("meta") for seed in seeds.values())])
        except (RuntimeError, GigagradError) as error:  # an operator waits for the device, say
            reason = str(error).partition("\n")[0]
        else:
            self._places = places
            return self._recording
        self._given_up = True
        self._say(f"the step cannot be recorded, so it is asked for operator by operator, which takes longer: {reason}")
        return None

    def _empty(self, source: Source, device: str | torch.device | None = None) -> torch.Tensor:
        device = device or self._device.torch_device
        if source.tensor is not None:
            return torch.empty_like(source.tensor, device=device)
        return torch.empty(source.spec.shape, dtype=source.spec.read_dtype, device=device)


def _found(graph: Graph, run: Run) -> dict[str, Any]:
    """Return the tensors that a run leaves."""
    return {
        "outputs": [run.values[i].detach() for i in graph.outputs],
        "gradients": {i: value.detach() for i, value in run.gradients.items()},
        "input_gradients": {name: value.detach() for name, value in run.input_gradients.items()},
        "updates": {name: value.detach() for name, value in run.updates.items()},
        "values": {i: value.detach() for i, value in run.values.items() if not graph[i].whole},
    }


def _placed(sources: Sources, tensors: Sequence[torch.Tensor]) -> dict[str, Source]:
    """Return sources that read these tensors."""
    found = {}
    for (name, source), tensor in zip(sources.items(), tensors, strict=True):
        if source.tensor is not None:
            there: dict[str, Any] = {"tensor": tensor}
        else:
            there = {"image": ArrayBag(tensor) if source.spec.bag else open_image(tensor[0])}
        found[name] = dataclasses.replace(source, opened_here=False, is_placed=True, **there)
    return found


def _uploaded(source: Source, placed: torch.Tensor, streams: Streams | None) -> torch.Tensor:
    """Copy all of a source to where it is read: on a device of its own band by band, through pinned memory."""
    if source.tensor is not None:
        return placed.copy_(source.tensor)
    for box, band in _bands(source):
        part = placed[box.y0 : box.y1, None] if source.spec.bag else placed[:, :, box.y0 : box.y1]
        if streams is None or band.device == placed.device:
            part.copy_(band)
            continue
        try:
            pinned = streams.pinned_like(band)
        except RuntimeError:  # the host locks no more pages
            part.copy_(band)
        else:
            part.copy_(pinned.copy_(band), non_blocking=True)
    return placed


def _bands(source: Source) -> Iterator[tuple[Box, torch.Tensor]]:
    """Read an image band by band, a bag so many patches at a time, not to be written to; files by several threads."""
    assert source.image is not None
    height, width = source.box.shape
    row_bytes = prod(source.spec.shape) // height * source.spec.read_dtype.itemsize
    rows = max(1, _BAND_BYTES // row_bytes)
    boxes = [Box(y, 0, min(y + rows, height), width) for y in range(0, height, rows)]
    if not source.image.decode_seconds:
        yield from ((box, source.view(box)) for box in boxes)
        return
    readers = SideThreads(min(torch.get_num_threads(), len(boxes)), "gigagrad-upload")
    try:
        yield from read_ahead(boxes, source.read, readers)
    finally:
        readers.shutdown(cancel=True)
