"""Whether a captured graph is still the one that capture would find: nothing that tracing could have seen has changed.

What Python would see, a guard sees: attributes of any type, closures, globals, class attributes, hooks, modes, dtypes,
ties, `requires_grad`, PyTorch's own flags. New values of parameters and buffers are no change: runs read them anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gigagrad.graphs.places import Contents, Place, same
from gigagrad.graphs.walk import Ran, Walk


class _Seen:
    """How everything that is reachable was at one moment."""

    def __init__(self, roots: Mapping[str, Any], ran: Ran) -> None:
        walk = Walk(roots, ran)
        self.places = [(place, place.read()) for place in walk.places]
        self.tensors = list({id(tensor): tensor for _, tensor in walk.tensors}.values())
        self.metas = [_meta(tensor) for tensor in self.tensors]
        number: dict[int, int] = {}
        self.ties = [(path, number.setdefault(id(tensor), len(number))) for path, tensor in walk.tensors]
        self.objects, self.kinds = walk.objects, list(map(type, walk.objects))
        self.unfollowed = walk.unfollowed
        self.flags = _flags()

    def is_as(self, other: _Seen) -> bool:
        """Whether, with other tensors in the places of some, the same ones are tied."""
        return self.ties == other.ties and self.metas == other.metas


class Guard:
    """`holds` as long as nothing reachable from `roots` has changed that code which `ran` could have read."""

    def __init__(self, roots: Mapping[str, Any], ran: Ran, bound: tuple[torch.Tensor, ...] = ()) -> None:
        """`bound` are tensors that the graph reads as these very objects."""
        self._roots, self._ran, self._bound = roots, ran, bound
        self._seen = _Seen(roots, ran)

    @property
    def unfollowed(self) -> str | None:
        """What code may have read that nobody can compare: such a guard never holds."""
        return self._ran.unfollowed or self._seen.unfollowed

    def holds(self) -> bool:
        """Whether all is as it was; a guard that did not hold compares with what it saw before, whatever it met."""
        seen = self._seen
        if self.unfollowed is not None or seen.kinds != list(map(type, seen.objects)):
            return False
        if seen.flags != _flags() or seen.metas != [_meta(tensor) for tensor in seen.tensors]:
            return False
        moved = list[tuple[int, Contents]]()
        replaced = False
        for index, (place, then) in enumerate(seen.places):
            if place.holds(then):
                continue
            now = place.read()
            found = self._compare(place, then, now)
            if found is None:
                return False
            replaced = replaced or found
            moved.append((index, now))
        if replaced:
            anew = _Seen(self._roots, self._ran)
            if not anew.is_as(seen):
                return False
            self._seen = anew
        else:
            for index, now in moved:
                seen.places[index] = seen.places[index][0], now
        return True

    def renew(self) -> None:
        """From now on compare with how things are now."""
        self._seen = _Seen(self._roots, self._ran)

    def _compare(self, place: Place, then: Contents, now: Contents) -> bool | None:
        """None: changed. Otherwise whether tensors were replaced by others of the same kind."""
        before, after = (
            [(key, value) for key, value in zip(*contents, strict=True) if not place.attributes or self._ran.reads(key)]
            for contents in (then, now)
        )
        if len(before) != len(after):
            return None
        replaced = False
        for (key, one), (key_now, other) in zip(before, after, strict=True):
            if not same(key, key_now):
                return None
            if not same(one, other):
                if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
                    return None
                if self._ran.asks_ids or _meta(one) != _meta(other) or any(one is tensor for tensor in self._bound):
                    return None
                replaced = True
        return replaced


def _meta(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.shape, tensor.dtype, tensor.requires_grad, tensor.device


def _flags() -> tuple[Any, ...]:
    """PyTorch's own settings that decide what a call of it does."""
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
    )
