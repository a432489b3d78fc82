"""The state of a model and a loss that no state dict has, and the random numbers that a forward may draw.

A forward may count in attributes, and write buffers that are not saved with a model, or those of a loss. A run that is
continued goes on with these, too.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has, `training` among them."""

Attributes = dict[str, dict[str, Any]]
"""Values that modules hold in attributes, by the names of both."""


class FurtherState:
    """The tensors and the plain values of some modules that have changed since this was made, beside those that
    `saved` state dicts have.
    """

    def __init__(self, modules: Mapping[str, object], saved: nn.Module) -> None:
        """`modules` have names, and may be objects of other classes; the state dict of `saved`, one of them or not, is
        kept by others.
        """
        self._modules = {
            ".".join(filter(None, (name, path))): module
            for name, root in modules.items()
            for path, module in (root.named_modules() if isinstance(root, nn.Module) else [("", root)])
        }
        self._saved = {id(tensor) for tensor in saved.state_dict(keep_vars=True).values()}
        self._first = {name: (tensor, tensor._version) for name, tensor in self._tensors().items()}
        self._plain = attributes_of(self._modules)

    def _tensors(self) -> dict[str, Tensor]:
        every = {
            f"{path}.{name}": tensor
            for path, module in self._modules.items()
            if isinstance(module, nn.Module)
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }
        return {name: tensor for name, tensor in every.items() if id(tensor) not in self._saved}

    def state(self) -> dict[str, Any]:
        """Return what `load` takes."""
        tensors = {}
        for name, tensor in self._tensors().items():
            first, version = self._first.get(name, (None, 0))
            if tensor is not first or tensor._version != version:
                tensors[name] = tensor.detach()
        return {"tensors": tensors, "attributes": self.attributes()}

    def attributes(self) -> Attributes:
        """Return the attributes that have changed, as they are now."""
        changed = {
            path: {name: copy.deepcopy(value) for name, value in _plain_in(module) if first.get(name, self) != value}
            for (path, module), first in zip(self._modules.items(), self._plain.values(), strict=True)
        }
        return {path: values for path, values in changed.items() if values}

    def writes(self) -> int:
        """Count the writes to these tensors."""
        return sum(tensor._version for tensor in self._tensors().values())

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a `state`. Raises anything at all for one of other modules."""
        for name, tensor in state.get("tensors", {}).items():
            path, _, own = name.rpartition(".")
            held = getattr(self._modules[path], own)
            if held.shape == tensor.shape:
                held.copy_(tensor)
            else:
                setattr(self._modules[path], own, tensor.to(held))
        for path, values in state.get("attributes", {}).items():
            vars(self._modules[path]).update(copy.deepcopy(values))


def attributes_of(modules: Mapping[str, object]) -> Attributes:
    """Copy the numbers and texts, and nests of them, that modules hold in attributes of their own."""
    return {path: {name: copy.deepcopy(value) for name, value in _plain_in(each)} for path, each in modules.items()}


def restore_attributes(modules: Mapping[str, nn.Module], values: Attributes) -> None:
    """Give modules back what `attributes_of` had of them, and no other such attributes."""
    for path, module in modules.items():
        for name in [name for name, _ in _plain_in(module) if name not in values[path]]:
            del vars(module)[name]
        vars(module).update(copy.deepcopy(values[path]))


def _plain_in(module: object) -> Iterator[tuple[str, Any]]:
    """Yield what `attributes_of` copies of a module; nothing of PyTorch's own, whose forwards leave theirs alone."""
    if hasattr(module, "__dict__") and not type(module).__module__.startswith("torch."):
        yield from ((name, value) for name, value in vars(module).items() if name not in _OWN and _is_plain(value))


def _is_plain(value: object) -> bool:
    if type(value) is dict:
        return all(map(_is_plain, (*value, *value.values())))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    return value is None or type(value) in (bool, int, float, str)


def seed_all(seed: int) -> None:
    """Seed the generators of PyTorch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # that which a forward may draw from


def random_states() -> tuple[Any, ...]:
    """Return the states of these generators, of PyTorch's on the processor."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002


def set_random_states(states: tuple[Any, ...]) -> None:
    """Go on from `random_states`."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Leave the generators as they were before the block."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
