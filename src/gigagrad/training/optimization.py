"""From settings to an optimizer: which one, of which parameters, at which rate in which step."""

from __future__ import annotations

import fnmatch
import inspect
import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from gigagrad.errors import ConfigError, did_you_mean
from gigagrad.models.trust import import_callable
from gigagrad.named import parse_named
from gigagrad.training.config import FitConfig
from gigagrad.training.schedule import rate_share

_RATE = "gigagrad_rate"
"""Of a parameter group: what its rate would be without a schedule."""


def make_optimizer(config: FitConfig, model: nn.Module, own: Collection[str] | None = None) -> torch.optim.Optimizer:
    """The optimizer of `config`, over the parameters that are not frozen, each at its own rate; of those over `own`,
    where these are named.

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
    """One group for each rate, in the order of `rates`, the full one last; of several patterns the first counts."""
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
    """Names that are `pattern`, lie inside the module `pattern`, or match it with `*` and `?`. Raises `ConfigError`."""
    found = [name for name in names if name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)]
    if not found and pattern != "*":
        modules = {name.rpartition(".")[0] for name in names} | {name.partition(".")[0] for name in names}
        hint = did_you_mean(pattern, [*modules, *names]) or f"; it has {', '.join(sorted(modules)[:12])}"
        raise ConfigError(f"{setting}: no parameter of the model matches {pattern!r}{hint}")
    return found
