"""Replay a step: what it asks a GPU for is recorded once, and asked for at once from then on.

A step in tiles is thousands of small kernels, and a GPU's host takes longer to ask for them than the GPU to compute
them (docs/decisions/0058-recorded-steps.md). Nothing that a plan does depends on what is in an image, so one recording
serves every image of the size, as long as the model's tensors stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch.utils._pytree import tree_unflatten

from gigagrad.devices import Device
from gigagrad.devices.device import Recording, Say
from gigagrad.errors import GigagradError
from gigagrad.execution.run import Run
from gigagrad.execution.scalars import Values
from gigagrad.execution.sources import Sources, empty_for, placed, reading, upload
from gigagrad.graphs import Graph
from gigagrad.threads import living

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
            run = compute(placed(sources, self._device), seeds)
            self._ran = True
            return run
        recording = self._recorded(graph, sources, seeds, tensors, compute)
        if recording is None:
            return self.run(graph, sources, seeds, tensors, compute)
        inputs = iter(recording.inputs)
        for source in sources.values():
            upload(source, next(inputs), self._streams)
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
            return _found(graph, compute(reading(sources, images), dict(zip(seeds, drawn, strict=True))))

        inputs = [empty_for(source, "meta") for source in sources.values()]
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


def _found(graph: Graph, run: Run) -> dict[str, Any]:
    """Return the tensors that a run leaves."""
    return {
        "outputs": [run.values[i].detach() for i in graph.outputs],
        "gradients": {i: value.detach() for i, value in run.gradients.items()},
        "input_gradients": {name: value.detach() for name, value in run.input_gradients.items()},
        "updates": {name: value.detach() for name, value in run.updates.items()},
        "values": {i: value.detach() for i, value in run.values.items() if not graph[i].whole},
    }
