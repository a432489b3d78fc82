"""A model and what trains it: engine, optimizer, rates, clipping, and an average of the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from gigagrad.execution.engine import Engine
from gigagrad.execution.engine import compile as compile_engine
from gigagrad.images import Image
from gigagrad.losses import Loss
from gigagrad.training.averaging import Averaged
from gigagrad.training.checkpoint import Checkpoint
from gigagrad.training.config import FitConfig
from gigagrad.training.group import Group, Opened
from gigagrad.training.optimization import make_optimizer, set_rates


class Learner:
    """Adds up gradients of slides and steps. `count` is how many an epoch has; `grouped`: they are bags of slides, or
    compared with each other.
    """

    def __init__(self, config: FitConfig, model: nn.Module, loss: Loss, count: int, *, grouped: bool) -> None:
        """Raises `ConfigError` for an optimizer that cannot be made."""
        self.model, self._config, self._count = model, config, count
        self.optimizer = make_optimizer(config, model)
        self._average = Averaged(model, config.ema) if config.ema else None
        settings: dict[str, Any] = {
            "memory": config.memory,
            "scratch": config.scratch,
            "storage": config.storage,
            "device": config.device,
            "precision": config.precision,
            "optimizer": self.optimizer,
        }
        self.group = Group(model, loss.function, **settings) if grouped else None
        self.engine = self.group.engine if self.group is not None else compile_engine(model, loss.function, **settings)
        self._bags: list[Sequence[Opened]] = []
        self._targets: list[torch.Tensor] = []

    @property
    def engines(self) -> tuple[Engine, ...]:
        return (self.engine,) if self.group is None else (self.engine, self.group.outputs)

    def add(self, slide: Image, target: Image | torch.Tensor, *, first: bool) -> float:
        """Add the gradients of a slide, the first of its step or a further one. Returns its loss."""
        self._begin(first)
        return float(self.engine.backward(slide, target))

    def add_bag(self, slides: Sequence[Opened], target: torch.Tensor, *, first: bool, last: bool) -> float | None:
        """A further bag of a group; with the `last` one of a step all their gradients. Returns the step's loss then."""
        assert self.group is not None
        self._begin(first)
        self._bags.append(slides)
        self._targets.append(target)
        return self.group.backward(self._bags, self._targets) if last else None

    def _begin(self, first: bool) -> None:
        self.model.train()
        if first:
            self.optimizer.zero_grad(set_to_none=True)
            self._bags, self._targets = [], []

    def step(self, epoch: int, index: int) -> dict[str, float]:
        """Step with the mean gradient of the slides up to `index` of `epoch`. Returns what there is to log of it."""
        config = self._config
        of_epoch = math.ceil(self._count / config.accumulate)
        done = epoch * of_epoch + index // config.accumulate
        values = {}
        if config.schedule != "constant" or config.warmup:
            share = set_rates(self.optimizer, config, done, config.epochs * of_epoch)
            values["learning_rate"] = share * config.learning_rate
        learned = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        if (added := index % config.accumulate) and self.group is None:
            for parameter in learned:
                assert parameter.grad is not None
                parameter.grad /= added + 1
        if config.clip is not None:
            values["gradient_norm"] = float(torch.nn.utils.clip_grad_norm_(learned, config.clip))
        self.optimizer.step()
        if self._average is not None:
            self._average.update(done + 1)
        return values

    def ends_step(self, index: int) -> bool:
        """Whether slide `index` of an epoch is the last of its step."""
        return (index + 1) % self._config.accumulate == 0 or index + 1 == self._count

    def as_kept(self) -> AbstractContextManager[None]:
        """The model with the weights that are validated and kept, meanwhile."""
        return nullcontext() if self._average is None else self._average.applied()

    def writes(self) -> int:
        """How often anything that a step changes has been written to: PyTorch counts it."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.state_dict(keep_vars=True).values(), *states]
        return sum(tensor._version for tensor in tensors if isinstance(tensor, torch.Tensor))

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it, by the names of `Checkpoint`."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "engine": self.engine.state_dict()
            | ({} if self.group is None else {"outputs": self.group.outputs.state_dict()}),
            "average": {} if self._average is None else self._average.weights,
        }

    def load(self, checkpoint: Checkpoint) -> None:
        """Raises anything at all for what is another model's."""
        self.model.load_state_dict(checkpoint.model)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        self.engine.load_state_dict(checkpoint.engine)
        if self.group is not None:
            self.group.outputs.load_state_dict(checkpoint.engine["outputs"])
        if self._average is not None:
            self._average.load(checkpoint.average)
