"""What a process holds, and an engine whose runs must leave it so, however they end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import gigagrad as gg
from tests.exactness.normed import Net, dice
from tests.exactness.steering import with_fields_in, with_workers

_LONG = 120.0
"""Seconds that closing may take behind an interrupt, however busy the machine is."""


class Watched:
    """An engine for steps with fields in a tier, "disk" or "memory", one for predictions, and what both take."""

    def __init__(self, scratch: Path, tier: str) -> None:
        torch.manual_seed(0)
        self.scratch, self.model = scratch, Net()
        self.pair = torch.rand(3, 46, 38), (torch.rand(1, 46, 38) > 0.5).float()
        self.engine = gg.compile(self.model, dice, tile=(24, 20), scratch=scratch)
        with_workers(with_fields_in(self.engine, *self.pair, tier), *self.pair, 2)
        self.predictor = gg.compile(self.model, tile=(24, 20))
        self.expected = self.gradients()
        list(self.predictor.stream(self.pair[0]))
        self.before = self.held()

    def gradients(self) -> list[Tensor | None]:
        """Takes a step as if it were the first, and leaves ones in every `.grad`. Returns its gradients."""
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
        self.model.zero_grad()
        self.engine.backward(*self.pair)
        found = [p.grad for p in self.model.parameters()]
        self.reset()
        return found

    def reset(self) -> None:
        for p in self.model.parameters():
            p.grad = torch.ones_like(p)

    def held(self) -> SimpleNamespace:
        return SimpleNamespace(
            descriptors=len(os.listdir("/proc/self/fd")),
            files=sorted(str(path) for path in self.scratch.rglob("*")),
            threads={thread for thread in threading.enumerate() if is_of_a_run(thread) and thread.daemon},
            settings=(torch.get_num_threads(), torch.is_grad_enabled()),
        )

    def check(self) -> None:
        """Asserts that nothing stays of a run that was to end early, and that the next one is as if there had been
        none."""
        assert self.held() == self.before
        assert all(p.grad is not None and bool((p.grad == 1).all()) for p in self.model.parameters())
        for ours, theirs in zip(self.gradients(), self.expected, strict=True):
            assert torch.equal(ours, theirs)  # type: ignore[arg-type]
        assert self.held() == self.before

    def settle(self) -> None:
        """Waits for what an interrupted run still closes in a thread."""
        end = time.monotonic() + _LONG
        while self.held() != self.before and time.monotonic() < end:
            time.sleep(0.005)


def failing(original: Callable[..., Any], error: BaseException, after: int) -> Callable[..., Any]:
    """Makes the same function, until it has been called so often."""
    calls: list[int] = []

    def call(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) > after:
            raise error
        return original(*given, **named)

    return call


def is_of_a_run(thread: threading.Thread) -> bool:
    """Says whether a thread ends with its run, unlike that which looks at memory step after step."""
    return thread.name.startswith("gigagrad-") and thread.name != "gigagrad-memory"
