"""From settings to an optimizer: which one, of which parameters, at which rate in which step; averages of weights."""

from __future__ import annotations

import fnmatch
import inspect
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gigagrad.config.fit import FitConfig
from gigagrad.errors import ConfigError, did_you_mean
from gigagrad.models.registry import import_callable
from gigagrad.named import parse_named

_RATE = "gigagrad_rate"
"""The key of a parameter group's rate without a schedule."""


def make_optimizer(config: FitConfig, model: nn.Module, own: Collection[str] | None = None) -> torch.optim.Optimizer:
    """Make the optimizer of `config`, over the parameters that are not frozen, each at its own rate; of those over
    `own`, where these are named.

    Raises `ConfigError` for an optimizer or a setting that there is not, and for a pattern that no parameter has.
    """
    name, settings = parse_named(config.optimizer)
    make = _optimizer_class(name)
    if config.weight_decay:
        if "weight_decay" not in inspect.signature(make).parameters:
            raise ConfigError(f"the optimizer {name!r} takes no weight_decay; choose adamw or sgd")
        settings["weight_decay"] = config.weight_decay
    try:
        optimizer = make(list(_groups(config, model, own)), lr=config.learning_rate, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"cannot make the optimizer {config.optimizer!r}: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{name!r} makes a {type(optimizer).__name__}, no torch.optim.Optimizer")
    return optimizer


def freeze(config: FitConfig, model: nn.Module) -> tuple[str, ...]:
    """Stop training the parameters whose names match `config.frozen`; returns their names. Raises `ConfigError`."""
    names = [name for name, _ in model.named_parameters()]
    chosen = {name for pattern in config.frozen for name in _matching(pattern, names, "frozen")}
    for name, parameter in model.named_parameters():
        if name in chosen:
            parameter.requires_grad_(False)
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
    if name.lower() not in known:
        hint = did_you_mean(name, known) or f"; there are {', '.join(sorted(known))}"
        raise ConfigError(f"unknown optimizer {name!r}{hint}, and package.module:Class")
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
    """Return names that are `pattern`, lie inside the module `pattern`, or match it with `*` and `?`. Raises
    `ConfigError`.
    """
    found = [name for name in names if name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)]
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
