"""What `torch.utils.checkpoint` leaves behind: code that runs again in the backward pass writes its buffers again.

PyTorch counts the batches of a norm inside of a checkpoint twice, and moves its running statistics twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._pytree import tree_map_only


class Checkpoints:
    """Notes what each checkpointed function writes into the model's buffers."""

    def __init__(self) -> None:
        self._regions: list[list[tuple[Any, Any, Any]]] = []
        self._inside: list[list[tuple[Any, Any, Any]]] = []

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        """Take down a call that writes into buffers."""
        if self._inside:
            self._inside[-1].append((func, args, kwargs))

    def run_again(self, run: Callable[[Any, Any, Any], Any]) -> None:
        """Writes once more, the last function first, as the backward pass does."""
        for region in reversed(self._regions):
            for func, args, kwargs in region:
                with torch.no_grad():
                    run(func, *tree_map_only(torch.Tensor, _without_gradient, (args, kwargs)))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run checkpointed functions plainly, and know which they are."""
        held = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction
        checkpoint._checkpoint_without_reentrant_generator = self._plain(held[0])
        checkpoint.CheckpointFunction = SimpleNamespace(apply=self._reentrant)  # type: ignore[assignment, misc]
        try:
            yield
        finally:
            checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction = held  # type: ignore[misc]

    def _plain(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
            steps = original(*args, **kwargs)
            next(steps)
            with self._region():
                yield
            next(steps, None)

        return generator

    def _reentrant(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """As PyTorch's own: nothing has a gradient where no argument has one."""
        tracked = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in args)
        with self._region(), torch.set_grad_enabled(tracked and torch.is_grad_enabled()):
            return function(*args)

    @contextmanager
    def _region(self) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        self._inside.append([])
        try:
            yield
        finally:
            calls = self._inside.pop()
            self._regions.append(calls)
            if self._inside:  # what is inside of another checkpoint runs again with that, too
                self._inside[-1].extend(calls)


def _without_gradient(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor
