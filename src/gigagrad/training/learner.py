"""A model and what trains it: engine, optimizer, rates, clipping, an average of the weights, and losses over several
slides.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gigagrad.config.fit import FitConfig
from gigagrad.errors import ConfigError, ModelError
from gigagrad.execution.compiling import compile as compile_engine
from gigagrad.execution.engine import Engine
from gigagrad.execution.model_state import Left
from gigagrad.images import Image
from gigagrad.losses import Loss
from gigagrad.plans import Plan
from gigagrad.prediction.classes import image_shape
from gigagrad.prediction.slide_scores import output_of, weighted_sum
from gigagrad.ranks import Mesh
from gigagrad.training.folder import Checkpoint
from gigagrad.training.optimization import AveragedWeights, make_optimizer, set_rates
from gigagrad.training.sharing import SHARDED, GradientTree, Shards, assign, leave_in_order, load_shards

Opened = Callable[[], AbstractContextManager[Image]]
"""Opens a slide, each time as it is seen in this step."""


class Group:
    """The loss of `model` over bags of slides, `(N, C)` outputs and their targets. `settings` are `compile`'s.

    It is exact, with one slide in memory at a time, as the loss needs the outputs alone: all slides go forward first,
    the loss is pulled back to each output, and then every slide is seen once more, forward and backward, with what its
    output is to receive (Gao et al., 2021, for contrastive losses). Outputs of a bag's slides are averaged before.
    """

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


Pair = Callable[[], AbstractContextManager[tuple[Image, Image | torch.Tensor]]]
"""Opens a slide and its target, as they are seen in this step."""


class Learner:
    """Adds up gradients of slides and steps. `grouped`: these are bags of slides, or compared with each other. The
    groups of the mesh share the slides of a step, the ranks of a group their tiles.
    """

    def __init__(
        self,
        config: FitConfig,
        model: nn.Module,
        loss: Loss,
        mesh: Mesh,
        *,
        grouped: bool,
        journal: Path | None = None,
    ) -> None:
        """Make the learner; `journal` is a folder for those of steps.

        Raises `ConfigError` for an optimizer that cannot be made, and for bags in several groups.
        """
        groups = mesh.data.count
        if groups > 1 and grouped:
            raise ConfigError(
                f"bags and cox see the slides of a step one after the other, and the mesh has {groups} groups; give "
                f"--mesh 1x{mesh.world.count}"
            )
        self.model, self._config, self._data = model, config, mesh.data
        self._journal, self._first = journal, mesh.first
        self.shards = Shards(model, mesh.world) if config.shard_optimizer else None
        self._saved: tuple[Path, int] | None = None
        """The folder of the last checkpoint's shards, and how many tensors they have."""
        self.optimizer = make_optimizer(config, model, None if self.shards is None else self.shards.own)
        self._average = AveragedWeights(model, config.ema) if config.ema else None
        settings: dict[str, Any] = {
            "memory": config.memory,
            "scratch": config.scratch,
            "storage": config.storage,
            "device": config.device,
            "precision": config.precision,
            "optimizer": self.optimizer,
            "mesh": mesh.tile,
            "journal": journal,
        }
        self.group = Group(model, loss.function, **settings) if grouped else None
        self.engine = self.group.engine if self.group is not None else compile_engine(model, loss.function, **settings)
        for engine in self.engines:
            engine.in_tiles = True  # a run may go on by another number of ranks, bit for bit
        self._overflows = self._overflows_behind = 0
        """`Engine.overflows` before the step at hand, where each of its slides begins whatever this group has seen
        of the others, and behind it.
        """

    @property
    def engines(self) -> tuple[Engine, ...]:
        return (self.engine,) if self.group is None else (self.engine, self.group.outputs)

    def add(
        self, slides: Sequence[Pair], pixels: Sequence[int], done: Callable[[int, float], None]
    ) -> list[dict[str, float]]:
        """Compute the gradients of a step's slides, of so many pixels each; what there is to log of each of them, its
        loss for one. `done` is told how many of this group's are, and the loss of the last.
        """
        self._begin()
        learned = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        owners = assign(pixels, self._data.count)
        tree, found, left = GradientTree(learned, len(slides)), dict[int, dict[str, float]](), dict[int, Left]()
        before = [buffer.clone() for buffer in self.model.buffers()] if self._data.count > 1 else []
        for slide, (opened, owner) in enumerate(zip(slides, owners, strict=True)):
            if owner != self._data.index:
                continue
            self.engine.overflows = self._overflows
            with opened() as (image, target):
                loss = float(self.engine.backward(image, target))
            self._overflows_behind = max(self._overflows_behind, self.engine.overflows)
            tree.add(slide, [parameter.grad for parameter in learned])
            self.model.zero_grad(set_to_none=True)
            found[slide] = {"loss": loss, **self._measured()}
            assert self.engine.left is not None
            left[slide] = self.engine.left
            done(len(found), loss)
        for parameter, gradient in zip(learned, tree.total(self._data), strict=True):
            parameter.grad = gradient
        self._forget_journals()  # all have ended their runs, and wait for this rank's word
        if before:
            for buffer, value in zip(self.model.buffers(), before, strict=True):
                buffer.copy_(value)
            leave_in_order(self.model, left, owners, self._data)
        told = self._data.all_gather_object(
            [self._overflows_behind, [[slide, values] for slide, values in found.items()]]
        )
        self._overflows_behind = max(overflows for overflows, _ in told)
        return [values for _, values in sorted(pair for _, pairs in told for pair in pairs)]

    def add_bags(self, bags: Sequence[Sequence[Opened]], targets: Sequence[torch.Tensor]) -> dict[str, float]:
        """Compute the gradients of a step's bags; what there is to log of them all."""
        assert self.group is not None
        self._begin()
        loss = self.group.backward(bags, targets)
        self._overflows_behind = self.engine.overflows
        self._forget_journals()
        return {"loss": loss, **self._measured()}

    def _forget_journals(self) -> None:
        """Remove the journals of steps that nobody goes on with."""
        if self._journal is not None and self._first:
            shutil.rmtree(self._journal, ignore_errors=True)

    def _begin(self) -> None:
        self.model.train()
        self.model.zero_grad(set_to_none=True)

    def _measured(self) -> dict[str, float]:
        run = self.engine.last_run
        assert run is not None
        found = {"seconds": run.seconds, "peak_bytes": float(run.peak_bytes)}
        return found | ({"gradient_error": run.gradient_error} if run.gradient_error else {})

    def step(self, done: int, steps: int, slides: int) -> dict[str, float]:
        """Step with the mean gradient of so many slides, when so many of all steps are done. Returns what there is to
        log.
        """
        config, values = self._config, {}
        if config.schedule != "constant" or config.warmup:
            share = set_rates(self.optimizer, config, done, steps)
            values["learning_rate"] = share * config.learning_rate
        learned = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        if slides > 1 and self.group is None:
            for parameter in learned:
                assert parameter.grad is not None
                parameter.grad /= slides
        if config.clip is not None:
            values["gradient_norm"] = float(torch.nn.utils.clip_grad_norm_(learned, config.clip))
        self.optimizer.step()
        if self.shards is not None:
            self.shards.spread()
        self._overflows = self._overflows_behind
        if self._average is not None:
            self._average.update(done + 1)
        return values

    def as_kept(self) -> AbstractContextManager[None]:
        """Give the model the weights that are validated and kept, meanwhile."""
        return nullcontext() if self._average is None else self._average.applied()

    def writes(self) -> int:
        """Count the writes to anything that a step changes: PyTorch keeps count."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.state_dict(keep_vars=True).values(), *states]
        return sum(tensor._version for tensor in tensors if isinstance(tensor, torch.Tensor))

    def state(self, sharded: Path | None) -> dict[str, Any]:
        """Return what a checkpoint holds of it, by the names of `Checkpoint`; all ranks ask at once where they share
        the optimizer's state, which is then put into the folder `sharded`, if there is any.
        """
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict() if self.shards is None else self._save_shards(sharded),
            "engine": self.engine.state_dict()
            | {"overflows": self._overflows}
            | ({} if self.group is None else {"outputs": self.group.outputs.state_dict()}),
            "average": {} if self._average is None else self._average.weights,
        }

    def _save_shards(self, folder: Path | None) -> dict[str, Any]:
        assert self.shards is not None
        if folder is None:
            return {SHARDED: 0}
        # A folder belongs to a step: the state is that which lies there, and a checkpoint may need it.
        if self._saved is None or self._saved[0] != folder:
            self._saved = folder, self.shards.save(self.optimizer, folder)
        return {SHARDED: self._saved[1]}

    def load(self, checkpoint: Checkpoint, sharded: Path) -> None:
        """Load a checkpoint; `sharded` is the folder of the optimizer's state, where ranks shared it. Raises anything
        at all for what is another model's.
        """
        self.model.load_state_dict(checkpoint.model)
        if SHARDED in checkpoint.optimizer:
            load_shards(self.optimizer, self.model, sharded, checkpoint.optimizer[SHARDED])
            self._saved = sharded, checkpoint.optimizer[SHARDED]
        elif self.shards is None:
            self.optimizer.load_state_dict(checkpoint.optimizer)
        else:
            whole = make_optimizer(self._config, self.model)
            whole.load_state_dict(checkpoint.optimizer)
            self.optimizer.state.update({p: whole.state[p] for p in self.shards.own.values() if p in whole.state})
        self.engine.load_state_dict(checkpoint.engine)
        self._overflows = self._overflows_behind = self.engine.overflows
        if self.group is not None:
            self.group.outputs.load_state_dict(checkpoint.engine["outputs"])
        if self._average is not None:
            self._average.load(checkpoint.average)
