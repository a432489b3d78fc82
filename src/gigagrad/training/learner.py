"""A model and what trains it: the optimizer and its rates, clipping, an average of the weights, the engine, and losses
over several slides.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import inspect
import itertools
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from gigagrad.config.fit import FitConfig
from gigagrad.errors import ConfigError, ModelError, did_you_mean
from gigagrad.execution.compiling import compile as compile_engine
from gigagrad.execution.engine import Engine
from gigagrad.images import Image
from gigagrad.images.bag import Bag
from gigagrad.losses import Loss
from gigagrad.models.registry import import_callable
from gigagrad.named import parse_named
from gigagrad.plans import Plan
from gigagrad.prediction.classes import image_shape
from gigagrad.prediction.slide_scores import output_of, weighted_sum
from gigagrad.ranks import Mesh
from gigagrad.training.apollo import Apollo
from gigagrad.training.folder import Checkpoint
from gigagrad.training.sharing import (
    GROUPS,
    SHARDED,
    GradientTree,
    Shards,
    assign,
    leave_in_order,
    load_groups,
    load_shards,
    settings_of_groups,
)
from gigagrad.training.state import (
    Attributes,
    FurtherState,
    attributes_of,
    random_states,
    restore_attributes,
    set_random_states,
)

_RATE = "gigagrad_rate"
"""The key of a parameter group's rate without a schedule."""


def make_optimizer(config: FitConfig, model: nn.Module, own: Collection[str] | None = None) -> torch.optim.Optimizer:
    """Make the optimizer of `config`, over the parameters that are not frozen, each at its own rate; of those over
    `own`, where these are named.

    Raises `ConfigError` for an optimizer or a setting that there is not, and for a pattern that no parameter has.
    """
    name, settings = parse_named(config.optimizer)
    make = _optimizer_class(name)
    known = inspect.signature(make).parameters
    if unknown := [setting for setting in settings if setting not in known and ":" not in name]:
        raise ConfigError(f"the optimizer {name!r} takes no {unknown[0]}{did_you_mean(unknown[0], known)}")
    if config.weight_decay is not None and "weight_decay" in known:
        settings["weight_decay"] = config.weight_decay
    elif config.weight_decay:
        raise ConfigError(f"the optimizer {name!r} takes no weight_decay; choose adamw or sgd")
    try:
        optimizer = make(list(_groups(config, model, own)), lr=config.learning_rate, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"cannot make the optimizer {config.optimizer!r}: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{name!r} makes a {type(optimizer).__name__}, no torch.optim.Optimizer")
    return optimizer


_STEPS: Final = 8
"""Tried of an optimizer: the first ones of some that estimate a rate are too small to tell."""


def check_apart(config: FitConfig) -> None:
    """Raise `ConfigError` for an optimizer whose step of a parameter depends on the others, of which a rank that shares
    its state has none. Tried on two small ones; one that takes no such parameters fails in its first step, if at all.
    """
    tried = replace(config, learning_rate=1.0, rates=())

    def stepped(own: Collection[str]) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model = nn.ParameterList([torch.randn(4, 4), torch.randn(5, 4)])
            optimizer = make_optimizer(tried, model, own)
            for _ in range(_STEPS):
                for parameter in model:
                    parameter.grad = torch.randn(parameter.shape)
                with torch.random.fork_rng(devices=[]):
                    optimizer.step()
            first: Tensor = model[0].detach()
            return first

    try:
        alone, together = stepped(["0"]), stepped(["0", "1"])
    except Exception:  # anybody's optimizer
        return
    if not torch.allclose(alone, together, rtol=0, atol=0, equal_nan=True):
        raise ConfigError(
            f"a step of {config.optimizer} depends on all parameters together, and with shard_optimizer a rank steps a "
            "part of them; leave that out, or choose another optimizer"
        )


def freeze(config: FitConfig, model: nn.Module) -> tuple[str, ...]:
    """Stop training the parameters whose names match `config.frozen`; returns their names. Raises `ConfigError`."""
    names = [name for name, _ in model.named_parameters()]
    chosen = {name for pattern in config.frozen for name in _matching(pattern, names, "frozen")}
    for name, parameter in model.named_parameters():
        if name in chosen:
            parameter.requires_grad_(False)
    model.train(model.training)  # a `BagNetwork` leaves an encoder that is frozen in eval mode
    if chosen and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"frozen: {', '.join(config.frozen)} leaves nothing to train")
    return tuple(name for name in names if name in chosen)


def set_rates(optimizer: torch.optim.Optimizer, config: FitConfig, step: int, steps: int) -> float:
    """Give every group its rate for step `step` of `steps`, counted from 0, and return the share of the full rate."""
    share = rate_share(config.schedule, config.warmup, step, steps)
    for group in optimizer.param_groups:
        group["lr"] = group[_RATE] * share
    return share


def rate_share(schedule: str, warmup: int, step: int, steps: int) -> float:
    """Return the factor of the learning rate in step `step` of `steps`: it rises in a line over `warmup` steps; then
    `cosine` falls to 0 along half a wave (Loshchilov and Hutter, 2017, without restarts), `linear` in a line.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    return {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done}.get(schedule, 1.0)


def _optimizer_class(name: str) -> Any:
    if ":" in name:
        return import_callable(name)
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    known |= {"apollo": Apollo}
    if name.lower() not in known and importlib.util.find_spec("pytorch_optimizer"):
        known = importlib.import_module("pytorch_optimizer.optimizer").OPTIMIZERS | known
    if name.lower() not in known:
        hint = did_you_mean(name, known) or f"; there are {', '.join(sorted(known))}"
        more = "; one of your own is package.module:Class, and pip install 'gigagrad[optimizers]' brings a hundred more"
        raise ConfigError(f"unknown optimizer {name!r}{hint}{more}")
    return known[name.lower()]


def _groups(config: FitConfig, model: nn.Module, own: Collection[str] | None) -> Iterator[dict[str, Any]]:
    """Yield a group for each rate, in the order of `rates`, the full one last; of several patterns the first counts."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for entry in (*config.rates, "*=1"):
        pattern, _, text = entry.rpartition("=")
        try:
            factor = float(text)
        except ValueError:
            factor = math.nan
        if not pattern or not 0 <= factor < math.inf:
            raise ConfigError(f"rates: {entry!r} is no pattern with a factor; write network.encoder=0.1")
        members = _matching(pattern, list(trained), "rates") if trained else []
        if members:
            rate = config.learning_rate * factor
            chosen = {name: trained.pop(name) for name in members}
            parameters = [parameter for name, parameter in chosen.items() if own is None or name in own]
            yield {"params": parameters, "lr": rate, _RATE: rate}


def _matching(pattern: str, names: list[str], setting: str) -> list[str]:
    """Return names that `pattern`, with `*`, `?` and `[0-5]`, matches, or that lie inside a module that it matches.

    Raises `ConfigError`.
    """
    inside = f"{pattern}.*"
    found = [name for name in names if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, inside)]
    if not found and pattern != "*":
        modules = {name.rpartition(".")[0] for name in names} | {name.partition(".")[0] for name in names}
        hint = did_you_mean(pattern, [*modules, *names]) or f"; it has {', '.join(sorted(modules)[:12])}"
        raise ConfigError(f"{setting}: no parameter of the model matches {pattern!r}{hint}")
    return found


class AveragedWeights:
    """`decay * average + (1 - decay) * weights` after every step (Polyak and Juditsky, 1992), begun at the weights.

    In the first steps the decay is `(1 + step) / (10 + step)` where that is less, so that the start is soon forgotten.
    Buffers are the model's own.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self, step: int) -> None:
        """Update the average after step `step`, counted from 1."""
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                self.weights[name].lerp_(parameter, share)

    def load(self, weights: dict[str, Tensor]) -> None:
        """Load weights. Raises `KeyError` or `RuntimeError` for those of another model."""
        with torch.no_grad():
            for name, average in self.weights.items():
                average.copy_(weights[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights; its own come back at the end."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                average, self.weights[name] = self.weights[name], parameter.detach().clone()
                parameter.copy_(average)


Pair = Callable[[], AbstractContextManager[tuple[Image | Bag, Image | torch.Tensor]]]
"""Opens a slide and its target, each time as they are seen in this step."""


class Group:
    """The loss of `model` over cases of slides, `(N, C)` outputs and their targets. `settings` are `compile`'s.

    It is exact, with one slide in memory at a time, as the loss needs the outputs alone: all slides go forward first,
    the loss is pulled back to each output, and then every slide is seen once more, forward and backward, with what its
    output is to receive (Gao et al., 2021, for contrastive losses). Outputs of a case's slides are averaged before.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], **settings: Any) -> None:
        self._model, self._loss = model, loss
        self.engine: Engine = compile_engine(model, weighted_sum, **settings)
        """Goes backward, where most of the time and memory is needed."""
        self.outputs: Engine = compile_engine(model, **settings)

    def plan(self, slide: Image | Bag) -> Plan:
        """Plan the backward pass. Raises as `Engine.plan` does, and `ModelError` for a model that gives an image."""
        if image_shape(self.outputs, slide) is not None:
            raise ModelError("the model gives an image; cases of slides and cox need one that scores whole slides")
        graph = self.outputs.problem(slide).graph
        return self.engine.plan(slide, torch.zeros(graph[graph.output].shape[-1]))

    def loss(self, cases: Sequence[Sequence[Pair]], targets: Sequence[Tensor]) -> float:
        """Compute the loss of the model as it is."""
        return float(self._of(self._seen(cases), cases, targets).detach())

    def backward(self, cases: Sequence[Sequence[Pair]], targets: Sequence[Tensor]) -> float:
        """Return the loss and add its gradients to the parameters' `.grad`. Random numbers are drawn, and running
        statistics updated, as by one forward of every slide.
        """
        states = list[tuple[Any, ...]]()
        before = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        modules = dict(self._model.named_modules())
        attributes = attributes_of(modules)
        try:
            outputs = self._seen(cases, states)
        finally:
            for buffer, value in before:
                buffer.copy_(value)
            restore_attributes(modules, attributes)
        leaves = [output.requires_grad_() for output in outputs]
        loss = self._of(leaves, cases, targets)
        cotangents = torch.autograd.grad(loss, leaves)
        for opened, state, cotangent in zip(itertools.chain(*cases), states, cotangents, strict=True):
            set_random_states(state)
            with opened() as (slide, _):
                self.engine.backward(slide, cotangent[0])
        return float(loss.detach())

    def _seen(self, cases: Sequence[Sequence[Pair]], states: list[tuple[Any, ...]] | None = None) -> list[Tensor]:
        """Compute the output `(1, C)` of each slide; before it, the state of random numbers goes to `states`."""
        found = []
        for opened in itertools.chain(*cases):
            if states is not None:
                states.append(random_states())
            with opened() as (slide, _):
                found.append(output_of(self.outputs, slide))
        return found

    def _of(self, outputs: Sequence[Tensor], cases: Sequence[Sequence[Pair]], targets: Sequence[Tensor]) -> Tensor:
        each = iter(outputs)
        pooled = [torch.cat(list(itertools.islice(each, len(case)))).mean(0, keepdim=True) for case in cases]
        output_NC = torch.cat(pooled)
        return self._loss(output_NC, torch.cat(list(targets)).to(output_NC.device))


class Learner:
    """Adds up gradients of slides and steps. `grouped`: these are cases of slides, or compared with each other. The
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
        computed: nn.Module | None = None,
    ) -> None:
        """Make the learner; `journal` is a folder for those of steps. With `computed`, a part of the model, steps run
        that alone.

        Raises `ConfigError` for an optimizer that cannot be made, and for cases in several groups.
        """
        groups = mesh.data.count
        if groups > 1 and grouped:
            raise ConfigError(
                f"cases and cox see the slides of a step one after the other, and the mesh has {groups} groups; give "
                f"--mesh 1x{mesh.world.count}"
            )
        self.model, self._config, self._data = model, config, mesh.data
        self._journal, self._first = journal, mesh.first
        self.shards = Shards(model, mesh.world) if config.shard_optimizer else None
        if config.shard_optimizer and mesh.world.count > 1:
            check_apart(config)
        self._saved: tuple[Path, int] | None = None
        """The folder of the last checkpoint's shards, and how many tensors they have."""
        self.optimizer = make_optimizer(config, model, None if self.shards is None else self.shards.own)
        self._average = AveragedWeights(model, config.ema) if config.ema else None
        of_loss = {f"loss {index}": each for index, (_, each) in enumerate(loss.made_of)}
        self._further = FurtherState({"model": model, **of_loss}, model)
        own = set(map(id, model.parameters()))
        self.untrained: Final = tuple(
            name
            for each in of_loss.values()
            if isinstance(each, nn.Module)
            for name, parameter in each.named_parameters()
            if parameter.requires_grad and id(parameter) not in own
        )
        """Names of the loss's parameters that ask for gradients, and that no step changes."""
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
        seen = model if computed is None else computed
        self.group = Group(seen, loss.function, **settings) if grouped else None
        self.engine = self.group.engine if self.group is not None else compile_engine(seen, loss.function, **settings)
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
        tree, found, left = (
            GradientTree(learned, len(slides)),
            dict[int, dict[str, float]](),
            dict[int, Callable[[], None]](),
        )
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
            assert self.engine.leave_again is not None
            left[slide] = self.engine.leave_again
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

    def add_cases(self, cases: Sequence[Sequence[Pair]], targets: Sequence[torch.Tensor]) -> dict[str, float]:
        """Compute the gradients of a step's cases; what there is to log of them all."""
        assert self.group is not None
        self._begin()
        loss = self.group.backward(cases, targets)
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
        """Step with the mean gradient of so many slides, `done` of all `steps` being done. Returns what to log."""
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
        """Give the model the weights that are validated and kept, meanwhile: their average, or those of an optimizer
        that has others for this (`eval` and `train`, as schedule-free ones).
        """
        if self._average is not None:
            return self._average.applied()
        return self._evaluated() if hasattr(self.optimizer, "eval") else nullcontext()

    @contextmanager
    def _evaluated(self) -> Iterator[None]:
        optimizer: Any = self.optimizer
        trained = [parameter.detach().clone() for parameter in self.model.parameters()]
        optimizer.eval()
        if self.shards is not None:
            self.shards.spread()
        try:
            yield
        finally:
            optimizer.train()
            with torch.no_grad():  # by their numbers: there and back is rounded
                for parameter, value in zip(self.model.parameters(), trained, strict=True):
                    parameter.copy_(value)

    def writes(self) -> tuple[int, Attributes]:
        """Count the writes to anything that a step changes: PyTorch keeps count; beside what attributes hold."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.state_dict(keep_vars=True).values(), *states]
        count = sum(tensor._version for tensor in tensors if isinstance(tensor, torch.Tensor))
        return count + self._further.writes(), self._further.attributes()

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
            "further": self._further.state(),
        }

    def _save_shards(self, folder: Path | None) -> dict[str, Any]:
        assert self.shards is not None
        if folder is None:
            return {SHARDED: 0}
        # A folder belongs to a step: the state is that which lies there, and a checkpoint may need it.
        if self._saved is None or self._saved[0] != folder:
            self._saved = folder, self.shards.save(self.optimizer, folder)
        return {SHARDED: self._saved[1], GROUPS: settings_of_groups(self.optimizer)}

    def load(self, checkpoint: Checkpoint, sharded: Path) -> None:
        """Load a checkpoint; `sharded` is the folder of the optimizer's state, where ranks shared it. Raises anything
        at all for what is another model's.
        """
        self.model.load_state_dict(checkpoint.model)
        if SHARDED in checkpoint.optimizer:
            load_shards(self.optimizer, self.model, sharded, checkpoint.optimizer[SHARDED])
            load_groups(self.optimizer, checkpoint.optimizer.get(GROUPS, settings_of_groups(self.optimizer)))
            self._saved = sharded, checkpoint.optimizer[SHARDED]
        elif self.shards is None:
            self.optimizer.load_state_dict(checkpoint.optimizer)
        else:
            whole = make_optimizer(self._config, self.model)
            whole.load_state_dict(checkpoint.optimizer)
            self.optimizer.state.update({p: whole.state[p] for p in self.shards.own.values() if p in whole.state})
            load_groups(self.optimizer, settings_of_groups(whole))
        self.engine.load_state_dict(checkpoint.engine)
        self._overflows = self._overflows_behind = self.engine.overflows
        if self.group is not None:
            self.group.outputs.load_state_dict(checkpoint.engine["outputs"])
        if self._average is not None:
            self._average.load(checkpoint.average)
        self._further.load(checkpoint.further)
