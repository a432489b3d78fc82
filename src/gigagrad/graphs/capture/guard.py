"""Tell whether a captured graph is still the one that capture would find: nothing that tracing saw has changed.

What Python would see, a guard sees: attributes of any type, closures, globals, class attributes, hooks, modes, dtypes,
ties, `requires_grad`, PyTorch's own flags. New values of parameters and buffers are no change: runs read them anew.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gigagrad.graphs.capture.slots import Contents, Slot, Unchanged, same
from gigagrad.graphs.capture.traversal import ExecutedCode, Traversal

_meta_of = operator.attrgetter("shape", "dtype", "requires_grad", "device")


class _Seen:
    """The contents of everything that is reachable, at one moment."""

    def __init__(self, roots: Mapping[str, Any], executed: ExecutedCode) -> None:
        reached = Traversal(roots, executed)
        self.slots = [(slot, slot.read()) for slot in reached.slots]
        self.tensors = list({id(tensor): tensor for _, tensor in reached.tensors}.values())
        self.metas = [*_metas(self.tensors)]
        number: dict[int, int] = {}
        self.ties = [(path, number.setdefault(id(tensor), len(number))) for path, tensor in reached.tensors]
        self.objects, self.kinds = reached.objects, list(map(type, reached.objects))
        self.unfollowed = reached.unfollowed
        self.flags = _flags()
        self.moving = set[int]()
        """The slots that have held other objects since, as good as those before."""
        self.still = Unchanged(self.slots)
        """All others."""

    def note(self, moved: Mapping[int, Contents]) -> None:
        """Note what some slots hold now, none of which counts as a change."""
        for index, contents in moved.items():
            self.slots[index] = self.slots[index][0], contents
        if not self.moving.issuperset(moved):
            self.moving.update(moved)
            self.still = Unchanged(seen for index, seen in enumerate(self.slots) if index not in self.moving)


class Guard:
    """Holds as long as nothing reachable from `roots` has changed that `executed` code could have read."""

    def __init__(self, roots: Mapping[str, Any], executed: ExecutedCode, bound: tuple[torch.Tensor, ...] = ()) -> None:
        """`bound` are tensors that the graph reads as these very objects."""
        self._roots, self._executed, self._bound = roots, executed, bound
        self._seen = _Seen(roots, executed)

    @property
    def unfollowed(self) -> str | None:
        """Something that code may have read and nobody can compare: such a guard never holds."""
        return self._executed.unfollowed or self._seen.unfollowed

    def holds(self) -> bool:
        """Tell whether all is as it was; after a no, the next call compares with what was seen before all the same."""
        seen = self._seen
        if self.unfollowed is not None or seen.kinds != list(map(type, seen.objects)):
            return False
        if seen.flags != _flags() or not all(map(operator.eq, seen.metas, _metas(seen.tensors))):
            return False
        moved = dict[int, Contents]()
        replaced = False
        for index in seen.moving if seen.still.holds() else range(len(seen.slots)):
            slot, then = seen.slots[index]
            if slot.holds(then):
                continue
            now = slot.read()
            found = self._compare(slot, then, now)
            if found is None:
                return False
            replaced = replaced or found
            moved[index] = now
        if replaced:
            anew = _Seen(self._roots, self._executed)
            if (anew.ties, anew.metas) != (seen.ties, seen.metas):  # others are tied now
                return False
            self._seen = anew
        else:
            seen.note(moved)
        return True

    def renew(self) -> None:
        """Compare with how things are now from now on."""
        self._seen = _Seen(self._roots, self._executed)

    def _compare(self, slot: Slot, then: Contents, now: Contents) -> bool | None:
        """Tell whether tensors were replaced by others of the same kind; None where anything else changed."""
        before, after = (
            [entry for entry in zip(*contents, strict=True) if not slot.attributes or self._executed.reads(entry[0])]
            for contents in (then, now)
        )
        if len(before) != len(after):
            return None
        replaced = False
        for (key, one), (key_now, other) in zip(before, after, strict=True):
            if not same(key, key_now):
                return None
            if same(one, other):
                continue
            tensors = [value for value in (one, other) if isinstance(value, torch.Tensor)]
            alike = len(tensors) == 2 and operator.eq(*_metas(tensors))
            if not alike or self._executed.asks_ids or any(one is tensor for tensor in self._bound):
                return None
            replaced = True
        return replaced


def _metas(tensors: list[torch.Tensor]) -> Iterator[tuple[Any, ...]]:
    return zip(map(type, tensors), map(_meta_of, tensors), strict=True)


def _flags() -> tuple[Any, ...]:
    """Return PyTorch's own settings that decide what a call of it does."""
    backends = torch.backends
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        backends.mkldnn.enabled,
        backends.mha.get_fastpath_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        *map(type, torch.overrides._get_current_function_mode_stack()),  # type: ignore[no-untyped-call]
    )
