"""Follow what `torch.utils.checkpoint` leaves behind: code that runs again in the backward pass writes buffers again.

PyTorch counts the batches of a norm inside of a checkpoint twice, and moves its running statistics twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import checkpoint


class Checkpoints:
    """Note which functions are checkpointed, and run those again that write into the model's buffers."""

    def __init__(self) -> None:
        self._again: list[Callable[[], Any]] = []
        self._inside = False
        self._writes = False
        self.ran_again = False

    def note_write(self) -> None:
        """Note that a buffer is written."""
        self._writes = True

    def run_again(self) -> None:
        """Run the functions as the backward pass does: the last one first, and what is checkpointed in it after it."""
        again, self._again = self._again, []
        for function in reversed(again):
            self.ran_again = True
            function()
            self.run_again()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run checkpointed functions plainly in the block, and note which they are."""
        held = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction
        checkpoint._checkpoint_without_reentrant_generator = self._without_reentrant(held[0])
        checkpoint.CheckpointFunction = SimpleNamespace(apply=self._reentrant)  # type: ignore[assignment, misc]
        try:
            yield
        finally:
            checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction = held  # type: ignore[misc]

    def _without_reentrant(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def generator(
            function: Callable[..., Any],
            preserve: bool,
            contexts: Any,
            check: str,
            debug: bool,
            *args: Any,
            **kwargs: Any,
        ) -> Iterator[None]:
            steps = original(function, preserve, contexts, check, debug, *args, **kwargs)
            given = args[1:] if args and isinstance(args[0], bool) else args  # `early_stop`, of later versions
            next(steps)
            with self._region(lambda: function(*given, **kwargs)):
                yield
            next(steps, None)

        return generator

    def _reentrant(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Run a function as the reentrant kind does: nothing has a gradient where no argument has one."""
        tracked = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in args)
        with torch.set_grad_enabled(tracked and torch.is_grad_enabled()), self._region(lambda: function(*args)):
            return function(*args)

    @contextmanager
    def _region(self, function: Callable[[], Any]) -> Iterator[None]:
        if self._inside or not torch.is_grad_enabled():
            yield
            return
        self._inside, self._writes = True, False
        try:
            yield
        finally:
            self._inside = False
        if self._writes:
            self._again.append(function)
