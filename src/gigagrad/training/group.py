"""A loss over the outputs of several slides, exactly, with one slide in memory at a time.

The loss needs the outputs alone. So all slides go forward first, the loss is pulled back to each output, and then every
slide is seen once more: forward and backward, with what its output is to receive (Gao et al., 2021, for contrastive
losses). The outputs of a bag's slides are averaged before the loss sees them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gigagrad.errors import ModelError
from gigagrad.execution.compiling import compile as compile_engine
from gigagrad.execution.engine import Engine
from gigagrad.images import Image
from gigagrad.plans import Plan
from gigagrad.prediction.classes import image_shape
from gigagrad.prediction.slide_scores import output_of, weighted_sum

Opened = Callable[[], AbstractContextManager[Image]]
"""Opens a slide, each time as it is seen in this step."""


class Group:
    """The loss of `model` over bags of slides, `(N, C)` outputs and their targets. `settings` are `compile`'s."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], **settings: Any) -> None:
        self._model, self._loss = model, loss
        self.engine: Engine = compile_engine(model, weighted_sum, **settings)
        """Goes backward, where most of the time and memory is needed."""
        self.outputs: Engine = compile_engine(model, **settings)

    def plan(self, slide: Image) -> Plan:
        """Plan the backward pass. Raises as `Engine.plan` does, and `ModelError` for a model that gives an image."""
        if image_shape(self.outputs, slide) is not None:
            raise ModelError("the model gives an image; bags of slides and cox need one that scores whole slides")
        graph = self.outputs.problem(slide).graph
        return self.engine.plan(slide, torch.zeros(graph[graph.output].shape[-1]))

    def loss(self, bags: Sequence[Sequence[Opened]], targets: Sequence[Tensor]) -> float:
        """Compute the loss of the model as it is."""
        return float(self._of(self._seen(bags), bags, targets).detach())

    def backward(self, bags: Sequence[Sequence[Opened]], targets: Sequence[Tensor]) -> float:
        """Return the loss and add its gradients to the parameters' `.grad`. Random numbers are drawn, and running
        statistics updated, as by one forward of every slide.
        """
        states = list[Tensor]()
        with buffers_kept(self._model):
            outputs = self._seen(bags, states)
        leaves = [output.requires_grad_() for output in outputs]
        value = self._of(leaves, bags, targets)
        cotangents = torch.autograd.grad(value, leaves)
        for opened, state, cotangent in zip(itertools.chain(*bags), states, cotangents, strict=True):
            torch.set_rng_state(state)
            with opened() as slide:
                self.engine.backward(slide, cotangent[0])
        return float(value.detach())

    def _seen(self, bags: Sequence[Sequence[Opened]], states: list[Tensor] | None = None) -> list[Tensor]:
        """Compute the output `(1, C)` of each slide; before it, the state of random numbers goes to `states`."""
        found = []
        for opened in itertools.chain(*bags):
            if states is not None:
                states.append(torch.get_rng_state())
            with opened() as slide:
                found.append(output_of(self.outputs, slide))
        return found

    def _of(self, outputs: Sequence[Tensor], bags: Sequence[Sequence[Opened]], targets: Sequence[Tensor]) -> Tensor:
        each = iter(outputs)
        pooled = [torch.cat(list(itertools.islice(each, len(bag)))).mean(0, keepdim=True) for bag in bags]
        output_NC = torch.cat(pooled)
        return self._loss(output_NC, torch.cat(list(targets)).to(output_NC.device))


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put running statistics back at the end."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)
