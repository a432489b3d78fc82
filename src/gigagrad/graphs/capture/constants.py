"""Compute values that are known while a model is traced: those that depend on no pixel and on no parameter.

Tracing computes shapes only. A loss that counts its classes with `torch.arange(2, n).tolist()`, or looks at the weights
that it was given (`if self.weight.min() < 0`), wants numbers: what is made of numbers and of buffers alone is computed
beside its fake tensor, and is there when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

_MOST_NUMBERS = 2**16
"""The size up to which a tensor is computed beside its fake one."""
_READING = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})
"""Functions that read values without an operator which says so."""


@dataclass(slots=True)
class _Known:
    fake: torch.Tensor
    value: torch.Tensor
    buffers: frozenset[str]
    """Names of the buffers that it was computed from."""
    ahead: int = field(init=False)

    def __post_init__(self) -> None:
        self.ahead = self.fake._version - self.value._version

    @property
    def holds(self) -> bool:
        """True if all that was written into one, through whatever view, was written into the other."""
        return self.fake._version - self.value._version == self.ahead


class Constants:
    """Computes the known values of one forward of a copy.

    `real` are the tensors in whose places its buffers are, by name, and more may come; `asked` gets the values of those
    that numbers were made of.
    """

    def __init__(self, copy: nn.Module, real: Mapping[str, torch.Tensor], asked: dict[str, torch.Tensor]) -> None:
        self._copy, self._real, self._asked = copy, real, asked
        self._known: dict[int, _Known] = {}
        self._buffers: dict[int, tuple[str, torch.Tensor, int]] = {}
        self._find_buffers()

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any, run: Callable[[Any, Any, Any], Any]) -> Any:
        """Return what a function of PyTorch returns as `run` runs it; of known values what tracing cannot tell."""
        if getattr(func, "__name__", "") in ("__getitem__", "__setitem__"):
            args = args[0], self._indices(args[1]), *args[2:]
        known = [self._of(leaf) for leaf in tensors_in((args, kwargs))]
        if None in known or getattr(func, "__name__", "") == "__get__":
            return run(func, args, kwargs)
        given = [one for one in known if one is not None]
        buffers = frozenset[str]().union(*(one.buffers for one in given))
        made, found, depends = (), (), False
        if not given:  # it makes tensors of numbers, or it changes a setting of PyTorch, which is not to be done twice
            made = run(func, args, kwargs)
        if given or tensors_in(made):
            found, depends = self._computed(func, args, kwargs)
        if depends or (given and func in _READING and not isinstance(found, tuple)):
            self._ask(buffers)
            return tree_map(lambda leaf: self._lifted(leaf, buffers), found)
        if given:
            made = run(func, args, kwargs)
        for tensor, value in zip(tensors_in(made), tensors_in(found), strict=False):
            self._note(tensor, value, buffers)
        return made

    def _of(self, tensor: torch.Tensor) -> _Known | None:
        found = self._known.get(id(tensor))
        if found is not None:
            return found if found.holds else None
        if len(self._buffers) < len(self._real):
            self._find_buffers()
        name, buffer, version = self._buffers.get(id(tensor), ("", None, 0))
        if buffer is None or version != tensor._version or tensor.numel() > _MOST_NUMBERS or self._real[name].is_meta:
            return None
        with _untraced():
            value = self._real[name].detach().to("cpu", tensor.dtype, copy=True)
        self._known[id(tensor)] = _Known(tensor, value, frozenset({name}))
        return self._known[id(tensor)]

    def _indices(self, index: Any) -> Any:
        """Put the places of a known mask's true values in its place: how many there are is known, too."""
        found = list[Any]()
        for one in index if isinstance(index, tuple) else (index,):
            known = self._of(one) if isinstance(one, torch.Tensor) and one.dtype == torch.bool else None
            if known is None:
                found.append(one)
                continue
            self._ask(known.buffers)
            with _untraced():
                places = known.value.nonzero(as_tuple=True)
            found.extend(self._lifted(place, known.buffers) for place in places)
        return tuple(found) if isinstance(index, tuple) or len(found) != 1 else found[0]

    def _ask(self, buffers: frozenset[str]) -> None:
        with _untraced():
            self._asked.update({name: self._real[name].detach().clone() for name in buffers})

    def _find_buffers(self) -> None:
        for name in self._real.keys() - {name for name, _, _ in self._buffers.values()}:
            buffer = self._copy.get_buffer(name)
            self._buffers[id(buffer)] = name, buffer, buffer._version

    def _note(self, tensor: torch.Tensor, value: torch.Tensor, buffers: frozenset[str]) -> None:
        if (tensor.shape, tensor.dtype) == (value.shape, value.dtype):
            self._known[id(tensor)] = _Known(tensor, value, buffers)

    def _lifted(self, leaf: Any, buffers: frozenset[str]) -> Any:
        """Turn a tensor whose shape depends on values into one that is traced."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made = torch.tensor(leaf.tolist(), dtype=leaf.dtype).reshape(leaf.shape)
        self._note(made, leaf, buffers)
        return made

    def _computed(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Call a function on the values; tell whether its shape depends on them.

        Returns nothing where they are drawn at random, are never set, or are too many.
        """

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return self._known[id(leaf)].value
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        args, kwargs = tree_map(real, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        try:
            with _untraced(), _Determined() as watched:
                return func(*args, **kwargs), watched.depends
        except Exception:
            return (), False


@contextmanager
def _untraced() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), torch.no_grad(), _disable_current_modes():
        yield


def tensors_in(nest: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True, slots=True)
class Asked:
    """The values of buffers that code asked for numbers while it was traced."""

    values: Mapping[str, torch.Tensor]
    closed: Mapping[str, torch.Tensor]
    """Tensors from outside of the model, by their names."""

    def holds(self, module: nn.Module) -> bool:
        """Tell whether these are the model's values now."""
        for name, value in self.values.items():
            now = self.closed[name] if name in self.closed else module.get_buffer(name)
            if now.shape != value.shape or not torch.equal(now, value.to(now.device)):
                return False
        return True


class _Determined(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse what is drawn at random, left as memory happens to be, or large."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.depends = False
        """True once a shape or a number on the way depended on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.__name__:
            raise ValueError(func)
        if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}.intersection(func.tags):
            self.depends = True
        else:
            with _disable_current_modes():
                shapes = func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
            if any(made.numel() > _MOST_NUMBERS for made in tensors_in(shapes)):
                raise ValueError(func)
        return func(*args, **kwargs)


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.to("meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf
